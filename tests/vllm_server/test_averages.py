"""Averaged weights beside asynchronous rollouts of a server: evaluated by an engine of this process, in the run's own precision."""

from __future__ import annotations

import pytest
from fake_server import FakeServer

from combinations.combined_run import policy, trainer
from covey import GRPOConfig
from covey.errors import ConfigError
from covey.rollout import SamplingParams
from kit import tiny_tokenizer

AHEAD = {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True, "ema_decay": 0.5}


@pytest.mark.filterwarnings("ignore")
def test_the_engine_that_evaluates_computes_as_the_run_asks(tmp_path):
    with FakeServer(policy(), tiny_tokenizer()) as fake:
        options = AHEAD | {"vllm_server_port": fake.port, "rollout_dtype": "bfloat16", "cast_lm_head_to_fp32": True}
        run = trainer(tmp_path, {"options": {**options, "rollout_max_rows": 3, "max_steps": 1}})
        run.train()
        sampler = run._parts.evaluation_sampler
        (group,) = sampler.sample(["2 + 2 ="], 1, SamplingParams(max_tokens=4))
    assert sampler.max_rows == 3
    assert sampler.float32_head
    assert sampler.dtype == "bfloat16"
    assert group.completions


def test_a_regular_expression_that_evaluations_would_not_keep_is_refused(tmp_path):
    options = {**AHEAD, "vllm_structured_outputs_regex": "[0-9]+", "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ConfigError, match="knows no vllm_structured_outputs_regex"):
        GRPOConfig(str(tmp_path), **options, use_cpu=True, bf16=False)
    for name in ("eval_strategy", "ema_decay", "async_rollouts"):
        GRPOConfig(
            str(tmp_path),
            **{key: value for key, value in options.items() if key not in (name, "eval_steps")},
            use_cpu=True,
            bf16=False,
        )
