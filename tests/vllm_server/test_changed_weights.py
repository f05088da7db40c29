"""Only the parts of the weights that changed are sent, where digests prove the rest; a server that may lack some is sent everything."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from changed_parts import expect_the_trainers, megabytes, moved, update
from fake_server import FakeServer
from safetensors.torch import load_file, save_file

from covey.errors import AttestationError
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.pieces import Piece, changed_pieces, in_pieces
from covey.rollout.vllm.weights import Source, write_weights
from kit import rest_nightly, tiny_model, tiny_tokenizer


@pytest.fixture(params=rest_nightly([True, False], 1), ids=["tied", "apart"])
def model(request):
    return tiny_model("qwen2", layers=2, tie_word_embeddings=request.param)


@pytest.fixture
def fake(model):
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as server:
        yield server


def sampler_of(fake, model, tmp_path, **options):
    options = {"transport": "directory", "directory": tmp_path, **options}
    sampler = ServerSampler(model, tiny_tokenizer(), port=fake.port, eos_ids=[2], **options)
    update(sampler)
    return sampler


def test_the_bytes_fall_to_those_of_what_was_trained(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "")
    assert update(sampler, model, 1) == megabytes(model, "")
    moved(model, "layers.1.mlp")
    assert update(sampler, model, 2) == megabytes(model, "layers.1.mlp")
    assert fake.read == [[f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]]
    expect_the_trainers(fake, model)
    moved(model, "embed_tokens", "k_proj")
    assert update(sampler, model, 3) == megabytes(model, "embed_tokens", "self_attn"), "matrices of one part are fused"
    expect_the_trainers(fake, model)
    assert update(sampler, model, 4) == 0
    assert fake.version.endswith(":4")


def test_every_folder_holds_all_weights_and_two_share_the_unchanged_files(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "norm")
    update(sampler, model, 1)
    before, last = sampler.sync.transport.written
    held = {name: weight for file in last.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert held.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weight, held[name]) for name, weight in model.named_parameters())
    shared = [file for file in last.glob("*.safetensors") if file.stat().st_ino == (before / file.name).stat().st_ino]
    assert len(shared) == 6 - model.config.tie_word_embeddings, "all but the norms"


def test_a_disk_without_links_holds_copies(fake, model, tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    assert update(sampler, model, 1) == megabytes(model, "layers.0.mlp")
    expect_the_trainers(fake, model)


@pytest.mark.nightly
def test_a_restarted_server_is_sent_everything(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    update(sampler, model, 1)
    fake.restart(tiny_model("qwen2", seed=9, layers=2, tie_word_embeddings=model.config.tie_word_embeddings))
    assert update(sampler) == megabytes(model, ""), "between two rollouts"
    expect_the_trainers(fake, model)
    fake.restart(tiny_model("qwen2", seed=9, layers=2, tie_word_embeddings=model.config.tie_word_embeddings))
    moved(model, "layers.0.mlp")
    assert update(sampler, model, 2) == megabytes(model, ""), "before an update"
    expect_the_trainers(fake, model)


@pytest.mark.nightly
def test_after_a_failed_label_check_everything_is_sent(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    fake.version = "another:1"
    with pytest.raises(AttestationError, match="says that it serves 'another:1'"):
        update(sampler)
    assert update(sampler, model, 1) == megabytes(model, "")
    expect_the_trainers(fake, model)


@pytest.mark.parametrize("phase", rest_nightly(["covey_reload", "/resume", "/pause", "/reset_prefix_cache"], 1))
def test_after_a_failed_update_everything_is_sent(phase, fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    failures = [503]
    fake.faults[phase] = lambda body: failures.pop() if failures else None
    assert update(sampler, model, 1) == megabytes(model, "")
    expect_the_trainers(fake, model)


def test_weights_that_a_server_lost_without_a_sign_are_missed_and_sent(fake, model, tmp_path, caplog):
    """As a sleep of level 2 drops them, after the last look at the server."""
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")

    def lose(body):
        fake.replicas[0].model.layers[1].self_attn.o_proj.weight.data.zero_()

    fake.faults["/pause"] = lose
    part, whole = megabytes(model, "layers.0.mlp").expected, megabytes(model, "").expected
    assert update(sampler, model, 1) == pytest.approx(part + whole)
    assert "lacks weights that were sent before" in caplog.text
    expect_the_trainers(fake, model)
    fake.faults.clear()
    moved(model, "layers.0.mlp")
    assert update(sampler, model, 2) == megabytes(model, "")


@pytest.mark.nightly
def test_versions_that_were_never_sent_are_made_up_for(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    moved(model, "layers.0.mlp")
    skipped = sampler.prepare(model, 1)
    moved(model, "layers.1.mlp")
    sampler.load_prepared(sampler.prepare(model, 2))
    assert update(sampler) == megabytes(model, "mlp")
    assert skipped.version == 1
    expect_the_trainers(fake, model)


@pytest.mark.nightly
def test_versions_that_wait_keep_their_folders(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    waiting = []
    for version in range(1, 5):
        moved(model, "layers.0.mlp")
        waiting.append((sampler.prepare(model, version), copy.deepcopy(model)))
    for prepared, then in waiting:
        sampler.load_prepared(prepared)
        assert update(sampler) == megabytes(model, "layers.0.mlp")
        expect_the_trainers(fake, then)


@pytest.mark.parametrize("has_digest, attest", [(False, "stop"), (True, "off")])
def test_without_digests_everything_is_sent(has_digest, attest, tmp_path):
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(model, tiny_tokenizer(), has_digest=has_digest) as fake:
        sampler = sampler_of(fake, model, tmp_path, attest=attest)
        moved(model, "mlp")
        assert update(sampler, model, 1) == megabytes(model, "")
        assert fake.read == []


def test_a_piece_is_compared_bit_for_bit(tmp_path):
    weights = {"a": torch.tensor([0.0, float("nan"), 1.0]), "b": torch.ones(3, 3, dtype=torch.bfloat16)}
    file = tmp_path / "piece.safetensors"
    save_file(weights, file)
    piece = Piece.of(weights, file, has_digests=False)
    assert piece.holds({name: weight.clone() for name, weight in weights.items()})
    for name, index, value in (("a", 0, -0.0), ("a", 2, 1.0000001), ("b", (2, 2), 1.0078125)):
        other = {key: weight.clone() for key, weight in weights.items()}
        other[name][index] = value
        assert not piece.holds(other), (name, value)
    assert not piece.holds({"a": weights["a"]})
    assert not piece.holds({**weights, "b": weights["b"].float()})
    file.unlink()
    assert not piece.holds(weights), "what cannot be read is written again"


def test_a_piece_whose_tensors_lie_apart_is_sent_with_all_its_parts(tmp_path):
    weights = [(f"h.0.{name}.weight", torch.ones(2)) for name in ("attn.q", "mlp.up", "attn.k")]
    keys = [key for key, _ in in_pieces([*weights, ("norm.weight", torch.ones(2))])]
    assert keys == ["h.0.attn 1", "h.0.mlp 1", "h.0.attn 2", "norm 1"]
    pieces = {key: Piece(number, 8, {}, tmp_path / str(number)) for number, key in enumerate(keys)}
    held = {key: piece.number for key, piece in pieces.items()} | {"h.0.attn 2": 99}
    assert [piece.number for piece in changed_pieces(pieces, held)] == [0, 2]


def test_the_type_of_the_server_decides_what_has_changed(tmp_path):
    """A step below the rounding of bfloat16 changes nothing for a server that computes in it."""
    model = tiny_model("qwen2")
    first = write_weights(Source(model), tmp_path / "1", torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-4)
        model.lm_head.weight.mul_(2)
    second = write_weights(Source(model), tmp_path / "2", torch.bfloat16, before=first)
    assert changed_pieces(second, {key: piece.number for key, piece in first.items()}) == [
        second["model.embed_tokens 1"]
    ]
