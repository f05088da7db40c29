"""Built-in rewards, and names that become rewards."""

from __future__ import annotations

import importlib.util
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.errors import ConfigError, DataError, RewardError
from covey.rewards import (
    BUILTIN,
    RewardSpec,
    Scorer,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    resolve,
)
from covey.rewards.builtin import math as math_module
from covey.rewards.builtin import verify
from covey.rewards.builtin.answers import conclusion
from covey.rewards.builtin.code import program_of
from covey.rewards.builtin.gym import answer_of
from covey.rewards.builtin.math import math_reward
from covey.rewards.builtin.text import text_of
from kit import group, tiny_reward_model, tiny_tokenizer

HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None
needs_math_verify = pytest.mark.skipif(not HAS_MATH_VERIFY, reason="math-verify is not installed")


def call(name, *completions, **columns):
    reward = resolve(name).call
    columns = {key: value if isinstance(value, list) else [value] * len(completions) for key, value in columns.items()}
    return reward(completions=list(completions), **columns)


def chat(text):
    return [{"role": "assistant", "content": text}]


# -- right answers -----------------------------------------------------------------------------------------------------------


def test_math_reads_gsm8k_gold_answers_and_any_marked_or_last_number():
    gold = "He has 3 * 24 = <<3*24=72>>72 eggs.\n#### 72"
    right = ["#### 72", r"\boxed{72}", "so it is 72.", "#### 72 eggs", "#### $72.00"]
    wrong = ["#### 71", "72 at first, but 71", "no idea", "", "7272"]
    assert call("math", *right, answer=gold) == [1.0] * 5
    assert call("math", *wrong, answer=gold) == [0.0] * 5


def test_math_takes_chat_completions_and_the_column_solution():
    assert call("math", chat("#### 4"), chat("#### 5"), solution="4") == [1.0, 0.0]


def test_math_takes_gold_answers_that_are_numbers():
    assert call("math", "#### 4", "#### 4", answer=[4, 4.5]) == [1.0, 0.0]


def test_math_abstains_without_a_gold_answer():
    assert call("math", "#### 4", "#### 4", answer=[None, ""]) == [None, None]


@pytest.mark.nightly
@needs_math_verify
def test_math_evaluates_latex_where_text_says_too_little():
    golds = [r"\frac{\sqrt{2}}{2}", r"\{1, 2\}", "x + 1", r"\sqrt{2}"]
    right = [r"\boxed{\frac{1}{\sqrt{2}}}", r"\boxed{\{2,1\}}", r"\boxed{1+x}", r"it is $\sqrt{2}$"]
    assert call("math", *right, answer=golds) == [1.0] * 4
    assert call("math", r"\boxed{1}", r"\boxed{\{2,3\}}", r"\boxed{x+2}", "$2$", answer=golds) == [0.0] * 4
    assert call("math", r"\boxed{\sqrt{16}}", answer="4") == [1.0]


@pytest.mark.slow
@needs_math_verify
def test_an_answer_that_never_ends_is_killed_alone():
    verifier = verify.Verifier(timeout_seconds=0.5)
    assert verifier.is_equal("1", "1") is True
    process = verifier._process
    with pytest.raises(TimeoutError):
        verifier.is_equal("1", "9^{9^{9^{9}}}")
    assert verifier.is_equal("2", r"\sqrt{4}") is True
    assert verifier._process is process
    verifier.close()


@pytest.mark.slow
@needs_math_verify
@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs POSIX signals")
def test_a_verifier_whose_parent_was_killed_while_it_hung_does_not_stay():
    code = (
        "import os, threading, time\n"
        "from covey.rewards.builtin.verify import Verifier\n"
        "verifier = Verifier(timeout_seconds=0.5)\n"
        "verifier.is_equal('1', '1')\n"
        "print(verifier._process.pid, flush=True)\n"
        "verifier.timeout_seconds = 0.5\n"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), 9)).start()\n"
        "verifier.is_equal('1', r'\\boxed{9^{9^{9^{9}}}}')\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    child, until = Path(f"/proc/{int(parent.stdout)}"), time.monotonic() + 10
    while child.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.exists()


@needs_math_verify
def test_equal_answers_to_one_solution_are_verified_once(monkeypatch):
    asked = []
    each = math_module._verdicts
    monkeypatch.setattr(math_module, "_verdicts", lambda judges: asked.append(len(judges)) or each(judges))
    texts, solutions = [r"\boxed{7}", r"\boxed{8}", r"\boxed{7}", r"\boxed{7}"], ["$7$", "$7$", "$7$", "$8$"]
    assert call("accuracy_reward", *texts, solution=solutions) == [1.0, 0.0, 1.0, 0.0]
    assert asked == [3]


