"""A step and a rollout of an adapter on a 4-bit model, of one process or of two that share the model: `python quantized_split.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from two_process_work import groups_of

from covey import GRPOConfig
from covey import algorithms as alg
from covey.learner import Policy
from covey.learner.packing import rows_of
from covey.process.sharding import Sharding, is_sharded, local, whole, whole_state
from covey.process.world import World
from covey.rollout import GatheredSampler, NativeSampler, SamplingParams
from covey.rollout.vllm.weights import Source, digests_of
from covey.training.build_learner import networks_of
from kit import prompt, tiny_tokenizer

PARAMS = SamplingParams(max_tokens=5, seed=3)


def policy_of(folder: Path) -> Policy:
    """An adapter on the model in the folder, in 4 bits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized, dtype=torch.float32)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it packs weights for inference, as no GPU does
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return Policy(get_peft_model(model, adapter).train(), pad_id=0)


def done(folder: Path, world: World) -> dict:
    """Log-probabilities, their gradient, what is drawn after a step, what a server is sent, and the share of the packed weights that is held."""
    policy = networks_of(alg.dapo(), policy_of(folder), world, Sharding(), None).policy
    packed = [p for p in policy.model.parameters() if p.dtype == torch.uint8]
    logp = policy.measure(rows_of(groups_of(False)[:2])).logp
    logp.sum().backward()  # the processes read the same rows, so their sum is twice the gradient
    gradient = torch.cat([whole(p.grad).flatten() for p in policy.parameters()]) / world.size
    torch.optim.SGD(policy.parameters(), lr=0.01 / world.size).step()
    make = lambda model: NativeSampler(model, tiny_tokenizer(), dtype="float32")
    sampler = make(policy.model) if policy.shards is None else GatheredSampler(policy.shards, make)
    policy.model.train()  # bitsandbytes packs for inference in eval mode
    sampler.load(policy.model, 1)
    groups = list(sampler.sample([prompt("2 + 2 =")], 3, PARAMS))
    return {
        "logp": logp.detach(),
        "gradient": gradient,
        "names": {name for name in whole_state(policy.model, trained_only=True) if "lora" in name},
        "drawn": [one.token_ids.tolist() for group in groups for one in group.completions],
        "sent": digests_of(Source(policy.model, policy.shards).distinct(torch.float32)),
        "held": sum(local(p).numel() for p in packed) / sum(p.numel() for p in packed),
        "split": sum(map(is_sharded, packed)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    args = GRPOConfig(output_dir=str(Path(sys.argv[1]) / "none"), use_cpu=True, bf16=False, report_to="none")
    world = World.of(args)
    torch.save(done(Path(sys.argv[1]), world), Path(sys.argv[1]) / f"{world.size}-{world.rank}.pt")
