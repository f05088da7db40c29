"""The reader of the prose of pages and help texts: long sentences and listed phrases are named with their line, code is not read."""

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import covey.cli
from covey.cli.verb import Verb

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("prose", ROOT / "docs/prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)

    def of(text, name="page.md"):
        page = tmp_path / name
        page.write_text(text)
        return prose.faults(page, prose.phrases())

    return of


def test_the_pages_of_the_repository_pass():
    assert prose.main() == 0


def test_a_long_sentence_is_named_with_its_line(faults):
    (fault,) = faults("Short.\n\n" + " ".join(["word"] * 26) + ".\n")
    assert fault.startswith("page.md:3: 26 words in a sentence, 25 at most: word")


def test_sentences_end_at_stops_and_at_items(faults):
    half = " ".join(["word"] * 20)
    assert faults(f"{half}. Then {half}.\n\n* {half}\n* {half}\n") == []


def test_a_phrase_of_the_list_is_named_with_what_to_write(faults):
    assert faults("The run starts\nanew.\n") == ["page.md:2: 'anew': write \"again\""]


def test_a_long_sentence_of_a_table_is_named(faults):
    half = " ".join(["word"] * 20)
    assert faults(f"| a | b |\n|---|---|\n| {half} | {half}; {half}. {half} |\n") == []
    (fault,) = faults(f"| a | b |\n|---|---|\n| {half} | {half}, {half} |\n")
    assert fault.startswith("page.md:3: 40 words in a sentence")


def test_code_headings_and_names_are_not_read(faults):
    many = " ".join(["word"] * 60)
    assert faults(f"```\n{many} anew\n```\n\n# {many}\n\nSay `anew`.\n") == []


def verbs_of_the_command_line():
    """Every verb by name, those below a verb included."""
    modules = [importlib.import_module(f"covey.cli.{found.name}") for found in pkgutil.iter_modules(covey.cli.__path__)]
    return {verb.name: verb for module in modules for verb in vars(module).values() if isinstance(verb, Verb)}


@pytest.mark.parametrize("verb", verbs_of_the_command_line().values(), ids=lambda verb: verb.name)
def test_help_texts_keep_to_the_rules_of_the_pages(verb):
    texts = [verb.sentence, *(flag.help for flag in verb.flags()), covey.cli.VERBS.get(verb.name, "")]
    assert [text for text in texts for pattern, _ in prose.phrases() if pattern.search(text)] == []
    sentences = [sentence for text in texts for sentence in prose.CELL.split(text) if sentence]
    assert [text for text in sentences if len(prose.WORD.findall(text)) > prose.MOST_WORDS] == []
