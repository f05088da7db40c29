"""The output layer on a GPU: Covey's beside liger-kernel's and cut-cross-entropy's, forward and backward. `pip install` those to compare.

    python benchmarks/heads.py                      # 32,768 tokens, hidden size 896, vocabulary of 151,936, bfloat16
    python benchmarks/heads.py --tokens 8192 --width 4096

Each side gives the log-probability of every token and takes its gradient, random here, as a policy gradient needs. Covey's also
gives the entropy, which the others do not. cut-cross-entropy runs twice: exact, and with its default, which leaves out small
gradients. Repeats alternate, medians are shown; the peak is what the allocator gave out at most above what was there before.
Errors are relative, of the gradients of the hidden states and of the weight, against float32 without TF32 on 2,048 of the tokens.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from learner_cuda import measured
from torch import Tensor

from covey.learner.lm_head import LinearLogProbability, LogitTransform, chunk_for
from covey.learner.vocabulary_blocks import by_vocabulary as blocks

Side = Callable[[Tensor, Tensor, Tensor], Tensor]
CHECKED = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch finds none.")
    found = run(given, torch.device("cuda"))
    print("| output layer | ms | peak, MiB | error, hidden states | error, weight |\n|---|--:|--:|--:|--:|")
    for name, one in found.items():
        errors = " | ".join(f"{error:.1e}" for error in one["errors"])
        print(f"| {name} | {1000 * one['seconds']:.1f} | {one['peak_mib']:.0f} | {errors} |")
    print(json.dumps(found))


def sides(vocabulary: int, device: torch.device) -> dict[str, Side]:
    """Those that are installed: hidden states [M, D], weight [V, D] and targets [M] -> log-probabilities [M]."""

    def own(with_entropy: bool, by_vocabulary: bool) -> Side:
        shape = LogitTransform(1.0, None, 1.0, chunk_for(vocabulary, None, device), blocks if by_vocabulary else None)
        return lambda hidden, weight, targets: LinearLogProbability.apply(
            hidden, weight, None, targets, shape, with_entropy
        )[0]

    found: dict[str, Side] = {
        "Covey": own(False, True),
        "Covey, with entropy": own(True, True),
        "Covey, by chunks of tokens": own(False, False),
    }
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            out: Any = LigerFusedLinearCrossEntropyFunction.apply(
                hidden, weight, targets, None, None, -100, 0.0, 0.0, "none"
            )
            return -(out[0] if isinstance(out, tuple) else out)

        found["liger-kernel"] = liger
    except ImportError:
        print("liger-kernel is not installed: left out")
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cut(**how: Any) -> Side:
            return lambda hidden, weight, targets: (
                -linear_cross_entropy(hidden, weight, targets, reduction="none", **how)
            )

        found |= {"cut-cross-entropy, exact": cut(filter_eps=None), "cut-cross-entropy": cut()}
    except ImportError:
        print("cut-cross-entropy is not installed: left out")
    return found


def run(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds, peak and errors by side."""
    torch.manual_seed(0)
    hidden = torch.randn(given.tokens, given.width, device=device, dtype=torch.bfloat16)
    weight = (torch.randn(given.vocabulary, given.width, device=device) * 0.05).to(torch.bfloat16)
    targets = torch.randint(given.vocabulary, (given.tokens,), device=device)
    slopes = torch.randn(given.tokens, device=device)
    every = sides(given.vocabulary, device)
    seconds: dict[str, list[float]] = {name: [] for name in every}
    peaks = dict.fromkeys(every, 0.0)
    for _ in range(given.repeats + 1):
        for name, side in every.items():
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            spent, most = measured(partial(_both, side, hidden, weight, targets, slopes), device)
            seconds[name].append(spent)
            peaks[name] = (most - before) / 2**20
    part = slice(0, min(CHECKED, given.tokens))
    expected = _both(_dense, hidden[part].float(), weight.float(), targets[part], slopes[part])
    errors = {}
    for name, side in every.items():
        found = _both(side, hidden[part], weight, targets[part], slopes[part])
        errors[name] = [
            float((one.float() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
        ]
    return {
        name: {"seconds": statistics.median(seconds[name][1:]), "peak_mib": peaks[name], "errors": errors[name]}
        for name in every
    }


def _both(side: Side, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight."""
    given = [x.detach().requires_grad_() for x in (hidden, weight)]
    logp = side(given[0], given[1], targets)
    first, second = torch.autograd.grad((logp.float() * slopes).sum(), given)
    return first, second


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)


if __name__ == "__main__":
    main()
