"""A process reward model from scored steps: the likelihood of each step's label, given the steps before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.data.checks import row_of
from covey.data.loading import parted
from covey.data.sources import opened, shown
from covey.errors import DataError
from covey.models import evaluating
from covey.rewards.builtin.process_reward import SEPARATOR, ProcessReward
from covey.rewards.preference import Pair, PreferenceOptions, fit, load_head, pairs_of

COLUMNS = ("completions", "steps")
"""Columns that may hold the steps of a completion, TRL's name first."""


@dataclass(frozen=True)
class ScoredSteps:
    """One completion as its steps, each with a label: True for a right one."""

    prompt: Any
    steps: tuple[str, ...]
    labels: tuple[bool, ...]


def load_examples(source: str) -> list[ScoredSteps] | list[Pair]:
    """The rows of a file, a folder or a hub id: scored steps where it has a column `labels`, else preference pairs.

    Scored steps have TRL's columns `prompt`, `completions` (or `steps`: a list of texts) and `labels` (as many booleans). Raises
    DataError for a row without them.
    """
    dataset, name = opened(*parted(source, None), False, None), shown(source)
    if "labels" not in (dataset.column_names or []):
        return pairs_of(dataset, name)
    return [scored_steps(row, row_of(index, name)) for index, row in enumerate(dataset)]


def scored_steps(row: Any, where: str) -> ScoredSteps:
    """A row with its steps and labels. Raises DataError, naming it by `where`, for one that has no prompt or not a label for each step."""
    steps = next((row[name] for name in COLUMNS if row.get(name) is not None), None)
    labels = row.get("labels")
    if row.get("prompt") is None or not isinstance(steps, list) or not isinstance(labels, list):
        raise DataError(
            f"{where} has no scored steps: it needs a prompt, a list of completions (its steps) and one of labels."
        )
    if len(steps) != len(labels) or not steps:
        raise DataError(f"{where} has {len(steps)} steps and {len(labels)} labels; give a label for each step.")
    if not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{where} has a step that is no text, or an empty one.")
    if not all(label in (0, 1) for label in labels):
        raise DataError(f"{where} has the labels {labels}; a label is true for a right step and false for a wrong one.")
    return ScoredSteps(row["prompt"], tuple(steps), tuple(map(bool, labels)))


def load_step_classifier(
    source: str, device: torch.device, *, separator: str = SEPARATOR, aggregate: str = "min"
) -> ProcessReward:
    """A token classifier with two labels on a language model's body, or one that is there already, with its tokenizer.

    The head of a language model starts anew. Raises ModelError for what cannot be loaded.
    """
    model, tokenizer = load_head("AutoModelForTokenClassification", source, 2)
    model.config.step_separator, model.config.step_aggregate = separator, aggregate
    model.config.id2label, model.config.label2id = {0: "wrong", 1: "right"}, {"wrong": 0, "right": 1}
    reward = ProcessReward(model, tokenizer=tokenizer)
    reward.frozen.to(device)
    model.requires_grad_(True)
    return reward


def train(
    reward: ProcessReward,
    rows: Sequence[ScoredSteps],
    options: PreferenceOptions,
    on_step: Callable[[int, int, float], None],
) -> None:
    """Minimize the mean cross-entropy of the labels at the steps' ends. Lightman et al. 2023, section 2.6; TRL's PRMTrainer.

    Changes the reward's model. `on_step` is called with each update's number, their count, and its loss. Raises DataError for
    a completion that the model cannot read whole, or a step with the separator in it.
    """
    frozen = reward.frozen

    def losses(batch: Sequence[tuple[list[int], list[int], tuple[bool, ...]]]) -> tuple[Tensor, Tensor]:
        ids, mask = frozen.padded([ids for ids, _, _ in batch])
        logits = frozen.model(input_ids=ids, attention_mask=mask).logits.float()  # [B, L, 2]
        read = torch.cat([logits[i, places] for i, (_, places, _) in enumerate(batch)])
        labels = torch.tensor(
            [label for _, _, labels in batch for label in labels], dtype=torch.int64, device=frozen.device
        )
        return F.cross_entropy(read, labels), read.new_zeros(())

    fit(frozen.model, _encode(reward, rows), options, losses, on_step)


def judge(reward: ProcessReward, rows: Sequence[ScoredSteps]) -> list[list[float]]:
    """Probability of each step to be right, by the very call that a training run makes."""
    with evaluating(reward.frozen.model):
        return reward.step_scores([row.prompt for row in rows], [row.steps for row in rows])


def _encode(reward: ProcessReward, rows: Sequence[ScoredSteps]) -> list[tuple[list[int], list[int], tuple[bool, ...]]]:
    limit = reward.frozen.limit
    encoded = []
    for index, row in enumerate(rows):
        if any(reward.separator in step for step in row.steps):
            raise DataError(
                f"row {index} has a step with the separator {reward.separator!r} in it, where the reward would cut it; give another "
                "--step-separator."
            )
        ids, places = reward.encode(row.prompt, row.steps)
        if len(ids) > limit:
            raise DataError(f"row {index} has {len(ids)} tokens, and the model reads {limit:g}; shorten or remove it.")
        encoded.append((ids, places, row.labels))
    return encoded
