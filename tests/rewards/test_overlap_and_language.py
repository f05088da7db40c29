"""ROUGE, BLEU, diversity within a group and language; expected values by hand and from published examples."""

from __future__ import annotations

import math
import time

import pytest

from covey.errors import ConfigError
from covey.rewards import Scorer, resolve
from covey.rewards.builtin.choice import common_length
from kit import group


def call(name, *completions, **columns):
    columns = {key: value if isinstance(value, list) else [value] * len(completions) for key, value in columns.items()}
    return resolve(name).call(completions=list(completions), **columns)


def test_rouge_l_is_lins_example():
    # Lin 2004, section 3: reference "police killed the gunman"; both have 4 words; common: 3, then 2
    found = call("rouge", "police kill the gunman", "the gunman kill police", reference="police killed the gunman")
    assert found == pytest.approx([3 / 4, 2 / 4])


def test_rouge_1_and_2_count_ngrams_as_multisets():
    # said: the the the cat, wanted: the cat sat. shared words: the, cat. shared pairs: the-cat
    assert call("rouge(kind='1')", "the the the cat", reference="the cat sat") == [pytest.approx(2 * 2 / (4 + 3))]
    assert call("rouge(kind='2')", "the the the cat", reference="the cat sat") == [pytest.approx(2 * 1 / (3 + 2))]


def test_rouge_takes_the_best_of_several_references_and_abstains_without_one():
    assert call("rouge", "a b", "a b", "a b", reference=[["x y", "a b"], None, "  "]) == [1.0, None, None]


def test_length_cannot_buy_recall_when_it_is_held_in_check():
    long = "a b c d " + "x " * 12  # 16 words, 4 of them right: 2 * 4 / 20 = 0.4; twice the free 8 words, so halved
    assert call("rouge", long, reference="a b c d") == [pytest.approx(0.4)]
    assert call("rouge(max_ratio=2)", long, "a b c d", reference="a b c d") == pytest.approx([0.2, 1.0])


def test_bleu_by_hand():
    # 4 of 5 words, (2 + 1) of (4 + 1) pairs; as long as the reference
    found = call("bleu(max_n=2)", "the cat sat on mat", reference="the cat sat by mat")
    assert found == pytest.approx([math.sqrt(4 / 5 * 3 / 5)])
    # a prefix: all precisions 1, penalty exp(1 - 4/2)
    assert call("bleu(max_n=2)", "a b", reference="a b c d") == pytest.approx([math.exp(-1)])


def test_bleu_clips_a_word_that_is_said_too_often():
    # Papineni 2002: "the" seven times, at most 2 in the reference
    found = call("bleu(max_n=1)", "the " * 7, reference="the cat is on the mat")
    assert found == pytest.approx([2 / 7])


OF_LIBRARIES = [
    ("the cat sat on the mat", "the cat is on the mat", 0.485492, 0.833333, 0.6, 0.833333),
    ("a quick brown fox jumps", "The quick brown fox jumped over the lazy dog", 0.222383, 0.428571, 0.333333, 0.428571),
    ("a b", "a b c d e f", 0.135335, 0.5, 0.333333, 0.5),
    ("我有3个苹果", "我有三个苹果", 0.485492, 0.833333, 0.6, 0.833333),
    ("今天天气很好我们去公园", "今天天气不错我们去公园玩", 0.576299, 0.782609, 0.666667, 0.782609),
    ("机器学习", "深度学习是机器学习的一个分支", 0.082085, 0.444444, 0.375, 0.444444),
    ("It's 3.5, no?", "It is 3.5, yes!", None, 0.6, 0.25, 0.6),  # sacrebleu counts marks as words: 0.278212
]


@pytest.mark.parametrize("text, reference, expected", [(said, gold, rest) for said, gold, *rest in OF_LIBRARIES])
def test_scores_are_those_of_sacrebleu_and_rouge_score(text, reference, expected):
    """`BLEU(smooth_method="add-k", lowercase=True).sentence_score` of sacrebleu 2.6.0, with its tokenizer 13a, or zh for Chinese.

    F-measures of `RougeScorer` of rouge-score 0.1.2, with its own tokenizer, or sacrebleu's for Chinese.
    """
    names = ("bleu", "rouge(kind='1')", "rouge(kind='2')", "rouge")
    found = [call(name, text, reference=reference)[0] for name in names]
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs is None or mine == pytest.approx(theirs, abs=1e-6)


def test_empty_texts_share_nothing_with_a_reference():
    for name in ("rouge", "rouge(kind='2')", "bleu"):
        assert call(name, "", "...", reference="some words") == [0.0, 0.0]


