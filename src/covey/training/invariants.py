"""Checks of a run: the first updates on-policy, and the same options and data on every process."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from covey.adapters import has_adapter
from covey.algorithms import Algorithm
from covey.config import GRPOConfig
from covey.config.options import HONOURED
from covey.errors import InvariantError
from covey.learner import FIRST_UPDATE, Learner, Policy
from covey.models import dropouts, reads_media
from covey.process.sharding import is_sharded, local
from covey.process.world import World
from covey.rewards.contract import RewardSpec
from covey.rollout import GatheredSampler, NativeSampler
from covey.rollout.agreement import FLOAT_ERROR, ROUNDED_ERROR, expect_agreement, is_exact
from covey.rollout.vllm import ServerSampler, VLLMSampler
from covey.types import Metric, Prompt

Fingerprints = dict[str, str]


@dataclass(eq=False)
class FrozenWeightsCheck:
    """Check that frozen weights do not change, and that the reference changes by its update rule only.

    Keeps a fingerprint of each. Trainable weights are skipped; a weight that is frozen later is checked from then on.
    """

    learner: Learner
    frozen: Fingerprints = field(default_factory=dict)
    reference: Fingerprints = field(default_factory=dict)
    moves: int = -1
    """The reference's number of intended changes when its fingerprint was taken."""

    def later(self) -> Callable[[], None]:
        """Start a check against the last fingerprints. Returns a function to run in the background; runs at once if that is unsafe.

        Both raise InvariantError with the name of the first weight that differs.
        """
        moves = self.learner.reference.moves
        if self.learner.policy.device.type != "cpu" or moves != self.moves:
            self._look(moves)
            return lambda: None
        return partial(self._look, moves)

    def _look(self, moves: int) -> None:
        frozen = fingerprints(frozen_weights(self.learner.policy.model))
        if name := first_difference(self.frozen, frozen):
            raise InvariantError(
                f"The frozen weight {name} has changed since the last look, though nothing trains it; look for a callback or "
                "reward that writes to the model, or an adapter merged into it, and resume from the last checkpoint."
            )
        reference = fingerprints(self.learner.reference.weights())
        stood_still = self.learner.reference.moves == moves
        if stood_still and self.moves == moves and (name := first_difference(self.reference, reference)):
            raise InvariantError(
                f"The reference model's weight {name} has changed though its rule did not move it; look for code that shares "
                "its tensors or writes to them, and resume from the last checkpoint."
            )
        self.frozen, self.reference, self.moves = frozen, reference, moves if stood_still else -1


_SAMPLER = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, eq=False)
class OnPolicyCheck:
    """On-policy check: at a rollout's first update the policy is the one that sampled it, so every ratio is 1 up to rounding.

    Compares with the learner's log-probabilities at the rollout, if computed, with the native sampler's, if it has the
    learner's dtype, and with vLLM's of a model that reads media, whose towers no probe of text sees. Costs one subtraction per token. Models that are random in training mode (dropout, router noise) are
    skipped.
    """

    policy: Policy
    sampler: Any

    def __call__(self, metrics: Mapping[str, Metric], version: int) -> None:
        """Raise InvariantError if the merged metrics of such an update exceed the tolerance; they are equal on every process.

        `version`: weight version that sampled the batch; a batch of older weights may be off-policy and is skipped.
        """
        if getattr(self.sampler, "version", version) != version or draws_while_training(self.policy.model):
            return
        limit = FLOAT_ERROR if self._is_exact() else ROUNDED_ERROR
        if FIRST_UPDATE in metrics and (gap := metrics[FIRST_UPDATE].value) > limit:
            raise InvariantError(
                f"The first update of a rollout is not on-policy: the learner's log-probabilities are {gap:.3g} a token from its "
                f"own at the rollout, where {limit:g} is float error; look for a callback or reward that writes to the model, "
                "and resume from the last checkpoint."
            )
        if not self._is_same_type():
            limit = ROUNDED_ERROR if self._sees_by_vllm() else math.inf
        if _SAMPLER in metrics and (gap := metrics[_SAMPLER].value) > limit:
            raise InvariantError(
                f"The sampler does not sample from the policy that is trained: their log-probabilities of the same tokens are "
                f"{gap:.3g} a token apart, where {limit:g} is float error; look for a callback or reward that writes to the "
                "model, or take rollout_backend='transformers', and resume from the last checkpoint."
            )

    def _is_exact(self) -> bool:
        return self.policy.compute_dtype is None and is_exact(self.policy.model)

    def _sees_by_vllm(self) -> bool:
        is_vllm = isinstance(self.sampler, (VLLMSampler, ServerSampler))
        return is_vllm and self.sampler.regex is None and reads_media(self.policy.model)

    def _is_same_type(self) -> bool:
        if not isinstance(self.sampler, NativeSampler):
            return False
        trained_in = self.policy.compute_dtype or next(self.policy.model.parameters()).dtype
        return self.sampler.forward.dtype == trained_in


