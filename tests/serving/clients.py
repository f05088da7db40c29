"""A real `covey serve` process of the shipped model, and what clients need of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import torch

from forked import Forked

QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many apples does Tom have?",
    "Ada has 54 shells and Mia has 22 shells. How many shells do they have together?",
    "Eva buys 6 boxes with 7 pens in each box. How many pens is that?",
    "There are 30 eggs on the table. Leo takes 11 away. How many eggs stay?",
)


SERVE = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"


@contextlib.contextmanager
def server(*options: str, **environment: str) -> Iterator[tuple[Forked, str]]:
    """A server process of the shipped model, and its base URL. It is stopped at the end, whatever has happened."""
    reads, writes = os.pipe()
    words = ["-c", SERVE, "serve", "demo", "--port", "0", *options]
    with open(reads) as said, Forked(*words, env=environment, stdout=writes) as process:
        os.close(writes)
        line = said.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"the server did not start: {line} {process.wait(60) and process.err}"
        yield process, found.group()


@contextlib.contextmanager
def client(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as made:
        yield made


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def foreign_environment(name: str, *packages: str) -> Path:
    """Python of an environment of its own with these packages, made at the first use. Skips the test where it cannot be made.

    COVEY_TEST_ENVS names the folder of such environments.
    """
    import pytest

    folder = Path(os.environ.get("COVEY_TEST_ENVS", Path.home() / ".cache" / "covey-test-envs")) / name
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no environment with {packages}: {error}")
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} could not be installed: {done.stderr[-300:]}")
    return python


class Words:
    """A sampler's tokenizer whose model writes these words, one after the other, token by token."""

    def __init__(self, sampler, *words):
        self.sampler, self.words = sampler, [sampler.tokenizer(word)["input_ids"] for word in words]
        self.decode = sampler.forward.decode

    def __enter__(self):
        pending = iter([token for word in self.words for token in word])

        def decode(ids, positions, batch):
            logits = torch.full_like(self.decode(ids, positions, batch), -50.0)
            logits[:, next(pending)] = 50.0
            return logits

        self.sampler.forward.decode = decode
        return self

    def __exit__(self, *_):
        self.sampler.forward.decode = self.decode
