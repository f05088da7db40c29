"""Training rows that hold evaluation questions are found, whatever stands around the question."""

from __future__ import annotations

import json
import random
from pathlib import Path

from covey.doctor.data_check.ngrams import Words, number_list
from covey.doctor.data_check.overlap import Overlap

FOLDER = Path(__file__).parents[1] / "data" / "gsm8k"
QUESTION = "a farmer has nine black hens and every hen lays two eggs on each day of the week"


def found(questions, rows, size=8, least=0.5):
    words = Words()
    return Overlap(questions, size, words).of([words(row) for row in rows], [number_list(row) for row in rows], least)


def test_a_question_is_found_though_its_case_signs_and_surroundings_differ():
    row = "Solve this one: " + QUESTION.upper().replace(" AND", ", and") + "!"
    assert [(one.place, one.question) for one in found(["other words", QUESTION], ["nothing of it", row])] == [(1, 1)]


def test_the_share_is_that_of_the_words_in_common_runs():
    words = QUESTION.split()
    (one,) = found([QUESTION], [" ".join([*words[:8], *"ABCDEFGH"])])
    assert one.share == 0.5


def test_a_run_shorter_than_asked_for_is_no_overlap():
    words = QUESTION.split()
    assert found([QUESTION], [" ".join([*words[:7], "or", *words[8:15], "or"])]) == []


def test_short_questions_must_be_the_same():
    assert [one.place for one in found(["What is DNA?"], ["what is dna", "what is rna", "what is dna made of"])] == [0]


def test_an_instruction_that_all_questions_share_is_no_overlap_and_hides_none():
    ask = "Think step by step, then write the final answer in a box at the end of your answer. "
    things = [f"{word}{tail}" for word in "abcdefghijklmnop" for tail in ("x", "y")]
    questions = [f"{ask} {thing} runs past {thing} while one big {thing} looks at it" for thing in things]
    rows = [ask + "something else entirely is asked for in this row", questions[3]]
    assert [(one.place, one.question, one.share) for one in found(questions, rows)] == [(1, 3, 1.0)]


def test_a_long_instruction_around_every_row_hides_no_question():
    ask = " ".join(f"instruction{word}" for word in "abcdefghijklmnopqrstuvwxyz" * 4)
    rows = [
        f"{ask} {' '.join(f'{thing}{part}' for part in 'abcdefghij')}"
        for thing in (chr(97 + i % 26) * (1 + i // 26) for i in range(60))
    ]
    rows[7] = f"{ask} {QUESTION}"
    assert [(one.place, one.question, one.share) for one in found([QUESTION], rows)] == [(7, 0, 1.0)]


def test_a_question_is_found_among_many_others_in_one_long_row():
    row = " ".join(f"word{chr(97 + i % 26)}{i // 26 * 'z'}" for i in range(200))
    assert [one.share for one in found([QUESTION], [f"{row} {QUESTION} {row}"])] == [1.0]


def test_a_question_with_other_numbers_is_told_from_the_same_one():
    question = (
        "On 12 farms live 9 hens each and every hen lays 2 eggs a day; how many eggs do all of them lay in a week"
    )
    rows = [question.replace("12", "14"), f"Question 5: {question}", question.replace("each", "every")]
    assert [(one.place, one.has_numbers) for one in found([question], rows)] == [(0, False), (1, True), (2, True)]


def test_of_questions_that_are_alike_the_one_with_the_same_numbers_is_named():
    question = (
        "Every one of {} hens lays 2 eggs a day and none of the eggs breaks; how many eggs are there after a week"
    )
    questions = [question.format(number) for number in range(3, 9)]
    assert [one.question for one in found(questions, [question.format(7)])] == [4]


def test_an_empty_evaluation_set_is_met_by_nothing():
    assert found([], ["a b c"]) == []


def test_planted_test_questions_in_gsm8k_are_found_and_little_else():
    random.seed(5)
    train, test = (
        [json.loads(line)["question"] for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    planted = []
    for number, place in enumerate(random.sample(range(len(test)), 200)):
        words = test[place].split()
        if number % 2 and len(words) > 24:  # one word in twelve replaced
            words = [("something" if index % 12 == 5 else word) for index, word in enumerate(words)]
        planted.append(" ".join(words))
    hit = {one.place for one in found(test, train + planted)}
    truth = set(range(len(train), len(train) + 200))
    assert len(hit & truth) >= 196
    assert (
        len(hit - truth) <= 5
    )  # three are true: "Bella bought stamps" and two on trains stand in both sets, with other numbers
