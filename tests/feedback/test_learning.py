"""An endpoint that learns, with the shipped model, over real sockets: what is taken, learnt, refused, promoted and survived."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import demo
from covey.cli import main
from covey.demo import task
from covey.errors import RunFolderError
from covey.evaluation.intervals import paired_difference
from covey.feedback import process
from covey.feedback.endpoint import LearningEndpoint
from covey.feedback.settings import Settings
from covey.rollout import NativeSampler
from feedback.simulated import Load, ask, call, candidates, is_right, scored, text_of
from forked import Forked, worker_of

FORM = "feedback.rewards:form"
KEY = "a-key-of-some-length"
FIXED = tuple(task.rows("test", 100))
HOW = {
    "model": str(demo.model_path()),
    "fixed_rows": FIXED,
    "rewards": ("demo",),
    "tolerance": 0.06,
    "scores_per_candidate": 128,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "max_tokens": 40,
    "num_samples": 2,
    "use_cpu": True,
}
STYLE = {"tolerance": 0.1, "batch_size": 16}
NO_CANDIDATE = {"tolerance": 0.0, "fixed_rows": FIXED[:8]}
"""Of an endpoint that gets too few scores for one: its own score on the fixed set is all that it computes."""


@pytest.fixture(autouse=True)
def _workers_that_start_at_once(monkeypatch):
    """The process that learns is forked instead of imported."""
    monkeypatch.setattr(process, "_start", worker_of("covey.feedback.worker"))


@contextlib.contextmanager
def learning(folder, api_key=None, **settings):
    """The base URL of an endpoint in this process that learns, and the endpoint."""
    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32).eval()
    sampler = NativeSampler(model, AutoTokenizer.from_pretrained(demo.model_path()), dtype="float32")
    with LearningEndpoint(sampler, Settings(folder=folder, **HOW | settings), name="demo", api_key=api_key) as one:
        yield one.endpoint.url, one


def rows(count, seed=0):
    return task.rows("train", count, seed=seed)


def short(text, row):
    """The score of a client who likes short answers."""
    return -min(1.0, len(text) / 60)


def unseen(url, **how):
    """That client's scores of the answers to 192 problems of which no answer is ever sent to be scored."""
    asked = rows(192, seed=99)
    return [short(text_of(one), row) for one, row in zip(scored(url, asked, None, seed=99, **how), asked, strict=True)]


@pytest.mark.slow
def test_scores_are_taken_once_within_bounds_with_the_key_and_never_for_the_fixed_set(tmp_path):
    question = rows(1)[0]
    with learning(tmp_path, api_key=KEY, max_age_seconds=3600.0, **NO_CANDIDATE) as (url, one):
        assert call(url, "feedback", {"id": "x", "score": 1})[0] == 401
        assert call(url, "rollback", {})[0] == 401
        give = lambda **body: call(url, "feedback", body, KEY)
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            create = lambda **how: client.chat.completions.create(model="demo", max_tokens=40, **how)
            drawn = create(messages=question["prompt"])
            two = create(messages=question["prompt"], n=2)
            greedy = create(messages=question["prompt"], temperature=0)
            cut = create(messages=question["prompt"], top_p=0.9)
            fixed = create(messages=[{"role": "system", "content": "Hello."}, *FIXED[7]["prompt"]])
            *_, streamed = create(messages=question["prompt"], stream=True)
        status, said = give(id=drawn.id, score=-0.5, comment="too \x00long")
        assert (status, said["trained_on"], said["weights_version"]) == (200, True, 0)
        assert give(id=drawn.id, score=1)[0] == 409
        assert give(id=streamed.id, score=1)[0] == 200
        assert [give(id=two.id, score=1, index=i)[0] for i in range(3)] == [200, 200, 404]
        assert give(id="chatcmpl-none", score=1)[0] == 404
        for wrong in (
            {"score": 1.5},
            {"score": "good"},
            {},
            {"score": 1, "comment": "x" * 5000},
            {"score": 1, "stars": 5},
        ):
            assert give(id=greedy.id, **wrong)[0] == 400
        reasons = [give(id=answer.id, score=1)[1]["reason"] for answer in (greedy, cut, fixed)]
        assert reasons == [
            "it was drawn greedily",
            "it was drawn from a truncated or penalised distribution",
            "its prompt is in the fixed set",
        ]
        one.store.max_age_seconds = 0.0
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            late = client.chat.completions.create(model="demo", messages=question["prompt"], max_tokens=8)
        assert give(id=late.id, score=1)[0] == 410
        counts = call(url, "learning", key=KEY)[1]["scores"]
        assert counts == {"late": 1, "not_trained": 3, "second": 1, "taken": 4, "unknown": 2}
        with pytest.raises(RunFolderError, match="in use"), learning_twice(tmp_path):
            pass


