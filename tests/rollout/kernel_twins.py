"""PyTorch twins of Triton's decode kernels: the same results, counted as the launches that the kernels take.

`with_twins(monkeypatch)` lets a sampler with `attention="triton"` run where Triton is not installed; the kernels themselves
are compared with PyTorch in `test_triton_*.py`.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from covey.kernels import TritonDecode
from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import draw

FREE = (
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "_unsafe_view",
    "lift_fresh",
    "_local_scalar_dense",
)


class Launches(TorchDispatchMode):
    """Counts launches: every operation that is no view and no allocation is one; a twin counts as its kernel does."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        self.total += not function.is_view and name not in FREE
        return function(*args, **kwargs or {})


def with_twins(monkeypatch, launches=None, attention=2):
    """Replace the kernels by their twins. Each adds to `launches.total`; `attention` is the number for one attention."""

    def twin(count, function):
        def run(*args, **kwargs):
            if launches is not None:
                launches.total += count
            with _disable_current_modes():
                return function(*args, **kwargs)

        return staticmethod(run)

    patches = {
        "unavailable_reason": staticmethod(lambda device: None),
        "errors": staticmethod(lambda: (RuntimeError,)),
        "rotation": twin(0, _rotation),
        "attend": twin(attention, _attend),
        "add_norm": twin(1, _add_norm),
        "norm": twin(1, _norm),
        "rotate": twin(1, _rotate),
        "gated": twin(1, lambda gate, up: F.silu(gate) * up),
        "draw_into": twin(2, _draw_into),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(TritonDecode, name, patch)


def _rotation(cosines, sines, positions, norms, **options):
    return SimpleNamespace(tables=(cosines[positions], sines[positions]), norms=norms, **options)


def _turned(x, rotation, norm):
    kind, x = x.dtype, x.float()
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], None, rotation.epsilon).to(kind) * norm
    cosines, sines = (table[:, None] for table in rotation.tables)
    return (x * cosines + x.roll(x.shape[-1] // 2, -1) * sines).to(kind)


def _attend(
    query,
    key,
    value,
    *,
    suffix,
    prompts,
    members,
    counts,
    lengths,
    first,
    step_column,
    scale,
    sinks=None,
    rotation=None,
    **others,
):
    assert others["softcap"] is None
    if rotation is not None:
        query, key = _turned(query, rotation, rotation.norms[0]), _turned(key, rotation, rotation.norms[1])
    now, rows, repeats = int(step_column), len(query), query.shape[1] // key.shape[1]
    suffix[0][:rows, :, now], suffix[1][:rows, :, now] = key, value
    owner = {int(members[p, g]): p for p in range(len(members)) for g in range(int(counts[p]))}
    out = torch.empty(query.shape, dtype=query.dtype)
    for row in range(rows):
        mine = suffix[:, row, :, min(int(first[row]), now) : now + 1]
        if row in owner:
            mine = torch.cat((prompts[:, owner[row], :, : int(lengths[owner[row]])], mine), 2)
        keys, values = mine.float().repeat_interleave(repeats, 1)
        scores = torch.einsum("hd,hkd->hk", query[row].float(), keys) * scale
        if others["suffix_bias"] is not None:
            hidden = others["suffix_bias"][row, min(int(first[row]), now) : now + 1]
            if row in owner:
                hidden = torch.cat((others["prompt_bias"][row, : int(lengths[owner[row]])], hidden))
            scores = scores + hidden.float()
        if sinks is not None:
            scores, values = torch.cat([scores, sinks[:, None].float()], -1), F.pad(values, (0, 0, 0, 1))
        weights = scores.softmax(-1)
        out[row] = torch.einsum("hk,hkd->hd", weights, values).to(query.dtype)
    return out


def _add_norm(x, update, weight, epsilon, dtype):
    if update is not None:
        x += update
    return (F.rms_norm(x.float(), weight.shape, None, epsilon).to(x.dtype) * weight).to(dtype)


def _norm(x, weight, epsilon, offset, dtype):
    normed = F.rms_norm(x.float(), x.shape[-1:], None, epsilon)
    return (normed if weight is None else normed * (weight.float() + offset)).to(dtype)


def _rotate(x, cosines, sines, pairs, by_pair, dtype):
    cosines, sines = cosines[:, None].float(), sines[:, None].float()
    if by_pair and pairs:
        cosines, sines = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cosines, sines))
    elif by_pair:
        cosines, sines = torch.cat([cosines, cosines], -1), torch.cat([sines, sines], -1)
    turned, rest = x.float().split([cosines.shape[-1], x.shape[-1] - cosines.shape[-1]], -1)
    if pairs:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    return torch.cat([turned * cosines + other * sines, rest], -1).to(dtype)


def _draw_into(tables, logits, *, seen, penalty, **options):
    t = SimpleNamespace(**tables)
    to = torch.where(t.live, t.output_row, len(t.tokens) - 1)
    written = t.written * t.live
    params = SamplingParams(repetition_penalty=penalty, **options)
    drawn = draw(logits, t.uniforms[to, written], params, seen=seen)
    tokens = drawn.tokens
    t.tokens[to, written], t.logprobs[to, written] = tokens, drawn.logprobs
    t.token[:] = tokens
    t.position += t.live
    t.written += t.live
    t.stopped |= t.is_eos[tokens] & t.live
    if seen is not None:
        seen.scatter_(1, tokens[:, None], True)
    if t.ends:
        t.live &= ~(t.stopped | (t.written >= t.limit))
        t.first.masked_fill_(~t.live, t.never)
