"""Rewards in worker processes: what can be loaded there, what comes back, and that nothing hangs or stays behind."""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path

import hanging_rewards as theirs
import pytest
import torch

from covey.errors import RewardError
from covey.process.spawner import WorkerProcesses
from covey.rewards import RewardSpec, Scorer, resolve
from covey.rewards.calling.workers import WorkerPool
from covey.rewards.decorators import CallOptions
from covey.types import Mean, RunningTotal, Sum
from forked import run
from kit import group, rest_nightly


def apart(call, **options):
    return RewardSpec(
        name=getattr(call, "__name__", "reward"), call=call, call_options=CallOptions(isolated=True, **options)
    )


def pids(scorer):
    return [pid for caller in scorer._callers if caller.pool for pid in process_ids(caller.pool)]


def process_ids(pool):
    return [worker.process.pid for worker in pool.processes.workers]


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.fixture
def score():
    made = []

    def run(*specs, groups=None, **options):
        scorer = Scorer(specs, **options)
        made.append(scorer)
        (scored,) = scorer.score([group(["a", "bb"])] if groups is None else groups)
        return scored, scorer

    yield run
    for scorer in made:
        left = pids(scorer)
        scorer.close()
        assert not any(is_alive(pid) for pid in left)


def test_a_function_scores_in_another_process_and_what_it_logs_comes_along(score):
    scored, scorer = score(apart(theirs.length), apart(theirs.talkative))
    assert scored.rewards.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert scored.extras == {"length": [1, 2]}
    metrics = scorer.take_metrics()
    assert metrics["longest"] == Mean(2.0, 1)
    assert metrics["calls"] == RunningTotal({"here": 3.0})
    assert len(pids(scorer)) == 2
    assert os.getpid() not in pids(scorer)


def test_a_reward_there_may_have_all_the_time_it_needs(score):
    scored, _ = score(apart(theirs.length, timeout_seconds=math.inf))
    assert scored.rewards.tolist() == [[1.0], [2.0]]


def test_a_worker_is_used_again_and_partials_and_files_work(score, tmp_path):
    (tmp_path / "mine.py").write_text("def twice(completions, by=2):\n    return [by * len(c) for c in completions]\n")
    from_file = resolve(f"{tmp_path / 'mine.py'}:twice")
    scored, scorer = score(apart(from_file.call), apart(functools.partial(from_file.call, by=3)))
    before = pids(scorer)
    scorer.score([group(["ccc"])])
    assert scored.rewards.tolist() == [[2.0, 3.0], [4.0, 6.0]]
    assert pids(scorer) == before


def test_an_error_there_has_its_kind_and_traceback_here_and_costs_its_own_completion(score):
    scored, _ = score(apart(theirs.picky), groups=[group(["a", "x"])])
    assert [math.isnan(v) for v in scored.rewards[:, 0].tolist()] == [False, True]
    assert scored.events[0].said == "Reward 'picky' did not score a completion: ValueError: no number in it."
    assert 'raise ValueError("no number in it")' in scored.events[0].details["traceback"]
    assert scored.events[0].details["error"] == "ValueError"


def test_a_crash_in_c_costs_the_completion_that_made_it(score):
    scored, _ = score(apart(theirs.crashes_on_x), groups=[group(["a", "x", "b"])])
    assert [math.isnan(v) for v in scored.rewards[:, 0].tolist()] == [False, True, False]
    assert "was ended by signal 11" in scored.events[0].said


def test_a_process_that_leaves_scores_nothing(score):
    scored, _ = score(apart(theirs.leaves))
    assert scored.rewards.isnan().all()
    assert "left with exit code 0" in scored.events[0].said


@pytest.mark.parametrize(
    "hang",
    rest_nightly(
        [
            theirs.hang_in_regular_expression,
            theirs.hang_in_c_with_the_lock,
            theirs.hang_in_c_library,
            theirs.hang_and_ignore_signals,
        ],
        [theirs.hang_in_c_with_the_lock, theirs.hang_in_c_library, theirs.hang_and_ignore_signals],
    ),
)
def test_whatever_hangs_is_killed_in_time_and_says_where_it_hung(score, hang):
    _, scorer = score(apart(theirs.length), apart(hang, timeout_seconds=0.5), groups=[group(["a"])])
    started = time.perf_counter()
    (scored,) = scorer.score([group(["a", "bb"])])
    assert time.perf_counter() - started < 30  # limit, a second to kill, a new worker's start
    assert scored.rewards[:, 0].tolist() == [1.0, 2.0]
    assert scored.rewards[:, 1].isnan().all()
    (event,) = scored.events
    assert event.kind == "reward_timeout"
    assert "within 0.5 seconds and was killed" in event.said
    assert f"in {hang.__name__}" in event.details["traceback"]
    assert scorer.take_metrics()[f"rewards/{hang.__name__}/timeouts"] == Sum(3)