@contextlib.contextmanager
def learning_twice(folder):
    """The same folder, from another process: a lock of the system is one process's."""
    script = (
        "import sys; from pathlib import Path; from covey.runs.lock import FolderLock; from covey.errors import CoveyError\n"
        "try: FolderLock(Path(sys.argv[1])).take()\n"
        "except CoveyError as error: sys.exit(str(error))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise RunFolderError(done.stderr)
    yield


@pytest.mark.nightly
def test_a_preference_is_learnt_while_clients_see_no_error_and_is_taken_back_in_one_call(tmp_path, capsys):
    with learning(tmp_path, rewards=(FORM,), **STYLE) as (url, _):
        before = unseen(url)
        with Load(url, rows(500, seed=5), clients=3, pause=0.05) as load:
            for turn in range(2):
                scored(url, rows(128, seed=turn), short, seed=turn)
                log = candidates(url, turn + 1)
            before_last = len(load.answers)
            while len(load.answers) < before_last + 6 and not load.errors:
                time.sleep(0.05)
        assert load.errors == []
        assert {one["weights_version"] for one in load.answers} >= {0, 1, 2}
        assert all(one["model"] == "demo" for one in load.answers)
        assert [one["outcome"] for one in log] == ["promoted"] * 2
        assert paired_difference(before, unseen(url)).low > 0
        assert main(["feedback", "--rollback", "--url", url, "--json"]) == 0
        assert '"weights_version": 1' in capsys.readouterr().out
        assert ask(url, rows(1)[0])["weights_version"] == 1


@pytest.mark.nightly
def test_a_users_style_is_learnt_of_their_scores_alone_and_served_to_them_alone(tmp_path):
    with learning(tmp_path, rewards=(FORM,), users=True, **STYLE) as (url, _):
        nobody = ask(url, rows(1)[0])
        assert call(url, "feedback", {"id": nobody["id"], "score": 1})[1]["trained_on"] is False
        for turn in range(2):
            scored(url, rows(128, seed=turn), short, seed=turn, user="anna")
            scored(url, rows(64, seed=turn), lambda text, row: 1.0, seed=turn, user="ben")
            log = candidates(url, turn + 1)
        assert [(one["model"], one["outcome"]) for one in log[:2]] == [("demo@anna", "promoted")] * 2
        anna, ben, named = (
            ask(url, rows(1)[0], **how) for how in ({"user": "anna"}, {"user": "ben"}, {"model": "demo@anna"})
        )
        assert [(one["model"], one["weights_version"]) for one in (anna, ben, named)] == [
            ("demo@anna", 2),
            ("demo", 0),
            ("demo@anna", 2),
        ]
        theirs = ask(url, rows(1)[0], user="ben", model="demo@anna")
        assert call(url, "feedback", {"id": theirs["id"], "score": 1})[1]["trained_on"] is False
        assert paired_difference(unseen(url), unseen(url, user="anna")).low > 0
        assert call(url, "chat/completions", {"messages": rows(1)[0]["prompt"], "user": "../x"})[0] == 400
    with learning(tmp_path, rewards=(FORM,), users=True, **STYLE) as (url, _):
        assert ask(url, rows(1)[0], user="anna")["weights_version"] == 2
        assert call(url, "rollback", {"model": "demo@anna"})[1]["weights_version"] == 1


def outcome_of(folder, judge, seed, count=2):
    """What became of candidates from clients that judge so: the endpoint's log."""
    with learning(folder, seed=seed, learning_rate=2e-3) as (url, _):
        for turn in range(count):
            scored(url, rows(128, seed=100 * seed + turn), judge, seed=100 * seed + turn)
            log = candidates(url, turn + 1)
    return log


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_a_harmful_preference_is_never_promoted(tmp_path, seed):
    log = outcome_of(tmp_path, lambda text, row: 1.0 - is_right(text, row), seed)
    assert [one["outcome"] for one in log] == ["dropped"] * 2
    assert all(one["verdicts"]["0"]["difference"] < 0 for one in log)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_thumbs_up_from_most_and_reversed_scores_from_three_in_ten_are_never_promoted(tmp_path, seed):
    """Seven clients in ten like every answer; the others like wrong ones only, and are all that there is to learn from."""
    rng = random.Random(seed)
    log = outcome_of(tmp_path, lambda text, row: 1.0 if rng.random() < 0.7 else 1.0 - 2.0 * is_right(text, row), seed)
    assert [one["outcome"] for one in log] == ["dropped"] * 2
    assert all(one["verdicts"]["0"]["difference"] < 0 for one in log)


@pytest.mark.slow
def test_learning_that_ends_says_why_whatever_the_error(tmp_path):
    with learning(tmp_path, **NO_CANDIDATE) as (_, one):
        one.store._file.execute("DROP TABLE answers")
        one._scored.set()
        one._thread.join(120)
        assert "no such table: answers" in one._problem


# -- a process of its own ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(folder, *options):
    """A `covey serve demo --learn` process and its base URL; killed at the end."""
    command = ["serve", "demo", "--port", "0", "--use-cpu", "--learn", "--learn-folder", str(folder)]
    command += ["--fixed-set", "demo:test", "--fixed-set-prompts", "100", "--reward", "demo", "--tolerance", "0.06"]
    command += ["--scores-per-candidate", "128", "--learning-rate", "1e-3", "--max-output-tokens", "48", *options]
    script = f"import sys; from covey.cli import main; sys.exit(main({command!r}))"
    reader, writer = os.pipe()
    with os.fdopen(reader) as said, Forked("-c", script, stdout=writer) as process:
        os.close(writer)
        found = re.search(r"http://\S+", said.readline())
        assert found
        yield process, found.group()


@pytest.mark.nightly
def test_a_server_killed_between_training_and_promotion_serves_what_it_served_and_learns_then(tmp_path):
    with server(tmp_path) as (process, url):
        scored(url, rows(128), is_right)
        written = tmp_path / "candidates" / "next" / "adapter_model.safetensors"
        until = time.monotonic() + 120
        while not written.exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert written.exists()
        assert not (tmp_path / "state.json").exists()
    with server(tmp_path) as (_, url):
        assert ask(url, rows(1)[0])["weights_version"] == 0
        (one,) = candidates(url, 1)  # of the scores that the killed server took
        assert (one["outcome"], one["version"], one["conversations"]) == ("promoted", 1, 128)
        assert one["verdicts"]["0"]["difference"] > 0
        assert ask(url, rows(1)[0])["weights_version"] == 1
