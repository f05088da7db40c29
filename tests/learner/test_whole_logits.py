"""No more logits than a chunk exist in a whole forward and backward of a model, and its log-probabilities are still its own."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from whole_logits import groups

from covey import algorithms as alg
from covey.learner import FrozenCopy, Policy
from covey.learner.packing import pad_rows, rows_of
from kit import learner_of, rest_nightly

VOCABULARY, HIDDEN, CHUNK = 997, 32, 8

MODELS = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "soft-capped": ("gemma2", {"final_logit_softcapping": 5.0}),
    "multiplied": ("cohere", {"logit_scale": 0.25}),
    "divided": ("granite", {"logits_scaling": 3.0}),
    "with biases": ("phi", {"tie_word_embeddings": False}),
}
"""What stands between hidden states and logits: the architecture and its options."""


def model_of(architecture, **options):
    shape = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**shape, "pad_token_id": 0, **options})
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(model):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(model, lora).eval()


def with_experts(**options):
    return model_of("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **options)


class Widest(TorchDispatchMode):
    """The most rows of any tensor whose last dimension is the vocabulary, of forward and backward; not the head's weight."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY:
                rows = tensor.numel() // VOCABULARY
                self.rows = max(self.rows, rows if rows != HIDDEN else 0)  # [D, V] is the weight's transpose
        return out


def widest(policy, rows, **options):
    policy.measure(rows)  # what is tried once is tried here
    with Widest() as seen:
        measured = policy.measure(rows, entropy=True, **options)
        total = measured.logp.sum() + measured.entropy.sum()
        balance = None if measured.balance is None else measured.balance.loss()
        for one in (measured.distance, balance):
            total = total if one is None else total + one.sum()
        total.backward()
    return seen.rows


@pytest.mark.parametrize("kind", rest_nightly(["an adapter on the head", *MODELS], 3))
def test_no_more_logits_than_a_chunk_exist_in_a_forward_and_backward_of_a_model(kind):
    model = adapted(model_of("llama", tie_word_embeddings=False)) if kind not in MODELS else None
    model = model or model_of(MODELS[kind][0], **MODELS[kind][1])
    rows = rows_of(groups())
    assert sum(row.completion.num_tokens for row in rows) > 2 * CHUNK
    assert widest(Policy(model, pad_id=0, logits_chunk=CHUNK), rows) == CHUNK


def test_nor_where_another_model_is_compared_with():
    policy = Policy(model_of("qwen2"), pad_id=0, logits_chunk=CHUNK)
    against = FrozenCopy.of(policy).against(alg.full)
    assert widest(policy, rows_of(groups()), against=against) == CHUNK


def test_nor_where_a_router_has_a_loss_of_its_own():
    policy = Policy(with_experts(), pad_id=0, logits_chunk=CHUNK, auxiliary_coefficient=0.1)
    assert widest(policy, rows_of(groups())) == CHUNK


def test_the_watch_sees_whole_logits_where_they_exist():
    model, rows = model_of("qwen2"), rows_of(groups())
    with Widest() as seen:
        model(input_ids=pad_rows(rows, 0, torch.device("cpu")).input_ids).logits.sum().backward()
    assert seen.rows >= sum(row.completion.num_tokens for row in rows)


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_the_models_own_logits(kind):
    model = model_of(MODELS[kind][0], **MODELS[kind][1])
    rows = rows_of(groups())

    def gradients(logp, mask):
        weight = torch.linspace(-1, 1, logp.shape[1])
        model.zero_grad()
        (logp * weight * mask).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    measured = Policy(model, pad_id=0, logits_chunk=CHUNK).measure(rows)
    mask = torch.stack([torch.arange(measured.logp.shape[1]) < row.completion.num_tokens for row in rows])
    got = gradients(measured.logp, mask)
    padded = pad_rows(rows, 0, torch.device("cpu"))
    whole = model(input_ids=padded.input_ids, use_cache=False).logits.log_softmax(-1)
    wanted = padded.spread(whole.flatten(0, 1)[padded.source].gather(-1, padded.target[:, None]).squeeze(-1))
    torch.testing.assert_close(measured.logp, wanted, rtol=1e-5, atol=1e-5)
    want = gradients(wanted, mask)
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("most, fitting", [(8, 8), (4, 8), (2, 8), (1, 8), (8, 2)])
def test_the_loss_of_a_router_is_kept_and_weighed(most, fitting, monkeypatch):
    """Without advantages a step follows the balancing loss alone: its coefficient times the model's own, however it is split."""
    model = with_experts()
    silent = [replace(one, advantages=torch.zeros(3)) for one in groups()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = Policy(model, pad_id=0, auxiliary_coefficient=0.1)
    options = {"max_rows": most, "max_grad_norm": 0.0, "disable_dropout": True}
    learner = learner_of(policy, optimizer, max_completion_length=24, **options)
    measure = policy.measure

    def measured(rows, **more):
        if len(rows) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(rows, **more)

    monkeypatch.setattr(policy, "measure", measured)
    padded = pad_rows(rows_of(silent), 0, torch.device("cpu"))
    given = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
    own = model(**given, use_cache=False, output_router_logits=True).aux_loss
    names = [name for name, _ in model.named_parameters()]
    wanted = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    report = learner.step(silent, alg.dapo(), 1)
    assert report["aux_loss"] == pytest.approx(own.item(), rel=1e-5)
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    whole = torch.stack([one.norm() for one in wanted if one is not None]).norm()
    for name, step, slope in zip(names, moved, wanted, strict=True):
        slope = torch.zeros_like(step) if slope is None else slope
        assert (step - 0.1 * slope).norm() < 1e-4 * whole, name
    router = next(i for i, name in enumerate(names) if name.endswith("gate.weight"))
    assert moved[router].norm() > 0
