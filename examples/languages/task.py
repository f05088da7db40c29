"""Word problems in English, German and Chinese: one calculation, three texts, and worked answers of a teacher who misreads many."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

LANGUAGES = ("en", "de", "zh")
SIGNS = "+-*+-*"
TEXTS = {
    "en": (
        "{n} has {a} {t} and gets {b} more. How many {t} is that?",
        "{n} had {a} {t} and lost {b}. How many {t} are left?",
        "{n} buys {a} boxes of {b} {t} each. How many {t} is that?",
        "{n} has {a} {t}, {m} has {b} more. How many {t} has {m}?",
        "{n} has {a} {t}, {m} has {b} fewer. How many {t} has {m}?",
        "{n} has {a} {t}, {m} has {b} times as many. How many {t} has {m}?",
    ),
    "de": (
        "{n} hat {a} {t} und bekommt {b} dazu. Wie viele {t} sind das?",
        "{n} hatte {a} {t} und verlor {b}. Wie viele {t} sind noch da?",
        "{n} kauft {a} Kisten mit je {b} {t}. Wie viele {t} sind das?",
        "{n} hat {a} {t}, {m} hat {b} mehr. Wie viele {t} hat {m}?",
        "{n} hat {a} {t}, {m} hat {b} weniger. Wie viele {t} hat {m}?",
        "{n} hat {a} {t}, {m} hat {b} mal so viele. Wie viele {t} hat {m}?",
    ),
    "zh": (
        "{n}有{a}个{t}，又得到{b}个。一共有多少个{t}？",
        "{n}有{a}个{t}，丢了{b}个。还剩多少个{t}？",
        "{n}买了{a}箱{t}，每箱{b}个。一共有多少个{t}？",
        "{n}有{a}个{t}，{m}比{n}多{b}个。{m}有多少个{t}？",
        "{n}有{a}个{t}，{m}比{n}少{b}个。{m}有多少个{t}？",
        "{n}有{a}个{t}，{m}的是{n}的{b}倍。{m}有多少个{t}？",
    ),
}
"""The question of each sign in `SIGNS`, by language."""
THINGS = {"en": ("apples", "books", "cups"), "de": ("Äpfel", "Bücher", "Tassen"), "zh": ("苹果", "本子", "杯子")}
NAMES = ("Anna", "Ben", "Mia", "Tom")
MISREAD = {"+": "-", "-": "*", "*": "+"}
"""In a circle, so that even a teacher who is wrong half of the time teaches which kind of question it is."""
SHARE = {"en": 0.4, "de": 0.7, "zh": 0.6}
"""Share of questions that the teacher misreads; rewards can mend it, since the model draws the right sign now and then."""


@dataclass(frozen=True)
class Problem:
    kind: int
    a: int
    b: int
    names: tuple[str, str]
    thing: int

    @property
    def is_held_out(self) -> bool:
        """Decided by the calculation alone: no held-out one is trained on under other names or in another language."""
        return zlib.crc32(f"{self.kind}:{self.a}:{self.b}".encode()) % 5 == 0

    @property
    def answer(self) -> str:
        return self.worked(SIGNS[self.kind]).partition("=")[2]

    def worked(self, sign: str) -> str:
        """A worked answer, such as `7-2=5`."""
        return f"{self.a}{sign}{self.b}={ {'+': self.a + self.b, '-': self.a - self.b, '*': self.a * self.b}[sign] }"

    def asked(self, language: str) -> list[dict[str, str]]:
        n, m = self.names
        text = TEXTS[language][self.kind].format(a=self.a, b=self.b, n=n, m=m, t=THINGS[language][self.thing])
        return [{"role": "user", "content": text}]


def draw(rng: random.Random) -> Problem:
    kind = rng.randrange(len(SIGNS))
    numbers = [rng.randint(2, 6 if SIGNS[kind] == "*" else 9) for _ in range(2)]
    first, second = rng.sample(NAMES, 2)
    return Problem(kind, max(numbers), min(numbers), (first, second), rng.randrange(3))


def drawn(split: str, count: int) -> list[Problem]:
    rng = random.Random(split)
    found: list[Problem] = []
    while len(found) < count:
        one = draw(rng)
        if one.is_held_out == (split == "test"):
            found.append(one)
    return found


def rows(split: str, count: int, languages: tuple[str, ...] = LANGUAGES) -> list[dict[str, Any]]:
    """`count` problems, each in one of the languages in turn: columns `prompt`, `answer`, `language`."""
    found = []
    for i, one in enumerate(drawn(split, count)):
        language = languages[i % len(languages)]
        found.append({"prompt": one.asked(language), "answer": one.answer, "language": language})
    return found


def together(split: str, count: int) -> list[dict[str, Any]]:
    """`count` problems, each in every language, for `group_languages`: `prompt` (English), `prompt_de`, `prompt_zh`, `answer`."""
    return [
        {"prompt": one.asked("en"), "prompt_de": one.asked("de"), "prompt_zh": one.asked("zh"), "answer": one.answer}
        for one in drawn(split, count)
    ]


def taught(rng: random.Random) -> dict[str, Any]:
    """A question that is not held out, with the teacher's answer: `prompt` and `completion`."""
    one = draw(rng)
    while one.is_held_out:
        one = draw(rng)
    language = rng.choice(LANGUAGES)
    sign = SIGNS[one.kind]
    return {
        "prompt": one.asked(language),
        "completion": one.worked(MISREAD[sign] if rng.random() < SHARE[language] else sign),
    }