def test_the_common_subsequence_agrees_with_the_textbook_recursion():
    def slow(a, b):
        if not a or not b:
            return 0
        return 1 + slow(a[1:], b[1:]) if a[0] == b[0] else max(slow(a[1:], b), slow(a, b[1:]))

    for a, b in [("abcbdab", "bdcaba"), ("", "a"), ("aaaa", "aa"), ("abc", "cba"), ("xay", "a")]:
        assert common_length(a, b) == slow(a, b)


def test_long_texts_are_compared_within_a_second_each():
    started = time.perf_counter()
    call("rouge", "word " * 100_000, reference="other word " * 10_000)
    call("bleu", "word " * 100_000, reference="other word " * 10_000)
    assert time.perf_counter() - started < 4


# -- diversity ---------------------------------------------------------------------------------------------------------------


def test_distinct_credits_each_text_with_what_only_it_has():
    # pairs: a-b, b-c | a-b, b-d | a-b, b-c: the second alone has b-d
    assert call("distinct", "a b c", "a b d", "a b c") == [0.0, 0.5, 0.0]
    assert call("distinct(n=1)", "a a b", "c", "") == [pytest.approx(2 / 3), 1.0, 0.0]  # a counts once


def test_self_bleu_punishes_copies_most():
    found = call("self_bleu(max_n=2)", "a b c d", "a b c d", "x y z w")
    assert found[:2] == [-1.0, -1.0]
    assert found[2] == 0.0
    assert call("self_bleu", "", "") == [-1.0, -1.0]
    assert call("self_bleu", "alone") == [0.0]


def test_diversity_compares_only_completions_of_one_prompt():
    scored = Scorer.of("distinct(n=1)").score(
        [group(["same words", "other things"]), group(["same words", "same words"])]
    )
    assert [one.rewards[:, 0].tolist() for one in scored] == [[1.0, 1.0], [0.0, 0.0]]


# -- language ----------------------------------------------------------------------------------------------------------------

GERMAN = "Ich gehe heute mit meinem Hund in den Park und danach kaufe ich noch etwas Brot beim Bäcker."
ENGLISH = "Today I am going to the park with my dog and afterwards I will buy some bread at the bakery."
FRENCH = "Aujourd'hui je vais au parc avec mon chien et ensuite j'achète du pain à la boulangerie du coin."


def test_a_text_in_the_wanted_language_scores_one_and_in_another_nothing():
    pytest.importorskip("py3langid")
    assert call("language(language='de')", GERMAN, ENGLISH, FRENCH) == [1.0, 0.0, 0.0]
    assert call("language", GERMAN, ENGLISH, FRENCH, language=["de", "en", "fr"]) == [1.0, 1.0, 1.0]


def test_a_text_of_two_languages_scores_its_share():
    pytest.importorskip("py3langid")
    letters = [sum(map(str.isalpha, text)) for text in (GERMAN, ENGLISH)]
    found = call("language(language='de')", GERMAN + "\n" + ENGLISH)
    assert found == [pytest.approx(letters[0] / sum(letters))]


def test_letters_of_another_script_never_count():
    pytest.importorskip("py3langid")
    (found,) = call("language(language='en')", ENGLISH + " 因此答案是")
    assert found == pytest.approx(1 - 5 / (5 + sum(map(str.isalpha, ENGLISH))))


def test_languages_with_a_script_of_their_own_are_told_by_it():
    japanese, chinese = (
        "今日は犬と公園に行ってから、パン屋でパンを買いました。",
        "今天我和狗去公园,然后在面包店买了一些面包和牛奶给家人。",
    )
    pytest.importorskip("py3langid")
    assert call("language(language='ja')", japanese) == [1.0]
    assert call("language(language='zh')", chinese, japanese, ENGLISH) == [1.0, 0.0, 0.0]


def test_code_and_formulas_have_no_language():
    pytest.importorskip("py3langid")
    code = "\n```python\nfor word in sentence: print(word.upper() if word.islower() else word)\n```\n$\\alpha + \\beta$"
    assert call("language(language='de')", GERMAN + code) == [1.0]


def test_too_few_letters_say_nothing_and_an_empty_text_is_wrong():
    pytest.importorskip("py3langid")
    assert call("language(language='de')", "42", "", "  ") == [None, 0.0, 0.0]


def test_an_unknown_language_is_told_before_training():
    pytest.importorskip("py3langid")
    with pytest.raises(ConfigError, match="'german' is not known"):
        resolve("language(language='german')")
