"""The page on algorithms names everything there is, and its code runs."""

import inspect
import re
from pathlib import Path

import pytest

from covey import algorithms as alg
from covey import testing
from covey.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_every_block_of_code_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/algorithms.md", "exec"), names)
    assert isinstance(names["mine"], alg.Algorithm)


def test_every_preset_has_a_paragraph():
    assert [name for name in alg.PRESETS if f"**`{name}`**" not in PAGE] == []


def test_every_option_of_trl_is_mapped():
    assert [name for name in inspect.signature(alg.from_options).parameters if f"`{name}`" not in PAGE] == []


def test_every_public_part_is_on_the_page():
    public = set(alg.__all__) - {"Controller", "Needs", "Algorithm", "PRESETS"}
    assert [name for name in public if not re.search(rf"\b{name}\b", PAGE)] == []


def test_every_check_is_on_the_page():
    assert [name for name in testing.__all__ if f"`{name}`" not in PAGE and f"{name}(" not in PAGE] == []


@pytest.mark.parametrize("slot", ["advantage", "objective"])
def test_every_part_of_the_tables_is_found_by_its_name(slot):
    section = PAGE.partition(f"\n## {slot.title()}: ")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)", section, re.MULTILINE)
    assert len(names) > 10
    said = {name: told(f"grpo, {slot}={name}") for name in names}
    assert {name: one for name, one in said.items() if one and "its parameters are" not in one} == {}  # it takes some


def told(name):
    """The reason why there is no such algorithm."""
    try:
        alg.from_name(name)
    except ConfigError as error:
        return str(error)
    return None
