"""With an adapter the reference is the base model, and no second copy of it; weights stay in float32 under bfloat16 products."""

import pytest
import torch
from datasets import Dataset
from whole_logits import groups

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.config import checks
from covey.kernels import HalfWeights
from covey.learner import AdapterCopy, Policy
from covey.learner.packing import rows_of
from kit import learner_of, tiny_model, tiny_tokenizer

ROWS = rows_of(groups())


@pytest.fixture
def adapted():
    """Two copies of one model, the first with a fresh adapter on it."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(tiny_model(), lora).eval(), tiny_model().eval()


def test_while_the_adapter_learns_the_reference_stays_the_base_model(adapted):
    model, base = adapted
    policy = Policy(model, pad_id=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    one = learner_of(policy, optimizer, reference=AdapterCopy.of(policy), max_completion_length=24)
    algorithm = alg.grpo(kl=alg.KL(coefficient=0.04))
    for step in range(3):
        one.step(one.annotate(groups(), algorithm), algorithm, step)
    reference = one.reference.measure(ROWS).logp
    torch.testing.assert_close(reference, Policy(base, pad_id=0).measure(ROWS).logp.detach(), rtol=1e-5, atol=1e-5)
    with torch.no_grad(), model.disable_adapter():
        off = policy.measure(ROWS).logp
    torch.testing.assert_close(reference, off, rtol=1e-5, atol=1e-5, msg="that is the model with its adapter off")
    assert (policy.measure(ROWS).logp - reference).abs().max() > 1e-2, "the adapter has learnt"


def test_the_reference_holds_the_adapter_once_more_and_nothing_of_the_base_model(adapted):
    model, _ = adapted
    reference = AdapterCopy.of(Policy(model, pad_id=0))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(kept.numel() for kept in reference.weights().values()) == trained
    assert reference.policy.model is model


@pytest.mark.parametrize("bias", ["none", "all"])
def test_the_reference_of_a_policy_that_computes_with_16_bit_copies_is_computed_with_its_own_adapter(bias):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", bias=bias)
    model = get_peft_model(tiny_model(), lora).eval()
    half = HalfWeights(model, torch.bfloat16, (model.get_output_embeddings(),))  # as `on_accelerator` makes on a GPU
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, half=half)
    reference = AdapterCopy.of(policy)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (bias == "none" or name.endswith("bias")):
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    one = learner_of(policy, torch.optim.SGD(policy.parameters()), reference=reference, max_completion_length=24)
    done = one.measured(groups(), alg.Needs(old_logp=True, ref_logp=True))
    with torch.no_grad():  # outside of a step no copy is read
        policy_logp, reference_logp = policy.measure(ROWS).logp, reference.measure(ROWS).logp
    assert (policy_logp - reference_logp).abs().max() > 0.1
    completions = [completion for group in done for completion in group.completions]
    for row, completion in enumerate(completions):
        count = completion.num_tokens
        assert (completion.old_logp - policy_logp[row, :count]).abs().mean() < 0.02
        assert (completion.ref_logp - reference_logp[row, :count]).abs().mean() < 0.02


def test_under_bfloat16_products_weights_gradients_and_optimizer_are_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checks, "processor_has_bfloat16", lambda: True
    )  # where it has not, torch computes the same, slowly
    args = GRPOConfig(
        output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to="none", num_generations=4, max_steps=1,
        per_device_train_batch_size=8, max_completion_length=8, learning_rate=1e-9, rollout_dtype="float32",
    )  # fmt: skip
    one = GRPOTrainer(
        model=tiny_model(),
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        args=args,
    )
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    one.train()
    assert one._running.learner.policy.compute_dtype == torch.bfloat16
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.float32}
    states = [value for state in one.optimizer.state.values() for value in state.values() if value.ndim]
    assert {value.dtype for value in states} == {torch.float32}
    moved = [not torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True)]
    assert any(moved), "an update of 1e-9 would be rounded away in bfloat16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_activations_that_wait_in_the_hosts_memory_change_no_gradient_and_take_less_of_the_gpus():
    def gradients(offloads):
        model = tiny_model(layers=4, hidden=256, max_position_embeddings=1024).cuda()
        policy = Policy(model, pad_id=0, offloads=offloads)
        policy.shares_prompts()
        torch.cuda.reset_peak_memory_stats()
        policy.measure(rows_of(groups(length=800))).logp.sum().backward()
        peak = torch.cuda.max_memory_allocated()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), peak

    (kept, more), (offloaded, less) = gradients(False), gradients(True)
    assert (offloaded - kept).norm() < 1e-5 * kept.norm()
    assert less < more
