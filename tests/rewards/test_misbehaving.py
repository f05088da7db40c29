"""Whatever a reward does: the run goes on or stops with one sentence, and its siblings score as they would have without it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import misbehaving as bad
import pytest
import torch

from covey.errors import ConfigError, RewardError
from covey.rewards import Scorer, per_completion, reward
from covey.rewards.builtin.registry import resolve
from covey.runs import rollouts
from kit import group, rest_nightly

COMPLETIONS = ["4", "bad", "5", ""]


def sibling(prompts, completions, completion_ids, answer, trainer_state=None):
    """A score made of everything that it receives, so that any change shows."""
    return [
        float(len(p) + 2 * len(c) + sum(ids) % 97 + len(a["tests"]) + len(a["word"]))
        for p, c, ids, a in zip(prompts, completions, completion_ids, answer, strict=True)
    ]


def groups():
    return [group(COMPLETIONS, columns={"answer": {"tests": [1, 2, 3], "word": "four"}})]


def state():
    return SimpleNamespace(global_step=3, max_steps=10, log_history=[{"loss": 1.0}])


def expected():
    return Scorer([sibling]).score(groups())[0].rewards[:, 0].tolist()


def scored(function, **options):
    """The middle one of three rewards misbehaves, in two batches; the second batch's group."""
    watched = {"weights": [1.0, 0.0, 1.0], "trainer_state": state, "timeout_seconds": 20.0}  # its failures cost no sum
    scorer = Scorer([sibling, function, sibling], **watched, **options)
    try:
        scorer.score(groups())
        (found,) = scorer.score(groups())
    finally:
        scorer.close()
    assert found.rewards[:, 0].tolist() == found.rewards[:, 2].tolist() == expected()
    return found


def test_there_are_many():
    assert sum(map(len, (bad.ONE_BAD, bad.REFUSED, bad.LOST, bad.FINE, bad.ON_THE_SIDE))) >= 85


@pytest.mark.parametrize("name", bad.ONE_BAD)
def test_one_bad_completion_costs_its_own_score_alone_and_is_told(name, tmp_path):
    found = scored(bad.ONE_BAD[name])
    assert found.rewards[:, 1].isnan().tolist() == [False, True, False, False]
    (event,) = found.events
    assert event.kind in ("reward_error", "reward_timeout")
    assert event.details["completion"] == "bad"
    assert "Traceback" in event.details["traceback"]
    assert len(event.said) < 600
    assert rollouts.write(tmp_path, 1, [found], ["a", "b", "c"]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_nightly(bad.ISOLATED, ["KeyboardInterrupt"]))
def test_one_bad_completion_costs_its_own_score_alone_in_a_worker_process_too(name):
    found = scored(bad.ISOLATED[name])
    assert found.rewards[:, 1].isnan().tolist() == [False, True, False, False]
    (event,) = found.events
    assert event.details["completion"] == "bad"


@pytest.mark.slow
def test_values_without_end_from_a_worker_process_are_refused():
    with pytest.raises(RewardError, match="returned 5 values for 4 completions"):
        scored(bad.isolated_endless)


@pytest.mark.parametrize("name", bad.REFUSED)
def test_what_is_no_list_of_numbers_stops_the_first_batch_with_one_sentence(name):
    with pytest.raises(RewardError) as error:
        scored(bad.REFUSED[name])
    assert "\n" not in str(error.value)
    assert error.value.events


@pytest.mark.parametrize("name", bad.LOST)
def test_a_batch_that_is_lost_leaves_the_siblings_alone(name):
    found = scored(bad.LOST[name])
    assert found.rewards[:, 1].isnan().all()
    assert found.events


@pytest.mark.parametrize("name", bad.FINE)
def test_odd_numbers_are_scores(name):
    function, value = bad.FINE[name]
    assert scored(function).rewards[:, 1].tolist() == [value] * 4


