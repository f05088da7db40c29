"""The reader of the pages' prose: long sentences and listed phrases are named with their line, code and tables are not read."""

import importlib.util
from pathlib import Path

import pytest

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
