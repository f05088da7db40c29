"""Process reward models: a token classifier that judges every step of a completion, and one score of its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.errors import ConfigError, ModelError
from covey.files.bounded import read_text
from covey.rewards.builtin.inference_model import conversation_ids, load_frozen
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import reward

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "prod": math.prod, "mean": fmean}
"""Score of a completion from the probabilities of its steps."""
SEPARATOR = "\n"
_RIGHT = 1
"""Label of a right step; 0 is that of a wrong one."""


@reward(timeout=math.inf)
class ProcessReward:
    """Probability that the steps of a completion are right, by a token classifier with two labels (1: right).

    The text is cut into steps at `step_separator`, and each step is judged at the last token of the separator behind it, as
    TRL's PRMTrainer trains such a model. `aggregate`: `min`, the worst step (Wang et al. 2024, Math-Shepherd); `prod`, the
    probability that all are right (Lightman et al. 2023, section 2.6); `mean`. Both default to those in the model's
    config, then to a line break and `min`. A completion without a step scores 0; one longer than the model reads is not scored.

    Example: `--reward "process(model='runs/steps', aggregate='prod')"`.
    """

    __name__ = "process"

    def __init__(
        self,
        model: Any,
        *,
        aggregate: str | None = None,
        step_separator: str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.frozen = load_frozen("token classifier", model, tokenizer, **options)
        config = self.frozen.model.config
        if config.num_labels != 2:
            raise ModelError(
                f"{self.frozen.name!r} has {config.num_labels} labels; a process reward has two, 0 for a wrong step and 1 for a right one."
            )
        self.aggregate = str(aggregate or getattr(config, "step_aggregate", "min"))
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"process(aggregate={self.aggregate!r}): use {', '.join(AGGREGATES)}.")
        self.separator = str(step_separator or getattr(config, "step_separator", SEPARATOR))
        self._behind = self._ids_of(self.separator)
        if not self._behind:
            raise ConfigError(f"process(step_separator={self.separator!r}) has no token in this model's vocabulary.")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        steps = [self.steps_of(text_of(completion)) for completion in completions]
        scores = self.step_scores(prompts, steps)
        return [AGGREGATES[self.aggregate](row) if row else 0.0 for row in scores]

    def steps_of(self, text: str) -> list[str]:
        """The steps of a completion, without empty ones."""
        return [step for step in text.split(self.separator) if step.strip()]

    def step_scores(self, prompts: Sequence[Any], steps: Sequence[Sequence[str]]) -> list[list[float]]:
        """Probability that each step is right, given those before it. Raises TooLongError for texts longer than the model reads."""
        held = [i for i, row_steps in enumerate(steps) if row_steps]
        rows = [self.encode(prompts[i], steps[i]) for i in held]
        for ids, _ in rows:
            self.frozen.check_length(ids, "the completion")
        read = self.frozen.run([ids for ids, _ in rows], lambda output, ids, mask: output.logits.float().softmax(-1))
        scores: list[list[float]] = [[] for _ in steps]
        for i, (_, places), probabilities in zip(held, rows, read, strict=True):
            scores[i] = probabilities[places, _RIGHT].tolist()
        return scores

    def encode(self, prompt: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Token ids of prompt and steps, and the place of each step's last token. Prompt, steps and separators are encoded
        apart, so that the place of a step's end does not depend on the text around it."""
        ids = self._prompt(prompt)
        places = []
        for step in steps:
            ids += [*self._ids_of(step), *self._behind]
            places.append(len(ids) - 1)
        return ids, places

    def _prompt(self, prompt: Any) -> list[int]:
        tokenizer = self.frozen.tokenizer
        if isinstance(prompt, str):
            first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            return [*first, *self.frozen.ids(prompt, special=False, reads_control=True)]
        return conversation_ids(tokenizer, self.frozen.name, list(prompt), add_generation_prompt=True)

    def _ids_of(self, text: str) -> list[int]:
        return self.frozen.ids(text, special=False)


def is_token_classifier(source: Any) -> bool:
    """True for a folder that holds a model with a head for tokens."""
    file = Path(source).expanduser() / "config.json"
    if not file.is_file():
        return False
    try:
        names = json.loads(read_text(file, error=ModelError)).get("architectures") or [""]
    except (ValueError, AttributeError):  # transformers' loader says what is wrong with the file
        return False
    return str(names[0]).endswith("ForTokenClassification")
