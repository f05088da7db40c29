"""The parts of learning from feedback: the gate's arithmetic, the store's rules, versions on the disk, cleaned texts."""

import errno
import math
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing import Pipe

import numpy
import pytest
import torch

from covey.errors import ConfigError, CoveyError, RunFolderError, StorageError
from covey.feedback import process
from covey.feedback.endpoint import LearningEndpoint, cleaned, marks
from covey.feedback.gate import judged, smallest_set
from covey.feedback.process import Learning
from covey.feedback.settings import Settings
from covey.feedback.store import FeedbackError, Store
from covey.feedback.versions import Versions
from covey.types import Completion, Prompt
from kit import rest_nightly

VERDICT = {"candidate": 0.6, "served": 0.5}


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_the_interval_is_agresti_and_mins_for_paired_proportions():
    """Agresti and Min 2005: with b gains and c losses of n, (b - c) / (n + 2) +- z sqrt((b + c + 1) - (b - c)^2 / (n + 2)) / (n + 2)."""
    n, b, c = 100, 12, 5
    served = [0.0] * b + [1.0] * c + [1.0] * (n - b - c)
    candidate = [1.0] * b + [0.0] * c + [1.0] * (n - b - c)
    found = judged(served, candidate, 0.02)
    spread = 1.959963984540054 * math.sqrt((b + c + 1) - (b - c) ** 2 / (n + 2)) / (n + 2)
    assert found.difference == pytest.approx(0.07)
    assert (found.low, found.high) == pytest.approx(((b - c) / (n + 2) - spread, (b - c) / (n + 2) + spread))


def test_a_candidate_that_changes_nothing_passes_from_the_smallest_set_on():
    least = smallest_set(0.02)
    assert judged([1.0] * least, [1.0] * least, 0.02).passes
    assert not judged([1.0] * (least - 1), [1.0] * (least - 1), 0.02).passes


def test_at_tolerance_zero_only_what_is_better_for_certain_passes():
    same = [0.0, 1.0] * 100
    assert not judged(same, same, 0.0).passes
    assert judged([0.0] * 20 + same, [1.0] * 20 + same, 0.0).passes


def test_the_scale_of_a_reward_does_not_change_the_verdict():
    served = [random.random() for _ in range(50)]
    candidate = [score + random.gauss(0.05, 0.2) for score in served]
    small = judged(served, candidate, 0.02)
    large = judged([100 * one for one in served], [100 * one for one in candidate], 2.0)
    assert (large.low, large.high) == pytest.approx((100 * small.low, 100 * small.high))


def test_prompts_without_a_reward_are_left_out_and_none_at_all_never_passes():
    assert judged([1.0, math.nan, 0.0], [1.0, 1.0, math.nan], 0.5).prompts == 1
    assert not judged([math.nan], [1.0], 10.0).passes


@pytest.mark.parametrize(("gains", "losses"), rest_nightly([(0.06, 0.12), (0.0, 0.06), (0.2, 0.26)], 1))
def test_candidates_that_lose_the_tolerance_pass_as_seldom_as_the_interval_says(gains, losses):
    """A loss of exactly the tolerance: 2.5% may pass. Of 2000 draws more than 3.6% would, by chance, in 1 test of 1000."""
    rng = numpy.random.default_rng(0)
    steps = rng.choice([1.0, -1.0, 0.0], size=(2000, 200), p=[gains, losses, 1 - gains - losses])
    passed = [judged((row < 0).astype(float), (row > 0).astype(float), losses - gains).passes for row in steps]
    assert sum(passed) <= 0.036 * 2000


@pytest.mark.parametrize("losses", rest_nightly([0.06, 0.12], 1))
def test_several_drawn_answers_a_prompt_do_not_make_the_gate_looser(losses):
    """Four answers a prompt, of which each may be lost or gained: again at most 2.5% pass at a loss of the tolerance."""
    rng = numpy.random.default_rng(0)
    gains = losses - 0.06
    steps = rng.choice([1.0, -1.0, 0.0], size=(2000, 200, 4), p=[gains, losses, 1 - gains - losses])
    served, candidate = (steps < 0).mean(-1), (steps > 0).mean(-1)
    passed = [judged(a, b, 0.06).passes for a, b in zip(served, candidate, strict=True)]
    assert sum(passed) <= 0.036 * 2000


