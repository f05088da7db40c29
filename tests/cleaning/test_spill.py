"""What is remembered of rows lies on disk and comes back a part at a time; however small the parts, the findings are the same."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy
import pytest

from covey.doctor.data_check import Rows, Settings, inspect, spill
from covey.doctor.data_check.findings import Findings
from covey.doctor.data_check.spill import Spill, median, percentile
from covey.doctor.data_check.summary import summary
from covey.errors import StorageError

WORDS = (
    "a",
    "baker",
    "sells",
    "loaves",
    "of",
    "fresh",
    "bread",
    "for",
    "three",
    "dollars",
    "each",
    "and",
    "buys",
    "flour",
)


@pytest.fixture(params=[1, 3, 50])
def few_at_once(request, monkeypatch):
    monkeypatch.setattr(spill, "AT_ONCE", request.param)


def numbers(count, most, seed=0):
    return numpy.random.default_rng(seed).integers(0, most, count, dtype=numpy.uint64)


def test_records_come_back_as_they_were_added_one_by_one_or_many_at_a_time():
    kept = Spill([("row", "<i8"), ("amount", "<f8")])
    for row in range(5000):
        kept.add((row, row / 2))
    kept.extend(numpy.array([(5000, 2500.0)], kept.kind))
    assert len(kept) == 5001
    assert kept.read(4990, 6000).tolist() == [(row, row / 2) for row in range(4990, 5001)]
    assert kept.read(7, 7).tolist() == []


@pytest.mark.usefixtures("few_at_once")
def test_equal_hashes_come_together_and_every_place_once():
    kept, hashes = Spill("<u8"), numbers(40, 20) * numpy.uint64(2**64 // 20)
    kept.extend(hashes)
    parts = list(kept.by_hash())
    assert sorted(place for places, _ in parts for place in places.tolist()) == list(range(40))
    seen = Counter(number for _, part in parts for number in set(part.tolist()))
    assert set(seen.values()) == {1}
    assert all((hashes[places] == part).all() for places, part in parts)


@pytest.mark.usefixtures("few_at_once")
def test_findings_come_by_row_and_those_of_one_row_in_the_order_in_which_they_were_made():
    findings, rows = Findings(), numbers(60, 30).tolist()
    for amount, row in enumerate(rows):
        findings.add("contaminated", row, amount=amount)
    expected = sorted(((row, amount) for amount, row in enumerate(rows)), key=lambda one: one[0])
    assert [(row, amount) for row, _, amount in findings.of("contaminated")] == expected
    assert findings.rows("contaminated") == sorted(rows)
    assert findings.count("contaminated") == 60


def dataset(path):
    """400 rows of which many are the same, nearly the same, far too long, in another language, or without an answer."""
    random.seed(0)
    rows = []
    for number in range(400):
        text, answer = f"{number} " + " ".join(random.choices(WORDS, k=random.randint(25, 40))), str(number % 40)
        if number % 5 == 1:
            text, answer = rows[-1]["prompt"].replace("bread", "cake"), rows[-1]["answer"]
        elif number % 7 == 1:
            text, answer = random.choice(rows).values()
        elif number % 97 == 2:
            text = f"{number} " + "bread " * 400
        elif number % 89 == 3:
            text = f"Wie viele sind es, wenn die Frau {number} kauft und er nicht?"
        elif number % 50 == 4:
            answer = None
        elif number % 50 == 9:
            text = rows[-3]["prompt"]
        rows.append({"prompt": text, "answer": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_however_small_the_parts_an_inspection_finds_the_same(tmp_path, monkeypatch):
    dataset(tmp_path / "rows.jsonl")
    look = lambda: summary(inspect(Rows(str(tmp_path / "rows.jsonl")), Settings())).as_dict()
    whole = look()
    assert {"duplicate", "disputed", "near_duplicate", "length", "language", "no_answer"} <= {
        found["kind"] for found in whole["findings"]
    }
    monkeypatch.setattr(spill, "AT_ONCE", 60)
    assert look() == whole


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
def test_quantiles_of_counted_values_are_those_of_the_list(size):
    values = numbers(size, 12, seed=size).astype(float)
    counted = Counter(values.tolist())
    ascending = sorted(counted)
    counts = [counted[value] for value in ascending]
    assert median(numpy.array(ascending), numpy.array(counts)) == numpy.median(values)
    for percent in (0, 5, 33, 50, 95, 100):
        assert percentile(ascending, counts, percent) == pytest.approx(numpy.percentile(values, percent), abs=1e-12)


def test_a_disk_that_is_full_is_told_with_what_to_do(monkeypatch):
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

        def close(self):
            return

    monkeypatch.setattr(spill.tempfile, "TemporaryFile", lambda **options: Full())
    with pytest.raises(StorageError, match="No space left on device.*TMPDIR"):
        Spill("<u8").extend(numbers(3, 9))
