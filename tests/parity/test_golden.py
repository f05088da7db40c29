"""The library equals TRL 1.16.0 and verl on every golden number, and the check itself can fail."""

import json
from pathlib import Path

import pytest

golden = pytest.importorskip("golden")

FOLDER = Path(__file__).parents[1] / "data" / "golden"
FILES = sorted(FOLDER.glob("*.json"))
CASE = {
    "name": "by hand",
    "algorithm": "dapo",
    "source": "TRL 1.16.0",
    "inputs": {"logp": [[0.0, 0.0]], "mask": [[1, 0]], "advantages": [2.0]},
    "config": {"loss_type": "dapo"},
    "expected": {"loss": -2.0, "grad_logp": [[-2.0, 0.0]]},
}


def written(folder, **changes):
    file = {
        "format": 1,
        "description": "",
        "tolerance": {"rtol": 1e-7, "atol": 1e-9, "metrics": 2e-6},
        "tensors": {},
        "cases": [{**CASE, **changes}],
    }
    path = folder / "case.json"
    path.write_text(json.dumps(file))
    return str(path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_number_of_the_peers_is_reproduced(file):
    cases = list(golden.load(file))
    problems = {case.name: found for case in cases if (found := golden.check(case))}
    assert not problems
    assert cases


def test_a_case_by_hand_passes(tmp_path, capsys):
    assert golden.main([written(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed\n"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"expected": {"loss": -2.1}}, "wanted -2.1"),
        ({"expected": {"loss": None}}, "wanted nan"),
        ({"expected": {"grad_logp": [[-2.0, 0.0, 0.0]]}}, "shape"),
        ({"expected": {"surprise": 1.0}}, "surprise: not computed"),
        ({"algorithm": "novel", "config": {}}, "'novel' of TRL is not known"),
        ({"config": {"loss_type": "dapo", "twist": 1}}, "nothing here reads option twist"),
        ({"config": {"loss_type": "dappo"}}, "Did you mean dapo?"),
        ({"source": "someone"}, "neither TRL nor verl"),
    ],
)
def test_whatever_is_wrong_or_unknown_fails_with_a_reason(tmp_path, capsys, changes, reason):
    assert golden.main([written(tmp_path, **changes)]) == 1
    said = capsys.readouterr().out
    assert reason in said
    assert said.endswith("0 passed, 1 failed\n")
