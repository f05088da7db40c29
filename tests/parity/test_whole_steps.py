"""Four optimizer steps equal TRL 1.16.0's: every metric of the same name, and the change of every weight."""

import json

import pytest

import covey
from kit import rest_nightly

whole_steps = pytest.importorskip("whole_steps")
RECORDED = json.loads(whole_steps.GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("name", rest_nightly(list(whole_steps.CASES), 2))
def test_four_steps_are_those_of_trl(name):
    ours, theirs = whole_steps.steps(covey, name), RECORDED[name]
    assert [entry["step"] for entry in ours["metrics"]] == [1, 2, 3, 4]
    for mine, golden in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert {key: mine.get(key) for key in golden} == pytest.approx(golden, rel=1e-4, abs=1e-5)
    assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-3, abs=1e-5)
    assert max(map(abs, theirs["moved"].values())) > 1e-2
