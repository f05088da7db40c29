"""No wrong program is judged right, none raises an error out of the reward, and none costs others their scores."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from covey.errors import RewardError
from covey.rewards import Scorer
from covey.rewards.builtin.code import Code
from covey.sandbox import Sandbox
from covey.types import Completion, Group, Prompt
from kit import rest_nightly
from sandbox import cheats, cheats_by_form, cheats_of_modules, cheats_of_the_run
from sandbox.cheats import FORMS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")
CHEATS = {**cheats.CHEATS, **cheats_of_the_run.CHEATS}
RIGHT = "def f(x):\n    return 2 * x"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(1) as sandbox:
        yield sandbox


def test_there_are_at_least_64_of_them() -> None:
    assert len(CHEATS) == len(cheats.CHEATS) + len(cheats_of_the_run.CHEATS) >= 64


@pytest.mark.parametrize("form", FORMS)
def test_the_right_program_passes_each_form(form: str, sandbox: Sandbox) -> None:
    for strict in (False, *([True] if form in ("plain", "check") else [])):
        result = sandbox.run(RIGHT, FORMS[form], timeout=20, strict=strict)
        assert result.passed, result


PAIRS = [(name, form) for name in CHEATS for form in FORMS]


@pytest.mark.parametrize("name, form", rest_nightly(PAIRS, {pair for i, pair in enumerate(PAIRS) if i % 19 == 0}))
def test_a_cheat_passes_no_form_of_tests(name: str, form: str, sandbox: Sandbox) -> None:
    """One of 19 pairs in CI, each form with seven cheats; a slow test below tries every cheat."""
    result = sandbox.run(CHEATS[name], FORMS[form], timeout=2)
    assert not result.passed, result
    assert result.reason != "tests", result


LIES = [(name, form) for name in cheats_by_form.LIARS for form in cheats_by_form.FORMS]


@pytest.mark.parametrize("form", cheats_by_form.FORMS)
def test_the_right_program_passes_tests_of_every_form(form: str, sandbox: Sandbox) -> None:
    result = sandbox.run(cheats_by_form.RIGHT, cheats_by_form.FORMS[form], timeout=20)
    assert result.passed, result


A_FORM_EACH = [LIES[place * (len(cheats_by_form.FORMS) + 1) % len(LIES)] for place in range(len(cheats_by_form.FORMS))]
"""Every form of tests once in CI, and every liar."""


@pytest.mark.parametrize("name, form", rest_nightly(LIES, A_FORM_EACH))
def test_a_liar_passes_tests_of_no_form(name: str, form: str, sandbox: Sandbox) -> None:
    result = sandbox.run(cheats_by_form.LIARS[name], cheats_by_form.FORMS[form], timeout=3)
    assert not result.passed, result
    assert result.reason != "tests", result


@pytest.mark.parametrize("name", cheats_of_modules.CASES)
def test_a_program_that_changes_python_or_reads_its_tests_fails(name: str, sandbox: Sandbox) -> None:
    code, tests = cheats_of_modules.CASES[name]
    result = sandbox.run(code, tests, timeout=3)
    assert not result.passed, result
    assert result.reason != "tests", result


def test_a_liar_that_takes_all_its_time_is_run_again_all_the_same(sandbox: Sandbox) -> None:
    code = "import time\nclass Box:\n    def get(self):\n        time.sleep(1.0)\n        return {}\n"
    liar = "type('E', (), {'__eq__': lambda s, o: True})()"
    assert sandbox.run(code.format(48611), "assert Box().get() == 48611", timeout=0.45).passed
    assert not sandbox.run(code.format(liar), "assert Box().get() == 48611", timeout=0.45).passed


@pytest.mark.slow
@pytest.mark.parametrize("every", rest_nightly([12, 1], 1))
def test_a_cheat_gets_0_raises_nothing_and_costs_its_siblings_nothing(every: int) -> None:
    """Alone each is in the tests above; in CI every twelfth has a sibling."""
    texts = [text for cheat in [*CHEATS.values()][::every] for text in (cheat, RIGHT)]
    prompt = Prompt(uid="0:0", text="Double it.", token_ids=(1,), columns={"tests": FORMS["plain"]})
    answers = tuple(Completion(token_ids=torch.tensor([5]), text=text, finish="stop") for text in texts)
    scorer = Scorer.of([Code(workers=2, timeout=2)])
    (scored,) = scorer.score([Group(prompt=prompt, completions=answers)])
    scorer.close()
    assert scored.rewards is not None
    assert scored.rewards[:, 0].tolist() == [0.0, 1.0] * (len(texts) // 2)


SETUPS = {
    "a set-up that uses the program": ("def make(): raise ValueError('no')", "thing = make()"),
    "a set-up that names what the program has not": ("pass", "thing = make()"),
    "a set-up in which the program leaves": ("def make(): raise SystemExit", "thing = make()"),
    "a set-up in which the program says that the tests are broken": (
        "def make(): raise SyntaxError('tests')",
        "thing = make()",
    ),
    "a set-up in which the program misses a module": (
        "def make(): raise ModuleNotFoundError('numpy')",
        "thing = make()",
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SETUPS)
def test_what_a_program_does_to_the_set_up_is_its_own_fault(name: str, strict: bool) -> None:
    code, setup = SETUPS[name]
    assert Code(workers=1, strict=strict)(code, tests=["assert thing == 1"], setup=setup) == 0.0


@pytest.mark.parametrize(
    "tests, setup", [(["assert f(2 =="], ""), (["assert f(2) == 4"], "import numpy"), (["import pandas as pd\nassert f(2) == 4"], ""), (["assert f(1) == 2"], "def (:")]
)  # fmt: skip
def test_tests_that_are_broken_are_told_whatever_the_program(tests: list[str], setup: str) -> None:
    for program in (RIGHT, "import os; os._exit(0)"):
        with pytest.raises(RewardError, match="the tests cannot be run"):
            Code(workers=1)(program, tests=tests, setup=setup)
