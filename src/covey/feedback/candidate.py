"""Candidates: an adapter trained on scored conversations, off-policy, from the served version on."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from covey import algorithms as alg
from covey.adapters import with_adapter, with_saved_adapter
from covey.config import GRPOConfig
from covey.errors import needed
from covey.feedback.settings import Settings
from covey.feedback.store import Conversation
from covey.process.world import World
from covey.rewards import Scorer
from covey.training.build_learner import RunInputs, build_learner
from covey.training.credit import with_advantages
from covey.types import merge_metrics


def train_candidate(
    base: Any,
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    scorer: Scorer,
    start: Path | None,
    conversations: Sequence[Conversation],
    settings: Settings,
    output: Path,
) -> dict[str, float]:
    """Train an adapter on top of the one in `start` (None: a fresh one) and write it to `output`. `base` stays as it is.

    One pass over the conversations by REINFORCE++ (Hu et al. 2025): with one answer a prompt there is no group, and the baseline is
    the mean score of the step's tokens. The answers are of older weights, so that their objective is weighted by the ratio of the
    current policy to the recorded log-probabilities (`Correction`: sequences above 3 count 0). The KL is to the served
    version. Returns metrics of the training. Raises CoveyError for a model that cannot be trained.
    """
    model = adapted(base, start, settings)
    args = arguments(conversations, settings, output)
    world = World.of(args)
    algorithm = alg.reinforce_pp(kl=settings.beta or None)
    inputs = RunInputs(
        args=args,
        model=model.to(world.device),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        algorithm=algorithm,
        scorer=scorer,
        train_dataset=None,
        world=world,
    )
    batches = split(conversations, settings)
    learner = build_learner(inputs, len(batches), (None, None), is_off_policy=True)
    torch.manual_seed(settings.seed)
    algorithm = algorithm.resolve(algorithm.initial_controllers())
    parts = []
    for step, batch in enumerate(batches, 1):
        groups = learner.annotate([conversation.group() for conversation in batch], algorithm)
        groups = with_advantages(groups, algorithm, torch.ones(1))
        report = learner.step(groups, algorithm, step)
        parts.append(report.metrics)
    learner.policy.release()
    model.save_pretrained(str(output))
    shown = ("sampling/importance_sampling_ratio/mean", "kl", "grad_norm")
    merged = merge_metrics(parts)
    return {name: float(merged[name].value) for name in shown if name in merged}


def adapted(base: Any, start: Path | None, settings: Settings) -> Any:
    """A PEFT model over the weights of `base`, which it shares, with the adapter of `start` or a fresh one, to be trained."""
    with needed("learning from feedback trains an adapter", "peft"):
        from peft import LoraConfig
    shared = {id(held): held for held in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    if start is not None:
        return with_saved_adapter(model, start, is_trainable=True)
    torch.manual_seed(settings.seed)
    rank = settings.lora_r
    return with_adapter(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0))


def arguments(conversations: Sequence[Conversation], settings: Settings, output: Path) -> GRPOConfig:
    """Options of the learner."""
    return GRPOConfig(
        output_dir=str(output.parent),
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=settings.batch_size,
        num_generations=settings.batch_size,
        max_completion_length=max(len(conversation.token_ids) for conversation in conversations),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=settings.use_cpu,
        report_to="none",
        seed=settings.seed,
    )


def split(conversations: Sequence[Conversation], settings: Settings) -> list[list[Conversation]]:
    """Batches of `batch_size` in random order; a rest goes to the others, since the baseline needs company."""
    order = list(conversations)
    random.Random(settings.seed).shuffle(order)
    count = max(1, len(order) // settings.batch_size)
    return [order[i::count] for i in range(count)]
