"""Packed rows whose tokens are shared out over a group of processes (context parallelism), with the gradients of one process.

Every process of a group packs the same rows and computes every C-th token: embeddings, norms, MLPs, the output layer and what
they save for the backward are a C-th each. Attention sees whole rows, for a C-th of the heads, through the kernels and masks of
rows that are not shared out. Log-probabilities are summed back to every process, so any loss of whole completions is computed
as before; a process's gradient of the weights is that of its tokens, and the sum over processes that of all.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.errors import ConfigError
from covey.kernels import AttentionHeads, choices, has_states
from covey.models import unwrapped
from covey.models.modalities import reason_against as reason_against_media
from covey.process.context import ContextGroup
from covey.types import Prompt


def split(rows: Any, group: ContextGroup) -> Any:
    """The `SharedRows` with this process's tokens: `source`, `target` and `place` are those of its own positions.

    The last place [N T] stands for none: every process scores equally many tokens, so that each has a gradient to pass on.
    """
    size, (count, width) = group.size, rows.shape
    padding = -rows.input_ids.shape[1] % size
    ids, positions = (F.pad(x, (0, padding))[:, group.tokens] for x in (rows.input_ids, rows.position_ids))
    owner = (rows.source % size).cpu()
    most = int(torch.bincount(owner, minlength=size).max())
    mine = (owner == group.rank).nonzero().squeeze(1).to(rows.source.device)
    filled = lambda x, fill: F.pad(x[mine], (0, most - len(mine)), value=fill)
    return replace(
        rows,
        input_ids=ids,
        position_ids=positions,
        source=filled(rows.source // size, 0),
        target=filled(rows.target, 0),
        place=filled(rows.place, count * width),
        context=group,
    )


def attend(
    attention: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    projected: tuple[Tensor, Tensor, Tensor],
    rows: Any,
    product: Any,
) -> tuple[Tensor, None]:
    """`attention` over whole rows for this process's heads. `projected`: query, key and value [1, H or K, t, D] of its tokens.

    Key heads of which there are too few to share out are repeated first. `product`: scale, dropout, cap and sinks of the scores.
    """
    group: ContextGroup = rows.context
    query, key, value = projected
    heads, shared_by, tokens = query.shape[1], query.shape[1] // key.shape[1], rows.layouts[-1].answers.stop
    repeats = next(r for r in range(1, shared_by + 1) if shared_by % r == 0 and key.shape[1] * r % group.size == 0)
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (key, value))
    whole = [group.by_head(x)[:, :, :tokens] for x in (query, key, value)]
    mine = slice(group.rank * heads // group.size, (group.rank + 1) * heads // group.size)
    sinks = None if product.sinks is None else product.sinks[mine]
    options = {"dropout": product.dropout, "scaling": product.scale, "softcap": product.softcap, "s_aux": sinks}
    out, _ = attention(module, *whole, None, covey_rows=replace(rows, context=None), **options)  # [1, S, H / C, D]
    out = F.pad(out.transpose(1, 2), (0, 0, 0, -tokens % group.size))
    return group.by_token(out).transpose(1, 2).contiguous(), None


def expect_context(policy: Any) -> None:
    """Raise ConfigError, with the reason, if the processes of the policy's context cannot compute a row of its model together."""
    if policy.context is not None:
        expect_shared_out(policy.model, policy.context.size, policy.heads if policy.shares_texts() else None)


def expect_media(policy: Any, prompt: Prompt) -> None:
    """Raise ConfigError, with the reason, if they cannot compute a row with this prompt's media together."""
    if policy.context is not None and not policy.embeds_media:
        untried = "no prompt with media was there to try before fsdp split it"
        reason = untried if policy.shards is not None else reason_against_media(policy.model, prompt)
        expect_reason(policy.model, policy.context.size, reason)
        policy.embeds_media = True


def expect_shared_out(model: nn.Module, size: int, heads: Collection[AttentionHeads] | None) -> None:
    """Raise ConfigError, with the reason, if `size` processes cannot compute a row of the model together."""
    expect_reason(model, size, reason_against(model, size, heads))


def expect_reason(model: nn.Module, size: int, reason: str | None) -> None:
    """Raise ConfigError with the reason against sharing out the tokens of a row; None: there is none."""
    if reason is not None:
        raise ConfigError(
            f"parallelism_config has cp_size={size}, and {type(unwrapped(model)).__name__} cannot share out the tokens of a row: {reason}."
        )


def reason_against(model: nn.Module, size: int, heads: Collection[AttentionHeads] | None) -> str | None:
    """Why `size` processes cannot compute a row of the model together; None: they can.

    `heads`: shapes of its attention layers; None: its rows cannot be packed.
    """
    reason = None
    if heads is None:
        reason = "its rows cannot be packed, for the reason above"
    elif has_states(model):
        reason = "layers with a state read the tokens of a row one after the other"
    elif choices(unwrapped(model)):
        reason = "its layers choose the keys of a token among those of a whole row"
    elif not heads:
        reason = "its attention is not called through transformers' interface"
    elif odd := sorted({layer.query for layer in heads if layer.query % size}):
        fitting = ", ".join(str(n) for n in range(2, odd[0] + 1) if odd[0] % n == 0)
        reason = f"it has {odd[0]} attention heads, so cp_size may be {fitting or '1 alone'}"
    return reason


def takes(policy: Any, rows: Any) -> bool:
    """True if the policy computes rows as another model has packed them, and shared them out over processes."""
    group: ContextGroup | None = getattr(rows, "context", None)
    if not hasattr(rows, "context"):  # rows that are padded
        return True
    if not policy.shares_prompts() or not all(policy.embeds(entry.prompt) for entry in rows.placed[:1]):
        return False
    return group is None or reason_against(policy.model, group.size, policy.heads) is None
