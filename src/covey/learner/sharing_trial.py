"""Trial of shared prompts: packed rows compared with single rows, before a policy computes them."""

from dataclasses import replace
from typing import Any

import torch

from covey.kernels import attention_windows
from covey.learner import shared_prompt
from covey.learner.heads import short_row
from covey.learner.packing import pad_rows
from covey.learner.shared_kernel import choose_kernel
from covey.learner.shared_prompt import share_rows
from covey.learner.state_layers import state_layers
from covey.models import unwrapped


@torch.no_grad()
def try_sharing(policy: Any) -> str | None:
    """Compare packed rows with single rows under the model's own attention. Returns a reason if they differ."""
    rows = [short_row(policy.model, count) for count in (3, 2)]
    was_training = policy.model.training
    is_exact = policy.compute_dtype is None and next(policy.model.parameters()).dtype == torch.float32
    shared_prompt.install()
    policy.model.eval()
    try:
        policy.windows = attention_windows(unwrapped(policy.model))
        policy.state_layers = policy.within(lambda: state_layers(policy.model))
        apart = policy.measure_packed(pad_rows(rows, policy.pad_id, policy.device), True)
        packed = share_rows(rows, policy.device, is_whole=policy.auxiliary_coefficient != 0)
        together = policy.measure_packed(replace(packed, heads=policy.heads), True)
        gap = (apart.logp - together.logp).abs().max().item()
        if apart.auxiliary_loss is not None and together.auxiliary_loss is not None:
            gap = max(gap, (apart.auxiliary_loss - together.auxiliary_loss).abs().item())
        is_same = gap < (1e-3 if is_exact else 0.2)
        reason = None if is_same else f"its log-probabilities would differ by {gap:.1g}"
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        is_ours = isinstance(error, ValueError) and str(error).startswith("its ")
        reason = str(error) if is_ours else f"its forward takes no packed rows ({type(error).__name__})"
    finally:
        policy.model.train(was_training)
        policy.release()
    if reason is None:
        policy.kernel = choose_kernel(policy.model, policy.shared_attention, policy.heads)
    return reason
