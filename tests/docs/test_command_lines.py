"""Every `covey` line of the pages is understood by the verb it calls, and every option that a page names exists."""

import importlib
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from covey.algorithms import from_name
from covey.cli import VERBS
from covey.cli.flags import read_flags
from covey.cli.verb import _ALWAYS, Verb
from covey.config import options
from covey.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def lines_of(page):
    """Command lines of its blocks and of its text; `covey train ...` stands for what a run needs, other gaps are left out."""
    text = page.read_text()
    blocks = [body for language, body in FENCED.findall(text) if language in ("", "bash", "sh", "console")]
    indented = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    fenced = [line for body in (*blocks, *indented) for line in body.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`(covey [^`]+)`", FENCED.sub("", text).replace("\n", " "))
    spans = [
        f"{span} VALUE" if re.search(r" --[a-z-]+$", span) else span for span in spans
    ]  # an option named without one
    started = [re.search(r"(?:^|-m )(covey .*)", line.strip()) for line in fenced]
    whole = (re.sub(r"^(covey \w+) \.\.\.", r"\1", line) for line in (*(one[1] for one in started if one), *spans))
    return [line for line in whole if "..." not in line]


COMMANDS = sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in lines_of(page)})


@cache
def verb_of(name, below):
    """The verb of a line; `data check` and its like are verbs below a verb."""
    files = [file for file in (name, f"{name}_{below}") if re.fullmatch(r"\w+", file)]
    modules = [importlib.import_module(f"covey.cli.{file}") for file in files if find_spec(f"covey.cli.{file}")]
    verbs = [one for module in modules for one in vars(module).values() if isinstance(one, Verb)]
    return next(
        (one for one in verbs if one.name == f"{name} {below}"), next((one for one in verbs if one.name == name), None)
    )


def read(line):
    """What the verb's own reader makes of a line; raises ConfigError as the command would."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((n for n, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")), len(words))]
    name, below = words[0], [*words[1:], ""][0]
    if name.startswith("-") or name == "VERB":
        return {}
    assert name in VERBS, f"covey has no verb {name}"
    verb = verb_of(name, below)
    rest = words[2:] if verb is not None and verb.name == f"{name} {below}" else words[1:]
    if verb is None:  # a verb with others below it, named alone
        return {}
    return read_flags(rest, [*verb.quiet_flags(), *verb.flags(), *_ALWAYS], verb.positional, verb.hints)


def test_there_are_lines_to_read():
    assert len(COMMANDS) > 240


def refusal_of(line):
    """The sentence with which a line is refused; None if it is understood."""
    try:
        algorithm = str(read(line).get("algorithm", "grpo"))
        if ".py:" not in algorithm:
            from_name(algorithm)
    except (ConfigError, AssertionError) as error:
        return str(error)
    return None


def test_every_command_line_of_the_pages_is_understood():
    refusals = [(place, line, refusal_of(line)) for place, line in COMMANDS]
    assert [one for one in refusals if one[2] is not None] == []


def test_a_renamed_option_is_noticed():
    with pytest.raises(ConfigError, match="--learning-rte is not an option here"):
        read("covey train --config run.yaml --learning-rte 1")


def test_a_renamed_part_of_an_algorithm_is_noticed():
    assert "Did you mean distill" in refusal_of("covey train --algorithm \"mopd, regularizer=distil(teacher='a')\"")


@pytest.mark.parametrize("page", ["from-verl.md", "from-unsloth.md"])
def test_options_of_other_libraries_are_translated_to_options_that_exist(page):
    train = {flag.name for flag in verb_of("train", "").flags()}
    of_the_trainer = {"reward_funcs", "peft_config", "quantization_config"}
    known = {*train, *(name for group in options.GROUPS.values() for name in group), *of_the_trainer}
    table = (ROOT / "docs" / page).read_text().partition("## Options")[2].partition("## ")[0]
    named = {
        name
        for row in re.findall(r"^\|.*\| (.*?) \|$", table, flags=re.MULTILINE)
        for name in re.findall(r"`([a-z]\w+)`", row)
    }
    presets = {"gspo", "gpg"}
    assert len(named) > 15
    assert named - known - presets == set()
