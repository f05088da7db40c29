"""How many planted faults `covey data check` finds in GSM8K, how many rows it accuses wrongly, and how fast it reads.

    python benchmarks/data_check.py --train train.jsonl --test test.jsonl
    python benchmarks/data_check.py --train train.jsonl --test test.jsonl --rows 200000

The first plants 100 rows of every kind and prints recall by kind, and precision over all rows; the second makes a large file of
the same words and prints rows a second and the most memory.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.doctor.data_check import Rows, Settings, inspect

Row = dict[str, Any]
NAMES = ("Ottilie", "Barnaby", "Xiomara", "Leopold", "Persis", "Quentin")
SAME = ("duplicate", "near_duplicate", "disputed")


def replaced(text: str, every: int, words: Sequence[str]) -> str:
    """The text with one word without digits in `every` replaced by another word."""
    old = text.split()
    for place in range(random.randrange(every), len(old), every):
        if not re.search(r"\d", old[place]):
            old[place] = random.choice(words)
    return " ".join(old)


def renamed(text: str) -> str:
    """The text with its most frequent capitalised word within a sentence (a name, mostly) replaced."""
    found = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", text) or re.findall(r"^[A-Z][a-z]+", text)
    return re.sub(rf"\b{max(found, key=found.count)}\b", random.choice(NAMES), text) if found else text


def restyled(text: str) -> str:
    """Other case, other signs, other spaces."""
    return "  ".join(text.lower().replace(",", "").replace("?", " ?").split(" "))


def renumbered(text: str) -> str:
    """Every number another one."""
    return re.sub(r"\d+", lambda match: str(int(match.group()) + 3), text)


def plants(train: Sequence[Row], test: Sequence[Row]) -> dict[str, tuple[set[str], Callable[[], Row]]]:
    """By name: the kinds of which one must be found, and a new faulty row."""
    words = [word for row in train[:200] for word in row["question"].split() if word.isalpha() and word.islower()]
    long = [row for row in train if len(row["question"].split()) >= 30]

    def again(change: Callable[[str], str], rows: Sequence[Row] = train) -> Callable[[], Row]:
        def make() -> Row:
            row = random.choice(rows)
            return {**row, "question": change(row["question"])}

        return make

    def text(change: Callable[[str], str]) -> Callable[[], Row]:
        return again(lambda old: change(f"{random.choice(words)} {renumbered(replaced(old, 3, words))}"))

    def answer(value: Any) -> Callable[[], Row]:
        return lambda: {**text(str)(), "answer": value}

    garbled = "Zoë's café"
    return {
        "same row": ({"duplicate"}, again(str)),
        "other case, signs, spaces": ({"near_duplicate"}, again(restyled)),
        "another name": ({"near_duplicate"}, again(renamed, long)),
        "1 word in 30 replaced": ({"near_duplicate"}, again(lambda old: replaced(old, 30, words), long)),
        "1 word in 15 replaced": ({"near_duplicate"}, again(lambda old: replaced(old, 15, words), long)),
        "other answer": ({"disputed"}, lambda: {**random.choice(train), "answer": "#### -7"}),
        "test row": ({"contaminated"}, again(str, test)),
        "test row in other words": ({"contaminated"}, again(lambda old: f"Solve this, my friend. {restyled(old)} Think!", test)),
        "test row, another name": ({"contaminated"}, again(renamed, test)),
        "test row, 1 word in 15 replaced": ({"contaminated"}, again(lambda old: replaced(old, 15, words), test)),
        "test row, 1 word in 10 replaced": ({"contaminated"}, again(lambda old: replaced(old, 10, words), test)),
        "test row, other numbers": ({"akin"}, again(renumbered, test)),
        "no answer": ({"no_answer"}, answer(None)),
        "answer in words": ({"odd_answer"}, answer("#### a dozen")),
        "empty": ({"no_prompt"}, lambda: {"question": " ", "answer": "#### 1"}),
        "wrong encoding": ({"mojibake"}, text(lambda old: f"{old} {garbled.encode().decode('cp1252')}")),
        "control characters": ({"controls"}, text(lambda old: old.replace(" ", " \x07", 1))),
        "e-mail address": ({"email"}, text(lambda old: f"{old} Write to {random.choice(NAMES).lower()}@example.org")),
        "telephone number": ({"phone"}, text(lambda old: f"{old} Call +44 20 7946 0{random.randint(100, 999)}")),
        "other language": ({"language"}, text(lambda old: f"Wie viele sind es, wenn die Frau {random.randint(2, 999999)} kauft und er nicht?")),
    }  # fmt: skip


def planted(train: Sequence[Row], test: Sequence[Row], each: int, seed: int) -> tuple[list[Row], list[str]]:
    """The training rows with `each` rows of every plant at the end, and the name of the plant of each of these."""
    random.seed(seed)
    rows, names = list(train), []
    for name, (_, make) in plants(train, test).items():
        rows += [make() for _ in range(each)]
        names += [name] * each
    return rows, names


def measured(train: Sequence[Row], test: Sequence[Row], each: int = 100, seed: int = 0) -> dict[str, Any]:
    """Recall of every plant, and how many of the rows that are to be mended were not planted.

    A row is found when any fault that must be mended, or its own, is found in it; an unplanted row that is only part of a
    dispute with a planted one is no false alarm.
    """
    rows, names = planted(train, test, each, seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("train.jsonl", "test.jsonl")]
        for path, content in zip(paths, (rows, test), strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        findings = inspect(Rows(str(paths[0])), Settings(prompt_column="question", against=(str(paths[1]),))).findings
    own: dict[int, set[str]] = {}
    for kind in findings.kinds():
        for row in findings.rows(kind.name):
            own.setdefault(row, set()).add(kind.name)
    wanted = plants(train, test)
    recall = {}
    for name in wanted:
        places = [len(train) + place for place, one in enumerate(names) if one == name]
        recall[name] = sum(bool(own.get(place, set()) & (wanted[name][0] | set(SAME))) for place in places) / each
    grave = {kind.name for kind in findings.kinds() if kind.must_be_mended} - {"disputed"}
    accused = {row: kinds & grave for row, kinds in own.items() if row < len(train)}
    return {"recall": recall, "accused": {row: sorted(kinds) for row, kinds in accused.items() if kinds}}


def speed(train: Sequence[Row], source: str, num_rows: int, most_words: int) -> dict[str, float]:
    """Rows a second, and the most memory of this process in MB before and after, for rows of a quarter to all of so many words.

    One row in twenty is an earlier one again, and one in twenty an earlier one with a word changed.
    """
    random.seed(0)
    words = [word for row in train for word in row["question"].split()]
    inspect(Rows(source), Settings(prompt_column="question"))  # everything that is loaded once is loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    recent: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.jsonl"
        with path.open("w") as file:
            for number in range(num_rows):
                half = random.randint(most_words // 8, most_words // 2)
                parts = [words[start : start + half] for start in random.sample(range(len(words) - most_words), 2)]
                row = {"prompt": " ".join([*parts[0], *parts[1], str(number)]), "answer": str(number)}
                line = json.dumps(row)
                if recent and number % 10 == 0:
                    line = random.choice(recent)
                    line = line if number % 20 else line.replace(random.choice(line.split()[1:-4]), "covey", 1)
                else:
                    recent = [*recent[-999:], line]
                file.write(line + "\n")
        start, began = time.process_time(), time.perf_counter()
        findings = inspect(Rows(str(path)), Settings()).findings
        used, took = time.process_time() - start, time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    found = {kind: findings.count(kind) for kind in ("duplicate", "near_duplicate")}
    speeds = {"rows_per_cpu_second": num_rows / used, "rows_per_second": num_rows / took}
    return {"rows": num_rows, **speeds, "memory_before_mb": before, "most_memory_mb": most, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--rows", type=int, default=0, help="measure speed on so many made-up rows instead")
    parser.add_argument("--words", type=int, default=80, help="the longest of these rows; the shortest have a quarter")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train, test = (
        [json.loads(line) for line in Path(name).read_text().splitlines()] for name in (options.train, options.test)
    )
    if options.rows:
        print(json.dumps(speed(train, options.train, options.rows, options.words)))
        return
    found = measured(train, test, seed=options.seed)
    for name, recall in found["recall"].items():
        print(f"{name:<34}{100 * recall:5.0f}%")
    print(f"rows that were not planted and must be mended: {len(found['accused'])} of {len(train)}")
    for row, kinds in found["accused"].items():
        print(f"  row {row}: {', '.join(kinds)}: {train[row]['question'][:90]}")


if __name__ == "__main__":
    main()
