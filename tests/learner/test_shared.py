"""Prompts computed once a group: the numbers and gradients of one row at a time, with less work."""

import pytest
import torch

from covey.learner.packing import Row
from covey.learner.policy import Policy
from covey.learner.shared import SharedRows, share_rows
from covey.types import Completion, Prompt
from kit import tiny_model


def row(group, prompt, completion):
    ids = torch.tensor(completion)
    return Row(
        prompt=Prompt(uid=f"0:{group}", token_ids=tuple(prompt)),
        completion=Completion(token_ids=ids, text="", finish="stop"),
        group=group,
        advantage=torch.zeros(()),
        counts=torch.ones(len(ids), dtype=torch.bool),
    )


A, B = [5, 6, 7, 8], [12, 13]
ROWS = [row(0, A, [9, 10, 11]), row(1, B, [14]), row(0, A, [15]), row(1, B, [16, 17, 18, 19]), row(0, A, [20, 21])]


def gradients(policy, batches):
    policy.model.zero_grad()
    values = []
    for batch in batches:
        measured = policy.measure(batch, entropy=True)
        weight = 0.7 * torch.arange(measured.logp.shape[1]) - 1
        (measured.logp * weight + 0.3 * measured.entropy).sum().backward()
        values += [measured.logp[i, : one.completion.num_tokens].detach() for i, one in enumerate(batch)]
    return values, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharing_equals_one_row_at_a_time_in_value_and_gradient(architecture, checkpointing):
    model = tiny_model(architecture).eval()
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    if checkpointing:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    policy = Policy(model, pad_id=0)
    together = gradients(policy, [ROWS])
    assert policy._is_shared, "this architecture shares prompts"
    for got, want in zip(together[0], apart[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert together[1].keys() == apart[1].keys()
    for name, want in apart[1].items():
        scale = want.abs().max().item()
        torch.testing.assert_close(together[1][name], want, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


def test_an_adapter_gets_the_same_gradient():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        tiny_model("qwen2"), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ).eval()
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    policy = Policy(model, pad_id=0)
    together = gradients(policy, [ROWS])
    assert policy._is_shared
    for name, want in apart[1].items():
        torch.testing.assert_close(together[1][name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture, reason", [("gemma2", "layers|softcap"), ("mistral", "sliding")])
def test_a_model_that_cannot_share_is_measured_row_by_row_and_says_why(architecture, reason, caplog):
    model = tiny_model(architecture, sliding_window=4) if architecture == "mistral" else tiny_model(architecture)
    policy = Policy(model.eval(), pad_id=0)
    together = gradients(policy, [ROWS])
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    assert not policy._is_shared
    assert "each prompt once a completion" in caplog.text
    for got, want in zip(together[0], apart[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_there_once_and_positions_are_those_of_one_row():
    packed = share_rows(ROWS, torch.device("cpu"))
    assert isinstance(packed, SharedRows)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 15, 20, 21, 12, 13, 14, 16, 17, 18, 19]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 4, 5, 0, 1, 2, 2, 3, 4, 5]]


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
