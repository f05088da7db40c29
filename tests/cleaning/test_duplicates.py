"""Rows that say the same are found, rows that ask something else are not."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import numpy

from covey.doctor.data_check.duplicates import Duplicates, Twin, jaccard
from covey.doctor.data_check.ngrams import Words, grams, numbers_in, same_text

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train.jsonl"
LONG = "A baker bakes 12 loaves of bread every morning and sells each of them for 3 dollars at the market in her small town"


def found(texts, answers=None, near=0.8, batch=7):
    words = Words()
    with closing(Duplicates(near)) as duplicates:
        for start in range(0, len(texts), batch):
            part = texts[start : start + batch]
            duplicates.add(
                range(start, start + len(part)),
                [same_text(text) for text in part],
                [numbers_in(text) for text in part],
                (answers or [0] * len(texts))[start : start + len(part)],
                [words(text) for text in part],
            )
        same = sorted(duplicates.same())
        certain, disputed = ([twin for twin, is_it in same if is_it == wanted] for wanted in (False, True))
        return certain, disputed, list(duplicates.nearly())


def test_white_space_and_unicode_form_do_not_make_another_text():
    same, disputed, near = found(["Caf\u00e9 au lait", "other", "Cafe\u0301  au\nlait"])
    assert (same, disputed, near) == ([Twin(2, 0, 1.0)], [], [])


def test_the_same_text_with_two_answers_is_a_dispute_of_all_its_rows():
    same, disputed, _ = found(["how many?", "what?", "how many?", "how many?"], [1, 2, 3, 1])
    assert same == []
    assert [(twin.row, twin.earlier) for twin in disputed] == [(0, 2), (2, 0), (3, 2)]


def test_a_few_changed_words_make_a_near_duplicate_of_a_long_text_only():
    near = found([LONG, "x", LONG.replace("small", "little")], near=0.7)[2]
    assert [(twin.row, twin.earlier) for twin in near] == [(2, 0)]
    assert found(["The surface area of a cube", "The surface area of a cone"], near=0.5)[2] == []


def test_case_and_the_signs_of_a_sentence_make_a_near_duplicate_of_any_text():
    assert found(["What is a cube?", "what is a cube"])[2] == [Twin(1, 0, 1.0)]


def test_other_numbers_other_signs_and_other_answers_are_other_questions():
    assert found([LONG, LONG.replace("12", "13")], near=0.5) == ([], [], [])
    assert found(["3 + 4 = ?", "3 - 4 = ?"], near=0.5) == ([], [], [])
    assert found([LONG, LONG.replace("small", "little")], [1, 2], near=0.5) == ([], [], [])


def test_what_is_dropped_names_a_row_that_stays():
    words = LONG.split()
    chain = [" ".join([*words[:-step], *("abcdefghijkl"[:step])]) for step in range(1, 12)]
    near = found(chain, near=0.7)[2]
    assert near
    assert not {twin.row for twin in near} & {twin.earlier for twin in near}


def test_a_row_without_words_is_no_duplicate_of_another():
    assert found(["", "...", "!!"], near=0.5)[2] == []


def test_the_runs_of_words_are_those_counted_by_hand():
    runs, places = grams([[1, 2, 3, 4], [], [1, 2], [2, 3, 4]], 3)
    assert places.tolist() == [0, 2, 2, 3, 4]
    assert runs[1] == runs[3]
    assert len(set(runs.tolist())) == 3


def test_the_likeness_is_the_share_of_common_numbers():
    assert jaccard(numpy.array([1, 2, 3]), numpy.array([2, 3, 4])) == 0.5
    assert jaccard(numpy.array([]), numpy.array([])) == 0.0


def test_planted_duplicates_in_gsm8k_are_found_and_little_else():
    random.seed(3)
    texts = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()]
    planted = []
    for number, place in enumerate(random.sample(range(2500), 200)):
        text = texts[place]
        if number % 2:
            swaps = {"She": "she", "he ": "He ", ",": "", "?": " ?"}
            for old, new in swaps.items():
                text = text.replace(old, new)
        planted.append(text)
    same, _, near = found(texts + planted, batch=500)
    hit = {twin.row for twin in same + near}
    truth = set(range(2500, 2700))
    assert len(hit & truth) == 200
    assert len(hit - truth) <= 2
