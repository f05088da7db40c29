"""Other weights than those that were sent are found, whatever the label says; and quiet updates raise no alarm."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from fake_server import FakeServer, nudged

from covey.errors import AttestationError, ConfigError
from covey.rollout import SamplingParams
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.attestation import Answer, Attestation, Slope, check_replicas, trainer_logprobs
from covey.rollout.vllm.weights import differing_blocks, digests_of, distinct_weights
from covey.rollout.vllm.worker.covey_worker import digest_of, weights_of
from covey.types import Prompt
from kit import rest_nightly, tiny_model, tiny_tokenizer

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture
def model():
    return tiny_model("qwen2", tie_word_embeddings=False)


@pytest.fixture
def fake(model):
    with FakeServer(model, tiny_tokenizer()) as server:
        yield server


def sampler_of(fake, model, tmp_path, **options):
    sampler = ServerSampler(model, tiny_tokenizer(), port=fake.port, directory=tmp_path, eos_ids=[2], **options)
    drawn(sampler)
    return sampler


def drawn(sampler):
    return list(sampler.sample(["2 + 2 ="], 2, GREEDY))


def step(sampler, model, version, by=0.02):
    nudged(model, by, seed=version)
    sampler.load(model, version)
    return drawn(sampler)


def test_a_right_update_moved_is_right_and_near(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    sampler.take_metrics()
    step(sampler, model, 1)
    found = {name: metric.value for name, metric in sampler.take_metrics().items()}
    assert found["vllm/moved"] == found["vllm/right"] == 1
    assert found["vllm/probe_slope"] == pytest.approx(1, abs=1e-3)
    assert found["vllm/probe_difference"] < 1e-4


def test_a_sync_that_moves_nothing_is_found(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    fake.moves_nothing = True
    with pytest.raises(AttestationError, match="The update moved nothing"):
        step(sampler, model, 1)
    assert fake.paused


@pytest.mark.nightly
def test_a_sync_that_moves_nothing_is_found_on_a_noisy_server_too(fake, model, tmp_path):
    """Its answers never have the same bits twice, so that only the slope can tell."""
    fake.noise = 2e-3
    sampler = sampler_of(fake, model, tmp_path)
    step(sampler, model, 1, by=0.3)
    fake.moves_nothing = True
    with pytest.raises(AttestationError, match="does not follow the weights|answers with other weights"):
        [step(sampler, model, version, by=0.3) for version in range(2, 6)]


def test_a_float32_server_that_is_further_off_than_rounding_is_found_at_its_first_update(fake, model, tmp_path):
    """As vLLM 0.32 on a CPU, which packs experts anew at a reload and computes with others."""
    fake.rounding = 0.02
    with pytest.raises(AttestationError, match=r"answers with other weights: .* 0\.003 is expected"):
        step(sampler_of(fake, model, tmp_path), model, 1)


def test_a_reload_from_the_same_path_is_found(fake, model, tmp_path, monkeypatch):
    """Files mapped into memory stay what they were when their path is written again; a path a version avoids it."""
    sampler = sampler_of(fake, model, tmp_path)
    fake.caches_paths = True
    step(sampler, model, 1)  # a new path: right
    used = sampler.sync.transport.written[-1]
    monkeypatch.setattr(
        sampler.server, "reload", lambda folder, size: type(sampler.server).reload(sampler.server, str(used), size)
    )
    with pytest.raises(AttestationError, match="The update moved nothing"):
        step(sampler, model, 2)


def test_a_foreign_writer_is_found_though_the_label_stays(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    step(sampler, model, 1)
    nudged(fake.replicas[0], 1e-4, seed=9)
    with pytest.raises(AttestationError, match="another process writes weights"):
        drawn(sampler)


def test_a_foreign_writer_while_the_server_writes_is_found_before_the_batch_is_learned_from(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    step(sampler, model, 1)
    writing = sampler.sample(["2 + 2 =", "Hello"], 2, GREEDY)
    next(writing)
    nudged(fake.replicas[0], 1e-4, seed=9)
    with pytest.raises(AttestationError, match="another process writes weights"):
        list(writing)


@pytest.mark.parametrize("rounding, has_digest", rest_nightly([(1e-6, True), (0.5, True), (1e-6, False)], 2))
def test_bits_that_change_are_rounding_where_digests_prove_the_weights(rounding, has_digest, model, tmp_path):
    """Two answers in a row are equal, and differ from that of the update: no batch of the moment explains it."""
    with FakeServer(model, tiny_tokenizer(), has_digest=has_digest) as fake:
        sampler = sampler_of(fake, model, tmp_path)
        step(sampler, model, 1)
        fake.rounding = rounding
        if rounding < 1e-3 and has_digest:
            drawn(sampler)
            assert sampler.sync.attestation.is_repeatable is False
            fake.rounding = 0.0
            step(sampler, model, 2)
            nudged(fake.replicas[0], 1e-6, seed=9)
        with pytest.raises(AttestationError, match="another process writes weights"):
            drawn(sampler)


def test_an_adapter_that_reached_one_replica_only_is_found(tmp_path):
    """Such a server is never sent an adapter alone; a whole update that reaches one replica looks the same."""
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(model, tiny_tokenizer(), replicas=2) as fake:
        sampler = sampler_of(fake, model, tmp_path)
        step(sampler, model, 1)
        fake.reached = [0]
        with pytest.raises(AttestationError, match="replica 1 of 2 still answers with the weights before it"):
            step(sampler, model, 2)


def test_replicas_that_all_moved_are_fine():
    answers = [Answer(((1, 0),), torch.tensor([value], dtype=torch.float64)) for value in (-1.0, -2.0)]
    check_replicas([answers[1], answers[1]], answers[0], is_repeatable=True)
    check_replicas([answers[0], answers[1]], answers[0], is_repeatable=False)


def test_a_digest_of_other_weights_stops_before_anything_is_written(model, tmp_path):
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as fake:
        sampler = sampler_of(fake, model, tmp_path)
        assert sampler.take_metrics()["vllm/exact"].value == 1
        fake.moves_nothing = True
        with pytest.raises(AttestationError, match="digest"):
            step(sampler, model, 1)
        assert fake.paused


def test_attestation_may_warn_and_go_on(fake, model, tmp_path, caplog):
    sampler = sampler_of(fake, model, tmp_path, attest="warn")
    fake.moves_nothing = True
    with caplog.at_level(logging.WARNING):
        assert step(sampler, model, 1)
    assert "moved nothing" in caplog.text


def test_an_update_of_nothing_is_no_alarm(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    sampler.load(model, 1)  # as with a learning rate of 0
    drawn(sampler)
    assert "vllm/moved" not in sampler.take_metrics()


def test_an_adapter_travels_alone_under_a_fresh_name(tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(base, tiny_tokenizer(), lora_rank=8) as fake:
        policy = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        sampler = sampler_of(fake, policy, tmp_path)
        for version in (1, 2, 3):
            step(sampler, policy, version)
        assert "reload_weights" not in fake.calls
        assert [name.split(":")[1] for name in fake.adapters] == ["2", "3"]
        assert sampler.take_metrics()["vllm/probe_difference"].value < 1e-4


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"r": 16}, "--max-lora-rank is 8"),
        ({"use_dora": True}, "uses DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["lm_head"]}, "targets among embeddings or lm_head"),
    ],
)
def test_an_adapter_that_cannot_travel_alone_is_sent_merged_and_said_so(tmp_path, caplog, changed, why):
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(base, tiny_tokenizer(), lora_rank=8) as fake:
        options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **changed}
        policy = peft.get_peft_model(base, peft.LoraConfig(**options))
        with caplog.at_level(logging.WARNING):
            ServerSampler(policy, tiny_tokenizer(), port=fake.port, directory=tmp_path, eos_ids=[2])
        assert why in caplog.text


@pytest.mark.parametrize("method, is_refused", [("fp8_per_tensor", False), ("fp8", True), ("awq", True)])
def test_a_server_of_quantized_weights_is_warned_of_and_one_of_a_quantized_checkpoint_is_sent_none(
    tmp_path, caplog, method, is_refused
):
    """The stand-in's digests are of its own numbers, as those of quantized weights are. vLLM 0.32's fp8 is that of checkpoints alone."""
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as fake:
        fake.quantization = method
        if is_refused:
            with pytest.raises(
                ConfigError, match=rf"whose weights are quantized \({method}\), and the run's weights cannot be"
            ):
                sampler_of(fake, model, tmp_path)
            return
        sampler = sampler_of(fake, model, tmp_path)
        assert "computes with weights quantized by fp8_per_tensor, not with the learner's" in caplog.text
        step(sampler, model, 1)
        assert "vllm/exact" not in sampler.take_metrics()
        assert "covey_digest" not in fake.calls


def test_a_server_that_rounds_its_cache_is_warned_of_and_its_weights_are_compared(tmp_path, caplog):
    """Real vLLM's cache in fp8 put the demo's model 0.24 nats away."""
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(model, tiny_tokenizer(), has_digest=True) as fake:
        fake.cache_dtype, fake.rounding = "fp8", 0.1
        sampler = sampler_of(fake, model, tmp_path)
        assert "keeps keys and values in fp8" in caplog.text
        assert sampler.dtype is None
        step(sampler, model, 1)
        assert sampler.take_metrics()["vllm/exact"].value == 1


def test_an_adapter_stands_alone_on_a_quantized_checkpoint_and_this_is_warned_of(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", tie_word_embeddings=False)
    base.config._name_or_path = "hub/the-model-before-it-was-quantized"
    with FakeServer(base, tiny_tokenizer(), has_digest=True, lora_rank=8) as fake:
        fake.quantization = "awq"
        policy = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        step(sampler_of(fake, policy, tmp_path), policy, 1)
        assert fake.adapters
        assert "computes with weights quantized by awq, not with the learner's" in caplog.text


# -- the mathematics ------------------------------------------------------------------------------------------------------------


def answer_of(logp, ids, noise=0.0, generator=None):
    tokens = logp.topk(20).indices.sort().values
    keys = tuple((p, t) for p, row in enumerate(tokens.tolist(), 1) for t in row)
    values = logp.gather(1, tokens).flatten().double()
    return Answer(keys, values + noise * torch.randn(len(keys), generator=generator, dtype=torch.float64))


def test_the_slope_and_its_error_by_hand():
    """Two pairs in each of 30 positions, the server moving half as far: slope 1/2, no error."""
    keys = tuple((p, t) for p in range(1, 31) for t in (0, 1))
    before, after = torch.zeros(30, 2), torch.ones(30, 2)
    still = Answer(keys, torch.zeros(60, dtype=torch.float64))
    moved = Answer(keys, torch.full((60,), 0.5, dtype=torch.float64))
    slope = Slope().with_update(still, moved, before, after)
    assert (slope.value, slope.error) == (0.5, 0.0)
    assert slope.verdict() == "wrong"
    assert Slope().verdict() == "not decidable yet"


def quiet_run(updates, noise, signal, stuck_after=None, seed=0):
    """Updates of a simulated policy [63, 50]; the server has them all, or none after `stuck_after`. Returns the one that alarmed."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(range(64))
    logits = torch.randn(63, 50, generator=generator) * 2
    attestation, served = Attestation(is_repeatable=False), None
    for update in range(updates):
        logits = logits + signal * torch.randn(63, 50, generator=generator)
        logp = logits.log_softmax(-1)
        served = logp if stuck_after is None or update <= stuck_after or served is None else served
        try:
            attestation.check_update(answer_of(served, ids, noise, generator), logp, logp)
        except AttestationError:
            return update
    return None


