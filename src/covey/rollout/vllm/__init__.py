"""vLLM as a sampler: in this process (`VLLMSampler`), or a server (`ServerSampler`) whose weights are verified."""

from covey.rollout.vllm.colocated import VLLMSampler, expect_vllm
from covey.rollout.vllm.sampler import ServerSampler
from covey.rollout.vllm.weights import plain_weights

__all__ = ["ServerSampler", "VLLMSampler", "expect_vllm", "plain_weights"]