# -- answers and scores -----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, max_age_seconds=60.0)
    yield made
    made.close()


def test_answers_without_a_score_are_kept_up_to_a_size_and_the_oldest_go(tmp_path):
    store = Store(tmp_path, max_age_seconds=60.0, most_bytes=50_000)
    for i in range(300):
        kept(store, id=f"a{i:03d}")
        if i == 0:
            store.score("a000", 0, 1.0, None)
    left = {i for (i,) in store._file.execute("SELECT id FROM answers")}
    assert 50 < len(left) < 250
    assert left >= {"a000", "a299"}, "a scored answer and the newest stay"
    assert "a001" not in left
    with pytest.raises(FeedbackError) as refused:
        store.score("a001", 0, 1.0, None)
    assert refused.value.status == 404
    store.close()


def kept(store, id="a", choice=0, refused=None, version=3):
    completion = Completion(
        token_ids=torch.tensor([5, 6, 2]),
        text="x",
        finish="stop",
        logprobs=torch.tensor([-0.25, -1.5, -0.125]),
        version=version,
    )
    store.add(id, choice, "demo", Prompt(uid="0", token_ids=(1, 2)), completion, refused)


def test_a_scored_answer_is_trained_on_exactly_as_it_was_drawn(store):
    kept(store)
    assert store.oldest("demo", 9) == []
    assert store.score("a", 0, 0.5, None).version == 3
    (group,) = [one.group() for one in store.oldest("demo", 9)]
    (answer,) = group.completions
    assert group.prompt.token_ids == (1, 2)
    assert answer.token_ids.tolist() == [5, 6, 2]
    assert answer.logprobs.tolist() == [-0.25, -1.5, -0.125]
    assert (answer.version, group.rewards.tolist()) == (3, [[0.5]])


def test_one_score_is_taken_for_each_answer(store):
    kept(store)
    kept(store, choice=1)
    store.score("a", 0, 1.0, None)
    store.score("a", 1, -1.0, None)
    with pytest.raises(FeedbackError, match="has the score 1 already") as second:
        store.score("a", 0, -1.0, None)
    with pytest.raises(FeedbackError) as unknown:
        store.score("b", 0, 1.0, None)
    assert (second.value.status, unknown.value.status) == (409, 404)
    assert sorted(one.score for one in store.oldest("demo", 9)) == [-1.0, 1.0]


def test_a_score_that_comes_too_late_is_not_taken(store):
    kept(store)
    store.max_age_seconds = 0.0
    with pytest.raises(FeedbackError) as late:
        store.score("a", 0, 1.0, None)
    assert (late.value.status, late.value.outcome) == (410, "late")
    assert store.oldest("demo", 9) == []


def test_answers_that_may_not_be_trained_on_take_a_score_and_keep_no_tokens(store):
    kept(store, refused="its prompt is in the fixed set")
    assert store.score("a", 0, 1.0, None).refused == "its prompt is in the fixed set"
    assert store.due(1) is None


def test_used_conversations_are_not_taken_again_even_by_another_process(store, tmp_path):
    for id in "abc":
        kept(store, id)
        store.score(id, 0, 1.0, None)
    assert store.due(3) == "demo"
    store.used(store.oldest("demo", 2), 1)
    store.close()
    again = Store(tmp_path, max_age_seconds=60.0)
    assert [one.id for one in again.oldest("demo", 9)] == ["c"]
    again.close()
    store.__init__(tmp_path, 60.0)


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_a_sentence_and_is_left_closed(tmp_path):
    (tmp_path / "feedback.sqlite").write_text("no database, and long enough to be looked at" * 50)
    with pytest.raises(StorageError, match=r"cannot be used .*; give another --learn-folder") as refused:
        Store(tmp_path, 60.0)
    held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [place for place in held if place.endswith("feedback.sqlite")]
    del refused  # whose traceback holds what the constructor had opened
    with pytest.raises(StorageError, match="cannot be used"):
        Store(tmp_path / "nowhere", 60.0)


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(store):
    for id in "ab":
        kept(store, id)
        store.score(id, 0, 1.0, None)
    taken = store.oldest("demo", 2)
    size = store._file.execute("PRAGMA page_count").fetchone()[0]
    store._file.execute(f"PRAGMA max_page_count={size}")
    with pytest.raises(StorageError, match=r"feedback.sqlite cannot be used \(database or disk is full\)"):
        kept(store, "c" * 100_000)
    store._file.execute("CREATE TRIGGER full BEFORE UPDATE ON answers BEGIN SELECT RAISE(FAIL, 'full'); END")
    with pytest.raises(StorageError, match="full"):
        store.used(taken, 1)
    store._file.execute("DROP TRIGGER full")
    store.used(taken, 1)
    assert not store._file.in_transaction
    assert store.due(1) is None


