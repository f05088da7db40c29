"""NumPy inside the sandbox: programs and their tests use it, the folder it came from stays out of sight, and its names are watched."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from covey.rewards.builtin.code import Code
from covey.sandbox import Sandbox
from kit import rest_nightly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(1, numpy=True) as sandbox:
        yield sandbox


SOLVE = "import numpy as np\ndef solve(a, b):\n    return np.linalg.solve(np.array(a), np.array(b))\n"
FAIR = {
    "a solver": (SOLVE, "import numpy as np\nassert np.allclose(solve([[2, 0], [0, 4]], [2, 4]), [1, 1])", ("a), ", "a).T + 1, ")),
    "a list": (SOLVE, "assert solve([[2]], [4]).tolist() == [2.0]", ("(b)", "(b) + 1")),
    "a scalar": ("import numpy as np\ndef total(x):\n    return np.sum(x)", "assert total([1, 2]) == 3", ("sum", "prod")),
    "a float": ("import numpy as np\ndef mean(x):\n    return np.mean(x)", "assert abs(mean([1, 2]) - 1.5) < 1e-9", ("mean(x)", "mean(x) + 1e-6")),
    "testing": (SOLVE, "import numpy\nnumpy.testing.assert_allclose(solve([[2]], [4]), [2.0])", ("(b)", "(b) + 1")),
    "random": ("import numpy as np\ndef draw():\n    return np.random.RandomState(3).randint(100, size=4).tolist()", "assert draw() == [24, 3, 56, 72]", ("(3)", "(4)")),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_nightly(FAIR, [name for name in FAIR if name not in ("a solver", "testing")]))
def test_a_right_program_is_judged_right_and_a_wrong_one_wrong(name: str, sandbox: Sandbox) -> None:
    code, tests, (old, new) = FAIR[name]
    right = sandbox.run(code, tests)
    assert right.passed, right
    wrong = sandbox.run(code.replace(old, new), tests)
    assert not wrong.passed
    assert wrong.reason != "tests"


def test_scripts_print_the_same_random_numbers_each_time(sandbox: Sandbox) -> None:
    code = "import numpy as np\nprint(np.random.rand(2), (np.arange(6).reshape(2, 3) @ np.ones(3)).sum())"
    first, again = sandbox.run(code), sandbox.run(code)
    assert first.passed, first
    assert first.stdout == again.stdout
    assert "15.0" in first.stdout


def test_its_memory_is_limited(sandbox: Sandbox) -> None:
    found = sandbox.run("import numpy as np\nnp.ones(2**29)", memory_mb=64)
    assert not found.passed
    assert "ArrayMemoryError" in found.stderr


@pytest.mark.parametrize(
    "cheat",
    rest_nightly(
        [
            "np.allclose = lambda *a, **k: True",
            "import numpy._core.numeric as inner\ninner.isclose = lambda *a, **k: np.True_",
            "np.testing.assert_allclose = lambda *a, **k: None",
        ],
        1,
    ),
)
def test_a_program_cannot_change_what_its_tests_compare_with(cheat: str, sandbox: Sandbox) -> None:
    tests = ["import numpy as np\nassert np.allclose(f(), [1.0, 2.0])", "np.testing.assert_allclose(f(), [1.0, 2.0])"]
    honest = "import numpy as np\ndef f():\n    return np.array([1.0, {}])\n"
    assert sandbox.run(honest.format(2.0), tests).passed
    assert not sandbox.run(honest.format(3.0) + cheat, tests).passed
    inside = honest.format(3.0).replace("    return", f"    {cheat.splitlines()[-1]}\n    return")
    assert not sandbox.run(cheat.partition("\n")[0] + "\n" + inside if "inner" in cheat else inside, tests).passed


def test_nothing_else_of_its_folder_can_be_reached(sandbox: Sandbox) -> None:
    assert sandbox.run("import torch").reason == "error"
    assert (
        "PermissionError" in (said := sandbox.run("import numpy, os\nos.listdir(numpy.__path__[0])").stderr)
        or "FileNotFoundError" in said
    )


def test_it_is_only_there_when_asked_for() -> None:
    program = "```python\nimport numpy as np\nprint(int(np.sum([1, 2])))\n```"
    row = {"input_output": {"inputs": [""], "outputs": ["3"]}}
    assert Code(workers=1, numpy=True)(program, **row) == 1.0
    assert Code(workers=1)(program, **row) == 0.0
