"""A server that fails in any phase gives one error within its deadline and stays paused until whole weights were sent and checked."""

from __future__ import annotations

import copy
import json
import threading
import time
from dataclasses import replace
from itertools import product

import pytest
import torch
from datasets import Dataset
from fake_server import FakeServer, nudged

from covey import GRPOConfig, GRPOTrainer
from covey.errors import AttestationError, ConfigError, ServerError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.vllm import Server, ServerSampler
from covey.rollout.vllm.client import Address, Client, Deadlines, NoAnswerError
from covey.rollout.vllm.weights import Source
from kit import rest_nightly, tiny_model, tiny_tokenizer
from modalities.models import tiny_vlm

PATIENT = {"deadlines": dict.fromkeys(("connect", "read"), 30.0), "timeout": 60.0}
"""Of calls that are answered, on a machine that others use too; a call that is left hanging has a deadline of its own."""
SHORT = 0.4
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROMPTS = ["Tom has 3 apples.", "2 + 2 ="]


@pytest.fixture
def model():
    return tiny_model("qwen2", tie_word_embeddings=False)


@pytest.fixture
def fake(model):
    with FakeServer(model, tiny_tokenizer()) as server:
        yield server


def sampler_of(fake, model, tmp_path, **options):
    options = {**PATIENT, "directory": tmp_path, "eos_ids": [2], **options}
    return ServerSampler(model, tiny_tokenizer(), port=fake.port, **options)


def drawn(sampler, prompts=PROMPTS):
    return list(sampler.sample(prompts, 2, GREEDY))


