"""Rollouts that run ahead: seconds a step beside the ordinary loop, and what is learned at each staleness.

    python benchmarks/asynchronous.py time --hidden 256     # one core for the learner, one for the sampler; the ordinary loop has both
    python benchmarks/asynchronous.py curves --seeds 3      # the demo's task at staleness 0, 1, 2, 4, corrected and not

`curves` sets `pipeline_depth` to the staleness, so that every rollout is as stale as its bound allows once the run is under way. Its
intervals are of Student's t over the seeds; "against 0" is the difference of the score to that seed's run without staleness.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

STALENESS = (0, 1, 2, 4)


def one_run(options: dict[str, Any], steps: int, seed: int, prompts: int, threads: int, hidden: int) -> dict[str, Any]:
    """A run in this process: seconds of its steps, rewards by step, and the score on held-out problems."""
    import torch
    from datasets import Dataset

    from covey import GRPOConfig, GRPOTrainer, demo
    from covey.models import load_model

    torch.set_num_threads(threads)
    model = load_model(str(demo.model_path())) if not hidden else wide(hidden)
    with tempfile.TemporaryDirectory() as folder:
        given = {
            **demo.DEMO_SETTINGS, "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": 8 * prompts,
            "save_strategy": "no", "rollout_log_steps": 0, "report_to": "none", "disable_tqdm": True, "log_level": "error",
            "eval_strategy": "no", "logging_steps": 1, "seed": seed, "num_generations_eval": 1,
            "per_device_eval_batch_size": 100, "vllm_importance_sampling_mode": "token_truncate", **options,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[demo.reward],
            args=GRPOConfig(**given),
            train_dataset=Dataset.from_list(demo.rows("train", prompts * steps, 1000 + seed)),
            eval_dataset=Dataset.from_list(demo.rows("test", 200, 5)),
        )
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        score = trainer.evaluate()["eval_reward"] if not hidden else float("nan")
        if trainer._parts is not None:
            trainer._parts.close()
    name = "staleness/mean"
    return {
        "score": score,
        "rewards": [entry["reward"] for entry in logs],
        "step_times": [entry["step_time"] for entry in logs],
        "staleness": [entry[name] for entry in logs if name in entry],
        "effective": min(entry.get("sampling/effective_sample_size", 1.0) for entry in logs),
        "idle": [(entry["idle/learner"], entry["idle/sampler"]) for entry in logs if "idle/learner" in entry],
        "seconds": seconds,
    }


def wide(hidden: int) -> Any:
    """A fresh model of the demo's vocabulary, for times alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from covey import demo

    config = AutoConfig.from_pretrained(str(demo.model_path()))
    config.update(
        {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": hidden // 8, "num_hidden_layers": 6}
    )  # fmt: skip
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 6
    model = AutoModelForCausalLM.from_config(config)
    model.name_or_path = model.config._name_or_path = str(demo.model_path())
    return model


def apart(**given: Any) -> dict[str, Any]:
    """`one_run` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"])}
    command = [sys.executable, __file__, "run", json.dumps(given)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(said.stderr)
    return json.loads(said.stdout.splitlines()[-1])


def times(given: argparse.Namespace) -> None:
    cases = {
        "ordinary, 2 threads": (2, {}),
        "ordinary, 1 thread": (1, {}),
        "ahead, 1 + 1 threads": (1, {"async_rollouts": True, "max_staleness": 1}),
    }
    print("| loop | median seconds a step | learner waits | sampler waits |\n|---|---:|---:|---:|")
    for name, (threads, options) in cases.items():
        run = apart(options=options, steps=given.steps, seed=0, prompts=8, threads=threads, hidden=given.hidden)
        waits = [statistics.median(column) for column in zip(*run["idle"][2:], strict=True)] if run["idle"] else []
        shown = [f"{share:.0%}" for share in waits] or ["-", "-"]
        print(f"| {name} | {statistics.median(run['step_times'][2:]):.3f} | {shown[0]} | {shown[1]} |", flush=True)


def curves(given: argparse.Namespace) -> None:
    print(
        "| staleness | corrected | score on 200 held-out | each seed | against 0 | reward, last quarter | tokens' mean age | least effective sample |"
    )
    print("|--:|---|--:|---|--:|--:|--:|--:|")
    fresh: list[float] = []
    for bound in STALENESS:
        for corrected in (True, False) if bound else (True,):
            options = {"async_rollouts": True, "max_staleness": bound, "pipeline_depth": max(1, bound)} if bound else {}
            options["vllm_importance_sampling_correction"] = corrected
            runs = [
                apart(options=options, steps=given.steps, seed=seed, prompts=8, threads=1, hidden=0)
                for seed in range(given.seeds)
            ]
            last = [statistics.mean(run["rewards"][-given.steps // 4 :]) for run in runs]
            age = statistics.mean([statistics.mean(run["staleness"] or [0.0]) for run in runs])
            scores = [run["score"] for run in runs]
            fresh = fresh or scores
            apart_from_it = [score - other for score, other in zip(scores, fresh, strict=True)]
            each = ", ".join(f"{score:.3f}" for score in scores)
            print(
                f"| {bound} | {'yes' if corrected else 'no'} | {shown(scores)} | {each} | {shown(apart_from_it) if bound else ''} | "
                f"{shown(last)} | {age:.2f} | {min(run['effective'] for run in runs):.2f} |",
                flush=True,
            )


def shown(values: list[float]) -> str:
    """Mean, and half of its 95% interval over the seeds."""
    from covey.evaluation.intervals import mean_of_few

    found = mean_of_few(values)
    return f"{found.value:.3f} ± {(found.high - found.low) / 2:.3f}"


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        print(json.dumps(one_run(**json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "curves"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="width of the timed model")
    given = parser.parse_args()
    (times if given.what == "time" else curves)(given)


if __name__ == "__main__":
    main()
