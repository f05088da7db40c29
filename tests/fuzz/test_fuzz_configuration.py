"""Options from files, the command line and Python: whatever they hold, an answer in Covey's own words or a config."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fuzzing import damages, fuzz, json_values, only_covey_errors, texts
from hypothesis import example, given
from hypothesis import strategies as st

from covey import GRPOConfig
from covey.cli import train
from covey.cli.columns import column_map
from covey.cli.flags import read_flags, read_yaml, typed

FLAGS = train.flags()
TYPES = train.flag_types()
NAMES = sorted(flag.name for flag in FLAGS)
OPTIONS = sorted(field.name for field in fields(GRPOConfig) if field.init and field.name != "output_dir")
WORDS = st.lists(st.sampled_from(["--" + name.replace("_", "-") for name in NAMES]) | texts, max_size=6)
GOOD = "max_steps: 3\nlearning_rate: 1e-5\nreward: [demo]\ncolumns: [a=b]\n"


@pytest.mark.slow
@fuzz
@given(st.dictionaries(st.sampled_from(OPTIONS), json_values, min_size=1, max_size=3))
@example({"accelerator_config": 0})
def test_options_of_any_value_are_taken_or_refused_in_a_sentence(given_options: dict[str, Any]) -> None:
    with only_covey_errors():
        GRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **given_options})


@fuzz
@given(WORDS)
@example(["--max-steps"])
@example(["--max-steps", "--max-steps", "1"])
@example(["--reward-weights", "[["])
def test_any_words_on_the_command_line_are_read_or_refused(words: list[str]) -> None:
    with only_covey_errors():
        found = read_flags(words, FLAGS, (), train.HINTS)
        typed(found, {name: TYPES.get(name, str) for name in found})


@fuzz
@given(content=st.binary(max_size=80) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
@example(content=b"? [a, b]\n: 3\n")
@example(content=b"max_steps: !!python/object/apply:os.system ['touch canary']")
@example(content=b"a: &a [*a]\n")
@example(content=b"{" * 3000)
@example(content=b"max_steps: 2026-13-45")
@example(content=b"\xff\xfe\x00")
@example(content=b"<<: 3\nmax_steps: 1")
def test_any_bytes_in_a_yaml_file_are_read_or_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    with only_covey_errors():
        found = read_yaml(path, FLAGS, train.HINTS)
        typed(found, {name: TYPES.get(name, str) for name in found})
    assert not (tmp_path / "canary").exists()


@fuzz
@given(how=damages())
def test_a_damaged_yaml_file_is_read_or_refused(how: Any, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_bytes(how(GOOD.encode()))
    with only_covey_errors():
        found = read_yaml(path, FLAGS, train.HINTS)
        typed(found, {name: TYPES.get(name, str) for name in found})


@fuzz
@given(st.dictionaries(st.sampled_from(NAMES), json_values, min_size=1, max_size=3))
def test_values_of_any_shape_become_their_types_or_are_refused(found: dict[str, Any]) -> None:
    with only_covey_errors():
        typed(found, {name: TYPES.get(name, str) for name in found})


@fuzz
@given(st.lists(texts, max_size=4))
def test_any_pairs_of_columns_are_read_or_refused(pairs: list[str]) -> None:
    with only_covey_errors():
        column_map(pairs)
