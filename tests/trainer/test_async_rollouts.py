"""Rollouts that run ahead: equal to the ordinary run at staleness 0, bounded above it, refused where they cannot be, safe to kill."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from async_run import digest, prompts_by_step, trainer
from transformers import TrainerCallback

from covey import GRPOConfig
from covey.ensembles import Ensemble, Member
from covey.errors import CheckpointError, ConfigError, CoveyError
from covey.rollout import worker_process
from covey.rollout.ahead import Ahead
from covey.rollout.on_ray import _not_started
from forked import Forked, worker_of
from kit import rest_nightly, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _worker(monkeypatch):
    """The process that samples is a fork that has imported everything; `tests/rollout/test_asynchronous.py` starts real ones."""
    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))


@pytest.fixture
def drawn_before_updates(monkeypatch):
    """Rollouts that are ordered ahead of an update are drawn before it, however slow the process that draws them."""
    order = Ahead.order

    def order_and_wait(ahead, position):
        order(ahead, position)
        ahead.sampler.finish(ahead.is_stopping)

    monkeypatch.setattr(Ahead, "order", order_and_wait)


@pytest.mark.slow
def test_without_staleness_the_run_is_the_ordinary_one_bit_for_bit(tmp_path: Path) -> None:
    runs = {
        "sync": trainer(tmp_path / "sync", 4, async_rollouts=False, save_strategy="no"),
        "async": trainer(tmp_path / "async", 4, max_staleness=0, save_strategy="no"),
    }
    for run in runs.values():
        run.train()
    assert digest(runs["async"].model) == digest(runs["sync"].model)
    assert prompts_by_step(tmp_path / "async") == prompts_by_step(tmp_path / "sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", rest_nightly(["sdpo, feedback=answer, teacher_update_rate=0.5", "rlsd, feedback=answer"], 1)
)
def test_a_teacher_by_token_teaches_rollouts_that_run_ahead(name: str, drawn_before_updates, tmp_path: Path) -> None:
    """Without staleness bit for bit as the ordinary run, also where the teacher is an average that follows; and with it."""
    runs = {
        "sync": trainer(tmp_path / "sync", 4, async_rollouts=False, algorithm=name, save_strategy="no"),
        "async": trainer(tmp_path / "async", 4, max_staleness=0, algorithm=name, save_strategy="no"),
        "stale": trainer(tmp_path / "stale", 4, max_staleness=2, pipeline_depth=2, algorithm=name, save_strategy="no"),
    }
    for run in runs.values():
        run.train()
    assert digest(runs["async"].model) == digest(runs["sync"].model)
    logs = [entry for entry in runs["stale"].state.log_history if "teacher/gap" in entry]
    assert [entry["teacher/informed"] for entry in logs] == [1.0] * 4
    assert [entry["staleness/max"] for entry in logs] == [0.0, 1.0, 2.0, 2.0]
    assert digest(runs["stale"].model) != digest(runs["sync"].model)


@pytest.mark.slow
@pytest.mark.parametrize("role", rest_nightly(["sibling", "rescue", "baseline"], 1))
def test_members_of_an_ensemble_join_rollouts_that_run_ahead(role: str, tmp_path: Path) -> None:
    """Without staleness bit for bit as in the ordinary run; with it they join each rollout that is delivered."""
    runs = {}
    for name, options in {
        "sync": {"async_rollouts": False},
        "async": {"max_staleness": 0},
        "ahead": {"max_staleness": 1, "in_flight_weights": False},
    }.items():
        member = Member(tiny_model(seed=3), role=role, samples=2, tokenizer=tiny_tokenizer(), name="peer")
        ensemble = Ensemble([member], threshold=0.999 if role == "rescue" else 0.5)
        runs[name] = trainer(tmp_path / name, 3, save_strategy="no", ensemble=ensemble, **options)
        runs[name].train()
    assert digest(runs["async"].model) == digest(runs["sync"].model)
    for run in runs.values():
        assert [entry["ensemble/peer/asked"] > 0 for entry in run.state.log_history if "reward" in entry] == [True] * 3


@pytest.mark.slow
def test_averaged_weights_are_evaluated_without_a_word_in_the_rollouts_ahead(tmp_path: Path) -> None:
    """Without staleness bit for bit as the ordinary run; with it the rollouts are those of a run that does not evaluate."""
    more: dict = {
        "save_strategy": "no",
        "ema_decay": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": False,
    }
    runs = {
        "sync": trainer(tmp_path / "sync", 4, async_rollouts=False, evaluates=True, **more),
        "async": trainer(tmp_path / "async", 4, max_staleness=0, evaluates=True, **more),
        "ahead": trainer(tmp_path / "ahead", 4, max_staleness=1, in_flight_weights=False, evaluates=True, **more),
        "quiet": trainer(
            tmp_path / "quiet", 4, max_staleness=1, save_strategy="no", ema_decay=0.5, in_flight_weights=False
        ),
    }
    for run in runs.values():
        run.train()
    evaluated = {
        name: [entry["eval_reward"] for entry in run.state.log_history if "eval_reward" in entry]
        for name, run in runs.items()
    }
    assert evaluated["async"] == evaluated["sync"]
    assert len(set(evaluated["sync"])) > 1
    assert digest(runs["async"].model) == digest(runs["sync"].model)
    assert digest(runs["ahead"].model) == digest(runs["quiet"].model) != digest(runs["sync"].model)
    after = runs["ahead"].evaluate()["eval_reward"]  # the run ended with the averaged weights, which are evaluated now
    assert after == evaluated["ahead"][-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* goes on from step 3:UserWarning")
def test_staleness_is_bounded_nothing_is_wasted_and_a_checkpoint_holds_what_is_ahead(tmp_path: Path) -> None:
    run = trainer(tmp_path, 6, max_staleness=2, pipeline_depth=2, steps_per_generation=2, gradient_accumulation_steps=1)
    run.train()
    logs = [entry for entry in run.state.log_history if "staleness/max" in entry]
    assert len(logs) == 6
    assert (
        1 <= max(entry["staleness/max"] for entry in logs) <= 2 + 1
    )  # a rollout of 2 updates is 1 older at its second
    assert sum(entry.get("wasted_tokens", 0.0) for entry in logs) == 0
    assert all(0 <= entry["idle/learner"] <= 1 for entry in logs if "idle/learner" in entry)
    drawn = [prompt for step in prompts_by_step(tmp_path) for prompt in step]
    assert len(set(drawn)) == len(drawn) == 12  # each row once

    later = trainer(tmp_path, 6, async_rollouts=False, steps_per_generation=2, gradient_accumulation_steps=1)
    with pytest.raises(CheckpointError, match="max_staleness=0 to train on them"):
        later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
        ({"pipeline_depth": 0}, "pipeline_depth=0 must be at least 1"),
        ({"rollout_placement": "slurm"}, "rollout_placement='slurm' is not known"),
    ],
)
def test_options_that_cannot_go_together_are_refused_in_one_sentence(options, said, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(output_dir=str(tmp_path), async_rollouts=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"generation_kwargs": {"num_beams": 2}}, "no log-probabilities"),
        ({"rollout_device": "cuda:7"}, "rollout_device='cuda:7' cannot be used here"),
    ],
)
def test_what_cannot_be_sampled_elsewhere_is_refused_before_a_worker_starts(options, said, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, 2, **options).train()


def test_options_without_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    GRPOConfig(output_dir=str(tmp_path), max_staleness=4, report_to="none")
    assert "max_staleness=4 changes nothing here: it acts with async_rollouts=True" in caplog.text


def test_staleness_that_nothing_corrects_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    GRPOConfig(
        output_dir=str(tmp_path), async_rollouts=True, vllm_importance_sampling_correction=False, report_to="none"
    )
    assert "updates from completions of older weights are not corrected" in caplog.text


def test_an_actor_that_does_not_start_says_what_the_cluster_lacks() -> None:
    assert "has 0 GPU free and it needs 1; add machines" in _not_started({"num_gpus": 1}, {"CPU": 8.0})
    assert "slow to start a process" in _not_started({"num_cpus": 2}, {"CPU": 8.0})


def full_cluster() -> SimpleNamespace:
    """A stand-in for Ray in a cluster without room: an actor that is asked for never starts."""
    is_over = threading.Event()

    def get(found):
        is_over.wait(120)
        raise LookupError("the cluster is gone")

    pending = SimpleNamespace(remote=lambda *given: "pending", options=lambda **given: pending)
    actor = SimpleNamespace(process_id=pending, put=pending, messages=pending)
    return SimpleNamespace(
        __spec__=ModuleSpec("ray", None), is_initialized=lambda: True, available_resources=dict, get=get,
        remote=lambda **needs: lambda body: SimpleNamespace(remote=lambda *given: actor),
        put=lambda value: value, wait=lambda found, timeout: ([], found),
        kill=lambda actor, no_restart: is_over.set(),
        exceptions=SimpleNamespace(RayError=LookupError, RayTaskError=KeyError),
    )  # fmt: skip


def expect_a_stop_while_it_waits(
    folder: Path, number: signal.Signals, leaves: type[BaseException], placement: str = "ray"
) -> None:
    """The signal comes two seconds into `train`."""
    run = trainer(folder, 2, max_staleness=0, rollout_placement=placement)
    sent: list[float] = []

    def stop() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    timer = threading.Timer(2.0, stop)
    timer.start()
    try:
        with pytest.raises(leaves):
            run.train()
        assert sent, "the run waits for its worker"
        assert time.monotonic() - sent[0] < 30
    finally:
        timer.cancel()
        run._parts.sampler.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "leaves"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_run_that_waits_for_its_actor_can_be_stopped(number, leaves, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", full_cluster())
    expect_a_stop_while_it_waits(tmp_path, number, leaves)


def started_as(code: str):
    """A start of the sampler's process that runs this code instead."""

    def start(theirs):
        with theirs:
            return subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], start_new_session=True)

    return start


