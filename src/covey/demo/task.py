"""Arithmetic word problems, generated from a seed, and the reward that knows their answers."""

import functools
import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]
HELD_OUT = 300
"""Problems of the evaluation before and after."""

NAMES = (
    "Ada", "Anna", "Ben", "Eva", "Ian", "Kim", "Leo", "Lily", "Max", "Mia", "Noah", "Omar", "Ruth", "Sam",
    "Tom", "Zoe",
)  # fmt: skip
THINGS = ("apples", "beads", "books", "cards", "coins", "cups", "eggs", "keys", "pens", "plums", "shells", "stamps")
TEMPLATES = (
    ("+", "{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?"),
    ("+", "{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?"),
    ("+", "{n} has {a} {t}. {m} has {b} more than {n}. How many {t} does {m} have?"),
    ("-", "{n} had {a} {t} and lost {b} of them. How many {t} are left?"),
    ("-", "There are {a} {t} on the table. {n} takes {b} away. How many {t} stay?"),
    ("-", "{n} has {a} {t}. {m} has {b} fewer than {n}. How many {t} does {m} have?"),
    ("*", "{n} buys {a} boxes with {b} {t} in each box. How many {t} is that?"),
    ("*", "{n} fills {a} bags. Every bag holds {b} {t}. How many {t} are in the bags?"),
    ("+-", "{n} has {a} {t}, finds {b} more and then gives {c} to {m}. How many {t} does {n} keep?"),
    ("-+", "{n} had {a} {t}, sold {b} and then bought {c}. How many {t} does {n} have?"),
    ("*+", "{n} has {a} packs of {b} {t} and {c} single {t}. How many {t} does {n} have?"),
    ("*-", "{n} has {a} rows of {b} {t} and gives {c} {t} to {m}. How many {t} are left?"),
)
"""The operations that solve it, and the text. `a` and `b` meet first, then `c`."""

_ANSWER = re.compile(r"####\s*(-?\d+)\s*$")


@dataclass(frozen=True)
class Problem:
    """`Problem(template=0, numbers=(3, 4), question="Tom has 3 ...", answer=7)`."""

    template: int
    numbers: tuple[int, ...]
    question: str
    answer: int

    @property
    def operations(self) -> str:
        return TEMPLATES[self.template][0]

    @property
    def split(self) -> Split:
        """Decided by template and numbers alone, so that no held-out calculation is ever trained on under other names."""
        key = f"{self.template}:{self.numbers}".encode()
        return "test" if int(hashlib.sha256(key).hexdigest(), 16) % 5 == 0 else "train"


@functools.cache
def problems(split: Split, count: int, seed: int = 0) -> tuple[Problem, ...]:
    """`count` problems of a split, each another calculation or other names; the same seed gives the same ones."""
    rng = random.Random(f"{split}/{seed}")
    drawn: list[Problem] = []
    while len(drawn) < count:
        problem = draw(rng)
        if problem.split == split:
            drawn.append(problem)
    return tuple(drawn)


def rows(split: Split = "train", count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a data set: `prompt` as chat messages, `answer` as text. 4096 to train on, 300 held out, by default."""
    default = HELD_OUT if split == "test" else 4096
    return [
        {"prompt": [{"role": "user", "content": problem.question}], "answer": str(problem.answer)}
        for problem in problems(split, default if count is None else count, seed)
    ]


def reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where the completion ends with `#### ` and the right number, else 0.0."""
    return [
        float(final_answer(text_of(completion)) == right) for completion, right in zip(completions, answer, strict=True)
    ]


def final_answer(text: str) -> str | None:
    """The number after `####` at the very end; None when there is none."""
    match = _ANSWER.search(text.strip())
    return None if match is None else str(int(match[1]))


def text_of(completion: Any) -> str:
    """A completion's text, from text or from chat messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def calculate(operation: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def draw(rng: random.Random) -> Problem:
    """One problem whose every number on the way lies between 1 and 99."""
    while True:
        template = rng.randrange(len(TEMPLATES))
        operations, text = TEMPLATES[template]
        is_product = operations[0] == "*"
        numbers = [rng.randint(2, 9), rng.randint(2, 9)] if is_product else [rng.randint(5, 60), rng.randint(2, 30)]
        numbers += [rng.randint(2, 30)] * (len(operations) - 1)
        steps = [calculate(operations[0], numbers[0], numbers[1])]
        if len(operations) == 2:
            steps.append(calculate(operations[1], steps[0], numbers[2]))
        if not all(1 <= step <= 99 for step in steps):
            continue
        n, m = rng.sample(NAMES, 2)
        letters = dict(zip("abc", numbers, strict=False))
        question = text.format(n=n, m=m, t=rng.choice(THINGS), **letters)
        return Problem(template, tuple(numbers), question, steps[-1])


def worked(problem: Problem, operations: str | None = None) -> str:
    """A worked answer, such as `3 + 4 = 7 ; 7 - 2 = 5 #### 5`; with other `operations`, the answer of a misreading."""
    value, lines = problem.numbers[0], []
    for operation, number in zip(operations or problem.operations, problem.numbers[1:], strict=False):
        result = calculate(operation, value, number)
        lines.append(f"{value} {operation} {number} = {result}")
        value = result
    return f"{' ; '.join(lines)} #### {value}"
