"""A reward model from preference pairs: the Bradley-Terry likelihood that the chosen completion scores above the rejected one."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.data.checks import row_of
from covey.errors import ConfigError, DataError
from covey.models import as_model_errors, evaluating, load_tokenizer, quiet_bars, resolve_source
from covey.process.ordered_sums import ordered_sums
from covey.rewards.builtin.inference_model import Frozen
from covey.rewards.builtin.reward_model import ModelReward


@dataclass(frozen=True)
class Pair:
    """One preference: a prompt (text or messages) and two completions of the same form."""

    prompt: Any
    chosen: Any
    rejected: Any


E = TypeVar("E")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Training options of a reward model. The learning rate is for all weights; a linear warm-up, then a linear decay to 0."""

    num_train_epochs: float = 1.0
    max_steps: int = -1
    """Updates; -1: as many as `num_train_epochs` takes."""
    per_device_train_batch_size: int = 16
    """Pairs, or completions with scored steps, of an update."""
    learning_rate: float = 1e-5
    warmup: float = 0.05
    """Share of the updates."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    center_rewards_coefficient: float = 0.0
    """Weight of `(r_chosen + r_rejected)^2`, which keeps rewards around 0 (Eisenstein et al. 2023)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_train_epochs", "per_device_train_batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ConfigError(f"max_steps={self.max_steps} must be 1 or more, or -1 for as many as the epochs take.")
        if self.center_rewards_coefficient < 0 or not 0 <= self.warmup < 1:
            raise ConfigError(
                "center_rewards_coefficient must not be below 0, and warmup must be a share from 0 to below 1."
            )

    def num_steps(self, count: int) -> int:
        """Updates on `count` pairs."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * count / self.per_device_train_batch_size))


@dataclass(frozen=True)
class Judged:
    """Pairs that a reward model has scored."""

    margins: Sequence[float]
    """Reward of the chosen less that of the rejected completion."""

    @property
    def right(self) -> list[float]:
        """1 for a pair in the right order, 0 in the wrong one, a half for equal rewards."""
        return [1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in self.margins]

    @property
    def loss(self) -> float:
        """Mean `-log sigmoid(margin)`, nats; log 2 is a coin."""
        return -F.logsigmoid(torch.tensor(self.margins)).mean().item()


def pairs_of(dataset: Any, name: str) -> list[Pair]:
    """The pairs of an opened data set with TRL's columns `prompt`, `chosen`, `rejected`.

    Without `prompt`, `chosen` and `rejected` are whole conversations, which part at their last message. Raises DataError for a
    missing column, a row without two different completions, or mixed forms.
    """
    have = list(dataset.column_names or [])
    if not {"chosen", "rejected"} <= set(have):
        raise DataError(f"{name} has no pairs: it needs the columns chosen and rejected; it has {', '.join(have)}.")
    return [_pair(row, row_of(index, name)) for index, row in enumerate(dataset)]


def _pair(row: Any, where: str) -> Pair:
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if chosen is None or rejected is None or chosen == rejected:
        raise DataError(f"{where} has no two different completions; remove the row.")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where} has a text and a conversation to compare; give both in one form.")
    if prompt is None and not isinstance(chosen, str):
        if chosen[:-1] != rejected[:-1]:
            raise DataError(f"{where} has conversations that part before their last message.")
        prompt, chosen, rejected = list(chosen[:-1]), list(chosen[-1:]), list(rejected[-1:])
    prompt = "" if prompt is None else prompt
    if isinstance(prompt, str) != isinstance(chosen, str):
        raise DataError(f"{where} has a prompt and completions of different forms; give texts, or messages, for both.")
    return Pair(prompt, chosen, rejected)


def by_prompt(examples: Sequence[Any], values: Sequence[V]) -> list[list[V]]:
    """The values, one for each example, in lists by prompt; an example without a prompt is alone."""
    grouped: dict[Hashable, list[V]] = {}
    for place, (example, value) in enumerate(zip(examples, values, strict=True)):
        grouped.setdefault(repr(example.prompt) if example.prompt else place, []).append(value)
    return list(grouped.values())


def parted_by_prompt(pairs: Sequence[E], share: float, seed: int) -> tuple[list[E], list[E]]:
    """About `1 - share` and `share` of the pairs; those of one prompt stay together, so that none is known from training."""
    groups = by_prompt(pairs, pairs)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    held, rest = list[E](), list[E]()
    for place in order:
        (held if len(held) < share * len(pairs) else rest).extend(groups[place])
    return rest, held


def load_classifier(source: str, device: torch.device) -> ModelReward:
    """A sequence classifier with one label on a language model's body, or one that is there already, with its tokenizer.

    The head of a language model starts anew. Raises ModelError for what cannot be loaded.
    """
    model, tokenizer = load_head("AutoModelForSequenceClassification", source, 1)
    reward = ModelReward.of(model, tokenizer, device=device)
    model.requires_grad_(True)
    return reward


def load_head(auto: str, source: str, num_labels: int) -> tuple[Any, Any]:
    """A float32 model of transformers' class `auto` with a head of this many labels, and its tokenizer. A missing head is initialized.

    Raises ModelError for what cannot be loaded.
    """
    import transformers
    from transformers.utils import logging as hf_logging

    place = resolve_source(source)
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # that a head is new is what is wanted here
    try:
        with quiet_bars(), as_model_errors(source):
            load = getattr(transformers, auto).from_pretrained
            model: Any = load(place, num_labels=num_labels, dtype=torch.float32)
    finally:
        hf_logging.set_verbosity(before)
    return model, load_tokenizer(model, place)


def train(
    reward: ModelReward, pairs: Sequence[Pair], options: PreferenceOptions, on_step: Callable[[int, int, float], None]
) -> None:
    """Minimize `-log sigmoid(r_chosen - r_rejected)` over the pairs. Bradley and Terry 1952; Ouyang et al. 2022, eq. 1.

    Changes `reward.model`. `on_step` is called with each update's number, their count, and its loss. Raises DataError for a pair that the model
    cannot read whole.
    """

    def losses(batch: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        padded, mask = reward.padded([ids for pair in batch for ids in pair])
        scores = reward.model(input_ids=padded, attention_mask=mask).logits[:, 0].float()  # [2 B], with gradient
        chosen, rejected = scores[0::2], scores[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        return loss, options.center_rewards_coefficient * (chosen + rejected).square().mean()

    fit(reward.model, _encode(reward, pairs), options, losses, on_step)


def fit(
    model: Any,
    items: Sequence[Any],
    options: PreferenceOptions,
    losses: Callable[[Sequence[Any]], tuple[Tensor, Tensor]],
    on_step: Callable[[int, int, float], None],
) -> None:
    """Minimize the sum of both `losses` of each batch by AdamW, over all weights; `on_step` gets the first of them."""
    total = options.num_steps(len(items))
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    warm = max(1, round(options.warmup * total))
    rate = lambda step: min((step + 1) / warm, max(0.0, (total - step) / max(1, total - warm + 1)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    torch.manual_seed(options.seed)
    model.train()
    for step, batch in enumerate(_batches(items, options.per_device_train_batch_size, total, generator), 1):
        loss, more = losses(batch)
        optimizer.zero_grad(set_to_none=True)
        with ordered_sums.on(loss.device):
            (loss + more).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
        optimizer.step()
        scheduler.step()
        on_step(step, total, loss.item())
    model.eval()


def judge(reward: ModelReward, pairs: Sequence[Pair]) -> Judged:
    """Margins of the pairs, by the very call that a training run makes."""
    prompts = [pair.prompt for pair in pairs]
    with evaluating(reward.model):
        chosen = reward(prompts, [pair.chosen for pair in pairs])
        rejected = reward(prompts, [pair.rejected for pair in pairs])
    return Judged((chosen - rejected).tolist())


def save(reward: Frozen, folder: Path) -> None:
    """Write model and tokenizer of a reward, as `--reward FOLDER` reads them."""
    with quiet_bars():
        reward.model.save_pretrained(folder)
    reward.tokenizer.save_pretrained(folder)


def _encode(reward: ModelReward, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    encoded = []
    for index, pair in enumerate(pairs):
        both = (reward.encode(pair.prompt, pair.chosen), reward.encode(pair.prompt, pair.rejected))
        longest = max(map(len, both))
        if longest > reward.limit:
            raise DataError(
                f"pair {index} has {longest} tokens, and the model reads {reward.limit:g}; shorten or remove it."
            )
        if both[0] == both[1]:
            raise DataError(f"pair {index} has two completions with the same tokens; remove it.")
        encoded.append(both)
    return encoded


def _batches(items: Sequence[Any], size: int, total: int, generator: torch.Generator) -> Iterator[list[Any]]:
    """`total` batches; each epoch is another permutation."""
    waiting: list[int] = []
    for _ in range(total):
        while len(waiting) < min(size, len(items)):
            waiting += torch.randperm(len(items), generator=generator).tolist()
        batch, waiting = waiting[:size], waiting[size:]
        yield [items[place] for place in batch]
