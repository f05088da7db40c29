"""Triton's kernels are compared at the start in every form that a rollout takes later: split parts, windows, penalties, tables."""

import pytest
from kernel_twins import with_twins

from covey.errors import Unsupported
from covey.kernels import TritonDecode
from covey.rollout import NativeSampler
from kit import tiny_model, tiny_tokenizer


def sampler(arch="qwen2", **options):
    model = tiny_model(arch, max_position_embeddings=1024, **options)
    return NativeSampler(model, tiny_tokenizer(), dtype="float32", attention="triton")


def planted(monkeypatch, name, is_met, spoil):
    """A kernel that is wrong where `is_met(arguments)` says so."""
    with_twins(monkeypatch)
    right = getattr(TritonDecode, name)

    def wrong(*args, **options):
        out = right(*args, **options)
        return spoil(out, args, options) if is_met(options) else out

    monkeypatch.setattr(TritonDecode, name, staticmethod(wrong))


def test_right_kernels_are_taken(monkeypatch):
    with_twins(monkeypatch)
    assert sampler().attention == "triton"
    assert sampler("mistral", sliding_window=900).attention == "triton"


@pytest.mark.parametrize("name", ["prompts", "suffix"])
def test_attention_that_is_wrong_for_split_parts_is_refused(monkeypatch, name):
    planted(monkeypatch, "attend", lambda options: options[name].shape[3] >= 512, lambda out, *_: 3 * out)
    with pytest.raises(Unsupported, match="the engine's logits differ"):
        sampler()


def test_attention_that_is_wrong_with_a_window_longer_than_any_prompt_is_refused(monkeypatch):
    planted(monkeypatch, "attend", lambda options: options["suffix_bias"] is not None, lambda out, *_: 3 * out)
    with pytest.raises(Unsupported, match="the engine's logits differ"):
        sampler("mistral", sliding_window=900)


def unmarked(out, args, options):
    options["seen"].zero_()


def unpenalized(out, args, options):
    return out[0], out[1] + 0.1, out[2]


@pytest.mark.parametrize("name, spoil", [("draw", unpenalized), ("draw_into", unmarked)])
def test_a_draw_that_is_wrong_with_a_penalty_is_refused(monkeypatch, name, spoil):
    planted(monkeypatch, name, lambda options: options["seen"] is not None, spoil)
    with pytest.raises(Unsupported, match="its draw"):
        sampler()


def test_a_draw_that_writes_its_tables_wrongly_is_refused(monkeypatch):
    def late(out, args, options):
        args[0]["written"].zero_()

    planted(monkeypatch, "draw_into", lambda options: True, late)
    with pytest.raises(Unsupported, match="tables that its draw advances"):
        sampler()