@pytest.mark.parametrize("name", bad.ON_THE_SIDE)
def test_what_a_reward_disturbs_is_put_back(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {
        "directory": os.getcwd, "dtype": torch.get_default_dtype, "grad": torch.is_grad_enabled,
        "threads": torch.get_num_threads, "stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr,
        "collector": gc.isenabled, "device": torch.get_default_device,
        "deterministic": torch.are_deterministic_algorithms_enabled,
    }  # fmt: skip
    before = {what: read() for what, read in kept.items()}
    found = scored(bad.ON_THE_SIDE[name])
    assert {what: read() for what, read in kept.items()} == before
    assert found.rewards[:, 1].tolist() == [1.0] * 4
    assert rollouts.write(tmp_path, 1, [found], ["a", "b", "c"]).is_file()


# -- inputs that are changed in place ----------------------------------------------------------------------------------------


def _spoils(prompts, completions, completion_ids, answer, trainer_state=None, log_extra=None):
    for messages in (*prompts, *completions):
        messages[0]["content"] = "spoilt"
        messages.append({"role": "user", "content": "more"})
    for ids, row in zip(completion_ids, answer, strict=True):
        ids.reverse()
        ids.append(0)
        row["tests"].clear()
        row["array"][:] = 0
        row["tensor"].zero_()
        row["deep"][0][0]["x"] = 9
    size = len(completions)
    for column in (prompts, completions, completion_ids, answer):
        column.clear()
    trainer_state.log_history[0]["loss"] = 9
    trainer_state.log_history.clear()
    trainer_state.max_steps = 0
    return [1.0] * size


async def _spoils_beside(**columns):
    return _spoils(**_named(columns))


SPOILERS = {
    "plain": _spoils,
    "async": _spoils_beside,
    "in a thread": reward(in_thread=True)(lambda **columns: _spoils(**_named(columns))),
    "streamed": reward(streams=True)(lambda **columns: _spoils(**_named(columns))),
}


def _named(columns):
    return {name: columns[name] for name in ("prompts", "completions", "completion_ids", "answer", "trainer_state")}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_reward_that_changes_its_inputs_changes_them_for_nobody(name, tmp_path):
    answer = {"tests": [1, 2], "array": torch.ones(2).numpy(), "tensor": torch.ones(2), "deep": [[{"x": 1}]]}
    messages = ({"role": "user", "content": "2 + 2 ="},)
    one = group(["4", "5"], question=messages, columns={"answer": answer})
    ids = [completion.token_ids.tolist() for completion in one.completions]
    trained, seen = state(), []

    def reads(prompts, completions, completion_ids, answer, trainer_state):
        seen.append(repr((prompts, completions, completion_ids, answer, trainer_state)))
        return [0.0] * len(completions)

    scorer = Scorer([reads, SPOILERS[name], reads], trainer_state=lambda: trained)
    (found,) = scorer.score([one])
    scorer.close()
    assert seen[0] == seen[1]
    assert found.rewards[:, 1].tolist() == [1.0, 1.0]
    assert messages == ({"role": "user", "content": "2 + 2 ="},)
    assert [completion.token_ids.tolist() for completion in found.completions] == ids
    assert answer["tests"] == [1, 2]
    assert answer["array"].tolist() == answer["tensor"].tolist() == [1.0, 1.0]
    assert answer["deep"] == [[{"x": 1}]]
    assert (trained.max_steps, trained.log_history) == (10, [{"loss": 1.0}])
    (row, _) = rollouts.table_of(1, [found], ["a", "b", "c"]).to_pylist()
    assert (row["prompt"], row["completion"]) == ("user: 2 + 2 =", "4")


def test_a_reward_that_changes_its_inputs_and_raises_sees_them_whole_when_it_is_called_again():
    def eats(completions, answer):
        taken = [row.pop() for row in answer]
        if "x" in completions:
            raise ValueError("no")
        return [float(value) for value in taken]

    (found,) = Scorer([eats]).score([group(["a", "x", "b"], columns={"answer": [1, 2]})])
    assert found.rewards[0].item() == found.rewards[2].item() == 2.0


# -- flaky judges, tasks, weights, classes -----------------------------------------------------------------------------------


def test_a_judge_that_fails_now_and_then_is_asked_again():
    asked = {}

    @per_completion(pure=False)
    async def judge(completion):
        asked[completion] = asked.get(completion, 0) + 1
        if completion == "never" or asked[completion] == 1:
            raise ConnectionResetError("503")
        return 1.0

    scorer = Scorer([judge])
    (found,) = scorer.score([group(["a", "b", "never"])])
    scorer.close()
    assert found.rewards[:2, 0].tolist() == [1.0, 1.0]
    assert found.rewards[2].isnan().all()
    assert asked == {"a": 2, "b": 2, "never": 2}


def test_tasks_that_nobody_awaits_are_cancelled_and_told_once(caplog):
    tasks = []

    async def leaks(completions):
        tasks.extend(asyncio.get_running_loop().create_task(asyncio.sleep(3600)) for _ in range(3))
        return [1.0 for _ in completions]

    scorer = Scorer([leaks])
    (first,) = scorer.score([group(["a"])])
    (second,) = scorer.score([group(["a"])])
    assert all(task.cancelled() for task in tasks)
    assert [event.kind for event in first.events] == ["reward_tasks_left"]
    assert "'leaks' left 3 task(s) running" in first.events[0].said
    assert second.events == ()
    scorer.close()


@pytest.mark.parametrize(
    "weight", [1e300, float("nan"), float("inf"), "1e300", "linear:1:1e39:10", 10**400, None, "much"]
)
def test_a_weight_that_no_sum_can_hold_is_refused_in_one_sentence(weight):
    with pytest.raises(ConfigError, match="weight") as error:
        Scorer([sibling], [weight])
    assert "\n" not in str(error.value)


def test_a_weight_of_negative_zero_is_zero():
    assert str(Scorer([sibling], [-0.0]).weights.tolist()) == "[0.0]"


@pytest.mark.parametrize("given", [lambda step: 1 / step, lambda step: "a lot", lambda step: 1e300])
def test_a_weight_function_that_fails_is_told_in_one_sentence(given):
    with pytest.raises(ConfigError, match="reward_weights: .* at step 0"):
        Scorer([sibling], [given]).weights.tolist()


def test_a_weighted_sum_that_overflows_is_not_scored_and_told():
    huge = lambda completions: [3e37 if c == "bad" else 1.0 for c in completions]
    (found,) = Scorer([sibling, huge], [1.0, 100.0]).score(groups())
    assert found.rewards.isnan().any(-1).tolist() == [False, True, False, False]
    (event,) = found.events
    assert "the weighted sum of its rewards is 3e+39" in event.said
    assert event.details["completion"] == "bad"


class NeedsMore:
    def __init__(self, scale):
        self.scale = scale


class Silent:
    pass


class Fails:
    def __init__(self):
        raise OSError("no judge here")


@pytest.mark.parametrize("thing", [NeedsMore, Silent, Fails, dict, int, type, Silent(), 3])
def test_what_is_no_reward_is_refused_before_any_work_in_one_sentence(thing):
    with pytest.raises((RewardError, ConfigError)) as error:
        Scorer.of([thing])
    assert "\n" not in str(error.value)


def test_a_class_that_makes_a_reward_without_parameters_is_made():
    assert resolve(Ready).call([1]) == [1.0]


class Ready:
    def __call__(self, completions):
        return [1.0 for _ in completions]


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------------


def test_a_ctrl_c_during_a_reward_ends_the_scoring():
    def interrupted(completions):
        signal.raise_signal(signal.SIGINT)
        return [1.0 for _ in completions]

    def wraps(completions):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt("stopped") from error
        return [1.0 for _ in completions]

    for function in (interrupted, wraps):
        with pytest.raises(KeyboardInterrupt):
            Scorer([function], timeout_seconds=None).score(groups())


def test_a_reward_that_replaces_the_handler_of_ctrl_c_does_not_keep_it():
    before = signal.getsignal(signal.SIGINT)
    deaf = lambda completions: [signal.signal(signal.SIGINT, signal.SIG_IGN) and 1.0 for _ in completions]
    (found,) = Scorer([deaf]).score([group(["a"])])
    assert signal.getsignal(signal.SIGINT) is before
    assert found.events[0].kind == "reward_side_effect"


@pytest.mark.nightly
def test_a_child_that_a_reward_forks_does_not_go_on_as_a_second_run(tmp_path):
    script = (
        "import os\nfrom covey.rewards import Scorer\nfrom kit import group\n"
        "def forks(completions):\n    os.fork()\n    return [1.0 for _ in completions]\n"
        "Scorer([forks], timeout_seconds=None).score([group(['a'])])\nprint('trained', flush=True)\n"
    )
    script = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{script}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.count("trained") == 1
