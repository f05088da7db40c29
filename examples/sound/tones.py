"""The task: which of four tones is it? Sounds of 0.4 seconds with noise, 8,000 samples a second, drawn by numpy.

`python tones.py FOLDER` writes `train.jsonl` and `test.jsonl`, with their sounds as WAV files in `sounds/`.
"""

from __future__ import annotations

import json
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np

TONES = {"A": 300.0, "B": 420.0, "C": 590.0, "D": 830.0}
"""Hertz; every tone is drawn within a tenth of its pitch."""
RATE, SECONDS = 8000, 0.4


def sound(hertz: float, rng: np.random.Generator) -> dict[str, Any]:
    """A tone with noise as loud as itself, as `datasets.Audio` gives it."""
    steps = np.arange(int(SECONDS * RATE)) / RATE
    pitch = hertz * rng.uniform(0.9, 1.1)
    samples = 0.2 * np.sin(2 * np.pi * (pitch * steps + rng.uniform())) + 0.14 * rng.standard_normal(len(steps))
    return {"array": samples.astype(np.float32), "sampling_rate": RATE}


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """So many sounds, a question about each, and its answer."""
    rng = np.random.default_rng(seed)
    names = rng.choice(list(TONES), count)
    return [
        {"prompt": [{"role": "user", "content": "Which tone ?"}], "audio": sound(TONES[name], rng), "answer": str(name)}
        for name in names
    ]


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The reward: 1 for the right letter and nothing else. `columns["audio"]` holds the samples."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """`FOLDER/NAME.jsonl`, whose audio column holds paths relative to it."""
    (folder / "sounds").mkdir(parents=True, exist_ok=True)
    lines = []
    for i, row in enumerate(rows):
        path = Path("sounds") / f"{name}-{i:04d}.wav"
        with wave.open(str(folder / path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((row["audio"]["array"].clip(-1, 1) * 32767).round().astype("<i2").tobytes())
        lines.append(json.dumps({**row, "audio": str(path)}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.jsonl"


if __name__ == "__main__":
    write(Path(sys.argv[1]), "train", questions(1000, seed=1))
    write(Path(sys.argv[1]), "test", questions(400, seed=2))
