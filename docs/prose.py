"""Prose of the pages, held by `make docs`: sentences that are too long, phrases that read as translated, and proselint's checks.

Code and headings are left out; a sentence ends at a full stop, a question mark, a colon or the end of its item. In a table, whose
sentences alone are read, it ends at a semicolon and with its cell too.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
WORDS = ROOT / "docs" / "prose_words.txt"
"""One phrase a line, `phrase => what to write`; a line with # is a comment."""
NOT_PROSELINTS = ("typography", "lexical_illusions", "spelling")
"""Checks of proselint that pages of code fail for their form: straight quotes, three points, repeated headings, diacritics."""
GENERATED = {"options.md"}
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
ROW, CELL = re.compile(r"^\|(.*)\|$", re.MULTILINE), re.compile(r" \| |(?<=[.?!:;])[\"')*]*\s+")
WORD = re.compile(r"[A-Za-z0-9]+(?:['.-][A-Za-z0-9]+)*")
BREAKS = re.compile(r"(?<=[.?!:])[\"')*]*\s+(?=[\"'(*`\[A-Z0-9])")


def pages() -> list[Path]:
    """English pages that people write."""
    there = [
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if "zh" not in page.relative_to(ROOT).parts and page.name not in GENERATED
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *there]


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """Phrases of the word list as patterns, with what to write."""
    lines = [
        line for line in WORDS.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")
    ]
    pairs = [line.partition(" => ") for line in lines]
    return [(re.compile(rf"\b{re.escape(phrase.strip())}\b", re.IGNORECASE), better) for phrase, _, better in pairs]


def prose_of(text: str) -> str:
    """The text with code, comments, tables, pictures and headings blanked, lines kept."""
    blank = lambda match: "\n" * match[0].count("\n")
    text = FENCE.sub(blank, text)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^(\||#|<| *<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "``", text)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


def sentences(text: str) -> list[tuple[int, str]]:
    """Line and words of each sentence of a page."""
    found, line = [], 1
    for block in re.split(r"(\n\s*\n|\n(?= *(?:[*-]|\d+\.) ))", prose_of(text)):
        at = line
        for sentence in BREAKS.split(block):
            if sentence.strip():
                found.append((at, " ".join(sentence.split())))
            at += sentence.count("\n")
        line += block.count("\n")
    return found + of_tables(text)


def of_tables(text: str) -> list[tuple[int, str]]:
    """Line and words of each sentence of the tables' cells."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = re.sub(r"\]\([^)\n]*\)", "]", re.sub(r"`[^`\n]*`", "``", text))
    return [
        (text.count("\n", 0, row.start()) + 1, sentence)
        for row in ROW.finditer(text)
        for sentence in CELL.split(row[1])
    ]


def faults(page: Path, known: list[tuple[re.Pattern[str], str]]) -> list[str]:
    """One line a fault of the page."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    found = []
    for line, sentence in sentences(text):
        count = len(WORD.findall(sentence))
        if count > MOST_WORDS:
            found.append(f"{name}:{line}: {count} words in a sentence, {MOST_WORDS} at most: {sentence[:90]}...")
    prose = prose_of(text)
    for pattern, better in known:
        for match in pattern.finditer(prose):
            line = prose[: match.start()].count("\n") + 1
            found.append(f"{name}:{line}: {match[0]!r}: {better}")
    return found


def of_proselint() -> list[str]:
    """Faults that proselint finds in the prose of the pages; none where it is not installed."""
    if importlib.util.find_spec("proselint") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        for page in pages():
            place = Path(folder) / page.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(prose_of(page.read_text(encoding="utf-8")), encoding="utf-8")
        settings = Path(folder) / "settings.json"
        settings.write_text(json.dumps({"checks": dict.fromkeys(NOT_PROSELINTS, False)}))
        words = [sys.executable, "-m", "proselint", "check", "--config", str(settings), folder]
        said = subprocess.run(words, capture_output=True, text=True).stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines()
    return [line.partition(f"{folder}/")[2] for line in lines if folder in line]


def main() -> int:
    """Print every fault; returns 1 if there is one."""
    known = phrases()
    found = [fault for page in pages() for fault in faults(page, known)] + of_proselint()
    print("\n".join(found) or f"{len(pages())} pages read, no sentence too long, no phrase of the list")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
