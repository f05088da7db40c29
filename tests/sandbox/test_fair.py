"""Right programs are judged right, whatever their values and manners, and wrong ones of the same kind wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from covey.sandbox import Sandbox
from kit import rest_nightly
from sandbox import fair_apart, fair_forms, fair_manners, fair_values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")
FAIR = {**fair_values.FAIR, **fair_manners.FAIR, **fair_forms.FAIR, **fair_apart.FAIR}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(1) as sandbox:
        yield sandbox


def test_there_are_at_least_180_of_them_each_with_its_own_fault() -> None:
    groups = (fair_values.FAIR, fair_manners.FAIR, fair_forms.FAIR, fair_apart.FAIR)
    assert len(FAIR) == sum(map(len, groups)) >= 180
    assert [name for name, (code, _, (old, new)) in FAIR.items() if code.replace(old, new) == code] == []


@pytest.mark.parametrize("name", rest_nightly(FAIR, set(list(FAIR)[::3])))
def test_a_right_program_is_judged_right_and_a_wrong_one_wrong(name: str, sandbox: Sandbox) -> None:
    code, tests, (old, new) = FAIR[name]
    right = sandbox.run(code, tests, timeout=20)
    assert right.passed, right
    wrong = sandbox.run(code.replace(old, new), tests, timeout=20)
    assert not wrong.passed, wrong
    assert wrong.reason != "tests"
