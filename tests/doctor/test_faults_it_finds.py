"""Each fault that is planted is found, named and told how to mend; a case in order passes."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.data import EngineLength, load
from covey.demo import model_path
from covey.doctor import AREAS, examine
from covey.doctor.data import first_rows, lengths, overlap
from covey.doctor.finding import attempt
from covey.doctor.model import closing_token, padding
from kit import tiny_tokenizer


def broken_model(place, change=None, *, tokenizer=None, **config):
    """The demo's model in a folder of its own, changed."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), **config)
    words = AutoTokenizer.from_pretrained(model_path())
    if change is not None:
        change(model)
    if tokenizer is not None:
        tokenizer(words)
    model.save_pretrained(place)
    words.save_pretrained(place)
    return str(place)


def rows(count=12, **columns):
    return Dataset.from_list(
        [{"prompt": f"{i} + {i} =", **{n: v(i) for n, v in columns.items()}} for i in range(count)]
    )


def test_a_case_in_order_passes_in_every_area(case):
    findings = list(examine(case(prompts=8)))
    bad = [one for one in findings if one.status != "PASS" and one.area != "environment"]
    assert bad == []
    assert {one.area for one in findings} == set(AREAS)


@pytest.mark.slow
def test_the_trial_reports_signal_with_an_interval_and_time_a_step(case):
    findings = {tuple(one.facts): one.facts for one in examine(case(prompts=8))}
    signal = next(facts for facts in findings.values() if "share" in facts and "groups" in facts)
    assert 0 <= signal["low"] <= signal["share"] <= signal["high"] <= 1
    assert signal["groups"] == 8
    time = next(facts for facts in findings.values() if "seconds_a_step" in facts)
    assert time["seconds"] == pytest.approx(time["seconds_a_step"] * 100)


def test_options_that_contradict_each_other_fail_and_the_data_are_still_looked_at(case, found):
    broken = case({"num_generations": 5}, load_dataset=lambda: load("nowhere.jsonl"))
    assert "num_generations" in found(broken, "FAIL", "options")
    assert "nowhere.jsonl" in found(broken, "FAIL", "data")


@pytest.mark.parametrize(
    "tokens, status, words",
    [
        (8, "FAIL", r"1 of 2 prompts are longer than the 7 tokens that the server's limit leaves, .* row 1\."),
        (20, "WARN", r"1 of 2 prompts leave completions fewer than 16 tokens of the server's limit, 20, .* row 1\."),
        (40, "PASS", r"24 fit beside a completion of 16"),
    ],
)
def test_lengths_that_an_engine_does_not_hold_are_told_by_its_own_limit(tokens, status, words):
    args = SimpleNamespace(max_completion_length=16, chat_template_kwargs=None, on_long_prompt="error")
    engine = EngineLength(tokens, 16, "the server's limit")
    prompts = [{"prompt": "2"}, {"prompt": "123456789"}]
    finding = lengths(prompts, tiny_tokenizer(), args, 256, engine=engine)
    assert finding.status == status
    assert re.search(words, finding.said)
    assert finding.fix.startswith("raise that") == (status != "PASS")


