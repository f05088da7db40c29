"""What every causal class of transformers gets, tried on a small model with random weights.

`PYTHONPATH=tests python tests/rollout/causal_table.py` prints the second table of docs/models.md.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from causal_classes import KINDS, build

from covey.errors import CoveyError
from covey.learner.policy import Policy
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.types import Prompt
from kit import tiny_tokenizer

PROMPTS = [Prompt(uid=str(i), token_ids=ids) for i, ids in enumerate([tuple(range(5, 14)), (40,), (40, 41, 42)])]
MOST = 1e-4
"""Largest gap in nats of a class that is sampled."""


ROLLOUTS = {
    "native": "native",
    "states": "native, with a state a row",
    "cache": "plain transformers, over its cache",
    "generate": "plain transformers, by `generate`",
    "alone": "plain transformers, by `generate`, one completion at a time",
    "refused": "refused, in one sentence",
    "unbuilt": "not tried: needs a package or numbers that fit together",
}


@dataclass(frozen=True)
class Verdict:
    """What a class gets: a row of the table."""

    rollout: str
    """A key of `ROLLOUTS`."""
    shared: str = ""
    adapters: str = ""
    export: str = ""

    def begin(self) -> str:
        """The row but for its kinds."""
        return f"| {ROLLOUTS[self.rollout]} | {self.shared} | {self.adapters} | {self.export} |"


def gap_of(sampler: Any, model: Any) -> float:
    """Largest difference in nats between the sampler's log-probabilities and a plain forward's."""
    groups = list(sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=8, seed=1)))
    drawn = [completion for group in groups for completion in group.completions]
    return max(float((a.logprobs - b).abs().max()) for a, b in zip(drawn, plain_logprobs(model, groups), strict=True))


def verdict_of(kind: str) -> Verdict:
    """The verdict on a class. Raises whatever is no sentence of Covey's, and ValueError for a gap above `MOST`."""
    try:
        model = build(kind)
    except Exception:  # noqa: BLE001 - a configuration that these sizes do not fit, or a package that is not here
        return Verdict("unbuilt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sampler = choose_sampler(model, tiny_tokenizer(), eos_ids=[2], dtype="float32")
        except CoveyError as error:
            if type(model).__name__ not in str(error):
                raise
            return Verdict("refused")
        if (gap := gap_of(sampler, model)) > MOST:
            raise ValueError(f"{kind}: sampled {gap:.2g} nats from its plain forward")
    if isinstance(sampler, TransformersSampler):
        way = sampler.way
    else:
        assert isinstance(sampler, NativeSampler)
        way = "native" if sampler.forward.states is None else "states"
    return Verdict(way, shared_by(model), export=exported(model), adapters=adapters_on(model))


def shared_by(model: Any) -> str:
    """`yes`, `in part` where layers read whole rows, or `no`."""
    policy = Policy(model, pad_id=0)
    if not policy.shares_prompts():
        return "no"
    return "in part" if any(layer.way == "rows" for layer in policy.state_layers) else "yes"


def exported(model: Any) -> str:
    """`yes` if the folder that a run writes (`--format merged`) is read back as the same model."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            model.save_pretrained(folder)
            back = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            return "yes" if torch.allclose(back(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5) else "no"
        except Exception:  # noqa: BLE001 - a class that transformers does not write or read back
            return "no"


def adapters_on(model: Any) -> str:
    """`yes` if LoRA on all linear layers gets a finite gradient."""
    from peft import LoraConfig, get_peft_model

    try:
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        adapted.train()
        ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
        adapted(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum().backward()
    except Exception:  # noqa: BLE001 - a layer or a router that PEFT does not know
        return "no"
    gradients = [parameter.grad for name, parameter in adapted.named_parameters() if "lora" in name]
    reached = [gradient for gradient in gradients if gradient is not None]
    return "yes" if reached and all(bool(gradient.isfinite().all()) for gradient in reached) else "no"


def table() -> str:
    """The rows of the page, classes with the same verdict together."""
    kinds: dict[Verdict, list[str]] = {}
    for kind in KINDS:
        kinds.setdefault(verdict_of(kind), []).append(kind)
    order = sorted(kinds, key=lambda verdict: (list(ROLLOUTS).index(verdict.rollout), -len(kinds[verdict])))
    named = lambda verdict: ", ".join(f"`{kind}`" for kind in kinds[verdict])
    rows = [f"{verdict.begin()} {named(verdict)} |" for verdict in order]
    return "\n".join(["| rollout | prompt shared | LoRA | export | kinds |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.stdout.write(table() + "\n")
