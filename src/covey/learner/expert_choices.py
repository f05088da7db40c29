"""Experts that the sampler chose, at the tokens of a micro-batch; and how the learner's routers spread their tokens."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.errors import RAW_ERRORS, ConfigError, Unsupported
from covey.kernels import Routers, find_routers
from covey.learner.micro_batches import MicroBatcher
from covey.learner.packing import PaddedRows, Row, filler
from covey.learner.shared_prompt import SharedRows
from covey.models import accepts, decoder_of, evaluating, unwrapped
from covey.process.device import onto
from covey.process.world import World


class Policy(Protocol):
    """A model that rows pass through, as far as its routers are concerned."""

    model: Any
    replays_experts: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def is_checkpointing(self) -> bool: ...

    def autocast(self) -> AbstractContextManager[None]: ...


class Routing:
    """The routers of a policy: found by a trial pass, then watched in each pass, with the sampler's experts or their own."""

    def __init__(self) -> None:
        self._routers: tuple[Routers | None] | None = None
        """None: not looked for yet."""
        self._replayed: Tensor | None = None

    @contextmanager
    def watching(self, policy: Policy, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Iterator[None]:
        """Context of a pass over `packed`, which replays the experts of `rows` if the policy does so.

        With activation checkpointing the backward computes the pass again, so the routers stay switched until `release`.
        """
        self._switch(policy, packed, rows)
        try:
            yield
        finally:
            if not (policy.is_checkpointing and torch.is_grad_enabled()):
                self.release()

    def find(self, policy: Policy) -> tuple[Routers | None]:
        """Look for the routers, before the model is split: every pass of a split one needs all processes."""
        try:
            self._routers = (routers_of(policy),)
        except (Unsupported, *RAW_ERRORS):  # metrics are left out then; `expect_replay` names the reason
            self._routers = (None,)
        return self._routers

    def _switch(self, policy: Policy, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> None:
        (routers,) = self._routers or self.find(policy)
        if routers is not None:
            size, mine = _share_of(packed)
            choices = choices_of(rows, packed.spans, size) if policy.replays_experts else None
            self._replayed = None if choices is None else onto(policy.device, choices[mine])
            routers.switch(self._replayed)

    def metrics(self, packed: PaddedRows | SharedRows) -> Mapping[str, Tensor]:
        """Scalars of the pass that was watched."""
        (routers,) = self._routers or (None,)
        is_whole = routers is not None and all(ids is not None for ids in routers.chosen)
        if routers is None or not is_whole:
            return {}
        group = getattr(packed, "context", None)
        return routing_metrics(routers, repeats_in(packed), self._replayed, group.summed if group else lambda x: x)

    def release(self) -> None:
        (routers,) = self._routers or (None,)
        if routers is not None:
            routers.release()


def routers_of(policy: Policy) -> Routers | None:
    """Routers of a policy's model, by a trial pass. Raises Unsupported, with the reason, for such as cannot be replayed."""

    def run(ids: Tensor) -> Any:
        with policy.autocast():
            return policy.model(input_ids=ids, use_cache=False)

    with evaluating(policy.model):
        return find_routers(unwrapped(policy.model), run)


def expect_replay(policy: Policy) -> None:
    """Raise ConfigError, with the reason, for a model whose experts cannot be replayed."""
    try:
        routers = routers_of(policy)
    except Unsupported as reason:
        raise ConfigError(f"router_replay='R3', but {reason}; leave it out.") from reason
    if routers is None:
        name = type(unwrapped(policy.model)).__name__
        raise ConfigError(f"router_replay='R3', but {name} has no experts to choose from; leave it out.")


def repeats_in(packed: PaddedRows | SharedRows) -> Tensor:
    """[M], how often each computed token stands in the rows, which have their prompt each: 0 for padding."""
    if isinstance(packed, PaddedRows):
        return packed.attention_mask.flatten().float()
    size, mine = _share_of(packed)
    counts = torch.zeros(size)
    for layout in packed.layouts:
        counts[layout.prompt] = len(layout.counts)
        counts[layout.answers] = 1
    return onto(packed.input_ids.device, counts[mine])


def _share_of(packed: PaddedRows | SharedRows) -> tuple[int, slice]:
    """Number of tokens of a batch, and which of them this process computes: all, or its share of the context (`split`)."""
    group = getattr(packed, "context", None)
    count = packed.input_ids.numel()
    return (count, slice(None)) if group is None else (count * group.size, group.tokens)


def choices_of(rows: Sequence[Row], spans: Sequence[tuple[int, int, int]], total: int) -> Tensor | None:
    """[total, L, k] experts that the sampler chose at each token of a batch, -1 where it did not; None if no row has any.

    `spans`: by row, the places of its prompt's first token and of its completion's, and the completion's tokens in the batch.
    """
    first = next((row.completion.experts for row in rows if row.completion.experts is not None), None)
    if first is None:
        return None
    out = torch.full((total, *first.shape[1:]), -1, dtype=torch.int16)
    for row, (prompt, answer, count) in zip(rows, spans, strict=True):
        drawn, read = row.completion.experts, row.completion.prompt_experts
        if drawn is None or not len(drawn):
            continue
        last = prompt + len(row.prompt.token_ids) - 1
        if read is not None and out[last, 0, 0] < 0:  # once a prompt that several rows share
            out[prompt:last] = read
            out[last] = drawn[0]
        used = min(count, len(drawn) - 1)
        out[answer : answer + used] = drawn[1 : 1 + used]
    return out


def routing_metrics(
    routers: Routers,
    computed: Tensor,
    replayed: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Tensor]:
    """Scalars of the last forward pass over the tokens where `computed` [M] is above 0, padding left out.

    `total`: sum over the processes that share out the tokens.
    `max_load`: the largest share of tokens that one expert of a layer gets, from k / E on. `entropy`: of the experts' loads, over
    log E, in the layer with the lowest. `changed`: share of tokens and layers whose experts are not the sampler's.
    """
    drawn = torch.stack([chosen for chosen in routers.chosen if chosen is not None], 1)  # [M, L, k]
    weight = (computed > 0).float()
    counts = drawn.new_zeros(drawn.shape[1], routers.num_experts, dtype=torch.float32)
    spread = weight[:, None, None].expand(drawn.shape).transpose(0, 1).flatten(1)
    counts.scatter_add_(1, drawn.transpose(0, 1).flatten(1), spread)
    load = total(counts) / total(weight.sum()).clamp(min=1.0)
    shares = load / routers.top_k
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(routers.num_experts)
    metrics = {"experts/max_load": load.max(), "experts/entropy": entropy.min()}
    if replayed is not None:
        is_replayed = (replayed[..., 0] >= 0) & (weight > 0)[:, None]
        differs = (drawn.sort(-1)[0] != replayed.to(drawn).sort(-1)[0]).any(-1)
        metrics["experts/changed"] = total((differs & is_replayed).sum()) / total(is_replayed.sum()).clamp(min=1)
    return metrics


@dataclass(frozen=True, eq=False)
class Balance:
    """Sums of the load-balancing loss over the tokens and layers of a pass.

    `E sum_e f_e p_e`, with f the experts' shares of choices and p their mean probabilities: Fedus et al. 2021, "Switch Transformers",
    eq. 4 to 6, as transformers computes it over rows without padding.
    """

    loads: Tensor
    """[E + 1], how often each expert was chosen, and the tokens and layers that chose."""
    probability: Tensor
    """[E], with gradient."""

    def loss(self, whole: Tensor | None = None) -> Tensor:
        """The loss of these tokens; with the loads of a `whole` step, their part in the loss of the step."""
        loads = self.loads if whole is None else onto(self.loads.device, whole.to(self.loads.dtype))
        return len(self.probability) * (loads[:-1] / loads[-1] * self.probability / loads[-1]).sum()


def balanced(model: nn.Module, packed: SharedRows, inputs: Mapping[str, Any]) -> tuple[Tensor, Balance]:
    """Hidden states of packed rows, and the sums of the load-balancing loss of the rows that they stand for."""
    output = decoder_of(model)(use_cache=False, output_router_logits=True, **inputs)
    return output.last_hidden_state, balance_of(model, output.router_logits, packed)


def balanced_padded(
    model: nn.Module, packed: PaddedRows, inputs: Mapping[str, Any], *, splits: bool
) -> tuple[Tensor, Balance]:
    """`balanced` of padded rows; logits in place of hidden states unless the model `splits` into decoder and head.

    Raises ConfigError for a model whose loss has another form.
    """
    # padding would be routed too and would change the load-balancing loss
    options: dict[str, Any] = {"attention_mask": packed.attention_mask, "output_router_logits": True}
    if splits and accepts(model, "logits_to_keep"):
        options["logits_to_keep"] = 1  # the model's own logits are not used; keep them small
    output = model(**inputs, output_hidden_states=splits, use_cache=False, **options)
    balance = balance_of(model, output.router_logits, packed)
    if not torch.is_grad_enabled():  # in the trial at the start; later a device need not wait
        gap = float((balance.loss() - output.aux_loss).abs())
        if gap > 1e-3 * float(output.aux_loss):
            name = type(unwrapped(model)).__name__
            raise ConfigError(
                f"{name} has a load-balancing loss of its own ({gap:.1g} from Switch Transformers'), which Covey cannot divide into "
                "micro-batches; set router_aux_loss_coef=0."
            )
    return output.hidden_states[-1] if splits else output.logits, balance


def balance_of(model: nn.Module, logits: Sequence[Tensor], packed: PaddedRows | SharedRows) -> Balance:
    """Sums over the routers' logits [M, E] by layer, each token counted as often as it stands in the rows."""
    top_k, weights = unwrapped(model).config.get_text_config().num_experts_per_tok, repeats_in(packed)
    experts = logits[0].shape[-1]
    loads, probability = weights.new_zeros(experts + 1), weights.new_zeros(experts)
    for layer in logits:
        p = torch.softmax(layer, -1)
        picked = torch.topk(p, top_k, -1).indices
        loads[:-1].scatter_add_(0, picked.flatten(), weights.repeat_interleave(top_k))
        loads[-1] += weights.sum()
        probability = probability + (p.float() * weights[:, None]).sum(0)
    group = getattr(packed, "context", None)
    return Balance(loads, probability) if group is None else Balance(group.summed(loads), group.sum(probability))


@torch.no_grad()
def loads_of_step(policy: Any, micro_batcher: MicroBatcher, world: World, rows: Sequence[Row]) -> Tensor | None:
    """`Totals.expert_loads`, by a pass of its own: the factor of the load-balancing loss that has no gradient. None for one micro-batch."""
    if policy.auxiliary_coefficient == 0 or (world.size == 1 and len(micro_batcher.batches(rows)) < 2):
        return None

    # each process of a context has the loads of all its tokens
    counts_here = policy.context is None or policy.context.rank == 0

    def count() -> list[Tensor]:
        batches = micro_batcher.each(rows, factor=2)
        pairs = [(batch, policy.measure(batch or [filler()]).balance) for batch in batches]
        return [balance.loads.cpu() for batch, balance in pairs if counts_here and batch and balance is not None]

    parts = [loads for part in world.gather(micro_batcher.attempt(count)) for loads in part]
    return torch.stack(parts).sum(0) if parts else None