def expect_served_policy(sampler: Any, model: torch.nn.Module, example: Prompt | None = None) -> None:
    """Raise ModelError unless vLLM, colocated or a server, draws from `model`; other samplers are compared when they are made.

    `example`: a prompt with images or sounds, which is compared too. Not compared: a model split over processes, and completions under
    a grammar, whose log-probabilities are of other distributions.
    """
    while not isinstance(sampler, GatheredSampler) and hasattr(sampler, "sampler"):  # an agent's, a rollout function's
        sampler = sampler.sampler
    is_whole = getattr(sampler, "shards", None) is None
    if is_whole and isinstance(sampler, (VLLMSampler, ServerSampler)) and sampler.regex is None:
        expect_agreement(sampler, model, example)


def draws_while_training(model: torch.nn.Module) -> bool:
    """True if the model in training mode is random (dropout, router noise), so that two forward passes may differ."""
    chances = [place[key] for place, key in dropouts(model)]
    chances += [getattr(module, "jitter_noise", 0.0) for module in model.modules()]
    return any(isinstance(chance, float) and chance > 0 for chance in chances)


def expect_same_weights(model: torch.nn.Module, world: World) -> None:
    """Raise InvariantError on every process unless the trained weights are bitwise equal on all."""
    if world.size == 1:
        return
    trained = fingerprints({name: p for name, p in model.named_parameters() if p.requires_grad and not is_sharded(p)})
    everyone = [part[0] for part in world.gather([trained])]
    for rank, theirs in enumerate(everyone):
        if name := first_difference(everyone[0], theirs):
            raise InvariantError(
                f"The weight {name} of rank {rank} differs from rank 0's, so the processes train two models; look for code that "
                "runs on one process only and touches the model, and resume from the last checkpoint."
            )


def frozen_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters that take no gradient, by name."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad and not p.is_meta}


@torch.no_grad()
def fingerprints(tensors: Mapping[str, Tensor]) -> Fingerprints:
    """A hash of each tensor's bits, as text.

    xxh3-64 of the bytes in host memory; on an accelerator the sum of the bits as integers, which needs no copy.
    """
    local_values = {name: local(value) for name, value in tensors.items()}
    plain = {name: value.detach().as_subclass(Tensor) for name, value in local_values.items() if value.numel()}
    held = {name: value.contiguous() for name, value in plain.items()}  # quantized weights may be tensor subclasses
    sums = {name: _bits(value).sum(dtype=torch.int64) for name, value in held.items() if value.device.type != "cpu"}
    totals = torch.stack([total.cpu() for total in sums.values()]).tolist() if sums else []
    digests = {name: f"sum {total}" for name, total in zip(sums, totals, strict=True)}
    return digests | {name: _hash(value) for name, value in held.items() if name not in sums}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first common name with different values; None if there is none."""
    return next((name for name, value in now.items() if name in before and before[name] != value), None)


def expect_adapter_reloads(model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Raise InvariantError unless the adapter in `folder` reloads bitwise equal to that of `model`.

    The same tensors under the same options on the same base give the same logits. `weights` as in `write_model`.
    A model without an adapter is skipped.
    """
    if not has_adapter(model):
        return
    from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights

    name = model.active_adapter
    place = folder if name == "default" else folder / str(name)
    saved = load_peft_weights(str(place), device="cpu")
    mine = {
        key: value.detach().cpu()
        for key, value in get_peft_model_state_dict(model, state_dict=weights, adapter_name=name).items()
    }
    wrong = next((key for key in {**mine, **saved} if not _is_same(mine.get(key), saved.get(key))), None)
    trained_config, saved_config = model.peft_config[name].to_dict(), PeftConfig.from_pretrained(str(place)).to_dict()
    option = next(
        (
            key
            for key in _OPTIONS
            if key in trained_config and _plain(trained_config[key]) != _plain(saved_config.get(key))
        ),
        None,
    )
    if wrong is not None or option is not None:
        what = f"its tensor {wrong} differs" if wrong is not None else f"its option {option} differs"
        raise InvariantError(
            f"The adapter written to {folder.name} does not load as the one that is trained ({what}), so it would answer "
            "otherwise; check the versions of peft and the adapter's options."
        )


_OPTIONS = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("fan_in_fan_out", "target_modules", "modules_to_save", "layers_to_transform"),
)
"""Adapter options that affect its output."""


def _plain(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, set | list | tuple) else value


