"""Prompts computed once a group: the numbers and gradients of one row at a time, with less work."""

import pytest
import torch
from shared_rows import ROWS, A, B, assert_same, biased_by_distance, checkpointing, gradients, policy_by, row

from covey.kernels.attention_product import Layout
from covey.kernels.shared_attention import SharedAttention
from covey.learner.packing import tokens_in
from covey.learner.policy import Policy
from covey.learner.shared_prompt import SharedRows, share_rows
from kit import rest_nightly, tiny_model

KERNELS = ["one function on a CPU", "SDPA by part, as on other devices", "FlexAttention, as on CUDA, uncompiled"]


@pytest.mark.parametrize("recomputes", rest_nightly([False, True], 1))
@pytest.mark.parametrize(
    "architecture, kernel",
    [(architecture, kernel) for architecture in ("qwen2", "qwen3", "llama", "gpt2") for kernel in KERNELS[:2]]
    + [pytest.param(name, KERNELS[2], marks=pytest.mark.nightly) for name in ("qwen2", "qwen3", "llama", "gpt2")],
)
def test_sharing_equals_one_row_at_a_time_in_value_and_gradient(architecture, recomputes, kernel, flex_on_a_cpu):
    """Rotary and learned positions, grouped queries, norms of queries and keys."""
    model = tiny_model(architecture).eval()
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    policy = policy_by(kernel, checkpointing(model) if recomputes else model)
    assert_same(gradients(policy, [ROWS]), apart)


OTHERS = {
    "cohere": {"logit_scale": 0.25},
    "gemma": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "olmo2": {},
    "phi3": {"sliding_window": None, "pad_token_id": 0},
    "starcoder2": {"sliding_window": None, "attention_dropout": 0.0},
}
"""Architectures of transformers, with options that make them differ from each other."""


@pytest.mark.parametrize(
    "architecture, kernel",
    rest_nightly(
        [(name, KERNELS[0]) for name in OTHERS], [(name, KERNELS[0]) for name in ("mixtral", "gpt_neox", "olmo2")]
    )
    + [
        pytest.param(name, KERNELS[2], marks=pytest.mark.slow if name == "granite" else pytest.mark.nightly)
        for name in OTHERS
    ],
)
def test_sharing_is_exact_for_architectures_of_every_kind(architecture, kernel, flex_on_a_cpu):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "bos_token_id": None, "eos_token_id": 2}
    config = AutoConfig.for_model(architecture, **shape, **OTHERS[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    assert_same(gradients(policy_by(kernel, model), [ROWS]), apart)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_attention_of_a_packed_row_is_that_of_each_completion_behind_its_prompt(dtype):
    """Three prompts (one without answers, one answer empty), grouped queries, in value and in all three gradients."""
    torch.manual_seed(0)
    heads, shared_heads, width = 4, 2, 16
    layouts = (Layout(0, 5, (3, 0, 7)), Layout(15, 2, ()), Layout(17, 1, (600, 1)))
    size = 17 + 1 + 601
    make = lambda h: torch.randn(h, size, width, dtype=torch.float64)
    leaves = [make(heads), make(shared_heads), make(shared_heads)]
    sign = make(heads)

    def one_by_one(query, key, value):
        out = torch.zeros_like(query)
        wide = lambda x: x.repeat_interleave(heads // shared_heads, 0)
        for layout in layouts:
            prompt = torch.arange(size)[layout.prompt]
            for place in [None, *layout.each_answer()]:
                own = prompt if place is None else torch.arange(size)[place]
                seen = prompt if place is None else torch.cat([prompt, own])
                scores = query[:, own] @ wide(key)[:, seen].transpose(1, 2) * width**-0.5
                late = torch.arange(len(seen)) > torch.arange(len(seen) - len(own), len(seen))[:, None]
                out[:, own] = scores.masked_fill(late, -torch.inf).softmax(-1) @ wide(value)[:, seen]
        return out

    def run(function, kind):
        given = [leaf.to(kind).requires_grad_() for leaf in leaves]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad((out * sign.to(kind)).sum(), given)]

    want = run(one_by_one, torch.float64)
    got = run(lambda *given: SharedAttention.apply(*given, layouts, width**-0.5), dtype)
    slack = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() / other.norm() < slack


@pytest.mark.parametrize("kernel", [*KERNELS[:2], pytest.param(KERNELS[2], marks=pytest.mark.nightly)])
@pytest.mark.parametrize("recomputes", rest_nightly([False, True], [True]))
def test_an_adapter_gets_the_same_gradient(kernel, recomputes, flex_on_a_cpu):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen2"), lora).eval()
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    assert all("lora" in name for name in apart[1])
    if recomputes:
        checkpointing(model.get_base_model()).enable_input_require_grads()
    assert_same(gradients(policy_by(kernel, model), [ROWS]), apart)


def test_a_model_that_cannot_share_is_measured_row_by_row_and_says_why(caplog):
    model = biased_by_distance()
    policy = Policy(model, pad_id=0)
    together = gradients(policy, [ROWS])
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    assert not policy._is_shared
    assert "each prompt once a completion: its attention is biased by the distance" in caplog.text
    for got, want in zip(together[0], apart[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_there_once_last_tokens_are_not_and_positions_are_those_of_one_row():
    packed = share_rows(ROWS, torch.device("cpu"))
    assert isinstance(packed, SharedRows)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 20, 12, 13, 16, 17, 18]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 0, 1, 2, 3, 4]]
    assert tokens_in(ROWS, shares_prompts=True) == 12


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_completions_of_one_token_are_predicted_by_the_prompt_alone(kernel):
    rows = [row(0, A, [9]), row(0, A, [10]), row(1, B, [14, 15])]
    policy = Policy(tiny_model(), pad_id=0, shared_attention=kernel)
    together = gradients(policy, [rows])
    assert policy._is_shared
    assert_same(together, gradients(policy, [[one] for one in rows]))


def test_the_model_still_generates_and_saves_as_before(tmp_path):
    model = tiny_model("llama").eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    want = model.generate(ids, max_new_tokens=5, do_sample=False)
    mask = torch.tensor([[0, 1, 1, 1]])
    logits = model(ids, attention_mask=mask).logits
    policy = Policy(model, pad_id=0)
    policy.measure(ROWS)
    assert policy._is_shared
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), want)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 1:], logits[:, 1:])
    model.save_pretrained(tmp_path)
    assert "covey" not in (tmp_path / "config.json").read_text()
