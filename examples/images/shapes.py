"""The task: how many squares of one colour does a picture hold? Pictures are drawn by Pillow, 40 x 40 pixels, 0 to 5 squares.

`python shapes.py FOLDER` writes `train.jsonl` and `test.jsonl`, with their pictures in `pictures/`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (230, 40, 40), "blue": (50, 80, 240)}
CELLS, CELL = 5, 8
"""A square lies inside one of 5 x 5 cells of 8 pixels."""


def draw(squares: list[tuple[int, str]]) -> Image.Image:
    """A picture with a square of the given colour in each of the cells."""
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (245, 245, 240))
    pen = ImageDraw.Draw(picture)
    for cell, colour in squares:
        x, y = cell % CELLS * CELL + 1, cell // CELLS * CELL + 1
        pen.rectangle([x, y, x + CELL - 3, y + CELL - 3], fill=COLOURS[colour])
    return picture


def question(rng: random.Random) -> dict[str, Any]:
    """One picture, a question about it, and its answer."""
    colour, other = rng.sample(list(COLOURS), 2)
    count, others = rng.randint(0, 5), rng.randint(0, 3)
    cells = rng.sample(range(CELLS * CELLS), count + others)
    colours = [colour] * count + [other] * others
    return {
        "prompt": [{"role": "user", "content": f"How many {colour} squares ?"}],
        "image": draw(list(zip(cells, colours, strict=True))),
        "answer": str(count),
    }


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [question(rng) for _ in range(count)]


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The reward: 1 for the right number and nothing else."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """`FOLDER/NAME.jsonl`, whose image column holds paths relative to it."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i, row in enumerate(rows):
        path = Path("pictures") / f"{name}-{i:04d}.png"
        row["image"].save(folder / path)
        lines.append(json.dumps({**row, "image": str(path)}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.jsonl"


def write_all(folder: Path, train: int = 2000, test: int = 400) -> None:
    write(folder, "train", questions(train, seed=1))
    write(folder, "test", questions(test, seed=2))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
