"""Comparison of a sampler with its model: a short continuation, and a plain forward of the same tokens."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from covey.data import vocabulary_size
from covey.errors import RAW_ERRORS, CoveyError, ModelError
from covey.models import evaluating, unwrapped
from covey.models.modalities import banned_ids, forget_positions, whole_inputs
from covey.process.interruption import StopNow
from covey.process.memory import is_out_of_memory
from covey.rollout.autocast import SamplerPrecision, in_precision
from covey.rollout.sampler import Sampler, SamplingParams, sampler_metrics
from covey.types import Group, Prompt

FLOAT_ERROR = 1e-3
"""Tolerance in nats, of any token, between two float32 computations of log-probabilities; measured: below 1e-5."""
ROUNDED_ERROR = 0.2
"""Tolerance, mean over tokens, in bfloat16, float16, TF32 or with quantized weights; measured in bfloat16: about 0.01."""

_LENGTHS = (2, 5)
"""Tokens of the prompts: unlike, so that a sampler that pads them is seen."""
_STEPS, _ENOUGH = 5, 3
"""Tokens of a completion, and those that show a cache which is read wrongly: the first comes from the prompt's own pass."""
_TRIES = 8
"""Draws at most, where completions end at once."""
TRIAL_ROWS = 4
"""Completions of a trial: two of each of two prompts."""


def expect_agreement(sampler: Sampler, model: nn.Module, media: Prompt | None = None) -> None:
    """Raise ModelError, with the model's class, if there is a `reason_against` the sampler."""
    if reason := reason_against(sampler, model, media):
        raise ModelError(refusal(model, reason))


def refusal(model: nn.Module, reason: str) -> str:
    return f"{type(unwrapped(model)).__name__} cannot be sampled here: {reason}; choose another model."


def reason_against(sampler: Sampler, model: nn.Module, media: Prompt | None = None) -> str | None:
    """The reason if `sampler` does not give the model's own log-probabilities for what it draws; None if it does.

    Draws two short completions of each of two short prompts, then of `media`, a prompt with images or sounds. No random generator changes. A sampler without log-probabilities
    is not compared, nor one whose run is stopped meanwhile.
    """
    try:
        groups = _trial(sampler, [*short_prompts(model), *([] if media is None else [media])])
    except StopNow:  # the run ends before it samples
        return None
    except RAW_ERRORS as error:
        return raw_reason(error)
    sampler_metrics(sampler)  # of no rollout
    drawn = [completion for group in groups for completion in group.completions]
    if any(completion.logprobs is None for completion in drawn):
        return None
    precision: SamplerPrecision | None = getattr(sampler, "dtype", None)
    computes_in = getattr(getattr(sampler, "forward", None), "dtype", torch.float32)
    has_float32 = precision in ("auto", "float32") and computes_in == torch.float32
    is_sharp = has_float32 and is_exact(model)  # one token that is off tells as much as all
    for of_media in (False, True):
        compared = [group for group in groups if (group.prompt.media is not None) == of_media]
        mine = plain_logprobs(model, compared, precision or "auto")
        theirs = [done.logprobs.cpu() for group in compared for done in group.completions if done.logprobs is not None]
        if not mine:
            continue
        gap, limit = gap_of(torch.cat(theirs), torch.cat(mine), is_sharp=is_sharp)
        if not gap <= limit:
            behind = " behind an image or a sound" if of_media else ""
            return (
                f"log-probabilities of the same tokens{behind} are {gap:.3g} a token from those of a plain forward, where {limit:g} is "
                "rounding"
            )
    return None


def _trial(sampler: Sampler, prompts: Sequence[Prompt]) -> list[Group]:
    """Short completions, drawn again while all those of a prompt end within their first tokens."""
    groups: list[Group] = []
    for seed in range(_TRIES):
        drawn = list(sampler.sample(prompts, 2, SamplingParams(max_tokens=_STEPS, seed=seed)))
        groups += drawn
        if all(max(done.num_tokens for done in group.completions) >= _ENOUGH for group in drawn):
            break
    return groups


def gap_of(theirs: Tensor, mine: Tensor, *, is_sharp: bool) -> tuple[float, float]:
    """Gap between log-probabilities of the same tokens, and its limit: of any token (`is_sharp`), or of their mean."""
    gaps = (theirs - mine).abs()
    return (float(gaps.max()), FLOAT_ERROR) if is_sharp else (float(gaps.mean()), ROUNDED_ERROR)


def price(sampler: Sampler, model: nn.Module) -> str:
    """A sentence with the seconds of 1,000 tokens, the prompts' share included, by the fastest of two trials."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        try:
            groups = list(sampler.sample(short_prompts(model), 2, SamplingParams(max_tokens=_STEPS, seed=0)))
        except StopNow:
            return "Their time is not measured, since the run is stopped."
        steps = max(completion.num_tokens for group in groups for completion in group.completions)
        seconds.append((time.perf_counter() - started) / steps)
    sampler_metrics(sampler)  # of no rollout
    return f"At the rate of a trial of {TRIAL_ROWS} short completions, 1,000 tokens of each take {1000 * min(seconds):.3g} s."


def raw_reason(error: Exception) -> str:
    """The reason that a model's own error is. Raises the error itself if it is Covey's, or says that memory ran out."""
    if isinstance(error, CoveyError) or is_out_of_memory(error):
        raise error
    return f"its forward fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def short_prompts(model: nn.Module) -> list[Prompt]:
    """Two prompts of made-up tokens, without placeholders of media."""
    barred = {*banned_ids(model), *range(3)}  # the first ids are often special
    allowed = [i for i in range(min(2000, vocabulary_size(model))) if i not in barred]
    ids = lambda count: tuple(allowed[(7919 * i + 11 * count) % len(allowed)] for i in range(count))
    return [Prompt(uid=f"agreement:{count}", token_ids=ids(count)) for count in _LENGTHS]


@torch.no_grad()
def plain_logprobs(model: nn.Module, groups: Sequence[Group], precision: SamplerPrecision = "auto") -> list[Tensor]:
    """Log-probabilities [T_i] of each completion, on the host, by a forward pass of its own, without cache and padding."""
    device, logprobs = next(model.parameters()).device, list[Tensor]()
    barred = torch.tensor(banned_ids(model), dtype=torch.int64, device=device)
    with evaluating(model), in_precision(model, precision):
        for group in groups:
            for completion in group.completions:
                whole = completion.behind(group.prompt)
                logits = model(**whole_inputs(model, whole)).logits[0, len(group.prompt.token_ids) - 1 : -1]
                if whole.media is not None:
                    forget_positions(model)
                logp = torch.log_softmax(logits.float().index_fill(-1, barred, -torch.inf), -1)
                logprobs.append(logp.gather(-1, completion.token_ids.to(device)[:, None]).squeeze(-1).cpu())
    return logprobs


def is_exact(model: nn.Module) -> bool:
    """True if the model computes in float32 throughout."""
    weights = list(model.parameters())
    is_plain = all(weight.dtype == torch.float32 for weight in weights)
    return is_plain and (weights[0].device.type == "cpu" or torch.get_float32_matmul_precision() == "highest")
