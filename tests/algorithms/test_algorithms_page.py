"""The page on algorithms names everything there is, and its code runs."""

import inspect
import re
from pathlib import Path

import pytest

from covey import algorithms as alg
from covey import testing

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_every_block_of_code_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/algorithms.md", "exec"), names)
    assert isinstance(names["mine"], alg.Algorithm)


@pytest.mark.parametrize("name", alg.PRESETS)
def test_every_preset_has_a_paragraph(name):
    assert f"**`{name}`**" in PAGE


@pytest.mark.parametrize("name", inspect.signature(alg.from_options).parameters)
def test_every_option_of_trl_is_mapped(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", alg.__all__)
def test_every_public_part_is_on_the_page(name):
    if name not in ("Controller", "Needs", "Algorithm", "PRESETS"):
        assert re.search(rf"\b{name}\b", PAGE)


@pytest.mark.parametrize("name", testing.__all__)
def test_every_check_is_on_the_page(name):
    assert f"`{name}`" in PAGE or f"{name}(" in PAGE