def promoted(versions, parent, reward=0.6):
    candidate = versions.folder / "candidates" / "next"
    candidate.mkdir(parents=True)
    (candidate / "adapter_model.safetensors").write_text(str(reward))
    return versions.promote("demo", parent, candidate, {**VERDICT, "candidate": reward})


def test_the_served_version_is_what_a_new_process_finds(tmp_path):
    versions = Versions(tmp_path, "base")
    assert promoted(versions, 0) == 1
    assert promoted(versions, 1) == 2
    (tmp_path / "candidates" / "next").mkdir(parents=True)  # one that was not judged when the process was killed
    again = Versions(tmp_path, "base")
    assert again.served("demo") == 2
    assert again.adapter("demo", 2).is_dir()
    assert not (tmp_path / "candidates").exists()


def test_rolling_back_serves_the_parent_and_never_reuses_a_number(tmp_path):
    versions = Versions(tmp_path, "base")
    promoted(versions, 0)
    promoted(versions, 1, reward=0.9)
    assert versions.roll_back("demo") == 1
    assert Versions(tmp_path, "base").served("demo") == 1
    assert promoted(versions, 1) == 3
    assert [versions.roll_back("demo") for _ in range(2)] == [1, 0]
    with pytest.raises(LookupError, match="nothing to roll back"):
        versions.roll_back("demo")


def test_the_best_version_is_not_a_withdrawn_one_and_stays_on_the_disk(tmp_path):
    versions = Versions(tmp_path, "base")
    promoted(versions, 0, reward=0.8)
    for parent in range(1, 12):
        promoted(versions, parent, reward=0.7)
    assert versions.best("demo") == 1
    assert versions.adapter("demo", 1).is_dir()
    assert not versions.adapter("demo", 2).exists()
    assert versions.adapter("demo", 12).is_dir()


def test_the_best_version_after_rolling_back_is_one_that_is_still_on_the_disk(tmp_path):
    versions = Versions(tmp_path, "base")
    for parent, reward in enumerate([0.9, *[0.5] * 8, 0.95]):
        promoted(versions, parent, reward)
    assert versions.best("demo") == 10
    assert not versions.adapter("demo", 1).is_dir(), "the best before it is gone"
    versions.roll_back("demo")
    assert versions.adapter("demo", versions.best("demo")).is_dir()


def test_a_folder_of_another_model_is_refused(tmp_path):
    promoted(Versions(tmp_path, "base"), 0)
    with pytest.raises(RunFolderError, match="learnt with another model"):
        Versions(tmp_path, "another")


# -- texts and settings -----------------------------------------------------------------------------------------------


def test_comments_lose_control_characters_and_broken_ones():
    assert cleaned(" too\x00 long\ud800\r\nreally\u0007 ") == "too long\nreally"