@pytest.mark.timeout(120)
def test_a_run_whose_process_is_slow_to_start_can_be_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker_process, "_start", started_as("import time; time.sleep(300)"))
    expect_a_stop_while_it_waits(tmp_path, signal.SIGTERM, SystemExit, placement="process")


@pytest.mark.timeout(120)
def test_a_process_that_ends_while_it_starts_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker_process, "_start", started_as("raise SystemExit(137)"))
    monkeypatch.setattr(worker_process, "_roomy", lambda size: str(tmp_path))
    run = trainer(tmp_path, 2)
    with pytest.raises(
        CoveyError, match=r"ended while it started \(exit code 137\); is there memory for a second copy"
    ):
        run.train()
    assert not list(tmp_path.glob("covey-weights-*")), "nothing is left of the memory that both would have shared"


def test_a_ray_cluster_that_is_not_there_is_told_before_a_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ray = full_cluster()
    ray.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError, match="No Ray cluster answers at RAY_ADDRESS=127.0.0.1:1 .*or unset RAY_ADDRESS"):
        trainer(tmp_path, 2, rollout_placement="ray")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_ray_that_is_not_installed_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout_placement='ray' needs Ray: pip install 'covey\[ray\]'"):
        trainer(tmp_path, 2, rollout_placement="ray")


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_on_ray_a_run_that_waits_for_room_can_be_stopped(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=0, log_to_driver=False, include_dashboard=False)
    try:
        expect_a_stop_while_it_waits(tmp_path, signal.SIGTERM, SystemExit)
    finally:
        ray.shutdown()


