"""Prompts that were solved rarely come again: as often as was asked for, longest unseen first, until they are solved or hopeless."""

from __future__ import annotations

from collections import Counter

import datasets
import pytest

from covey.data import Outcome, PromptStream
from covey.data.curriculum import parted
from covey.errors import DataError
from kit import tiny_tokenizer

RARELY = Outcome(score=0.25, has_signal=True)
OFTEN = Outcome(score=0.75, has_signal=True)
NEVER = Outcome(score=0.0, has_signal=False)
ALWAYS = Outcome(score=1.0, has_signal=False)


def stream(n=20, curriculum="replay:0.5", **columns):
    data = datasets.Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(n)], **columns})
    return PromptStream(data, tiny_tokenizer(), curriculum=curriculum, seed=3)


def round_of(prompts, n, became):
    """One rollout of `n` prompts: those that came from the order, and those that were replayed."""
    drawn = prompts.take(n)
    places = {prompt.uid: int(prompt.uid.partition(":")[2]) for prompt in drawn}
    prompts.learn({uid: became(row) for uid, row in places.items()})
    fresh = [row for uid, row in places.items() if not uid.startswith("r")]
    return fresh, [row for uid, row in places.items() if uid.startswith("r")]


def test_rows_that_are_solved_rarely_come_again_in_the_share_that_was_asked_for():
    prompts = stream(200, "replay:0.25")
    hard = set(range(40))
    fresh, again = Counter(), Counter()
    for _ in range(40):
        new, old = round_of(prompts, 10, lambda row: RARELY if row in hard else OFTEN)
        fresh.update(new)
        again.update(old)
    assert set(again) <= hard
    assert again.total() == pytest.approx(0.25 * 400, abs=15)  # the pool is empty at first
    assert max(again.values()) <= 8


def test_the_order_beneath_still_gives_every_row_once_an_epoch():
    prompts = stream(20)
    fresh = []
    while len(fresh) < 20:
        fresh += round_of(prompts, 4, lambda row: RARELY)[0]
    assert sorted(fresh[:20]) == list(range(20))


def test_what_has_waited_longest_comes_first_and_a_row_that_was_not_judged_yet_does_not_come_twice():
    prompts = stream(30)
    first, _ = round_of(prompts, 4, lambda row: RARELY)
    assert round_of(prompts, 20, lambda row: RARELY)[1] == first


def test_a_tenth_of_the_rows_lies_between_two_draws_of_one():
    prompts, drawn = stream(100, "replay:0.9"), []
    for _ in range(40):
        taken = prompts.take(2)
        drawn += [int(prompt.uid.partition(":")[2]) for prompt in taken]
        prompts.learn({prompt.uid: RARELY for prompt in taken})
    gaps = [next((k for k, other in enumerate(drawn[i + 1 :]) if other == row), 99) for i, row in enumerate(drawn)]
    assert min(gaps) >= 10
    assert len(drawn) > len(set(drawn))


@pytest.mark.parametrize("outcome", [OFTEN, ALWAYS, NEVER])
def test_a_row_enters_only_when_some_of_its_answers_were_right_and_most_were_not(outcome):
    prompts = stream(20)
    assert all(round_of(prompts, 5, lambda row: outcome)[1] == [] for _ in range(8))


def test_a_row_that_is_solved_leaves_at_once_and_one_without_signal_after_three_replays():
    prompts = stream(400)
    (solved, hopeless), _ = round_of(prompts, 2, lambda row: RARELY)
    counts = Counter()
    for _ in range(30):
        counts.update(round_of(prompts, 8, lambda row: ALWAYS if row == solved else NEVER)[1])
    assert counts == {solved: 1, hopeless: 3}


def test_a_replay_whose_judge_was_out_waits_again():
    prompts = stream(400)
    (hard,), _ = round_of(prompts, 1, lambda row: RARELY)
    out = Outcome(score=0.0, has_signal=False, is_judged=False)
    counts = Counter()
    for _ in range(30):
        counts.update(round_of(prompts, 8, lambda row: out)[1])
    assert set(counts) == {hard}
    assert counts[hard] > 3  # an unsolved one leaves after three


def test_every_draw_has_a_name_of_its_own():
    prompts, seen = stream(6), []
    for _ in range(20):
        drawn = prompts.take(4)
        seen += [prompt.uid for prompt in drawn]
        prompts.learn({prompt.uid: RARELY for prompt in drawn})
    assert len(set(seen)) == 80


def test_a_frontier_learns_of_replays_too():
    prompts = stream(10, "frontier+replay:0.5")
    for _ in range(6):
        round_of(prompts, 4, lambda row: NEVER if row > 5 else RARELY)
    weights = prompts._order.base.weights()
    assert weights[:6].min() > weights[6:].max() or weights[6:].max() == 0.5  # 0.5: not drawn yet


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", None)),
        ("replay", ("none", 0.25)),
        ("replay:0.1", ("none", 0.1)),
        ("frontier+replay", ("frontier", 0.25)),
        ("-a+b+replay:0.5", ("-a+b", 0.5)),
        ("a+b", ("a+b", None)),
        ("replayed", ("replayed", None)),
    ],
)
def test_a_curriculum_is_an_order_and_a_share(text, expected):
    assert parted(text) == expected


@pytest.mark.parametrize("share", ["0", "1", "-1", "half", "nan", ""])
def test_a_share_that_is_none_is_refused_in_a_sentence(share):
    with pytest.raises(DataError, match=r"share of prompts that are replays lies between 0 and 1, as in replay:0\.25"):
        stream(4, f"replay:{share}")


def test_a_column_of_that_name_is_a_column():
    fresh = [int(prompt.uid.partition(":")[2]) for prompt in stream(4, "replay", replay=[4, 3, 2, 1]).take(4)]
    assert fresh == [3, 2, 1, 0]


def test_a_stream_is_refused():
    data = datasets.Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()
    with pytest.raises(DataError, match="needs a data set with a length"):
        PromptStream(data, tiny_tokenizer(), curriculum="replay")