@needs_math_verify
def test_accuracy_reward_abstains_where_the_solution_is_a_list():
    assert call("accuracy_reward", r"\boxed{7}", r"\boxed{7}", solution=[["$7$"], "$7$"]) == [None, 1.0]


def test_accuracy_reward_takes_boxed_answers_only():
    solutions = [r"\frac{1}{3}", r"\frac{1}{3}", r"$\frac{1}{3}$", "no mathematics here"]
    completions = [chat(r"My answer is \boxed{\frac{1}{3}}"), chat(r"\boxed{\frac{1}{2}}"), chat("1/3"), chat("1")]
    assert call("accuracy_reward", *completions, solution=solutions) == [1.0, 0.0, 0.0, None]


def test_exact_compares_texts_and_last_numbers():
    assert call("exact", "Paris", " paris. ", "It is Paris", r"\boxed{Paris}", answer="Paris") == [1.0, 1.0, 0.0, 1.0]
    assert call("exact", "It is 7.", "#### 7", "7 or 8", answer="7") == [1.0, 1.0, 0.0]


def test_data_without_a_gold_answer_is_refused_before_training():
    scorer = Scorer.of("math")
    scorer.check(["prompt", "solution"])
    with pytest.raises(
        DataError, match=r"reward 'math' needs a column answer or solution, but the data set has anser\. Did you"
    ):
        scorer.check(["prompt", "anser"])


# -- form --------------------------------------------------------------------------------------------------------------------


def test_format_wants_the_answer_on_the_last_line():
    good = ["#### 42", "Because.\n#### -1,250.5\n", "x #### $3 "]
    bad = ["42", "#### 42 dollars", "####", "#### 42\nThe end.", "#### four"]
    assert call("format", *good, *bad) == [1.0] * 3 + [0.0] * 5


def test_think_format_wants_one_closed_thought_at_the_start():
    good = ["<think>\na\n</think>\nb", "<think></think>"]
    bad = ["<think>a", " <think>a</think>b", "a<think></think>", "<think><think></think>", "<think></think><think>", ""]
    assert call("think_format", *good, *bad) == [1.0] * 2 + [0.0] * 6
    assert call("think_format_reward", chat(good[0]), chat(bad[0])) == [1.0, 0.0]


def test_length_is_minus_the_distance_from_its_target():
    assert call("length", "x" * 20, "x" * 23, "", completion_ids=[[1], [1], []]) == [0.0, -3.0, -20.0]
    assert call("length(target=2, unit='tokens')", "abc", completion_ids=[[1, 2, 3]]) == [-1.0]


def test_soft_overlong_is_dapos_equation_13():
    ids = [[0] * n for n in (0, 80, 85, 90, 100, 101)]
    name = "soft_overlong(max_completion_len=100, soft_punish_cache=20)"
    assert call(name, *ids, completion_ids=ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(100, 0)(completion_ids=[[0] * 100, [0] * 101]) == [0.0, -1.0]


def test_repetition_is_the_share_of_repeated_ngrams():
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1], [1, 2, 1, 2]]
    assert call("repetition(ngram_size=2)", *ids, completion_ids=ids) == [0.0, -0.75, 0.0, pytest.approx(-1 / 3)]
    assert get_repetition_penalty_reward(2, -2.0)(completion_ids=[[5, 5, 5]]) == [-1.0]


def test_the_text_of_a_completion_is_what_the_assistant_wrote():
    assert text_of("a") == "a"
    assert (
        text_of([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"content": "c"}]) == "a\n\nc"
    )
    assert text_of([{"role": "assistant", "content": None}]) == ""


def test_numbers_of_two_turns_are_never_read_as_one():
    turns = [{"role": "assistant", "content": "I take 7"}, {"role": "tool", "content": "ok"}]
    turns.append({"role": "assistant", "content": "2 are left."})
    assert math_reward([turns, turns], answer=["72", "2"]) == [0.0, 1.0]


