"""Hashed words and word n-grams of texts, for the search for duplicates and overlap."""

import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import xxhash

from covey.data.rendering import with_text

# Scripts without spaces between words count by character; signs of a formula count, those of a sentence do not.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_QUOTES = "\u00ab\u00bb\u00b4\u2013\u2014\u2018-\u201f\u2026\u3001\u3002\uff01\uff0c\uff1f"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+|[^\w\s.,;:!?\"'`{_QUOTES}]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_ODD = numpy.uint64(0x9E3779B97F4A7C15)
_MOST_IDS = 200_000

Hashes = numpy.ndarray[Any, numpy.dtype[numpy.uint64]]


class Words:
    """Hashes of the words of texts, 64 bits each, with a bounded cache."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        """A number for each word and each sign of a formula; case, width and the signs of sentences do not count."""
        numbers = self._ids
        if len(numbers) > _MOST_IDS:
            numbers.clear()
        plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
        ids = []
        for word in _TOKEN.findall(plain.casefold()):
            number = numbers.get(word)
            if number is None:
                number = numbers[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
            ids.append(number)
        return ids


def text_of(prompt: Any) -> str:
    """The words of a prompt, which is text or chat messages, with JSON of an answer that is an object; empty where there is no text."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        return ""
    contents = [with_text(message).get("content") for message in prompt if isinstance(message, Mapping)]
    return "\n".join(content if isinstance(content, str) else _parts(content) for content in contents)


def _parts(content: Any) -> str:
    """The text of a message whose content is a list of parts."""
    if not isinstance(content, Sequence):
        return ""
    return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def same_text(text: str) -> int:
    """A number that two texts share when they differ in white space and Unicode form alone."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return xxhash.xxh3_64_intdigest(" ".join(plain.split()).encode("utf-8", "surrogatepass"))


def numbers_in(text: str) -> int:
    """Hash of the sequence of numbers in a text: equal for texts with the same numbers in the same order."""
    return xxhash.xxh3_64_intdigest(" ".join(number_list(text)).encode())


def number_list(text: str) -> list[str]:
    """The numbers of a text, in their order, without commas."""
    return [number.replace(",", "") for number in _NUMBER.findall(text)]


def grams(rows: Sequence[Sequence[int]], size: int) -> tuple[Hashes, numpy.ndarray]:
    """Every run of `size` words of every row, as [M] numbers, and the [R + 1] places where each row's begin.

    A row with fewer words has one run, of all its words; a row without words has none.
    """
    padded = [list(row) + [0] * (size - len(row)) if 0 < len(row) < size else row for row in rows]
    lengths = numpy.array([len(row) for row in padded], dtype=numpy.int64)
    flat = numpy.fromiter(itertools.chain.from_iterable(padded), numpy.uint64, int(lengths.sum()))
    counts = numpy.maximum(lengths - size + 1, 0)
    begins = numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]]).astype(numpy.int64)
    places = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64)
    starts = numpy.repeat(begins - places[:-1], counts) + numpy.arange(places[-1])
    hashes = numpy.zeros(len(starts), dtype=numpy.uint64)
    for step in range(size):
        hashes = mixed(hashes * _ODD + flat[starts + step])
    return hashes, places


def common_runs(runs: Hashes, places: numpy.ndarray, unique_runs: Hashes) -> numpy.ndarray:
    """Number of rows that hold each of `unique_runs` (sorted, each once)."""
    owners = numpy.repeat(numpy.arange(len(places) - 1, dtype=numpy.uint64), numpy.diff(places))
    once = numpy.unique(numpy.stack([runs, owners], axis=1), axis=0)[:, 0]
    counts = numpy.searchsorted(once, unique_runs, side="right") - numpy.searchsorted(once, unique_runs, side="left")
    return counts


def mixed(numbers: Hashes) -> Hashes:
    """The numbers with all their bits stirred (the end of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> numpy.uint64(33))) * numpy.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> numpy.uint64(33))) * numpy.uint64(0xC4CEB9FE1A85EC53)
    stirred: Hashes = numbers ^ (numbers >> numpy.uint64(33))
    return stirred
