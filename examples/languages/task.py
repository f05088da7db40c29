"""The demo's word problems in English, German and Chinese: the same calculation, the same names, three texts."""

from __future__ import annotations

import random
import re
from typing import Any

from covey.demo.task import NAMES, THINGS, Problem, draw

LANGUAGES = ("en", "de", "zh")
GERMAN = (
    "{n} hat {a} {t}. {m} gibt {n} noch {b}. Wie viele {t} hat {n} jetzt?",
    "{n} hat {a} {t} und {m} hat {b} {t}. Wie viele {t} haben sie zusammen?",
    "{n} hat {a} {t}. {m} hat {b} mehr als {n}. Wie viele {t} hat {m}?",
    "{n} hatte {a} {t} und verlor {b} davon. Wie viele {t} sind noch da?",
    "Auf dem Tisch liegen {a} {t}. {n} nimmt {b} weg. Wie viele {t} bleiben?",
    "{n} hat {a} {t}. {m} hat {b} weniger als {n}. Wie viele {t} hat {m}?",
    "{n} kauft {a} Kisten mit je {b} {t}. Wie viele {t} sind das?",
    "{n} packt {a} Beutel. In jedem sind {b} {t}. Wie viele {t} sind in den Beuteln?",
    "{n} hat {a} {t}, findet noch {b} und gibt {m} dann {c}. Wie viele {t} behält {n}?",
    "{n} hatte {a} {t}, verkaufte {b} und kaufte dann {c}. Wie viele {t} hat {n}?",
    "{n} hat {a} Pakete mit {b} {t} und {c} einzelne {t}. Wie viele {t} hat {n}?",
    "{n} hat {a} Reihen mit {b} {t} und gibt {m} {c} {t}. Wie viele {t} sind noch da?",
)
CHINESE = (
    "{n}有{a}个{t}，{m}又给了{n}{b}个。{n}现在有多少个{t}？",
    "{n}有{a}个{t}，{m}有{b}个{t}。他们一共有多少个{t}？",
    "{n}有{a}个{t}，{m}比{n}多{b}个。{m}有多少个{t}？",
    "{n}有{a}个{t}，丢了{b}个。还剩多少个{t}？",
    "桌上有{a}个{t}，{n}拿走{b}个。还剩多少个{t}？",
    "{n}有{a}个{t}，{m}比{n}少{b}个。{m}有多少个{t}？",
    "{n}买了{a}箱{t}，每箱{b}个。一共多少个{t}？",
    "{n}装了{a}袋，每袋{b}个{t}。袋里有多少个{t}？",
    "{n}有{a}个{t}，又找到{b}个，然后给{m}{c}个。{n}还有多少个{t}？",
    "{n}有{a}个{t}，卖了{b}个，又买了{c}个。{n}有多少个{t}？",
    "{n}有{a}包{t}，每包{b}个，还有{c}个散的。{n}有多少个{t}？",
    "{n}有{a}排{t}，每排{b}个，给{m}{c}个。还剩多少个{t}？",
)
THINGS_IN = {
    "de": [
        "Äpfel",
        "Perlen",
        "Bücher",
        "Karten",
        "Münzen",
        "Tassen",
        "Eier",
        "Schlüssel",
        "Stifte",
        "Pflaumen",
        "Muscheln",
        "Marken",
    ],
    "zh": ["苹果", "珠子", "本子", "卡片", "硬币", "杯子", "鸡蛋", "钥匙", "钢笔", "李子", "贝壳", "邮票"],
}


def in_language(problem: Problem, language: str) -> str:
    """The question of a problem in another language."""
    if language == "en":
        return problem.question
    words = re.findall(r"[A-Za-z]+", problem.question)
    people = [*dict.fromkeys(word for word in words if word in NAMES), "", ""]
    thing = THINGS.index(next(word for word in words if word in THINGS))
    numbers = dict(zip("abc", problem.numbers, strict=False))
    text = {"de": GERMAN, "zh": CHINESE}[language][problem.template]
    return text.format(n=people[0], m=people[1], t=THINGS_IN[language][thing], **numbers)


def drawn(split: str, count: int, seed: int = 0) -> list[Problem]:
    """Problems of a split: no held-out calculation is trained on, in any language."""
    rng = random.Random(f"{split}/{seed}")
    found: list[Problem] = []
    while len(found) < count:
        one = draw(rng)
        if one.split == split:
            found.append(one)
    return found


def rows(split: str, count: int, languages: tuple[str, ...] = LANGUAGES, seed: int = 0) -> list[dict[str, Any]]:
    """`count` problems a language, each of its own: `prompt`, `answer`, `language`."""
    problems = drawn(split, count * len(languages), seed)
    return [row(one, languages[i % len(languages)]) for i, one in enumerate(problems)]


def row(problem: Problem, language: str) -> dict[str, Any]:
    return {"prompt": asked(problem, language), "answer": str(problem.answer), "language": language}


def together(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` problems, each in every language, for `group_languages`: `prompt` (English), `prompt_de`, `prompt_zh`, `answer`."""
    return [
        {
            "prompt": asked(one, "en"),
            "prompt_de": asked(one, "de"),
            "prompt_zh": asked(one, "zh"),
            "answer": str(one.answer),
        }
        for one in drawn(split, count, seed)
    ]


def asked(problem: Problem, language: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": in_language(problem, language)}]
