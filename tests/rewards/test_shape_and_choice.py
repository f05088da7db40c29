"""Rewards for shape and for short answers; every expected value is worked out by hand."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
from datasets import Dataset

from covey.errors import ConfigError, DataError, RewardError
from covey.rewards import RewardSpec, check, get_cosine_scaled_reward, reasoning_accuracy_reward, resolve


def call(name, *completions, **columns):
    columns = {key: value if isinstance(value, list) else [value] * len(completions) for key, value in columns.items()}
    return resolve(name).call(completions=list(completions), **columns)


def chat(text):
    return [{"role": "assistant", "content": text}]


# -- patterns and tags -------------------------------------------------------------------------------------------------------


def test_a_pattern_must_match_the_whole_text_unless_told_otherwise():
    texts = ["Answer: 12", "  Answer: 12\n", "Well. Answer: 12", "Answer: 12 or 13", "", chat("Answer: 1")]
    assert call(r"pattern(pattern='Answer: \\d+')", *texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert call(r"pattern(pattern='Answer: \\d+', match='end')", *texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert call(r"pattern(pattern='Answer: \\d+', match='start')", *texts) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert call(r"pattern(pattern='answer', match='anywhere', ignore_case=True)", *texts) == [1, 1, 1, 1, 0, 1]


def test_alternatives_in_a_pattern_are_anchored_together():
    assert call("pattern(pattern='yes|no', match='end')", "yes, but", "no", "say yes") == [0.0, 1.0, 1.0]


def test_a_text_longer_than_a_pattern_looks_at_scores_nothing():
    assert call("pattern(pattern='a+', max_characters=10)", "a" * 10, "a" * 11) == [1.0, 0.0]


def test_a_wrong_pattern_is_told_at_once():
    with pytest.raises(ConfigError, match="no regular expression"):
        resolve("pattern(pattern='(')")
    with pytest.raises(ConfigError, match="'all', 'start'"):
        resolve("pattern(pattern='a', match='somewhere')")


def test_tags_must_stand_once_in_order_and_hold_something():
    good = ["<think>a</think><answer>b</answer>", "\n<think>a</think>\n\n<answer>b</answer>\n"]
    bad = [
        "<answer>b</answer><think>a</think>",
        "<think></think><answer>b</answer>",
        "<think>a</think><answer> </answer>",
        "<think>a</think><answer>b</answer> and more",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<answer>b</answer></think>",
        "<think>a</think><answer>b",
        "hello",
        "",
    ]
    assert call("tags", *good) == [1.0] * 2
    assert call("tags", *bad) == [0.0] * len(bad)


def test_partial_tags_count_the_tags_that_stand_where_they_should():
    texts = ["<think>a</think><answer>b", "<think>a", "<answer>b</answer>", "", "<think><think></think>", "x <think>"]
    # of four tags: think, /think, answer; think; answer, /answer; none; /think alone (think stands twice); think
    assert call("tags(partial=True)", *texts) == [0.75, 0.25, 0.5, 0.0, 0.25, 0.25]


def test_stuffing_a_text_with_tags_earns_nothing():
    assert call("tags(partial=True)", "<think></think><answer></answer>" * 50) == [0.0]


# -- JSON --------------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_must_be_the_whole_text_and_satisfy_the_schema():
    right = ['{"name": "Ada", "age": 36}', ' {"age": 0, "name": ""}\n', '```json\n{"name": "a", "age": 1}\n```']
    wrong = [
        '{"name": "Ada"}',
        '{"name": "Ada", "age": "36"}',
        '{"name": "Ada", "age": -1}',
        '{"name": "Ada", "age": 36, "more": 1}',
        'Here: {"name": "Ada", "age": 36}',
        '{"name": "Ada", "age": 36} {"name": "Ada", "age": 36}',
        '{"name": "Ada", "age": NaN}',
        '{"name": "Ada", "age": 1, "age": 2}',
        "{'name': 'Ada', 'age': 36}",
        '{"name": "Ada", "age": 36',
        "null",
        "",
    ]
    assert call("json_schema", *right, schema=SCHEMA) == [1.0] * 3
    assert call("json_schema", *wrong, schema=json.dumps(SCHEMA)) == [0.0] * len(wrong)


def test_each_prompt_may_have_its_own_schema_or_none():
    schemas = [{"type": "integer"}, {"type": "string"}, None]
    assert call("json_schema", "1", "1", "1", schema=schemas) == [1.0, 0.0, None]


def test_nulls_that_a_table_fills_into_its_schemas_are_no_part_of_them():
    schemas = [{"properties": {"a": {"const": "x"}}}, {"properties": {"a": {"type": "string"}, "b": {"minimum": 3}}}]
    table = Dataset.from_dict({"schema": schemas})
    assert table[1]["schema"]["properties"]["a"] == {"const": None, "type": "string"}
    assert call("json_schema", '{"a": "y"}', '{"a": "y"}', schema=table["schema"][:]) == [0.0, 1.0]
    assert call("json_schema", "null", "1", schema='{"const": null}') == [1.0, 0.0]


def test_a_fence_counts_only_where_it_is_allowed():
    assert call("json_schema(schema={'type': 'integer'}, fenced=False)", "```json\n1\n```", "1") == [0.0, 1.0]


def test_a_schema_may_come_from_a_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array", "minItems": 2}')
    assert call(f"json_schema(schema={str(path)!r})", "[1, 2]", "[1]") == [1.0, 0.0]


def test_a_million_brackets_are_no_json_and_take_no_time():
    started = time.process_time()
    assert call("json_schema(schema={})", "[" * 1_000_000, "[" * 150 + "]" * 150) == [0.0, 1.0]
    assert time.process_time() - started < 2


def test_a_bad_schema_is_told_before_training():
    with pytest.raises(ConfigError, match="schema is not valid"):
        resolve("json_schema(schema={'type': 'number-ish'})")
    with pytest.raises(ConfigError, match="neither JSON nor a JSON file"):
        resolve("json_schema(schema='nowhere.json')")


def test_a_schema_does_not_reach_out_to_other_files(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    schema = {"$ref": (tmp_path / "secret.json").as_uri()}
    with pytest.raises(Exception, match="secret"):
        call("json_schema", "1", schema=schema)


def test_json_schema_without_a_schema_wants_the_column():
    with pytest.raises(DataError, match="schema"):
        check([RewardSpec(name="json_schema", call=resolve("json_schema").call)], ["prompt", "answer"])


# -- choices -----------------------------------------------------------------------------------------------------------------


def test_a_choice_is_read_from_the_ways_in_which_it_is_said():
    right = [
        "B",
        "(B)",
        "b",
        "B.",
        "**B**",
        "B) Paris",
        "The answer is B.",
        "The answer is (B).",
        "Answer: B",
        r"So \boxed{B}",
        r"\boxed{\text{B}}",
        "A and C are wrong, so the answer is B",
        "<answer>B</answer>",
        "#### B",
    ]
    assert call("choice", *right, answer="B") == [1.0] * len(right)


def test_a_choice_of_several_or_none_is_wrong():
    wrong = [
        "A",
        "A or B",
        "The answer is A, B",
        "A/B",
        "B and C",
        "",
        "Because",
        "Best",
        "a book",
        "E",
        "answer is",
        "ABCD",
    ]
    assert call("choice", *wrong, answer="B") == [0.0] * len(wrong)
    assert call("choice", "A train leaves, so it must be C", "A because of that", "A", answer="A") == [0.0, 1.0, 1.0]
    assert call("choice", "The answer is A. The answer is B. The answer is C.", answer="B") == [0.0]


def test_the_gold_choice_may_be_an_index_or_absent():
    assert call("choice", "C", "C", "C", answer=[2, "C", None]) == [1.0, 1.0, None]


def test_a_gold_choice_beyond_the_letters_is_told():
    with pytest.raises(ValueError, match="none of the letters ABCD"):
        call("choice", "E", answer="E")
    assert call("choice(letters='ABCDE')", "E", answer="E") == [1.0]


# -- numbers and words near a gold answer ------------------------------------------------------------------------------------


def test_a_number_counts_within_its_tolerance_to_the_last_digit():
    assert call("numeric(relative=0.01)", "101", "99", "101.0001", "#### 100 m", "1e2", answer="100") == [1, 1, 0, 1, 1]
    assert call("numeric(relative=0, absolute=0.5)", "-1.5", "-0.4", "-1", answer="-1") == [1.0, 0.0, 1.0]


def test_a_tolerance_is_the_decimal_number_that_was_written():
    assert call("numeric(relative=0.29)", "129", "71", "129.0001", answer="100") == [1.0, 1.0, 0.0]


def test_beyond_the_tolerance_a_scale_lets_the_score_fall():
    found = call("numeric(relative=0, absolute=1, scale=2)", "10", "11", "13", "9" * 60, answer="10")
    assert found[:2] == [1.0, 1.0]
    assert found[2] == pytest.approx(math.exp(-1))  # 3 away, 1 free, so 2 / 2
    assert found[3] == pytest.approx(0.0)


def test_what_is_no_number_is_not_near_one():
    texts = ["", "nan", "inf", "ten", "1e999999999", "#### 9 or 10"]
    assert call("numeric(absolute=1000)", *texts, answer="10") == [0.0] * len(texts)
    assert call("numeric", "1", "1", answer=["none", None]) == [None, None]


def test_a_number_in_words_of_ten_has_its_size():
    texts = ["12 million", "There are 12 million.", "12", "12 m"]
    assert call("numeric", *texts, answer="12000000") == [1.0, 1.0, 0.0, 0.0]
    assert call("numeric", *texts, answer="12") == [0.0, 0.0, 1.0, 1.0]
    assert call("numeric", *texts, answer="12 million") == [1.0, 1.0, 0.0, 0.0]
    assert call("numeric", "3 million-dollar homes", "3\nmillion more", answer="3") == [1.0, 1.0]


@pytest.mark.parametrize(
    "text, gold",
    [
        ("it fell by -$5 million", "-5000000"),
        ("1/2 million", "500000"),
        (r"\boxed{3\text{ million}}", "3000000"),
        (r"\boxed{\$3 million}", "3e6"),
        ("#### 3 million dollars", "3000000"),
        ("2 thousand", "2 Thousand dollars"),
    ],
)
def test_a_number_in_words_of_ten_keeps_sign_share_and_unit(text, gold):
    assert call("numeric", text, answer=gold) == [1.0]


@pytest.mark.parametrize(
    "text", ["A\n\nthe train is late", "A would be right", "A seems right", "A was it", "A must hold"]
)
def test_a_letter_before_what_follows_no_article_is_a_choice(text):
    assert call("choice", text, text, answer=["A", "B"]) == [1.0, 0.0]


GOLD = ("math", "exact", "numeric", "f1", "fuzzy", "rouge", "choice")


@pytest.mark.parametrize("name", GOLD)
def test_any_of_several_gold_answers_is_right_and_a_missing_one_abstains(name):
    right, wrong = ("B", "C") if name == "choice" else ("7", "8")
    cells = [[right], ["A", right] if name == "choice" else ["6", right], np.array([right]), [None, right]]
    assert call(name, *[right] * 4, answer=cells) == [1.0] * 4
    assert call(name, *[wrong] * 4, answer=cells) == [0.0] * 4
    assert call(name, *[right] * 4, answer=[math.nan, None, [], [math.nan]]) == [None] * 4


@pytest.mark.parametrize("name", GOLD)
def test_whole_numbers_stored_as_floats_or_in_arrays_are_the_same_gold_answers(name):
    text = "C" if name == "choice" else "2"
    assert call(name, *[text] * 4, answer=[2, 2.0, np.int64(2), torch.tensor(2.0)]) == [1.0] * 4


@pytest.mark.parametrize("name", ["math", "exact", "f1", "fuzzy"])
def test_decimals_of_narrow_types_are_the_gold_answers_that_they_print(name):
    cells = [np.float32(0.1), np.array([0.1], dtype=np.float32), torch.tensor(0.1), np.float16(0.1), 0.1]
    assert call(name, *["0.1"] * 5, answer=cells) == [1.0] * 5


@pytest.mark.parametrize("name", GOLD)
def test_a_missing_value_of_pandas_abstains(name):
    pandas = pytest.importorskip("pandas")
    assert call(name, "A", "A", answer=[pandas.NA, pandas.NaT]) == [None, None]


@pytest.mark.parametrize("name", GOLD)
def test_a_gold_answer_with_fields_is_refused(name):
    with pytest.raises(RewardError, match="the fields value, aliases"):
        call(name, "7", answer=[{"value": "7", "aliases": ["seven"]}])


def test_f1_is_squads():
    # said: cat sat mat (articles dropped: "the cat sat on the mat" -> cat sat on mat), gold: cat mat
    assert call("f1", "The cat sat on the mat.", answer="cat mat") == [pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1))]
    assert call("f1", "PARIS!", "London", "", answer="Paris") == [1.0, 0.0, 0.0]
    assert call("f1", "Rome", answer=[["Paris", "Rome"]]) == [1.0]


def test_saying_the_answer_many_times_lowers_f1():
    assert call("f1", "Paris " * 9, answer="Paris") == [pytest.approx(2 * (1 / 9) / (1 / 9 + 1))]


def test_fuzzy_counts_letters_in_common():
    assert call("fuzzy", "abcd", "", answer="abxd") == [pytest.approx(0.75), 0.0]  # 2 * 3 / 8
    assert call("fuzzy(at_least=0.8)", "abcd", "abxd", answer="abxd") == [0.0, 1.0]


def test_fuzzy_stays_quick_on_long_texts_that_repeat_themselves():
    started = time.process_time()
    call("fuzzy", "a" * 200_000, "ab" * 100_000, answer="a" * 50_000)
    assert time.process_time() - started < 5


# -- cosine and reasoning ----------------------------------------------------------------------------------------------------


def test_cosine_follows_the_paper_at_its_ends_and_middle():
    ids = [[1] * n for n in (0, 50, 100, 500)]
    right = call("cosine(max_len=100)", *["#### 1"] * 4, answer="1", completion_ids=ids)
    wrong = call("cosine(max_len=100)", *["#### 2"] * 4, answer="1", completion_ids=ids)
    assert right == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert wrong == pytest.approx([-1.0, -0.75, -0.5, -0.5])


def test_cosine_abstains_where_there_is_no_gold_answer():
    assert call("cosine(max_len=9)", "#### 1", answer=[None], completion_ids=[[1]]) == [None]


def test_cosine_refuses_values_that_favour_wrong_answers():
    with pytest.raises(ConfigError, match="must rise"):
        resolve("cosine(max_len=10, min_value_correct=-2)")


def test_cosine_under_trls_name_has_trls_example():
    pytest.importorskip("math_verify")
    texts, gold = [r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], [r"\frac{1}{3}"] * 2
    found = get_cosine_scaled_reward(max_len=100)(texts, completion_ids=[[1] * 50] * 2, solution=gold)
    assert found == pytest.approx([0.75, -0.75])


def test_reasoning_accuracy_looks_only_after_the_thinking():
    pytest.importorskip("math_verify")
    texts = [r"<think>x</think> \boxed{3}", r"<think>\boxed{3}</think> \boxed{4}", r"<think>\boxed{3}", ""]
    assert reasoning_accuracy_reward(texts, ["3"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert reasoning_accuracy_reward([r"\boxed{1} END \boxed{3}"], ["3"], reasoning_delimiters=["END"]) == [1.0]