@pytest.mark.nightly
@pytest.mark.parametrize(
    "updates, noise, signal",
    [
        (150, 1e-2, 1e-3),
        pytest.param(1000, 1e-2, 1e-3, marks=pytest.mark.nightly),
        pytest.param(1000, 0.0, 1e-3, marks=pytest.mark.nightly),
        pytest.param(1000, 1e-2, 1e-1, marks=pytest.mark.nightly),
    ],
)
def test_no_false_alarm_in_a_thousand_quiet_updates(updates, noise, signal):
    assert quiet_run(updates, noise, signal, seed=int(1e4 * signal)) is None


@pytest.mark.parametrize("noise, signal, within", rest_nightly([(1e-2, 3e-3, 40), (1e-2, 1e-1, 2), (1e-2, 1e-2, 6)], 1))
def test_a_server_that_stays_behind_is_found_under_bfloat16s_noise(noise, signal, within):
    found = [quiet_run(200, noise, signal, stuck_after=20, seed=seed) for seed in range(3)]
    assert all(update is not None and 20 < update <= 20 + within for update in found), found


# -- digests --------------------------------------------------------------------------------------------------------------------


def test_a_digest_is_blind_to_fusing_padding_and_packing_and_to_nothing_else():
    q, k = torch.randn(4, 3), torch.randn(2, 3)
    fused = torch.cat([q, k, torch.zeros(2, 3)])
    assert digest_of(fused) == (digest_of(q) + digest_of(k)) % 2**64
    changed = q.clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(9.0))
    assert digest_of(changed) != digest_of(q)
    assert digest_of(torch.tensor([-0.0])) == digest_of(torch.tensor([0.0])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_name_the_block_that_differs(model, dtype):
    other = copy.deepcopy(model)
    expected = digests_of(distinct_weights(model, dtype))
    assert differing_blocks(expected, digests_of(weights_of(other.to(dtype)))) == []
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert differing_blocks(expected, digests_of(weights_of(other))) == ["layers.0.mlp"]


def test_a_matrix_that_a_kernel_packed_away_is_read_back_exactly():
    layer = torch.nn.Linear(5, 3, bias=False)
    weight = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, w, b: x @ weight.T
    layer.input_size = 5
    expected = digest_of(weight)
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    (found,) = weights_of(torch.nn.Sequential(layer))
    assert digest_of(found[1]) == expected


def test_a_packed_copy_that_stayed_behind_is_not_right():
    """vLLM 0.32 on a CPU, with tied embeddings: a reload renews the weight and not its packed copy."""
    layer = torch.nn.Linear(5, 3, bias=False)
    packed = layer.weight.detach().clone()
    layer.cpu_linear, layer.quant_method = (lambda x, w, b: x @ packed.T), object()
    model = torch.nn.Sequential(layer)
    assert len(list(weights_of(model))) == 1
    with torch.no_grad():
        layer.weight.add_(1)
    assert len(list(weights_of(model))) == 2


def test_the_trainers_probe_is_its_plain_forward(model):
    found = trainer_logprobs(model, Prompt(uid="", token_ids=(5, 6, 7)))
    expected = model(torch.tensor([[5, 6, 7]])).logits[0, :2].float().log_softmax(-1)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_the_time_and_the_bytes_of_each_update_are_measured(fake, model, tmp_path):
    for attest in ("stop", "off"):
        sampler = sampler_of(fake, model, tmp_path, attest=attest)
        sampler.take_metrics()
        drawn(sampler)
        assert "weights/mb" not in sampler.take_metrics(), "nothing was sent"
        step(sampler, model, 1)
        step(sampler, model, 2)
        seen = sampler.take_metrics()
        assert seen["weights/mb"].count == 2
        assert seen["weights/mb"].value == pytest.approx(sum(p.nbytes for p in model.parameters()) / 1e6)
        assert 0 < seen["weights/seconds"].value < 60
