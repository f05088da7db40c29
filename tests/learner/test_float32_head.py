"""`cast_lm_head_to_fp32`: logits are a float32 product, in the learner and in each sampler, whatever the rest is computed in."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.learner.packing import Row, pad_rows
from covey.learner.policy import Policy
from covey.learner.reference import FrozenCopy
from covey.learner.trials import find_head
from covey.models import decoder_of, float32_stream
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from covey.types import Completion, Prompt
from kit import tiny_model, tiny_tokenizer

PROMPT, COMPLETION = (5, 6, 7, 8), (9, 10, 11, 12, 13)
ROWS = [
    Row(
        prompt=Prompt(uid="0", token_ids=PROMPT),
        completion=Completion(token_ids=torch.tensor(COMPLETION), text="", finish="stop"),
        group=0,
        advantage=torch.zeros(()),
        counts=torch.ones(len(COMPLETION), dtype=torch.bool),
    )
]


def half_model(**options):
    return tiny_model("qwen2", layers=2, hidden=64, dtype=torch.bfloat16, **options).eval()


def by_hand(measured, weight):
    """Log-probabilities [T] of the completion from a float32 product of the very hidden states that were measured."""
    rows = pad_rows(ROWS, 0, torch.device("cpu"))
    logits = F.linear(measured.hidden.detach().float(), weight)
    return torch.log_softmax(logits, -1).gather(-1, rows.target[:, None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["autocast over float32 weights", "bfloat16 weights"])
def test_the_learner_takes_the_product_in_float32(dtype):
    model = tiny_model("qwen2", layers=2, hidden=64).eval() if dtype else half_model()
    weight = model.lm_head.weight.detach().float()
    with_it = Policy(model, pad_id=0, compute_dtype=dtype, float32_head=True).measure(ROWS)
    without = Policy(model, pad_id=0, compute_dtype=dtype).measure(ROWS)
    torch.testing.assert_close(with_it.logp[0].detach(), by_hand(with_it, weight), rtol=1e-6, atol=1e-6)
    assert (without.logp[0] - by_hand(without, weight)).abs().max() > 1e-5, "the product in bfloat16 is another number"


def test_the_gradient_is_that_of_the_float32_product():
    model = half_model(tie_word_embeddings=False)
    measured = Policy(model, pad_id=0, float32_head=True).measure(ROWS)
    measured.logp.sum().backward()
    weight = model.lm_head.weight.detach().float().requires_grad_()
    by_hand(measured, weight).sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad, weight.grad.to(torch.bfloat16))


def test_an_adapter_on_the_output_layer_is_part_of_the_product():
    half = half_model(tie_word_embeddings=False)
    model = get_peft_model(half, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)).eval()
    head = find_head(model).project
    weight = head.base_layer.weight.detach().float() + head.get_delta_weight("default").detach().float()
    measured = Policy(model, pad_id=0, float32_head=True).measure(ROWS)
    torch.testing.assert_close(measured.logp[0].detach(), by_hand(measured, weight), rtol=1e-3, atol=1e-3)
    measured.logp.sum().backward()
    assert head.lora_A["default"].weight.grad.abs().sum() > 0


def test_the_reference_is_measured_like_the_policy():
    policy = Policy(half_model(), pad_id=0, float32_head=True)
    assert torch.equal(FrozenCopy.of(policy).measure(ROWS).logp, policy.measure(ROWS).logp.detach())


def recorded(sampler, monkeypatch):
    """The logits of each decode step, as they come."""
    decode, seen = sampler.forward.decode, []
    monkeypatch.setattr(sampler.forward, "decode", lambda *given: seen.append(decode(*given).clone()) or seen[-1])
    return seen


@pytest.mark.parametrize("family", ["qwen2", "gemma2"], ids=["written out", "by modules"])
def test_the_native_sampler_draws_from_logits_of_float32(family, monkeypatch):
    model = tiny_model(family, layers=2, hidden=64, dtype=torch.bfloat16).eval()
    before = dict(model.lm_head.__dict__)
    for wide in (False, True):
        sampler = NativeSampler(model, tiny_tokenizer(), float32_head=wide)
        seen = recorded(sampler, monkeypatch)
        list(sampler.sample(["Tom has"], 2, SamplingParams(max_tokens=4, seed=1)))
        is_rounded = all(torch.equal(logits.float(), logits.to(torch.bfloat16).float()) for logits in seen)
        assert is_rounded is not wide
    assert dict(model.lm_head.__dict__) == before, "the user's model is as it was"


def test_the_transformers_sampler_draws_from_the_float32_product():
    model, found = half_model(), {}
    for wide in (False, True):
        sampler = TransformersSampler(model, tiny_tokenizer(), float32_head=wide)
        (group,) = sampler.sample(["Tom has"], 2, SamplingParams(max_tokens=12, seed=1))
        gaps = []
        for one in group.completions:
            ids = torch.tensor([[*group.prompt.token_ids, *one.token_ids.tolist()]])
            with torch.no_grad(), float32_stream(model):
                hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            logits = F.linear(hidden.float(), model.lm_head.weight.detach().float())
            start = len(group.prompt.token_ids)
            logp = torch.log_softmax(logits[0], -1)[start - 1 : -1].gather(-1, one.token_ids[:, None]).squeeze(-1)
            gaps.append((one.logprobs - logp).abs())
        found[wide] = torch.cat(gaps).mean()
    assert found[True] < 0.5 * found[False]


def test_a_model_that_cannot_be_split_is_refused():
    model = tiny_model("llama").eval()
    forward = model.forward
    model.forward = lambda *args, **kwargs: _tripled(forward(*args, **kwargs))
    with pytest.raises(ConfigError, match="cast_lm_head_to_fp32=True, but the output layer of LlamaForCausalLM cannot"):
        Policy(model, pad_id=0, float32_head=True).expect_float32_head()


def _tripled(output):
    output.logits = output.logits * 3.0
    return output


def test_a_run_hands_the_option_to_learner_and_sampler(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), cast_lm_head_to_fp32=True, max_steps=1, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=4, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rewards = lambda completions, **columns: [float(len(one)) for one in completions]
    data = Dataset.from_list([{"prompt": "Tom has"}])
    run = GRPOTrainer(half_model(), rewards, args, data, processing_class=tiny_tokenizer())
    run.train()
    assert run._running.learner.policy.float32_head
    assert run._running.sampler.forward.float32_head
