"""vLLM as a sampler: in this process (`VLLMSampler`), or a server (`ServerSampler`) whose weights are verified."""

from covey.rollout.vllm.choice import refuse_unfit
from covey.rollout.vllm.client import Address, Client, Deadlines
from covey.rollout.vllm.colocated import VLLMSampler, expect_vllm
from covey.rollout.vllm.sampler import ServerSampler
from covey.rollout.vllm.server import Server
from covey.rollout.vllm.transports import Carrier
from covey.rollout.vllm.weights import plain_weights

__all__ = [
    "Address", "Carrier", "Client", "Deadlines", "Server", "ServerSampler", "VLLMSampler", "expect_vllm",
    "plain_weights", "refuse_unfit",
]  # fmt: skip
