"""Runs with vLLM in the process, one after another: `python in_process.py FOLDER CASES(JSON)`, by a Python that has vLLM.

Each completion is compared with a plain forward of the weights of its version, and of those before the last update.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import TrainerCallback

from combinations.combined_run import policy, trainer
from combinations.pairs import write_others
from covey.models import unwrapped
from covey.rollout import SamplingParams
from covey.rollout.agreement import plain_logprobs, short_prompts
from covey.rollout.vllm import VLLMSampler, colocated
from covey.training.drawing import Draws
from environments.acting import chat_tokenizer, tiny_llama
from kit import tiny_tokenizer
from teacher_server import serving

_start = colocated._engine
_engines: dict[str, Any] = {}


def engine(model: Any, processor: Any, *given: Any) -> Any:
    """An engine for models of this shape, which later runs take over: its start takes longer than they do."""
    shape = f"{type(unwrapped(model)).__name__} {unwrapped(model).config.to_json_string()} {given}"
    if shape not in _engines:
        _engines[shape] = _start(model, processor, *given)
    return _engines[shape]


class Versions(TrainerCallback):
    """Weights of every version of the run, and the completions that were drawn."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.weights: list[dict[str, torch.Tensor]] = []
        self.groups: list[Any] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.weights.append({name: value.clone() for name, value in self.model.state_dict().items()})

    on_step_end = on_train_begin

    def gaps(self, groups: Any, behind: int = 0, last: Any = None) -> list[float]:
        """Largest difference of each completion of the policy, by the weights of its version, of one `behind` that, or by the `last`."""
        out = []
        for group in groups:
            for one in group.completions:
                if one.source != "policy" or one.version < behind:
                    continue
                self.twin.load_state_dict(last or self.weights[one.version - behind])
                (mine,) = plain_logprobs(self.twin, [group.__class__(prompt=group.prompt, completions=(one,))])
                mask = torch.ones(one.num_tokens, dtype=torch.bool) if one.mask is None else one.mask
                out.append(float((one.logprobs - mine)[mask].abs().max()))
        return out


def result(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The logs of a run, gaps of what it drew, and of what its engine draws after the last update."""
    features, engines, drawn = tuple(case["features"]), list[Any](), list[Any]()
    call, make = Draws.__call__, VLLMSampler.__init__

    def kept(self: Draws, *given: Any, **more: Any) -> Any:
        groups = call(self, *given, **more)
        drawn.extend(groups)
        return groups

    def made(self: VLLMSampler, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        engines.append(self)

    Draws.__call__, VLLMSampler.__init__ = kept, made  # type: ignore[method-assign]
    try:
        with ExitStack() as stack:
            if "served teacher" in features:
                big, tokenizer = (
                    (tiny_llama(chat_tokenizer()), chat_tokenizer())
                    if case.get("chat")
                    else (policy(), tiny_tokenizer())
                )
                case["url"], _ = stack.enter_context(serving(big, tokenizer))
            run = trainer(folder, case)
            seen = Versions(run.model)
            run.add_callback(seen)
            run.train()
            after = []
            for engine in engines:
                after += list(engine.sample(short_prompts(run.model), 2, SamplingParams(max_tokens=8)))
        acts = {"rollout_func"}.isdisjoint(features)  # which writes numbers of its own
        return {
            "logs": [line for line in run.state.log_history if "loss" in line],
            "gaps": seen.gaps(drawn) if acts else [],
            "stale": seen.gaps(drawn, 1) if acts else [],
            "after": seen.gaps(after, last=run.model.state_dict()),
            "after_stale": seen.gaps(after, last=seen.weights[0]),
            "replies": sum(
                int((~one.mask).sum()) for group in drawn for one in group.completions if one.mask is not None
            ),
        }
    finally:
        Draws.__call__, VLLMSampler.__init__ = call, make  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    colocated._engine = engine
    place = Path(sys.argv[1])
    for name, case in json.loads(sys.argv[2]).items():
        folder, started = place / name.replace(" ", "-"), time.perf_counter()
        folder.mkdir(parents=True)
        try:
            write_others(tuple(case["features"]), folder)
            found = result(folder, {**case, "others": str(folder)})
        except Exception as error:  # noqa: BLE001 - the other cases run all the same
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
        print("RESULT", json.dumps({"name": name, "seconds": time.perf_counter() - started, **found}), flush=True)  # noqa: T201 - read by the test
