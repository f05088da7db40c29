"""Garbled text is mended once and for all, personal data is pointed at, languages are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data.features.language import language
from covey.doctor.data_check import languages
from covey.doctor.data_check.encoding import repaired, repaired_row
from covey.doctor.data_check.row_checks import personal
from example_counts import examples

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    "text, mended, faults",
    [
        ("plain text,\n\twith lines\r\n", "plain text,\n\twith lines\r\n", ()),
        ("naïve “quotes” and 数学 🙂", "naïve “quotes” and 数学 🙂", ()),
        ("cafÃ© and Ã¼ber", "café and über", ("mojibake",)),
        ("a\x00b\x07c", "abc", ("controls",)),
        ("\x1b[31mred\x1b[0m", "red", ("controls",)),
        ("\ufeffstart", "start", ("controls",)),
        ("\ud83d\ude42", "🙂", ("surrogates",)),
        ("half \ud83d.", "half \ufffd.", ("surrogates",)),
        ("Cafe\u0301", "Café", ("form",)),
        ("e\x00\u0301", "é", ("controls", "form")),
    ],
)  # fmt: skip
def test_a_fault_of_the_text_is_named_and_mended(text, mended, faults):
    assert repaired(text) == (mended, faults)


@examples(50)
@given(st.text(st.characters(codec=None)))
def test_mending_twice_is_mending_once(text):
    once, _ = repaired(text)
    assert repaired(once) == (once, ())


def test_every_text_of_a_row_is_mended_through_lists_and_objects():
    row = {"prompt": [{"role": "user", "content": "cafÃ©"}], "tests": ["a\x00"], "n": 3, "none": None}
    mended, faults = repaired_row(row)
    assert mended == {"prompt": [{"role": "user", "content": "café"}], "tests": ["a"], "n": 3, "none": None}
    assert list(faults) == ["mojibake", "controls"]


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("mail ada.lovelace@example.co.uk now", ("email",)),
        ("call (555) 010-9999 or 555-010-9999", ("phone",)),
        ("call +49 30 901820 today", ("phone",)),
        ("key AKIAABCDEFGHIJKLMNOP", ("key",)),
        ("-----BEGIN RSA PRIVATE KEY-----", ("key",)),
        ("card 4111 1111 1111 1111", ("card",)),
        ("to DE89 3704 0044 0532 0130 00 please", ("iban",)),
        ("card 4111 1111 1111 1112", ()),
        ("from 2024-01-02 to 2024-02-03: 1,250,000 + 3.14159 = x, 12/13", ()),
        ("@decorator and a @ b; version 1.2.3-4", ()),
        ("0000 0000 0000 0000", ()),
    ],
)
def test_personal_data_is_pointed_at(text, kinds):
    assert personal(text) == kinds


@pytest.mark.parametrize(
    "text, code",
    [
        ("How many of the apples are left if she eats two in the morning?", "en"),
        ("Combien de pommes est-ce que Marie a dans son sac si elle en mange deux?", "fr"),
        ("¿Cuántos libros tiene María si compra dos en la tienda y vende uno por la tarde?", "es"),
        ("Сколько яблок осталось сейчас?", "ru"),
        ("小明有三个苹果", "zh"),
        ("りんごを三つ食べました", "ja"),
        ("12 + 7 =", None),
        ("def f(x): return x", None),
    ],
)
def test_the_language_is_told_by_script_and_small_words(text, code):
    assert language(text) == code


@pytest.mark.parametrize(
    "text, code, without",
    [
        ("Anna ma trzy jabłka i kupuje jeszcze dwa na targu. Ile jabłek ma teraz Anna?", "pl", None),
        ("Lan có ba quả táo và mua thêm hai quả ở chợ. Bây giờ Lan có bao nhiêu quả táo?", "vi", None),
        ("Марія має три яблука і купує ще два на ринку. Скільки яблук вона має тепер?", "uk", "ru"),
        ("How many of the apples are left if she eats two in the morning?", "en", "en"),
        ("Solve for x: 3x + 4 = 10", None, None),
        (r"\frac{1}{2} + \sqrt{3} = ? Evaluate \int_0^1 x^2 dx", None, None),
        ("def foo(bar): return bar + 1  # implement quicksort", None, None),
    ],
)
def test_languages_that_small_words_do_not_tell_are_told_where_py3langid_is(text, code, without, monkeypatch):
    pytest.importorskip("py3langid")
    assert languages.language_of(text) == code
    monkeypatch.setattr(languages, "knows_many", lambda: False)
    assert languages.language_of(text) == without


def test_published_sets_are_not_accused():
    lines = [
        line for name in ("gsm8k/train.jsonl", "mbpp/mbpp.jsonl") for line in (DATA / name).read_text().splitlines()
    ]
    texts = [row.get("question") or row["text"] for row in map(json.loads, lines)]
    assert sum(bool(personal(text)) for text in texts) <= 2
    assert sum(language(text) not in ("en", None) for text in texts) <= 5
    assert sum(languages.language_of(text) not in ("en", None) for text in texts) <= 5
    assert sum(bool(set(repaired(text)[1]) & {"mojibake", "surrogates"}) for text in texts) <= 2
