"""ROUGE, BLEU, diversity within a group and language; expected values by hand and from published examples."""

from __future__ import annotations

import math
import random
import sys
import time
from importlib.util import find_spec

import pytest

from covey.errors import ConfigError
from covey.rewards import Scorer, resolve
from covey.rewards.builtin.bleu import measure_of
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
    # 4 of 5 words, 2 of 4 pairs; as long as the reference
    found = call("bleu(max_n=2)", "the cat sat on mat", reference="the cat sat by mat")
    assert found == pytest.approx([math.sqrt(4 / 5 * 2 / 4)])
    # a prefix: all precisions 1, penalty exp(1 - 4/2)
    assert call("bleu(max_n=2)", "a b", reference="a b c d") == pytest.approx([math.exp(-1)])


def test_bleu_clips_a_word_that_is_said_too_often():
    # Papineni 2002: "the" seven times, at most 2 in the reference
    found = call("bleu(max_n=1)", "the " * 7, reference="the cat is on the mat")
    assert found == pytest.approx([2 / 7])


def test_bleu_holds_length_in_check_and_abstains_without_a_reference():
    long = "a b c d " + "x " * 12  # 16 words; 4 of them right, and twice the free 8 words
    assert call("bleu(max_n=1)", long, reference="a b c d") == [pytest.approx(4 / 16)]
    assert call("bleu(max_n=1, max_ratio=2)", long, "a b c d", reference="a b c d") == pytest.approx([1 / 8, 1.0])
    assert call("bleu", "a b", "a b", reference=[None, ["", None]]) == [None, None]


WORDS = [
    "the",
    "The",
    "cat",
    "sat's",
    "on,",
    "mat.",
    "3.5",
    "it's",
    "(yes)",
    "“no”",
    "1,000",
    "end-of",
    "&amp;",
    "—",
    "Über",
]
CHINESE = ["我", "有", "3", "个", "苹果", "。", "今天", "天气", "很好", "，", "我们", "去", "公园", "Apple"]


def test_bleu_is_sacrebleus_number():
    from sacrebleu import sentence_bleu

    draw = random.Random(0)
    for words, joined, tokenize in ((WORDS, " ", "13a"), (CHINESE, "", "zh")):
        drawn = [joined.join(draw.choices(words, k=draw.randint(8, 20))) for _ in range(300)]
        said, wanted = drawn[:100], list(zip(drawn[100:200], drawn[200:], strict=True))
        theirs = [sentence_bleu(t, r, tokenize=tokenize).score / 100 for t, r in zip(said, wanted, strict=True)]
        assert call("bleu", *said, reference=wanted) == pytest.approx(theirs, abs=1e-12)
        options = {"tokenize": "intl", "lowercase": True, "smooth_method": "add-k"}
        theirs = [sentence_bleu(t, r, **options).score / 100 for t, r in zip(said, wanted, strict=True)]
        mine = call("bleu(tokenize='intl', lowercase=True, smooth_method='add-k')", *said, reference=wanted)
        assert mine == pytest.approx(theirs, abs=1e-12)


def test_japanese_and_korean_are_cut_into_words_by_mecab_or_refused_with_what_to_install():
    """Where MeCab is installed (`make extras`), the scores are sacrebleu's; elsewhere one sentence names the package."""
    for tokenize, text, reference in (
        ("ja-mecab", "今日は公園に行きました。", "昨日は公園に行きました。"),
        ("ko-mecab", "나는 오늘 공원에 갔다.", "나는 어제 공원에 갔다."),
    ):
        if find_spec("MeCab" if tokenize == "ja-mecab" else "mecab_ko"):
            from sacrebleu import sentence_bleu

            theirs = sentence_bleu(text, [reference], tokenize=tokenize).score / 100
            assert call("bleu", text, reference=reference) == [pytest.approx(theirs)]
            assert 0 < theirs < 1
            continue
        with pytest.raises(ConfigError, match=rf"needs MeCab: pip install 'sacrebleu\[{tokenize[:2]}\]'"):
            resolve(f"bleu(tokenize='{tokenize}')")
        with pytest.raises(ConfigError, match="needs MeCab"):
            call("bleu", text, reference=reference)


@pytest.mark.parametrize("name", ["bleu", "self_bleu"])
def test_bleu_without_sacrebleu_says_what_to_install(name, monkeypatch):
    measure_of.cache_clear()
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ConfigError, match=r"need sacrebleu: pip install 'covey\[rewards\]'"):
        resolve(name)


def test_a_tokenizer_that_sacrebleu_lacks_is_told():
    with pytest.raises(ConfigError, match="'ja-mecap'.* is not known. Did you mean ja-mecab?"):
        resolve("bleu(tokenize='ja-mecap')")
    with pytest.raises(ConfigError, match="smooth_method='ex'"):
        resolve("bleu(smooth_method='ex')")


def test_texts_are_not_kept_after_they_are_scored():
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

    call("bleu", "a b c", "d e f", reference="a b c")
    call("self_bleu", "a b c", "d e f")
    assert Tokenizer13a.__call__.cache_info().currsize == TokenizerRegexp.__call__.cache_info().currsize == 0


OF_ROUGE_SCORE = [
    ("the cat sat on the mat", "the cat is on the mat", 0.833333, 0.6, 0.833333),
    ("a quick brown fox jumps", "The quick brown fox jumped over the lazy dog", 0.428571, 0.333333, 0.428571),
    ("a b", "a b c d e f", 0.5, 0.333333, 0.5),
    ("我有3个苹果", "我有三个苹果", 0.833333, 0.6, 0.833333),
    ("今天天气很好我们去公园", "今天天气不错我们去公园玩", 0.782609, 0.666667, 0.782609),
    ("机器学习", "深度学习是机器学习的一个分支", 0.444444, 0.375, 0.444444),
    ("It's 3.5, no?", "It is 3.5, yes!", 0.6, 0.25, 0.6),
]


@pytest.mark.parametrize("text, reference, expected", [(said, gold, rest) for said, gold, *rest in OF_ROUGE_SCORE])
def test_rouge_is_that_of_rouge_score(text, reference, expected):
    """F-measures of `RougeScorer` of rouge-score 0.1.2, with its own tokenizer, or sacrebleu's for Chinese."""
    found = [call(name, text, reference=reference)[0] for name in ("rouge(kind='1')", "rouge(kind='2')", "rouge")]
    assert found == pytest.approx(expected, abs=1e-6)


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


@pytest.mark.nightly
def test_long_texts_are_compared_within_a_second_each():
    started = time.process_time()
    call("rouge", "word " * 100_000, reference="other word " * 10_000)
    call("bleu", "word " * 100_000, reference="other word " * 10_000)
    assert time.process_time() - started < 4


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
