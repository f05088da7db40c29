"""Every evaluation leaves its answers' rewards, question by question, under names that two runs share."""

import json
import math
from dataclasses import replace

import pytest

from covey.runs import RunFolder, evaluations
from covey.runs.metrics import read
from covey.types.media import Media
from kit import group


def test_an_evaluation_is_read_back_question_by_question(tmp_path):
    groups = [
        group(["4", "5"], uid="0:0", question="2 + 2 =", rewards=[[1.0, 0.5], [0.0, math.nan]]),
        group(["6", "?"], uid="0:1", question="3 + 3 =", rewards=[[1.0, 1.0], [math.nan, math.nan]]),
    ]
    rows = evaluations.rows_of(groups, ["right", "form"], [1.0, 2.0])
    path = evaluations.write(tmp_path, 10, "eval", rows)
    back = evaluations.read(path)
    assert [row["reward"] for row in back] == [2.0, 0.0, 3.0, None]
    assert [row["reward/form"] for row in back] == [0.5, None, 1.0, None]
    assert evaluations.steps(tmp_path, "eval") == [10]
    assert evaluations.by_question(back) == {evaluations.digest("2 + 2 ="): 1.0, evaluations.digest("3 + 3 ="): 3.0}
    assert evaluations.by_question(back, "reward/right") == {
        evaluations.digest("2 + 2 ="): 0.5,
        evaluations.digest("3 + 3 ="): 1.0,
    }


def test_a_question_that_is_there_twice_is_two_questions():
    groups = [group(["a"], uid=f"0:{i}", question="same", rewards=[[float(i)]]) for i in range(2)]
    found = evaluations.by_question(evaluations.rows_of(groups, ["r"], [1.0]))
    assert list(found.values()) == [0.0, 1.0]


def test_questions_with_the_same_text_about_other_images_are_others():
    """Or two sets of images with one question would be compared as one, each with another's answers."""
    shown = lambda *digests: Media(
        tensors={}, count=len(digests), digests={"image": digests}, previews=(b"",) * len(digests)
    )
    ask = group(["a"], question="What is it?", rewards=[[1.0]])
    questions = []
    for media in (shown("cat"), shown("dog"), shown("cat", "dog"), shown("cat"), None):
        seen = replace(ask, prompt=replace(ask.prompt, media=media))
        questions.append(evaluations.rows_of([seen], ["right"], [1.0])[0]["question"])
    assert len(set(questions)) == 4
    assert questions[0] == questions[3]
    assert questions[4] == evaluations.digest("What is it?")


def test_messages_have_a_digest_of_their_own_text():
    chat = [{"role": "user", "content": "hi"}]
    assert evaluations.digest(chat) == evaluations.digest([dict(chat[0])])
    assert evaluations.digest(chat) != evaluations.digest("hi")


def test_a_resumed_run_makes_later_evaluations_again(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    for step in (2, 4):
        run.write_evaluation(
            step, "eval", {"eval_reward": float(step)}, [{"question": "q", "uid": "0:0", "reward": 1.0}]
        )
    evaluations.truncate_to(tmp_path / "run" / "evaluations", 2)
    run.evaluations.truncate_to(2)
    assert evaluations.steps(tmp_path / "run" / "evaluations") == [2]
    assert [row["eval_reward"] for row in read(tmp_path / "run" / "evaluations.jsonl")] == [2.0]
    run.close()


def test_an_evaluation_that_is_added_later_is_json_on_a_line_of_its_own(tmp_path):
    (tmp_path / evaluations.LOG).write_text('{"step": 1, "set": "eval"}\n{"step": 2, "se')
    evaluations.record(tmp_path, 3, "eval", {"eval_reward": math.nan}, [{"question": "a", "uid": "0", "reward": None}])
    lines = (tmp_path / evaluations.LOG).read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in lines]
    assert [(row["step"], row.get("eval_reward", 0.0)) for row in rows] == [(1, 0.0), (3, None)]
    assert math.isnan(read(tmp_path / evaluations.LOG)[1]["eval_reward"])