@pytest.mark.nightly
def test_on_ray_the_run_is_the_same_and_a_killed_actor_is_replaced(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    here = trainer(tmp_path / "here", 4, async_rollouts=False, save_strategy="no")
    here.train()
    there = trainer(tmp_path / "there", 4, max_staleness=0, rollout_placement="ray", save_strategy="no")
    killed: list[int] = []
    priorities: list[int] = []

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            if state.global_step == 2:
                killed.append(there._parts.sampler._workers[0].process_id)
                priorities.append(os.getpriority(os.PRIO_PROCESS, killed[0]))
                os.kill(killed[0], signal.SIGKILL)

    there.add_callback(Kill())
    try:
        there.train()
    finally:
        ray.shutdown()
    assert priorities == [os.getpriority(os.PRIO_PROCESS, 0)]  # by Ray's default a busy machine would starve the actor
    assert there._parts.sampler.replaced == 1
    assert digest(there.model) == digest(here.model)


STEPS = 8
REPEATABLE = json.dumps({"max_staleness": 1, "in_flight_weights": False})


def start(folder: Path, steps: int = STEPS) -> Forked:
    return Forked(HERE / "async_run.py", folder, str(steps), REPEATABLE)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    folder = tmp_path_factory.mktemp("alone")
    process = start(folder)
    assert process.wait(300) == 0, process.err
    return process.out.split("digest ")[-1].strip(), prompts_by_step(folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "trial",
    [pytest.param(i, marks=pytest.mark.slow if i < 1 else pytest.mark.nightly) for i in range(20)],
)
def test_killed_at_a_random_moment_no_prompt_is_lost_or_doubled(trial: int, left_alone, tmp_path: Path) -> None:
    expected, prompts = left_alone
    process = start(tmp_path)
    draw, metrics = random.Random(trial), tmp_path / "metrics.jsonl"
    least = draw.randint(1, STEPS - 3)
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < least):
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.err
    again = start(tmp_path)
    assert again.wait(300) == 0, again.err
    assert prompts_by_step(tmp_path) == prompts, again.err
    assert again.out.split("digest ")[-1].strip() == expected, again.err


@pytest.mark.parametrize(
    "backend, options, is_named",
    [
        ("transformers", {}, True),
        ("generate", {}, True),
        ("vllm", {}, True),
        ("auto", {}, False),
        ("vllm-server", {}, False),
        ("transformers", {"in_flight_weights": False}, False),
        ("transformers", {"max_staleness": 0}, False),
    ],
)
def test_workers_that_keep_the_weights_of_a_completion_are_named(backend, options, is_named, tmp_path, caplog):
    from covey.training.build_sampler import name_whole_completions

    args = GRPOConfig(str(tmp_path), use_cpu=True, report_to="none", async_rollouts=True, **options)
    caplog.clear()
    name_whole_completions(args, backend)
    assert ["in_flight_weights=True changes no completion here" in text for text in caplog.messages] == [
        True
    ] * is_named
