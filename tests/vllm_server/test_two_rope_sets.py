"""Two sets of rotary factors (`longrope`) in real vLLM: for every row it takes the set that a run takes at the same context length."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from real_server import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SCRIPT = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
import torch
from transformers import Phi3Config, Phi3ForCausalLM
from covey.models import context_limit, take_factors
from covey.rollout import SamplingParams
from covey.rollout.vllm.colocated import VLLMSampler
from covey.types import Prompt
from kit import tiny_tokenizer
from rollout.plain_sampling import plain_logprobs

torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0 + i / 8 for i in range(16)]}
config = Phi3Config(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=320,
    max_position_embeddings=64, original_max_position_embeddings=16, sliding_window=None,
    rope_parameters={**rope, "partial_rotary_factor": 1.0}, pad_token_id=0, bos_token_id=None, eos_token_id=2,
)
model = Phi3ForCausalLM(config).eval()
for name, weight in model.named_parameters():
    weight.data.mul_(8.0 if "proj" in name else 1.0)
length = int(sys.argv[1])
sampler = VLLMSampler(model, tiny_tokenizer(), eos_ids=[319], dtype="float32", gpu_memory_utilization=0.3, max_model_length=length)
params = SamplingParams(max_tokens=6, seed=3)
prompts = [Prompt(uid=f"0:{n}", token_ids=tuple(3 + i * 7 % 200 for i in range(n))) for n in (5, length - 8)]
groups = sorted(sampler.sample(prompts, 2, params), key=lambda group: len(group.prompt.token_ids))
gaps = {}
for factors in ("short", "long"):
    take_factors(model, factors)
    gaps[factors] = [
        float((one.logprobs - logp).abs().max())
        for group in groups for one, logp in zip(group.completions, plain_logprobs(model, group, params), strict=True)
    ]
print("RESULT " + json.dumps(gaps))
"""


@pytest.mark.parametrize("length, same, other", [(16, "short", "long"), (40, "long", "short")])
def test_vllm_takes_for_every_row_the_set_of_the_run_at_its_context_length(length, same, other, tmp_path):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests.parent / "src", tests, tests / "rollout")))
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, str(length)], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    results = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    gaps = json.loads(results[0])
    assert len(gaps[same]) == 4
    assert max(gaps[same]) < 1e-4
    assert min(gaps[other][:2]) > 1e-2  # of the short prompt; transformers takes the long set for a long row alone