def test_a_prompt_of_the_fixed_set_is_known_by_its_ids_or_its_words():
    fixed = Prompt(uid="0", token_ids=(1, 2, 3), messages=({"role": "user", "content": "How many apples?"},))
    system = {"role": "system", "content": "Be brief."}
    other = Prompt(
        uid="1", token_ids=(9, 1, 2, 3), messages=(system, {"role": "user", "content": " how  many APPLES?\n"})
    )
    plain = Prompt(uid="2", token_ids=(1, 2, 3), text="something else")
    new = Prompt(uid="3", token_ids=(4,), messages=({"role": "user", "content": "How many pens?"},))
    assert marks(fixed) & marks(other)
    assert marks(fixed) & marks(plain)
    assert not marks(fixed) & marks(new)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"tolerance": 0.001}, "too few to show"),
        ({"fixed_rows": (), "tolerance": 0.0}, "needs a fixed set"),
        ({"batch_size": 1}, "at least 2"),
        ({"rewards": ()}, "needs a reward"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, wrong, said):
    rows = tuple({"prompt": str(i)} for i in range(200))
    given = {"folder": tmp_path, "model": "demo", "fixed_rows": rows, "rewards": ("demo",), **wrong}
    with pytest.raises(ConfigError, match=said):
        Settings(**given)


# -- learning that fails ----------------------------------------------------------------------------------------------


class Outcomes:
    """A store without scores, where looking for old answers fails or not, in this order; the last one closes the endpoint."""

    def __init__(self, *outcomes):
        self.outcomes, self.done = list(outcomes), 0

    def due(self, least):
        return None

    def forget_old(self):
        outcome, self.done = self.outcomes[self.done], self.done + 1
        self.endpoint._scored.set()
        if self.done == len(self.outcomes):
            self.endpoint._closing.set()
        if outcome == "fails":
            raise StorageError("the disk is full")


class NothingRuns:
    def close(self):
        pass


def endpoint_of(store, settings=None):
    """The part of an endpoint that goes on after a failure, without a server."""
    endpoint = object.__new__(LearningEndpoint)
    endpoint._closing, endpoint._scored, endpoint._problem = threading.Event(), threading.Event(), None
    endpoint.store, endpoint.settings, endpoint._learning = store, settings, NothingRuns()
    store.endpoint = endpoint
    endpoint._scored.set()
    return endpoint


@pytest.fixture
def learning_settings(tmp_path):
    rows = tuple({"prompt": str(i)} for i in range(200))
    return Settings(folder=tmp_path, model="demo", fixed_rows=rows, rewards=("demo",))


def test_a_process_that_cannot_even_be_started_again_is_the_problem_that_is_shown(learning_settings, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("covey.feedback.process.Pipe", refuse)
    endpoint = endpoint_of(Outcomes("fails", "passes"), learning_settings)
    endpoint._learn()
    assert "Too many open files" in endpoint._problem


@pytest.mark.slow
def test_the_process_starts_by_its_module_and_says_itself_why_it_cannot_learn(learning_settings):
    """Elsewhere it is forked: `test_learning.py`."""
    learning = Learning.__new__(Learning)
    learning.connection, theirs = Pipe()
    learning.process = process._start(theirs)
    with pytest.raises(CoveyError, match="the process that learns failed: .*'/nowhere' does not exist"):
        learning._ask(replace(learning_settings, model="/nowhere"))
    learning.close()


@pytest.mark.parametrize(
    ("outcomes", "done"), [(("fails", "passes") * 4, 8), (("passes", *("fails",) * 4, "passes"), 4)]
)
def test_failures_are_in_a_row_if_nothing_went_well_between_them(learning_settings, monkeypatch, outcomes, done):
    monkeypatch.setattr("covey.feedback.endpoint.Learning", lambda settings: NothingRuns())
    store = Outcomes(*outcomes)
    endpoint = endpoint_of(store, learning_settings)
    endpoint._learn()
    assert (store.done, endpoint._problem) == (done, None if done == 8 else "the disk is full")


ORPHAN = "import os, sys; sys.stdin.read() if not os.fork() else os._exit(3)"  # the child keeps the pipe open


def test_a_process_that_ends_is_noticed_though_one_that_it_started_holds_the_pipe():
    learning = Learning.__new__(Learning)
    learning.connection, theirs = Pipe()
    command = [sys.executable, "-c", ORPHAN]
    with theirs, subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as learning.process:
        theirs.close()
        with pytest.raises(CoveyError, match="ended with exit code 3"):
            learning.make(None)
        learning.process.stdin.close()
