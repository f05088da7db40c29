"""Episodes whose turns are answered: answers prefilled into their rows, and fed token by token through decode steps, in processor time.

    OMP_NUM_THREADS=1 python benchmarks/answers.py [repetitions [prompts [answers' lengths ...]]]

Prompts of 64 tokens, 4 completions each, 3 answers a completion, turns of 24 tokens in the mean. Both ways write the same tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from hybrid_rollout import FAMILIES, SIZES
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from covey.kernels import training_heap
from covey.rollout import NativeSampler, SamplingParams
from covey.types import Prompt

KINDS = {"Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}), "Qwen3.5": FAMILIES["Qwen3.5"]}
ANSWERS = (16, 128, 512)
TURNS, MEAN = 3, 24
NEVER = 10**9


def main(repetitions: int, num_prompts: int, answers: Sequence[int]) -> None:
    training_heap(returns_blocks=False)  # as in a run
    prompts = [Prompt(uid=str(i), token_ids=tuple(range(1000 + i, 1064 + i))) for i in range(num_prompts)]
    for name, (config, model_class, options) in KINDS.items():
        torch.manual_seed(0)
        shape = {**SIZES, "max_position_embeddings": 4096, **options}
        model = getattr(transformers, model_class)(getattr(transformers, config)(**shape)).float().eval()
        for length in answers:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(repetitions):
                for by_token, taken in seconds.items():
                    taken.append(_episodes(model, prompts, length, by_token))
            prefilled, fed = (statistics.median(taken) for taken in seconds.values())
            line = f"{name}, answers of {length}: prefilled {prefilled:.2f} s, by token {fed:.2f} s, ratio {fed / prefilled:.2f}\n"
            sys.stdout.write(line)
            sys.stdout.flush()


def _episodes(model: Any, prompts: list[Prompt], length: int, by_token: bool) -> float:
    def environment(turns: Any) -> list[list[int] | None]:
        return [[700] * length if len(turn.token_ids) < TURNS * (length + MEAN) - MEAN else None for turn in turns]

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    ends = list(range(8192 // MEAN))
    way = mock.patch("covey.rollout.answers.fewest_tokens", return_value=NEVER) if by_token else nullcontext()
    with way:
        sampler = NativeSampler(model, tokenizer, dtype="float32", eos_ids=ends, environment=environment)
        start = time.process_time()
        list(sampler.sample(prompts, 4, SamplingParams(max_tokens=TURNS * (length + 2 * MEAN), seed=1)))
    return time.process_time() - start


if __name__ == "__main__":
    repetitions, prompts, *answers = [*map(int, sys.argv[1:]), *(5, 8, *ANSWERS)[len(sys.argv) - 1 :]]
    main(repetitions, prompts, answers)
