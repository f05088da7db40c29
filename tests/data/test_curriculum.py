"""Orders that know how hard a row is, mixtures, and replacing groups without signal."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch

from covey import algorithms as alg
from covey.data import Outcome, PromptStream, load, mix
from covey.data.curriculum import Frontier, order_of
from covey.data.mixing import terms
from covey.errors import DataError
from covey.rewards import Scorer, reward_metrics
from covey.training.credit import outcomes
from kit import group, rest_nightly, tiny_tokenizer


def table(n: int = 20, **columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(n)], **columns})


def stream(dataset, curriculum: str = "none", **options) -> PromptStream:
    return PromptStream(dataset, tiny_tokenizer(), curriculum=curriculum, **{"seed": 3, **options})


def rows(prompts) -> list[int]:
    return [int(prompt.uid.partition(":")[2]) for prompt in prompts]


# -- a column ----------------------------------------------------------------------------------------------------------------


def test_a_column_orders_from_low_to_high_and_ties_by_the_seed():
    difficulty = [3, 1, 2, 1, 3, 2, 1, 1]
    data = table(8, difficulty=difficulty)
    for curriculum, expected in (("difficulty", sorted(difficulty)), ("-difficulty", sorted(difficulty)[::-1])):
        prompts = stream(data, curriculum)
        first, second = rows(prompts.take(8)), rows(prompts.take(8))
        assert [difficulty[row] for row in first] == expected == [difficulty[row] for row in second]
        assert first != second  # ties are mixed anew
        assert sorted(first) == list(range(8))


def test_a_column_that_cannot_order_is_refused_in_a_sentence():
    with pytest.raises(
        DataError, match=r"'difficult' is neither none, nor frontier, nor a column .*Did you mean difficulty\?"
    ):
        stream(table(2, difficulty=[1, 2]), "difficult")
    with pytest.raises(DataError, match=r"needs numbers, and row 1 .* has None"):
        stream(table(2, difficulty=[1.0, None]), "difficulty")
    with pytest.raises(DataError, match="needs a data set with a length"):
        stream(table(2).to_iterable_dataset(), "frontier")


def ranked(order, round):
    """All rows in the order of a round, by one sort of all."""
    generator = torch.Generator().manual_seed(order.seed * 1_000_003 + round)
    uniform = torch.rand(order.num_rows, generator=generator, dtype=torch.float64)
    return torch.argsort(order.weights().double().log() - (-uniform.log()).log(), descending=True).tolist()


def test_a_long_draw_of_the_frontier_and_a_resumed_one_go_on_in_the_order_of_one_sort(monkeypatch):
    monkeypatch.setattr("covey.data.curriculum._FIRST", 4)
    rows, taken = [{"prompt": "a"}] * 20, []
    order, resumed = Frontier(rows, seed=3), Frontier(rows, seed=3)
    drawn = [int(order.next()[0].split(":")[1]) for _ in range(10)]
    order.learn({row: Outcome(float(row % 2), row % 3 == 0, True) for row in drawn})
    for place in range(20):
        resumed.load_state_dict(order.state_dict())
        taken.append(int(order.next()[0].split(":")[1]))
        assert int(resumed.next()[0].split(":")[1]) == taken[-1], place
    assert taken == ranked(order, 2)


# -- the frontier ------------------------------------------------------------------------------------------------------------


def learn_round(prompts: PromptStream, n: int, solved, unsolved) -> list[int]:
    drawn = prompts.take(n)
    prompts.learn(
        {
            prompt.uid: Outcome(
                score=1.0 if row in solved else 0.0 if row in unsolved else 0.5, has_signal=row not in solved | unsolved
            )
            for prompt, row in zip(drawn, rows(drawn), strict=True)
        }
    )
    return rows(drawn)


def test_a_row_whose_judge_was_out_counts_as_not_asked():
    prompts = stream(table(4), "frontier")
    out = replace(group(["a", "b"]), rewards=torch.full((2, 1), torch.nan), measured=torch.full((2, 1), torch.nan))
    drawn = prompts.take(4)
    prompts.learn(
        outcomes([replace(out, prompt=prompt) for prompt in drawn], Scorer([lambda completions: []]), alg.grpo())
    )
    assert prompts._order.weights().tolist() == [0.5] * 4
    mixed = replace(out, rewards=torch.tensor([[0.0], [1.0]]), prompt=drawn[0])  # what is left differs
    prompts.learn(outcomes([mixed], Scorer([lambda completions: []]), alg.grpo()))
    assert prompts._order.weights()[rows(drawn)[0]] == 1.0


def test_a_rows_signal_is_that_of_its_advantages():
    two = [lambda completions: [0.0] * len(completions), lambda completions, **columns: [0.0] * len(completions)]
    cancel = group(["a", "b", "c"], rewards=[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    apart = group(["a", "b", "c"], rewards=[[0.0, 2.0], [1.0, 0.0], [1.0, 0.0]])  # 2 x 0.5 = 1: the sums are equal
    high = group(["a", "b", "c"], rewards=[[5.0, 0.0], [9.0, 0.0], [7.0, 0.0]])
    each, clipped = (
        alg.grpo().replace(advantage=alg.NormalizeThenSum()),
        alg.rloo().replace(advantage=alg.LeaveOneOut(clip=(-1.0, 1.0))),
    )
    signal = lambda one, algorithm, weights: outcomes([one], Scorer(two, weights), algorithm)["0:0"].has_signal
    assert [signal(cancel, alg.grpo(), [1.0, 1.0]), signal(cancel, each, [1.0, 1.0])] == [False, False]
    near = torch.tensor([0.5, 0.5003, 0.5008])
    rounded = replace(cancel, rewards=torch.stack([near, 1 - near], -1))
    assert not signal(rounded, each, [1.0, 1.0])
    assert [signal(apart, alg.grpo(), [1.0, 0.5]), signal(apart, each, [1.0, 0.2])] == [False, True]
    assert [signal(high, alg.grpo(), [1.0, 1.0]), signal(high, clipped, [1.0, 1.0])] == [True, False]
    metrics = [reward_metrics([high], ["x", "y"], [1.0, 1.0], clip=clip) for clip in (None, (-1.0, 1.0))]
    assert [each["frac_reward_zero_std"].value for each in metrics] == [0.0, 1.0]


@pytest.mark.slow
def test_rows_on_the_frontier_are_drawn_most_often_and_no_row_is_forgotten():
    solved, unsolved = set(range(0, 40)), set(range(40, 80))
    prompts = stream(table(100), "frontier")
    for _ in range(20):  # every row has been seen by then
        learn_round(prompts, 20, solved, unsolved)
    counts = Counter(row for _ in range(100) for row in learn_round(prompts, 20, solved, unsolved))
    mean = lambda which: sum(counts[row] for row in which) / len(which)
    frontier = mean(set(range(80, 100)))
    assert frontier > 4 * mean(unsolved) > 4 * mean(solved) > 0
    assert frontier == pytest.approx(100 * 20 / 100 * 3, rel=0.35)  # most of each draw of 20, out of 20 frontier rows


def test_the_first_draws_see_every_row_before_dull_ones_come_again():
    prompts = stream(table(64), "frontier")
    seen = [row for _ in range(4) for row in learn_round(prompts, 16, set(range(64)), set())]
    assert len(set(seen)) > 54  # weights of 0.5 against 0.05


def test_a_rollout_never_holds_a_row_twice():
    prompts = stream(table(10), "frontier")
    for _ in range(5):
        assert len(set(learn_round(prompts, 10, {1, 2}, {3}))) == 10


def test_a_row_that_changes_changes_its_weight():
    prompts = stream(table(50), "frontier")
    for _ in range(15):
        learn_round(prompts, 10, set(), set(range(50)))
    before = prompts._order.weights()[:10].mean()
    for _ in range(40):
        learn_round(prompts, 10, set(), set(range(10, 50)))
    assert prompts._order.weights()[:10].mean() > 3 * before


@pytest.mark.parametrize(
    "curriculum",
    rest_nightly(
        ["none", "frontier", "difficulty", "replay", "frontier+replay:0.4", "-difficulty+replay"],
        ["none", "frontier+replay:0.4", "-difficulty+replay"],
    ),
)
def test_every_order_resumes_exactly_through_json(curriculum: str):
    data = table(30, difficulty=list(range(30)))
    for cut in (0, 3, 7):
        first, again = stream(data, curriculum), stream(data, curriculum)
        for _ in range(cut):
            learn_round(first, 7, {1, 2, 3}, {4, 5})
        first.take(2)  # in the middle of a rollout
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for _ in range(6):
            assert learn_round(first, 7, {1, 2, 3}, {4, 5}) == learn_round(again, 7, {1, 2, 3}, {4, 5})
        assert first.state_dict() == again.state_dict()


def test_another_curriculum_cannot_resume():
    data = table(4, difficulty=[1, 2, 3, 4])
    with pytest.raises(DataError, match="drew its prompts with curriculum='none' and this run has 'frontier'"):
        stream(data, "frontier").load_state_dict(stream(data).state_dict())


# -- mixtures ----------------------------------------------------------------------------------------------------------------


def test_a_mixture_draws_each_set_in_exactly_its_share_at_any_time():
    data = mix({"big": table(100), "small": table(5, extra=list("abcde"))}, {"big": 3, "small": 1})
    prompts = stream(data)
    counts: Counter[str] = Counter()
    for n in range(1, 200):
        (prompt,) = prompts.take(1)
        counts[prompt.columns["dataset"]] += 1
        assert abs(counts["big"] - 0.75 * n) <= 1
        assert (prompt.columns["extra"] is None) == (prompt.columns["dataset"] == "big")


def test_a_column_of_a_mixture_is_read_once():
    data = mix(
        {"a": table(40, difficulty=list(range(40))), "b": table(40, difficulty=list(range(40)))}, {"a": 1, "b": 1}
    )
    reads = []

    class Counted(datasets.Dataset):
        def __getitem__(self, key):
            reads.append(key)
            return super().__getitem__(key)

    data.__class__ = Counted
    stream(data, "difficulty")
    assert len(reads) < 10


class Interleaved:
    """Rows of two sets by turns."""

    column_names = ("prompt", "dataset", "dataset_weight")

    def __len__(self):
        return 20_000

    def __getitem__(self, key):
        if isinstance(key, str):
            return ["a", "b"] * 10_000 if key == "dataset" else [1.0] * 20_000
        return {"prompt": f"{key} + 1 ="}


def test_a_large_mixture_keeps_little_of_each_row_and_passes_outcomes_on_to_its_set():
    data, solved = Interleaved(), Outcome(score=1.0, has_signal=False)
    order_of(data, curriculum="none", seed=0, shuffle=True, block_size=1)
    tracemalloc.start()
    order = order_of(data, curriculum="none", seed=0, shuffle=True, block_size=1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 60 * len(data)
    order = order_of(data, curriculum="frontier", seed=0, shuffle=True, block_size=1)
    order.learn({0: solved, 7: solved, 19_998: solved})
    floor = {name: (part.weights() < 0.1).nonzero()[:, 0].tolist() for name, part in order._orders.items()}
    assert floor == {"a": [0, 9_999], "b": [3]}


@pytest.mark.parametrize("curriculum", ["none", "frontier"])
def test_a_row_that_cannot_be_read_is_named_in_any_order(curriculum: str):
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"fine", b"\xff"]).buffers())
    data = datasets.Dataset(pyarrow.table({"prompt": ["1", "2"], "answer": column}))
    with pytest.raises(DataError, match="Row 1 .* cannot be read"):
        stream(data, curriculum).take(2)


def test_each_set_of_a_mixture_has_epochs_of_its_own():
    prompts = stream(mix({"a": table(40), "b": table(4)}, {"a": 1, "b": 1}))
    drawn = prompts.take(80)
    of_a = [row for row in rows(drawn) if row < 40]
    of_b = [row for row in rows(drawn) if row >= 40]
    assert sorted(of_a) == list(range(40))
    assert Counter(of_b) == dict.fromkeys(range(40, 44), 10)
    assert len({prompt.uid for prompt in drawn}) == 80


def test_a_mixture_that_is_evaluated_gives_each_row_once_in_its_place():
    data = mix({"a": table(2), "b": table(8)}, {"a": 1, "b": 1})
    assert rows(stream(data, shuffle=False, keeps_shares=False).take(10)) == list(range(10))


@pytest.mark.parametrize("curriculum", ["none", "frontier", "replay:0.4"])
def test_a_mixture_resumes_exactly(curriculum: str):
    data = mix({"a": table(9), "b": table(4)}, {"a": 0.7, "b": 0.3})
    first, again = stream(data, curriculum), stream(data, curriculum)
    for _ in range(3):
        learn_round(first, 5, {1, 2}, {10})
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(5):
        assert learn_round(first, 5, {1, 2}, {10}) == learn_round(again, 5, {1, 2}, {10})


def test_streams_are_mixed_too():
    sets = {"a": table(60).to_iterable_dataset(), "b": table(60).to_iterable_dataset()}
    drawn = stream(mix(sets, {"a": 0.8, "b": 0.2})).take(60)
    assert 38 <= Counter(prompt.columns["dataset"] for prompt in drawn)["a"] <= 58


def test_a_mixture_can_be_written_as_a_sum(tmp_path: Path):
    for name, column in (("a", "question"), ("b", "prompt")):
        lines = [json.dumps({column: f"{name} {i}", "answer": str(i)}) for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = load(f"0.75*{tmp_path}/a.jsonl + .25*{tmp_path}/b.jsonl", prompt_column="question")
    assert data.column_names == ["prompt", "answer", "dataset", "dataset_weight"]
    drawn = stream(data).take(8)
    assert Counter(prompt.text[0] for prompt in drawn) == {"a": 6, "b": 2}


def test_the_first_rows_of_a_mixture_are_those_of_each_set_in_its_share(tmp_path: Path):
    for name, count in (("a", 9), ("b", 9), ("c", 1)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count)))
    sets = f"0.3*{tmp_path}/a.jsonl + 0.3*{tmp_path}/b.jsonl + 0.4*{tmp_path}/c.jsonl"
    assert load(sets, limit=7)["prompt"][:] == ["a0", "a1", "a2", "b0", "b1", "b2", "c0"]
    assert len(load(sets, limit=99)) == 19
    with pytest.raises(DataError, match="limit is 2, and the mixture has 3 sets"):
        load(sets, limit=2)
    with pytest.raises(DataError, match="The weight of .* is 0.0"):
        load(f"0*{tmp_path}/a.jsonl + 1*{tmp_path}/b.jsonl", limit=7)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: mix({}), "at least one"),
        (lambda: mix({"a": table()}, {"b": 1}), r"The weights name \['b'\] and the mixture has \['a'\]"),
        (lambda: mix({"a": table()}, {"a": 0}), "The weight of a is 0"),
        (lambda: mix({"a": table(), "b": table().to_iterable_dataset()}), "streams .b. and sets with a length"),
        (lambda: mix({"a": table().to_iterable_dataset()}), "needs weights"),
        (lambda: mix({"a": table(2, x=[1, 2]), "b": table(2, x=["1", "2"])}), "do not fit together"),
        (lambda: load("0.5*demo + 0.5*demo"), "names a data set twice"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_in_a_sentence(make, sentence: str):
    with pytest.raises(DataError, match=sentence):
        make()


@pytest.mark.parametrize(
    "text", ["0.7*a.jsonl + 0.3*b+c.jsonl", "0.7*a.jsonl+0.3*b+c.jsonl", "0.7 * a.jsonl+ .3 * b+c.jsonl"]
)
def test_a_mixture_may_be_written_without_spaces(text: str):
    assert terms(text) == {"a.jsonl": 0.7, "b+c.jsonl": 0.3}


def test_the_score_of_a_question_is_the_mean_over_its_languages():
    data = table(2, prompt_de=["eins", "zwei"], prompt_fr=["un", "deux"])
    prompts = stream(data, "frontier", languages=("en", "de", "fr"))
    drawn = prompts.take(3)
    scores = dict(zip((one.uid for one in drawn), (0.9, 0.9, 0.0), strict=True))
    prompts.learn({uid: Outcome(score, has_signal=False) for uid, score in scores.items()})
    assert prompts.state_dict()["order"]["base"]["score"] == [pytest.approx(0.6)]