def test_a_folder_that_holds_a_run_fails(case, found, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "holds a run already" in found(case(), "FAIL", "disk")


def test_a_model_that_is_not_there_fails(case, found):
    assert "does not exist" in found(case(model="./nowhere"), "FAIL", "model")


def test_a_weight_that_is_no_number_fails(case, found, tmp_path):
    def spoil(model):
        model.model.norm.weight.data[3] = torch.nan

    broken = case(model=broken_model(tmp_path / "model", spoil))
    assert "model.norm.weight holds numbers that are not finite" in found(broken, "FAIL", "model")


def test_a_chat_template_whose_end_would_not_stop_a_completion_fails(case, found, tmp_path):
    def other_end(words):
        words.eos_token = words.pad_token

    def forget(model):
        for config in (model.config, model.generation_config):
            config.eos_token_id = None

    broken = case(model=broken_model(tmp_path / "model", forget, tokenizer=other_end))
    said = found(broken, "FAIL", "model")
    assert "closes an answer with <|im_end|>" in said
    assert "generation_config.json" in said


@pytest.mark.parametrize(
    "template, closing",
    [
        ("{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}\n{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('only one message') }}", None),
        (None, None),
    ],
)
def test_the_token_that_closes_an_answer_is_read_from_the_template(template, closing):
    words = tiny_tokenizer()
    words.chat_template = template
    found = closing_token(words)
    assert (None if found is None else words.convert_ids_to_tokens(found)) == closing


def test_chat_prompts_without_a_chat_template_fail(case, found, tmp_path):
    def forget(words):
        words.chat_template = None

    broken = case(model=broken_model(tmp_path / "model", tokenizer=forget))
    assert "no chat template" in found(broken, "FAIL", "model")


def test_plain_prompts_to_a_chat_model_are_warned_of(case, found):
    plain = case(load_dataset=lambda: rows(answer=str), load_held_out=lambda: None)
    assert "it will continue the text" in found(plain, "WARN", "model")


def test_dropout_is_warned_of_unless_it_is_switched_off(case, found, tmp_path):
    model = broken_model(tmp_path / "model", attention_dropout=0.1)
    assert "dropout of up to 0.1" in found(case(model=model), "WARN", "model")
    assert found(case({"disable_dropout": True}, model=model), "WARN", "model") == ""


def test_half_precision_weights_with_a_small_rate_are_warned_of(case, found):
    options = {"learning_rate": 1e-6, "model_init_kwargs": {"dtype": "bfloat16"}}
    assert "rounds away" in found(case(options), "WARN", "model")


def test_a_padding_token_that_is_a_word_is_warned_of():
    words = SimpleNamespace(pad_token="a", pad_token_id=40, all_special_ids=[0, 1])
    assert padding(words).status == "WARN"
    assert padding(SimpleNamespace(pad_token="<pad>", pad_token_id=0, all_special_ids=[0, 1])).status == "PASS"


def test_a_data_set_without_rows_fails(case, found):
    assert "empty" in found(case(load_dataset=lambda: rows().select([])), "FAIL", "data")


def test_prompts_that_do_not_fit_fail_with_their_number(case, found):
    long = case({"max_completion_length": 2040}, prompts=4)
    assert "60 of 60 prompts are longer than the 8 tokens" in found(long, "FAIL", "data")
    assert "no trial" in found(long, "FAIL", "signal")


def test_repeated_prompts_empty_answers_and_leaked_held_out_prompts_are_warned_of(case, found):
    messages = [{"role": "user", "content": "1 + 1 ="}]
    data = Dataset.from_list([{"prompt": messages, "answer": "" if i == 2 else str(i)} for i in range(8)])
    said = found(case(load_dataset=lambda: data, load_held_out=lambda: data.select([0])), "WARN", "data")
    assert "7 of 8 prompts are repetitions" in said
    assert "column 'answer' is empty in 1 of 8 rows, the first of them row 2" in said
    assert "1 of 1 held-out prompts are in the training data" in said


def test_a_leaked_prompt_is_seen_under_the_nulls_of_either_set():
    turn, named = {"role": "user", "content": "2 + 2"}, {"role": "user", "content": "3 + 3", "name": "Ann"}
    trained = Dataset.from_list([{"prompt": [turn]}, {"prompt": [turn | {"content": "1"}]}])
    held_out = Dataset.from_list([{"prompt": [turn]}, {"prompt": [named]}])  # Arrow fills in a name for the first
    assert overlap(first_rows(trained), first_rows(held_out)).facts["overlap"] == 1


def test_a_reward_that_needs_a_missing_column_fails(case, found):
    def strict(completions, solution):
        return [0.0] * len(completions)

    assert "needs a column solution" in found(case(rewards=[strict]), "FAIL", "rewards")


def test_a_reward_file_that_python_cannot_read_fails_with_the_line(case, found, tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [1.0 for c in completions\n")
    said = found(case(rewards=[f"{tmp_path / 'mine.py'}:f"]), "FAIL", "rewards")
    assert "fails when it is imported, with SyntaxError" in said
    assert "mine.py, line 2" in said


def test_code_that_fails_in_a_library_is_named_with_the_line_of_its_own():
    _, wrong = attempt("rewards", lambda: json.loads("x"), is_foreign=True)
    assert f"mend {__file__}:" in str(wrong)


def test_what_is_unknown_for_want_of_data_is_not_guessed(case, found):
    missing = case(load_dataset=lambda: load("nowhere.jsonl"))
    assert found(missing, "WARN", "model") == ""


def test_a_reward_that_raises_fails_with_what_it_said(case, found):
    def broken(completions, answer):
        return [1.0 / (len(str(text)) % 2) for text in completions]

    assert "ZeroDivisionError" in found(case(rewards=[broken, "demo"], prompts=4), "FAIL", "rewards")


def test_a_reward_with_one_value_is_warned_of_and_leaves_no_signal(case):
    def constant(completions):
        return [0.5] * len(completions)

    findings = list(examine(case(rewards=[constant], prompts=4)))
    said = [one.said for one in findings if (one.status, one.area) == ("WARN", "rewards")]
    assert said == ["constant gave every one of 16 answers 0.5, so it tells none apart."]
    dead = [one for one in findings if (one.status, one.area) == ("FAIL", "signal")]
    assert [one.facts["share"] for one in dead] == [0.0]


@pytest.mark.slow
def test_a_reward_of_chance_is_warned_of(case, found):
    def chance(completions):
        return [random.random() for _ in completions]

    assert "other scores when it was called again" in found(case(rewards=[chance], prompts=4), "WARN", "rewards")


def test_weights_that_are_all_0_fail(case, found):
    assert "every reward has weight 0" in found(case({"reward_weights": [0.0]}, prompts=4), "FAIL", "rewards")


@pytest.mark.slow
def test_answers_that_never_end_are_warned_of_and_fail_where_they_are_masked(case, found):
    assert "none of 16 answers ended within 2" in found(case({"max_completion_length": 2}, prompts=4), "WARN", "signal")
    masked = case({"max_completion_length": 2, "mask_truncated_completions": True}, prompts=4)
    assert "All of them are masked" in found(masked, "FAIL", "signal")


@pytest.mark.slow
def test_answers_that_are_all_alike_are_warned_of(case, found):
    assert "the same answer every time" in found(case({"temperature": 0.01}, prompts=4), "WARN", "signal")


def test_a_step_of_one_prompt_and_many_passes_are_warned_of(case, found):
    small = case({"per_device_train_batch_size": 4, "max_steps": 20_000})
    said = found(small, "WARN", "batches")
    assert "a step learns from 1 prompt," in said
    assert "passes over the same prompts" in said


def test_a_run_that_does_not_fit_in_memory_fails(case, found):
    assert "GiB predicted" in found(case(predict_memory=lambda args, dataset, tokens: 2**50), "FAIL", "memory")
