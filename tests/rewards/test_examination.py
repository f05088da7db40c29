"""Rewards that are wrong in one known way each, and what the examination says of them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time

import pytest

from covey.doctor.reward_audit.examination import examine
from covey.doctor.reward_audit.probes import garbage, gold_probes, mark_file, rows_of
from covey.doctor.reward_audit.verdicts import judge
from covey.errors import RewardError
from covey.rewards import ModelReward, RewardSpec, resolve, reward
from kit import tiny_reward_model, tiny_tokenizer

DATA = [
    {"prompt": f"What is {a} + {a}?", "answer": f"Twice {a} is {2 * a}, you see.\n#### {2 * a}"}
    for a in range(311, 319)
]
ROWS = rows_of(DATA, "answer")


def test_every_answer_of_a_list_is_right():
    golds = [["true", "yes"], ["yes", "true"], ["false", "no"], ["correct", "right"], ["2", "3"], ["3", "2"], [], ["4"]]
    rows = rows_of([{"prompt": f"{i}?", "answer": gold} for i, gold in enumerate(golds)], "answer")
    for row, gold in zip(rows, golds, strict=True):
        assert (row.gold, row.other in gold) == (gold[0] if gold else None, False)
    assert rows_of([{"prompt": "?", "answer": ["2", "3"]}] * 2, "answer")[0].other == "4"
    assert [v for v in verdicts("exact", rows) if v.check in ("gold", "garbage")] == []


def verdicts(reward, rows=ROWS, **options):
    return judge(examine(resolve(reward), rows, **options))


def checks(found, level=None):
    return {v.check for v in found if level in (None, v.level)}


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else None


def gold_of(answer):
    return answer.split("####")[1].strip()


def test_a_sound_reward_has_no_failure():
    found = verdicts("exact")
    assert not checks(found, "FAIL")
    assert "gold" not in checks(found)


@pytest.mark.nightly
def test_garbage_that_a_reward_model_is_too_short_to_read_is_a_note():
    found = verdicts(ModelReward.of(tiny_reward_model(max_position_embeddings=1024), tiny_tokenizer()), ROWS[:7])
    assert "errors" not in checks(found)
    (note,) = [v for v in found if v.check == "too_long"]
    assert note.level == "NOTE"
    assert "one word, for ever" in note.facts["probes"]


@pytest.mark.slow
def test_a_right_answer_that_a_reward_model_is_too_short_to_read_is_a_failure():
    found = verdicts(ModelReward.of(tiny_reward_model(max_position_embeddings=8), tiny_tokenizer()), ROWS[:3])
    assert "errors" in checks(found, "FAIL")


def test_gold_answers_that_do_not_score_are_named_by_row():
    def misses_even_rows(completions, answer):
        return [
            float(last_number(c) == gold_of(a) and int(gold_of(a)) % 4 != 0)
            for c, a in zip(completions, answer, strict=True)
        ]

    (gold,) = [v for v in verdicts(misses_even_rows) if v.check == "gold"]
    assert gold.level == "FAIL"
    assert gold.facts["rows"] == [1, 3, 5, 7]  # 2 * 312, 2 * 314 ...
    assert "4 of 8 rows" in gold.said
    assert "row 1" in gold.said


def test_a_reward_for_anything_that_names_the_answer_pays_for_lists_of_candidates():
    def contains(completions, answer):
        return [float(gold_of(a) in c) for c, a in zip(completions, answer, strict=True)]

    (hackable,) = [v for v in verdicts(contains) if v.check == "hackable"]
    assert hackable.facts["probes"] == [
        "right, then wrong",
        "right or wrong",
        "a hundred candidates",
        "candidates in a list",
    ]


def test_a_reward_that_believes_what_it_is_told_pays_garbage():
    def gullible(completions, answer):
        right = [last_number(c) == gold_of(a) for c, a in zip(completions, answer, strict=True)]
        return [float(r or "correct" in c) for r, c in zip(right, completions, strict=True)]

    failed = [v.facts["probe"] for v in verdicts(gullible) if v.check == "garbage" and v.level == "FAIL"]
    assert failed == ["praise of itself", "orders to the judge", "a judge's reply"]


def test_an_empty_completion_that_pays_is_a_failure():
    def forgiving(completions, answer):
        return [float(not c.strip() or last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    failed = [v.facts["probe"] for v in verdicts(forgiving) if v.check == "garbage" and v.level == "FAIL"]
    assert failed == ["empty", "spaces"]


def test_paying_by_the_number_of_times_the_answer_is_said_is_told():
    def counts(completions, answer):
        return [float(c.count(gold_of(a))) for c, a in zip(completions, answer, strict=True)]

    told = [v.said for v in verdicts(counts) if v.check == "hackable"]
    assert any("more than for the plain right answer: 'right, fifty times'" in said for said in told)


def test_a_constant_reward_is_a_failure():
    found = verdicts(lambda completions: [0.5] * len(completions))
    assert [v.said for v in found if v.check == "constant"] == [
        "gives 0.5 to everything, so nothing can be learnt from it"
    ]


def test_a_reward_that_raises_is_told_with_the_completion_that_it_raised_on():
    def index_error(completions, answer):
        return [float(re.findall(r"\d+", c)[-1] == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    (errors,) = [v for v in verdicts(index_error) if v.check == "errors"]
    assert errors.level == "FAIL"
    assert "IndexError" in errors.said
    assert "empty" in errors.facts["probes"]
    assert "as in the data" not in errors.facts["probes"]


def test_a_reward_that_hangs_on_one_kind_of_text_is_stopped_and_told():
    def hangs(completions, answer):
        if any("(" in c and len(c) > 5 for c in completions):
            time.sleep(120)
        return [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    started = time.perf_counter()
    (errors,) = [v for v in verdicts(hangs, timeout_seconds=0.3) if v.check == "errors"]
    assert time.perf_counter() - started < 60
    assert errors.facts["probes"] == ["a program that leaves marks", "a bare program that leaves marks"]


def test_random_and_order_dependent_scores_are_told_apart():
    calls = itertools.count()

    def random_one(completions, answer):
        noise = 0.01 * next(calls)
        return [float(last_number(c) == gold_of(a)) + noise for c, a in zip(completions, answer, strict=True)]

    def by_place(completions, answer):
        right = [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]
        return [r + 0.01 * i for i, r in enumerate(right)]

    assert [(v.level, v.check) for v in verdicts(random_one) if "determ" in v.check] == [("FAIL", "nondeterministic")]
    (ordered,) = [v for v in verdicts(by_place) if v.check == "nondeterministic"]
    assert ordered.level == "WARN"
    assert "order of the batch" in ordered.said


def test_a_slow_reward_is_told_and_so_is_a_text_that_makes_it_slow():
    def slow(completions, answer):
        time.sleep(0.03 * len(completions))
        return [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    def slow_on_long(completions, answer):
        if len(completions[0]) > 50_000:
            time.sleep(1.0)
        return [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    (told,) = [v for v in judge(examine(resolve(slow), ROWS[:1]), slow_seconds=0.02) if v.check == "slow"]
    assert "streams=True hides" in told.said
    (told,) = [v for v in judge(examine(resolve(slow_on_long), ROWS[:1]), slow_seconds=0.5) if v.check == "slow"]
    assert told.facts["probe"] == "20,000 words"


def test_a_reward_for_form_is_not_blamed_for_paying_wrong_answers():
    found = verdicts("format")
    assert checks(found) == {"form"}
    assert not checks(found, "FAIL")


def test_a_reward_for_form_is_told_by_its_scores_not_by_the_texts_that_it_gets():
    longer = [
        row | {"answer": "because " * i + row["answer"]} for i, row in enumerate(DATA)
    ]  # form differs from row to row
    assert checks(verdicts("length", rows_of(longer, "answer"))) <= {"form"}


def test_a_reward_that_reads_the_prompt_alone_is_judged_by_right_and_wrong():
    def doubled(prompts, completions):
        return [
            float(last_number(c) == str(2 * int(last_number(p)))) for p, c in zip(prompts, completions, strict=True)
        ]

    assert examine(resolve(doubled), ROWS).reads_gold


def test_a_reward_for_short_texts_is_told_to_pay_empty_ones():
    (form,) = [v for v in verdicts("length(target=0)") if v.check == "form"]
    assert "empty" in form.facts["highest_for"]


def test_wordings_that_a_reward_does_not_read_are_a_note():
    def only_marks(completions, answer):
        return [float(c.endswith(f"#### {gold_of(a)}")) for c, a in zip(completions, answer, strict=True)]

    (note,) = [v for v in verdicts(only_marks) if v.check == "wordings"]
    assert note.level == "NOTE"
    assert set(note.facts["not_read"]) == {"in a box", "in a sentence", "in tags", "thought, then boxed", "alone"}


def test_a_reward_that_abstains_from_right_answers_is_told():
    def shy(completions, answer):
        judged = [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]
        return [None if int(gold_of(a)) % 4 else score for a, score in zip(answer, judged, strict=True)]

    assert any(v.check == "abstains" and "4 of 8 rows" in v.said for v in verdicts(shy))


def test_a_reward_that_compares_completions_of_a_prompt_has_one_to_compare_with():
    @reward(streams=True)
    def beats_others(completions, answer):
        right = [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]
        return [None if len(right) < 2 else (1 + r - max(right[:i] + right[i + 1 :])) / 2 for i, r in enumerate(right)]

    found = examine(resolve(beats_others), ROWS)
    assert set(found.scores("gold")) == {1.0}
    assert set(found.scores("wrong")) == {0.5}
    assert not checks(judge(found), "FAIL")


@pytest.mark.slow
def test_many_rows_are_scored_in_calls_of_64():
    sizes = []

    def counted(completions, answer):
        sizes.append(len(completions))
        return [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    found = examine(resolve(counted), rows_of(DATA * 9, "answer"))
    assert set(sizes) == {64, 8}
    assert found.scores("gold") == [1.0] * 72


def test_completions_that_the_data_holds_are_scored_too():
    rows = rows_of([row | {"mine": "#### 1"} for row in DATA], "answer", "mine")
    found = examine(resolve("exact"), rows)
    (given,) = found.of("given")
    assert given.scores == [0.0] * 8


def test_programs_that_pass_without_doing_the_work_are_tried_where_the_answer_is_a_program():
    def naive(completions, tests):
        scores = []
        for completion, test in zip(completions, tests, strict=True):
            known = {}
            try:
                exec(completion.removeprefix("```python\n").removesuffix("```"), known)
                scores.append(float(eval(test, known)))
            except Exception:  # noqa: BLE001 - whatever the program raises
                scores.append(0.0)
        return scores

    programs = [(f"def add{i}(a):\n    return a + {i}\n", f"add{i}(2) == {2 + i}") for i in range(4)]
    rows = rows_of([{"prompt": "Add.", "code": code, "tests": test} for code, test in programs], "code")
    told = verdicts(naive, rows)
    assert [v.facts["probe"] for v in told if v.check == "garbage" and v.level == "FAIL"] == ["equal to everything"]
    (escape,) = [v for v in told if v.check == "escape"]
    assert "in this very process" in escape.said


def test_a_program_that_runs_in_another_process_but_not_in_a_sandbox_is_told_too():
    def subprocess_reward(completions, answer):
        for completion in completions:
            if completion.startswith("import "):
                subprocess.run([sys.executable, "-c", completion], check=False, capture_output=True)
        return [float(last_number(c) == gold_of(a)) for c, a in zip(completions, answer, strict=True)]

    (escape,) = [v for v in verdicts(subprocess_reward, ROWS[:2]) if v.check == "escape"]
    assert "temporary files" in escape.said
    assert not mark_file().exists()
    assert "escape" not in checks(verdicts("exact"))


def test_what_no_call_can_mend_is_raised():
    with pytest.raises(RewardError, match="7 values for 8 completions"):
        examine(RewardSpec(name="short", call=lambda completions: [1.0] * (len(completions) - 1)), ROWS)


def test_a_wrong_answer_is_never_the_right_one_and_garbage_never_names_it():
    same = rows_of(
        [{"prompt": "a", "answer": "10"}, {"prompt": "b", "answer": "10.0"}, {"prompt": "c", "answer": "10"}], "answer"
    )
    assert [row.wrong for row in same] == ["11"] * 3
    judged = next(probe for probe in garbage(same) if probe.name == "praise of itself")
    assert judged.texts == [None, judged.texts[1], None]  # "10/10" would be right by chance
    assert {probe.kind for probe in gold_probes(same)} == {"gold", "wrong"}