def test_what_a_hanging_reward_started_is_killed_with_it(score, tmp_path):
    groups = [group(["a"], columns={"file": str(tmp_path / "pid")})]
    score(apart(theirs.hang_with_a_child, timeout_seconds=1.0), groups=groups)
    child, until = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(child)


def test_one_completion_that_hangs_costs_itself_alone(score):
    scored, _ = score(theirs.hangs_on_x, groups=[group(["a", "x", "ccc", "dd"])])
    assert scored.rewards[:, 0].nan_to_num(-1.0).tolist() == [1.0, -1.0, 3.0, 2.0]


def test_a_wrong_return_is_refused_as_in_this_process(score):
    with pytest.raises(RewardError, match=r"the score of completion 0 is a str \('high'\), not a number"):
        score(apart(theirs.words))


def test_what_no_process_can_import_is_refused_with_the_reason():
    with pytest.raises(
        RewardError, match="cannot run in a worker process .* define it with `def` at the top of a file"
    ):
        Scorer([apart(lambda completions: [1.0])])


def test_a_module_that_fails_to_load_stops_the_run_with_a_sentence(tmp_path, score):
    (tmp_path / "once.py").write_text(
        "import os\nif 'COVEY_REWARD_WORKER' in os.environ:\n    raise KeyError('no key')\ndef f(completions):\n    return [0.0]\n"
    )
    with pytest.raises(RewardError, match="reward 'f' cannot be loaded in a worker process: KeyError: 'no key'"):
        score(apart(resolve(f"{tmp_path / 'once.py'}:f").call))


def test_with_workers_own_functions_are_isolated_and_the_others_run_here_with_a_warning(caplog):
    class Odd:
        def __call__(self, completions):
            return [0.0 for _ in completions]

    scorer = Scorer([theirs.length, Odd(), resolve("length")], workers=2)
    assert [caller.pool is not None for caller in scorer._callers] == [True, False, False]
    assert caplog.text.count("runs in the process of training") == 1


def test_a_pool_that_nobody_closes_ends_with_its_owner():
    pool = WorkerPool("length", theirs.length)
    pool.call({"completions": ["a"]}, (), 30.0)
    (pid,) = process_ids(pool)
    del pool
    assert not is_alive(pid)


@pytest.mark.slow
def test_large_batches_cross_the_socket(score):
    texts = ["z" * 20_000] * 100
    scored, _ = score(apart(theirs.length), groups=[group(texts)])
    assert torch.equal(scored.rewards[:, 0], torch.full((100,), 20_000.0))


@pytest.mark.slow
def test_many_hangs_in_a_row_leave_the_pool_whole_and_no_file_open(score):
    _, scorer = score(apart(theirs.hang_in_c_with_the_lock, timeout_seconds=0.2))
    for count in range(4):
        assert scorer.score([group(["a"])])[0].events[0].kind == "reward_timeout"
        if count == 0:
            opened = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == opened
    assert pids(scorer) == []


SCRIPT = """
from covey.rewards import Scorer, reward
from covey.types import Completion, Group, Prompt
import torch

@reward(isolated=True)
def mine(completions, **columns):
    return [float(len(c)) for c in completions]

def train():
    answers = tuple(Completion(token_ids=torch.tensor([1]), text=text, finish="stop") for text in ("a", "bb"))
    scorer = Scorer([mine])
    print(scorer.score([Group(prompt=Prompt(uid="0", text="q", token_ids=(1,)), completions=answers)])[0].rewards.tolist())
    scorer.close()
"""


def run_script(folder, ending):
    (folder / "script.py").write_text(SCRIPT + ending)
    return run(folder / "script.py", timeout=120)


@pytest.mark.slow
def test_a_reward_of_a_script_is_imported_from_its_file_and_a_script_without_a_guard_does_not_train_twice(tmp_path):
    good = run_script(tmp_path, "\nif __name__ == '__main__':\n    train()\n")
    assert good.out == "[[1.0], [2.0]]\n", good.err
    bad = run_script(tmp_path, "\ntrain()\n")
    assert bad.returncode == 1
    assert bad.out == ""
    assert "a worker process was about to train" in bad.err


class Counted:
    """A worker that counts how often it is killed."""

    is_alive = True
    kills = 0

    def begin(self):
        """Nothing to wait for."""

    def kill(self):
        self.kills += 1


def test_a_lost_worker_is_killed_once_as_its_process_id_may_be_another_ones_by_then():
    processes = WorkerProcesses(Counted, 1)
    with processes.worker() as worker:
        processes.drop(worker)
        processes.drop(worker)
    processes.close()
    assert worker.kills == 1
    with processes.worker() as another:
        assert another is not worker
