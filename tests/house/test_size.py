"""Budgets of size: a commit that needs more room changes the number here, and says why."""

import ast
import re
from pathlib import Path

import pytest
from sources import FILES, SRC, nodes_of, text_of

LINES = 104_844
"""Lines of src/covey in Python, JavaScript and C++, without what others wrote (`vendor`)."""


def test_the_source_stays_within_its_budget():
    files = [file for end in ("py", "js", "cpp", "h") for file in SRC.rglob(f"*.{end}") if is_own(file)]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= LINES, f"src/covey has {lines} lines; delete what became idle, or raise LINES on purpose."


def is_own(file: Path) -> bool:
    return "vendor" not in file.parts and not file.name.startswith("uPlot")


PATH = (
    *("types/values.py", "training/loop.py", "training/credit.py", "rewards/scorer.py", "rewards/calling/caller.py"),
    *(f"rollout/{name}.py" for name in ("engine", "scheduler", "sampling", "kv_cache", "decoder", "attention")),
    *(f"algorithms/{name}.py" for name in ("algorithm", "advantages", "objectives")),
    *(f"learner/{name}.py" for name in ("learner", "micro_batches", "packing", "shared_prompt")),
    *(f"learner/{name}.py" for name in ("policy", "logprobs", "lm_head")),
)
"""The files from a prompt to its gradient in a plain run: what a reader of one step reads."""
PATH_LINES = 4_500


def test_the_path_from_a_prompt_to_its_gradient_stays_within_its_budget():
    lines = sum(len(text_of(SRC / file).splitlines()) for file in PATH)
    assert lines <= PATH_LINES, f"the path has {lines} lines; a feature's code has its place in the feature's file."


def test_the_loop_stays_on_one_screen_and_names_no_feature():
    loop = SRC / "training" / "loop.py"
    modules = {
        node.module
        for node in nodes_of(loop)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("covey")
    }
    assert len(text_of(loop).splitlines()) <= 160
    assert len(modules) <= 10, sorted(modules)
    features = ("ensembles", "environments", "serving", "together", "ahead", "asynchron", "greedy")
    assert [module for module in modules if any(feature in module for feature in features)] == []


@pytest.mark.parametrize(("room", "most"), [("training", 24)])
def test_a_room_has_few_files(room: str, most: int):
    assert len([file for file in FILES if file.parent == SRC / room]) <= most


def test_no_test_appends_to_the_path():
    """`tests` is on the path: `from faults.small_runs import trainer`."""
    tests = Path(__file__).parents[1]
    added = "sys.path" + ".append("
    assert [str(file.relative_to(tests)) for file in tests.rglob("*.py") if added in file.read_text()] == []


def test_builders_and_the_front_door_alone_read_the_configuration_in_training():
    """`build*.py` hand each part what it needs; the trainer's own classes hold `args` as TRL's do. Others become fewer, never more."""
    front_door = {"trainer.py", "trl_interface.py", "hooks.py", "warm_up.py"}
    others = {"datasets.py", "invariants.py", "loading.py"}
    readers = {file.name for file in FILES if file.parent == SRC / "training" and "GRPOConfig" in text_of(file)}
    assert {name for name in readers if not name.startswith("build")} <= front_door | others


def test_no_test_imports_another():
    """What several tests share has a file of its own, or is in `kit`: an edit of a test then changes that test alone."""
    tests = Path(__file__).parents[1]
    imported = re.compile(r"^\s*(?:from|import) (?:\w+\.)*test_\w+", re.MULTILINE)
    assert [str(file.relative_to(tests)) for file in tests.rglob("*.py") if imported.search(file.read_text())] == []