def _is_same(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None or mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    return _hash(mine.contiguous()) == _hash(other.contiguous())


def _bits(value: Tensor) -> Tensor:
    """The tensor's memory as 16-bit integers, or 8-bit if its size is odd."""
    flat = value.view(-1).view(torch.uint8)
    return flat.view(torch.int16) if flat.numel() % 2 == 0 else flat


def _hash(value: Tensor) -> str:
    content: Any = value.view(-1).view(torch.uint8).numpy()  # a buffer, though its type does not say so
    return xxhash.xxh3_64_hexdigest(content) if value.numel() else "empty"


_SECRET = ("hub_token", "alert_webhook")
_PER_PROCESS = frozenset(
    ("output_dir", "run_name", "disable_tqdm", "report_to", "log_level", "log_level_replica", "use_cpu", *_SECRET)
)
"""Options that may differ: the main process's value is used, or they affect only a process's output."""
_ROWS = 16


def comparable_options(args: GRPOConfig) -> dict[str, str]:
    """Options that affect training, as text, without objects and functions, which have no stable text."""
    names = {item.name for item in fields(args)}  # an older transformers lacks the newest of its options
    values = {name: getattr(args, name) for name in sorted((HONOURED - _PER_PROCESS) & names)}
    return {name: str(getattr(value, "value", value)) for name, value in values.items() if _is_plain(value)}


def comparable_inputs(dataset: Any, model: Any, algorithm: Algorithm, rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """All inputs of a trainer but its options."""
    return comparable_parts(algorithm, rewards) | comparable_data(dataset, model)


def comparable_data(dataset: Any, model: nn.Module) -> dict[str, str]:
    """Number of rows of the data set, a digest of some of its prompts, and the model's name; for a stream the name only."""
    facts = {"as model": str(model)} if isinstance(model, str) else {}
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return facts
    count = len(dataset)
    facts["rows of train_dataset"] = str(count)
    places = sorted({i * count // _ROWS for i in range(_ROWS)}) if count else []
    rows = [dataset[place] for place in places]
    prompts = [row.get("prompt") if isinstance(row, dict) else None for row in rows]
    return {**facts, "as digest of prompts of train_dataset": xxhash.xxh3_64_hexdigest(repr(prompts).encode())}


def comparable_parts(algorithm: Algorithm, rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """The algorithm's parts with their parameters, and the names of the rewards."""
    parts = {f"as the algorithm's {field.name}": _text(getattr(algorithm, field.name)) for field in fields(algorithm)}
    return {**parts, "as rewards": ", ".join(reward.name for reward in rewards)}


def _text(part: Any) -> str:
    """The same text on every process: a dataclass with its fields, and of functions and other objects the name alone."""
    if is_dataclass(part) and not isinstance(part, type):
        inside = ", ".join(f"{field.name}={_text(getattr(part, field.name))}" for field in fields(part))
        return f"{type(part).__name__}({inside})"
    if isinstance(part, (list, tuple)):
        return f"[{', '.join(map(_text, part))}]"
    return str(part) if _is_plain(part) else getattr(part, "__qualname__", type(part).__name__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    value = getattr(value, "value", value)
    return value is None or isinstance(value, (str, int, float, bool))


def still_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A check between steps, from flags and types alone: the weights are trained as they were when it was made.

    It raises InvariantError if all of the optimizer's weights are frozen, one that the optimizer lacks is trainable or new, or a type changed.
    Freezing some of them, and setting them free again, is allowed.
    """
    weights = [(name, weight, weight.dtype, weight.requires_grad) for name, weight in model.named_parameters()]
    names = {name for name, *_ in weights}

    def check() -> None:
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not any(weight.requires_grad for weight in trained):
            raise InvariantError(
                "a callback froze every weight in the middle of the run, so nothing would be trained; leave some of them trainable."
            )
        for name, weight in model.named_parameters():
            if name not in names and weight.requires_grad and not any(weight is other for other in trained):
                raise InvariantError(
                    f"a callback added {name} to the model in the middle of the run, and the optimizer does not hold it; add it before "
                    "GRPOTrainer is made, or freeze it."
                )
        for name, weight, dtype, was_trained in weights:
            if weight.dtype != dtype:
                raise InvariantError(
                    f"a callback changed {name} from {dtype} to {weight.dtype} in the middle of the run; convert the model before "
                    "GRPOTrainer is made, or in on_train_end."
                )
            if weight.requires_grad and not was_trained and not any(weight is other for other in trained):
                raise InvariantError(
                    f"a callback made {name} trainable in the middle of the run, and the optimizer does not hold it; have it trainable "
                    "where train() begins, and freeze it in on_train_begin."
                )

    return check
