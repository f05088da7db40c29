"""vLLM's side of `rollout.py --vllm PYTHON`, run by the interpreter of vLLM's own environment: times on the last line as JSON.

Continuous batching, prefix caching on, bfloat16, everything in one process so that processor time counts all of it.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def main() -> None:
    from vllm import LLM, SamplingParams

    task = json.loads(sys.stdin.read())
    now = time.process_time if task["cpu_time"] else time.perf_counter
    engine = LLM(task["model"], dtype="bfloat16", enable_prefix_caching=True, max_model_len=2048, max_num_seqs=256)
    seconds, tokens = [], []
    for seed in range(task["repeats"] + 1):
        engine.reset_prefix_cache()  # the weights of a training step are new, and so are its keys and values
        params = SamplingParams(
            n=task["group"], temperature=1.0, max_tokens=task["max_tokens"]
        )  # its CPU build takes no seed
        started = now()
        outputs = engine.generate(task["prompts"], params, use_tqdm=False)
        if seed:
            seconds.append(now() - started)
            tokens.append(sum(len(answer.token_ids) for output in outputs for answer in output.outputs))
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
