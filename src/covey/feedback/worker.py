"""The process that trains candidates and scores the fixed set, so that neither can stop the endpoint."""

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.feedback.settings import Settings
from covey.feedback.store import Conversation
from covey.models import first_line

WEIGHTS = "adapter_model.safetensors"
"""File of an adapter's folder that holds its weights."""
_IN_FLIGHT = 128
"""Answers to the fixed set that are written at a time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A candidate to train, and the versions that it is compared with."""

    conversations: tuple[Conversation, ...]
    start: Path | None
    """Adapter of the served version; None: the model as it was given."""
    against: tuple[Path | None, ...]
    """Adapters of the versions to compare with; the served one first."""
    output: Path


@dataclass(frozen=True, kw_only=True)
class Made:
    """A candidate and the verdicts on it, in the order of `Order.against`."""

    verdicts: tuple[Any, ...]
    metrics: dict[str, float]
    seconds: float


class Bench:
    """The base model, and scores of versions on the fixed set."""

    def __init__(self, settings: Settings) -> None:
        from covey import data
        from covey.environments.messages import with_messages
        from covey.models import load_model, load_tokenizer
        from covey.process.device import choose_device
        from covey.rewards import Scorer

        self.settings = settings
        trust = settings.trust_remote_code
        device = choose_device("cpu" if settings.use_cpu else None)
        self.base = load_model(settings.model, {"dtype": settings.dtype}, trust_remote_code=trust).eval().to(device)
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
        tokenizer = load_tokenizer(self.base, settings.model, trust_remote_code=trust)
        self.tokenizer = data.prepare_tokenizer(tokenizer, self.base)
        self.eos_ids = tuple(data.eos_ids(self.base, self.tokenizer))
        self.scorer = Scorer.of(list(settings.rewards), settings.reward_weights, device=device)
        self.scorer.read = partial(with_messages, tokenizer=self.tokenizer)
        self.prompts = fixed_prompts(settings, self.tokenizer)
        self._scores: dict[str | None, tuple[float, ...]] = {}

    def scores(self, adapter: Path | None) -> tuple[float, ...]:
        """[P], mean rewards of `num_samples` drawn answers to each prompt of the fixed set, by the weights that would be served.

        Drawn, since a greedy answer does not show a loss until it changes; with the same seed for every version.
        """
        from covey.evaluation.assessment import scored_answers, totals
        from covey.evaluation.intervals import finite_mean
        from covey.rollout import SamplingParams, choose_sampler
        from covey.serving.loading import with_merged_adapter

        key = None if adapter is None else hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
        if key not in self._scores:
            model = self.base if adapter is None else with_merged_adapter(self.base, adapter)
            sampler = choose_sampler(model, self.tokenizer, eos_ids=self.eos_ids)
            params = SamplingParams(max_tokens=self.settings.max_tokens, seed=self.settings.seed)
            groups = scored_answers(sampler, self.scorer, self.prompts, self.settings.num_samples, params, _IN_FLIGHT)
            self._scores[key] = tuple(finite_mean(totals(group, self.scorer)) for group in groups)
        return self._scores[key]

    def make(self, order: Order) -> Made:
        """Train the candidate, write it, and compare it."""
        from covey.feedback.candidate import train_candidate
        from covey.feedback.gate import judged

        started = time.monotonic()
        shutil.rmtree(order.output, ignore_errors=True)
        order.output.mkdir(parents=True)
        metrics = train_candidate(
            self.base,
            self.tokenizer,
            self.eos_ids,
            self.scorer,
            order.start,
            order.conversations,
            self.settings,
            order.output,
        )
        candidate_scores = self.scores(order.output)
        verdicts = tuple(
            judged(self.scores(rival), candidate_scores, self.settings.tolerance) for rival in order.against
        )
        return Made(verdicts=verdicts, metrics=metrics, seconds=time.monotonic() - started)


def fixed_prompts(settings: Settings, tokenizer: Any) -> list[Any]:
    """The fixed set as prompts in token ids, every row once."""
    from datasets import Dataset

    from covey.data import PromptStream

    rows = Dataset.from_list([dict(row) for row in settings.fixed_rows])
    return PromptStream(rows, tokenizer, shuffle=False, keeps_shares=False).take(len(rows))


def work(connection: Connection) -> None:
    """Answer ("ready",) to the settings, then ("made", Made) or ("failed", kind, words, traceback) to each order."""
    bench = Bench(connection.recv())
    connection.send(("ready",))
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("made", bench.make(order)))
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001 - sent to the endpoint
            connection.send(_failure(error))


def _failure(error: BaseException) -> tuple[str, str, str, str]:
    message = str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {first_line(error)}"
    return "failed", type(error).__name__, message, "".join(traceback.format_exception(error))


def _end_with_parent() -> None:
    """End this process when the endpoint has ended, however that was."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Entry of the process: the number of the connection's descriptor is its only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the endpoint's to handle
    connection = Connection(int(sys.argv[1]))
    _end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(10)  # answers come first
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    try:
        work(connection)
    except Exception as error:  # noqa: BLE001 - sent to the endpoint
        with contextlib.suppress(OSError):
            connection.send(_failure(error))


if __name__ == "__main__":
    from covey.feedback import worker  # pickled names are those of the module, not of __main__

    worker.main()