def test_groups_come_back_whole_with_their_log_probabilities_and_version(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    sampler.load(model, version=7)
    groups = drawn(sampler)
    assert sorted(group.prompt.text for group in groups) == sorted(PROMPTS)
    for group in groups:
        for completion in group.completions:
            assert completion.version == 7
            ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
            logp = model(ids).logits[0].float().log_softmax(-1)[len(group.prompt.token_ids) - 1 : -1]
            expected = logp.gather(1, completion.token_ids[:, None])[:, 0]
            assert torch.allclose(completion.logprobs, expected, atol=1e-5)
    assert fake.version.endswith(":7")


@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_server_on_a_cpu_that_computes_prompts_in_pieces_gets_no_seeds(fake, model, tmp_path, in_pieces):
    """vLLM 0.32 ends there at a prompt with a seed that it splits."""
    fake.computes_in_pieces = in_pieces
    sampler, bodies = sampler_of(fake, model, tmp_path, attest="off"), list[dict]()
    fake.faults["/v1/completions"] = bodies.append
    sampler.load(model, version=1)
    drawn(sampler)
    seeds = [body.get("seed") for body in bodies if body.get("return_token_ids")]
    assert len(seeds) == len(PROMPTS)
    assert [seed is None for seed in seeds] == [in_pieces, in_pieces]


def test_a_server_writes_no_placeholder_of_an_image_that_is_not_there(tmp_path):
    """As the native engine, on prompts of text: the learner gives these tokens no probability."""
    model, processor = tiny_vlm("qwen2_5_vl")
    placeholder = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight.data, head.bias.data = model.lm_head.weight.detach().clone(), torch.zeros(len(model.lm_head.weight))
    head.bias.data[placeholder] = 9.0
    model.lm_head = head
    with FakeServer(model, processor.tokenizer) as fake:
        server = ServerSampler(model, processor.tokenizer, port=fake.port, directory=tmp_path, attest="off", **PATIENT)
        server.load(model, version=0)
        groups, native = list(server.sample(PROMPTS, 1, GREEDY)), NativeSampler(model, processor.tokenizer)
        expected = {group.prompt.uid: group.completions[0] for group in native.sample(PROMPTS, 1, GREEDY)}
    for group in groups:
        completion = group.completions[0]
        assert completion.token_ids.tolist() == expected[group.prompt.uid].token_ids.tolist()
        assert placeholder not in completion.token_ids
        torch.testing.assert_close(completion.logprobs, expected[group.prompt.uid].logprobs, atol=1e-4, rtol=0)


def test_several_loads_before_a_rollout_send_the_weights_once(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    for version in (1, 2, 3):
        sampler.load(model, version)
    drawn(sampler)
    assert fake.calls.count("reload_weights") == 1


def test_a_version_has_a_folder_of_its_own_and_two_are_kept(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    for version in range(4):
        nudged(model, seed=version)
        sampler.load(model, version)
        drawn(sampler)
    (run,) = tmp_path.iterdir()
    assert sorted(folder.name.rsplit("-", 1)[-1] for folder in run.iterdir()) == ["2", "3"]


def test_a_run_looks_at_its_server_once_and_hands_the_connection_on(fake, model, tmp_path):
    args = GRPOConfig(
        str(tmp_path / "run"), use_vllm=True, vllm_mode="server", vllm_server_port=fake.port, max_steps=1, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=4, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "2 + 2 ="}])
    reward = lambda completions, **columns: [float(len(one)) for one in completions]
    GRPOTrainer(model, reward, args, rows, processing_class=tiny_tokenizer()).train()
    looks = ("/openapi.json", "/server_info", "/tokenize")
    assert [fake.calls.count(path) for path in looks] == [1, 1, 1]
    assert fake.version.endswith(":0")


PHASES = {
    "/pause": "pause", "reload_weights": "update", "/reset_prefix_cache": "finish", "/update_weight_version": "finish",
    "/resume": "resume",
}  # fmt: skip
"""By call: the deadline that it has."""
FAULTS = (404, 503, "hang", "half")
IN_CI = [([*PHASES][2], FAULTS[2]), ("/resume", "half")]
"""No answer, and one that broke off when the phase had acted; every pair nightly."""


@pytest.mark.parametrize("phase, fault", rest_nightly(product(PHASES, FAULTS), IN_CI))
def test_a_phase_that_fails_is_one_error_within_its_deadline_and_leaves_the_server_paused(
    fake, model, tmp_path, phase, fault
):
    sampler = sampler_of(fake, model, tmp_path)
    drawn(sampler)
    nudged(model)
    sampler.load(model, version=1)
    fake.faults[phase] = fault
    patient = sampler.client.deadlines
    sampler.client.deadlines = replace(patient, **({PHASES[phase]: SHORT} if fault == "hang" else {}))
    began = time.monotonic()
    calls = len(fake.calls)
    settles = fault == "half" and phase in ("/pause", "/resume")  # it acted, and the state says so
    if settles:
        drawn(sampler)
    else:
        with pytest.raises(ServerError, match=str(fake.port)):
            drawn(sampler)
        assert "/v1/completions" not in fake.calls[calls + 2 :] or phase == "/resume"
    assert time.monotonic() - began < 30  # two attempts of five phases, each below half a second
    assert fake.calls[calls:].count(phase) <= 4
    if not settles and phase != "/pause":
        assert fake.paused
    fake.faults, sampler.client.deadlines = {}, patient
    groups = drawn(sampler)  # the server is whole again: whole weights, checked, and on
    assert not fake.paused
    assert fake.version.split(":")[1].startswith("1")
    assert len(groups) == 2


def test_a_lifecycle_call_without_an_answer_is_not_sent_again_within_an_update(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path, deadlines={"update": SHORT})
    fake.faults["reload_weights"] = "hang"
    with pytest.raises(NoAnswerError, match="did not answer within"):
        sampler.sync.push(sampler.sync.prepare(Source(model), 1))
    assert fake.calls.count("reload_weights") == 1


def test_a_server_lost_in_the_middle_of_a_rollout_is_asked_again_for_what_is_missing(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    drawn(sampler)
    failures = iter(["half"])
    fake.faults["/v1/completions"] = lambda body: None if "prompt_logprobs" in body else next(failures, None)
    groups = drawn(sampler)
    assert sorted(group.prompt.text for group in groups) == sorted(PROMPTS)


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_completion_that_the_server_broke_off_is_asked_for_again(fake, model, tmp_path, monkeypatch, prompts):
    sampler, draw, faults = sampler_of(fake, model, tmp_path), fake._greedy, iter([{"finish_reason": "abort"}])
    drawn(sampler)
    monkeypatch.setattr(fake, "_greedy", lambda *request: {**draw(*request), **next(faults, {})})
    groups = list(sampler.sample(PROMPTS[:prompts], 2, SamplingParams(max_tokens=4, temperature=0)))
    assert sorted(group.prompt.text for group in groups) == sorted(PROMPTS[:prompts])


@pytest.mark.parametrize("has_new_weights", rest_nightly([True, False], [False]))
def test_a_server_that_was_started_again_is_sent_everything(fake, model, tmp_path, has_new_weights):
    first = copy.deepcopy(model)
    sampler = sampler_of(fake, model, tmp_path)
    nudged(model)
    sampler.load(model, version=1)
    drawn(sampler)
    fake.restart(first)
    if has_new_weights:
        nudged(model)
        sampler.load(model, version=2)
    assert len(drawn(sampler)) == 2
    assert serves(fake, model)
    assert fake.version.split(":")[1].startswith("2" if has_new_weights else "1")


@pytest.mark.parametrize("has_new_weights", rest_nightly([True, False], 1))
def test_a_server_that_is_killed_and_started_again_is_waited_for_and_sent_everything(
    fake, model, tmp_path, has_new_weights
):
    first = copy.deepcopy(model)
    sampler = sampler_of(fake, model, tmp_path, timeout=20.0)
    nudged(model)
    sampler.load(model, version=1)
    drawn(sampler)
    fake.stop()
    later = threading.Timer(0.3, fake.restart, [first])
    later.start()
    if has_new_weights:
        nudged(model)
        sampler.load(model, version=2)
    assert len(drawn(sampler)) == 2
    later.join()
    assert serves(fake, model)


def test_a_server_that_answers_health_alone_is_to_be_started_again(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    drawn(sampler)
    nudged(model)
    sampler.load(model, version=1)
    fake.faults["/is_paused"] = "hang"
    sampler.client.deadlines = replace(sampler.client.deadlines, read=SHORT)
    with pytest.raises(ServerError, match="/is_paused did not answer within 0.4 seconds.* resume the run"):
        drawn(sampler)


def serves(fake, model):
    served = fake.replicas[0].state_dict()
    return all(torch.equal(served[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("option", "value", "before"),
    [("dtype", "bfloat16", "float32"), ("logprobs_mode", "raw_logprobs", "processed_logprobs")],
)
def test_a_server_that_was_started_again_with_other_options_is_named_in_a_sentence(
    option, value, before, fake, model, tmp_path
):
    sampler = sampler_of(fake, model, tmp_path)
    drawn(sampler)
    setattr(fake, option, value)
    fake.restart(model)
    with pytest.raises(
        ServerError, match=f"was started again with {option} {value} instead of {before}; start it as before"
    ):
        drawn(sampler)


def test_a_server_that_was_started_again_without_development_mode_is_refused_with_the_command(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    drawn(sampler)
    gone = ("/server_info", "/collective_rpc", "/weight_info")
    fake.paths = [path for path in fake.paths if path not in gone]
    fake.faults |= dict.fromkeys(gone, 404)
    fake.restart(model)
    with pytest.raises(ServerError, match="lacks /server_info, /weight_info, .*start it with covey serve-vllm MODEL"):
        drawn(sampler)


def test_an_older_version_is_refused(fake, model, tmp_path):
    sampler = sampler_of(fake, model, tmp_path)
    sampler.load(model, 1)
    drawn(sampler)
    older = fake.version
    sampler.load(model, 2)
    drawn(sampler)
    fake.version = older
    with pytest.raises(AttestationError, match="at an older version"):
        drawn(sampler)


# -- wrong input, before any work ---------------------------------------------------------------------------------------------


def test_without_a_server_a_sentence_says_how_to_start_one(model, tmp_path):
    with pytest.raises(ServerError, match=r"No vLLM server answers at http://127.0.0.1:1 .*covey serve-vllm MODEL"):
        ServerSampler(model, tiny_tokenizer(), port=1, timeout=0.2, eos_ids=[2])


def test_a_server_of_another_program_is_refused_with_the_command_that_starts_one(fake, model, tmp_path):
    fake.faults["/openapi.json"] = 404
    with pytest.raises(ServerError, match=r"lists no endpoints .*covey serve-vllm MODEL"):
        sampler_of(fake, model, tmp_path)


def test_a_server_without_the_endpoints_is_refused_by_their_names(fake, model, tmp_path):
    fake.paths = [path for path in fake.paths if path not in ("/pause", "/weight_info")]
    with pytest.raises(ConfigError, match="lacks /pause, /weight_info, .*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        sampler_of(fake, model, tmp_path)


def test_another_vocabulary_is_refused(fake, model, tmp_path):
    fake.tokenizer = lambda text, add_special_tokens: {"input_ids": [1, 2, 3]}
    with pytest.raises(ConfigError, match="has another vocabulary"):
        sampler_of(fake, model, tmp_path)


def test_a_smaller_vocabulary_is_refused(fake, model, tmp_path):
    fake.faults["/v1/completions"] = lambda body: 400
    with pytest.raises(ConfigError, match=r"does not know token \d+ of this run's vocabulary"):
        sampler_of(fake, model, tmp_path)


def test_embeddings_that_were_resized_after_the_look_at_the_server_are_refused(fake, model, tmp_path):
    server = Server.connect(Client(Address.of(None, "127.0.0.1", fake.port)), 5)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    is_known = lambda body: max(body["prompt"]) < fake.replicas[0].config.vocab_size
    fake.faults["/v1/completions"] = lambda body: None if is_known(body) else 400
    with pytest.raises(ConfigError, match="does not know token 327 of this run's vocabulary"):
        ServerSampler(model, tiny_tokenizer(), directory=tmp_path, eos_ids=[2], server=server)
    assert "covey_join" not in fake.calls


def test_another_model_of_the_same_vocabulary_is_refused(fake, model, tmp_path):
    fake.folder = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "num_hidden_layers": 7}))
    with pytest.raises(ConfigError, match="serves another model: .* has num_hidden_layers 7, this run's model 1"):
        sampler_of(fake, model, tmp_path)


def test_a_proxy_that_gives_up_is_named_and_not_taken_for_another_vocabulary(fake, model, tmp_path):
    fake.faults["/v1/completions"] = 504
    with pytest.raises(
        ServerError, match="HTTP 504, which a proxy before the server says .*raise the proxy's time limit"
    ):
        sampler_of(fake, model, tmp_path)


def test_a_cpu_server_that_forgets_tied_embeddings_is_refused(tmp_path):
    model = tiny_model("qwen2", tie_word_embeddings=True)
    with FakeServer(model, tiny_tokenizer()) as fake, pytest.raises(ConfigError, match="packed copy of lm_head"):
        sampler_of(fake, model, tmp_path)


def test_nccl_is_refused_where_it_would_move_nothing(fake, model, tmp_path):
    with pytest.raises(
        ConfigError, match="vllm_transport='nccl' cannot be used: the server computes on cpu; use 'directory'"
    ):
        sampler_of(fake, model, tmp_path, transport="nccl")


@pytest.mark.parametrize(("mode", "temperature"), [("raw_logprobs", 0.5), ("raw_logits", 1.0)])
def test_raw_log_probabilities_are_refused_at_another_temperature(fake, model, tmp_path, mode, temperature):
    fake.logprobs_mode = mode
    sampler = sampler_of(fake, model, tmp_path)
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        sampler.sample(PROMPTS, 2, SamplingParams(temperature=temperature))


def test_deadlines_have_names():
    with pytest.raises(ConfigError, match="vllm_deadlines has 'paus'"):
        Deadlines.of({"paus": 3})
    with pytest.raises(ConfigError, match="above 0"):
        Deadlines.of({"pause": 0})


@pytest.mark.parametrize(
    "given, expected",
    [
        (("http://gpu7:8001/v1/", "x", 1), "http://gpu7:8001"),
        ((None, "0.0.0.0", 8000), "http://127.0.0.1:8000"),
        (("https://host/proxy", "x", 1), "https://host:443/proxy"),
    ],
)
def test_addresses(given, expected):
    assert str(Address.of(*given)) == expected


@pytest.mark.parametrize("given", ["gpu7:8000", "ftp://x", "http://", "http://a:b"])
def test_no_address(given):
    with pytest.raises(ConfigError, match="is no address"):
        Address.of(given)


def test_an_error_of_the_server_is_told_in_its_words(fake):
    client = Client(Address.of(None, "127.0.0.1", fake.port))
    fake.faults["/pause"] = 500
    with pytest.raises(ServerError, match=r"POST http://127.0.0.1:\d+/pause answers HTTP 500: told to fail"):
        client.post("/pause")