ANSWERS = {
    "math": r"<think>Maybe \boxed{5}.</think> So 6 are left.",
    "exact": r"<think>Maybe \boxed{5}.</think>6",
    "numeric": r"[THINK]Maybe \boxed{5}.[/THINK] It is 6.",
    "f1": r"<think>Maybe \boxed{5}.</think> 6",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_in_thoughts_that_are_closed_does_not_count(name):
    assert resolve(name).call([ANSWERS[name]] * 2, answer=["5", "6"]) == [0.0, 1.0]


def test_a_choice_and_a_program_in_thoughts_do_not_count():
    text = "<think>\n```python\nx = 1\nThe answer is A.</think>The answer is B.\n```python\ny = 2\n```"
    assert resolve("choice").call([text] * 2, answer=["A", "B"]) == [0.0, 1.0]
    assert program_of(conclusion(text)) == "y = 2\n"
    assert answer_of("<think><answer>7</answer></think>8") == "8"


EXAMPLES = {
    "soft_overlong": "soft_overlong(max_completion_len=8, soft_punish_cache=4)",
    "cosine": "cosine(max_len=8)",
    "pattern": "pattern(pattern='(a|b)+')",
}
"""Built-in rewards that have a parameter without a default."""
NEED_MODELS = {"judge", "judge_pairs", "reward_model", "process", "classifier", "similarity", "fluency"}
COLUMNS = {"gym": None, "solution": "4", "schema": {"type": "integer"}, "language": "en", "tests": ["assert f(1) == 2"]}


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - NEED_MODELS))
def test_every_built_in_survives_empty_endless_and_strange_completions(name):
    if name in {"accuracy_reward", "reasoning_accuracy_reward"} and not HAS_MATH_VERIFY:
        pytest.skip("math-verify is not installed")
    text = EXAMPLES.get(name, name)
    completions = ["", " ", "\x00", "\ud800", "(" * 5000, "9" * 5000, "####" * 500, "\\boxed{" * 500, "1/0", "<think>"]
    scorer = Scorer.of(text, isolate=False)
    (scored,) = scorer.score([group(completions, columns=COLUMNS | {"answer": "B" if name == "choice" else "4"})])
    assert scored.events == ()
    assert all(math.isfinite(value) or math.isnan(value) for value in scored.rewards.flatten().tolist())


# -- names -------------------------------------------------------------------------------------------------------------------


def test_a_name_gives_the_reward_and_its_metrics_their_name():
    assert resolve("math").name == "math"
    assert resolve("length(target=3)").name == "length"
    assert resolve("length(target=3)").call.target == 3
    spec = RewardSpec(name="mine", call=len)
    assert resolve(spec) is spec
    assert resolve(len).name == "len"
    assert resolve(get_soft_overlong_punishment(8, 4)).name == "soft_overlong_punishment_reward"


def test_an_import_path_gives_the_users_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "def shorter(completions, **columns): return [-len(c) for c in completions]\n"
        "def scaled(by): return lambda completions: [by * len(c) for c in completions]\n"
        "@dataclass(frozen=True)\nclass Bonus:\n"
        "    amount: float = 1.0\n"
        "    def __call__(self, completions): return [self.amount for _ in completions]\n"
    )
    assert resolve(f"{file}:shorter").name == "shorter"
    assert resolve(f"{file}:scaled(by=2)").call(["abc"]) == [6]
    assert resolve(f"{file}:Bonus").call(["abc"]) == [1.0]
    assert resolve(f"{file}:Bonus(amount=3)").call(["abc"]) == [3]
    with pytest.raises(ConfigError, match=r"has no 'shortr'\. Did you mean shorter\?"):
        resolve(f"{file}:shortr")


@pytest.mark.parametrize(
    "name, said",
    [
        ("mth", r"'mth' is no built-in reward.* Did you mean math\?"),
        (
            "length(goal=3)",
            r"unexpected keyword argument 'goal'; its parameters are target, unit, as in length\(target=...\)",
        ),
        ("soft_overlong", r"missing a required argument: 'max_completion_len'"),
        ("length(3)", "write its parameters as name=value"),
        ("length(target=open('x'))", "write its parameters as name=value"),
        ("length(unit='lines')", "must be 'characters', 'words' or 'tokens'"),
        ("soft_overlong(max_completion_len=4, soft_punish_cache=9)", "must lie between 0 and"),
        ("repetition(max_penalty=1)", "at most 0"),
        ("math(3", r"'math\(3' is no built-in"),
    ],
)
def test_a_name_that_is_none_is_told_with_the_nearest(name, said):
    with pytest.raises(ConfigError, match=said):
        resolve(name)


def test_a_scorer_takes_names_functions_and_models_together():
    model = tiny_reward_model()
    spec = resolve(model, tiny_tokenizer())
    scorer = Scorer.of(["format", lambda completions: [2.0 for _ in completions], spec], [1.0, 0.5, 0.0])
    assert scorer.names == ["format", "<lambda>", "Qwen2ForSequenceClassification"]
    (scored,) = scorer.score([group(["#### 4", "4"])])
    assert scored.rewards[:, :2].tolist() == [[1.0, 2.0], [0.0, 2.0]]
    assert scored.rewards[:, 2].isfinite().all()
    assert Scorer.of("format").names == ["format"]
    with pytest.raises(RewardError, match="there is no reward"):
        Scorer.of([])
