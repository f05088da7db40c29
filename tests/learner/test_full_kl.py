"""The KL over the whole vocabulary: the number and the gradient of the definition, a chunk of logits at a time."""

import pytest
import torch

from covey import algorithms as alg
from covey.errors import ConfigError
from covey.learner import AdapterCopy, FrozenCopy, Policy
from covey.learner.packing import Row
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


ROWS = [row(0, [5, 6, 7], [9, 10, 11]), row(0, [5, 6, 7], [15]), row(1, [8, 9], [20, 21])]


def by_definition(model, reference, one, temperature):
    ids = torch.tensor([[*one.prompt.token_ids, *one.completion.token_ids.tolist()]])
    start = len(one.prompt.token_ids) - 1
    logp = torch.log_softmax(model(ids).logits[0, start:-1] / temperature, -1)
    with torch.no_grad():
        ref = torch.log_softmax(reference(ids).logits[0, start:-1] / temperature, -1)
    return (logp.exp() * (logp - ref)).sum(-1)


def moved(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_value_and_gradient_are_those_of_the_definition(architecture, temperature):
    model = tiny_model(architecture).eval()
    policy = Policy(model, pad_id=0, temperature=temperature, logits_chunk=2)
    reference = FrozenCopy.of(policy)
    moved(model)
    measured = policy.measure(ROWS, against=reference.against(alg.full))
    assert measured.distance is not None
    measured.distance.sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    wanted = [by_definition(model, reference.policy.model, one, temperature) for one in ROWS]
    torch.cat(wanted).sum().backward()
    for i, want in enumerate(wanted):
        torch.testing.assert_close(measured.distance[i, : len(want)], want, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_an_adapter_is_measured_against_what_it_was_at_the_start():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    policy = Policy(adapted.eval(), pad_id=0)
    reference = AdapterCopy.of(policy)
    at_start = policy.measure(ROWS, against=reference.against(alg.full)).distance
    assert at_start.abs().max() < 1e-5
    moved(adapted)
    assert policy.measure(ROWS, against=reference.against(alg.full)).distance.max() > 1e-4


def test_an_adapter_on_the_output_layer_is_refused():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        tiny_model("qwen2", tie_word_embeddings=False), LoraConfig(r=2, target_modules=["lm_head"])
    )
    with pytest.raises(ConfigError, match="adapter on the output layer"):
        AdapterCopy.of(Policy(adapted, pad_id=0)).against(alg.full)


def test_in_the_reward_it_is_refused():
    with pytest.raises(ConfigError, match="acts in the loss"):
        alg.KL(alg.full, where="reward")


def test_it_trains_by_name_and_is_logged(tmp_path):
    from datasets import Dataset

    from covey import GRPOConfig, GRPOTrainer
    from kit import tiny_tokenizer

    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=3, max_completion_length=6, learning_rate=1e-2,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, algorithm="grpo, kl=full",
    )  # fmt: skip
    one = GRPOTrainer(
        model=tiny_model("qwen2"), reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": "Tom has 3 apples."}] * 4), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    one.train()
    curve = [entry["kl"] for entry in one.state.log_history[:-1]]
    assert curve[0] == pytest.approx(0.0, abs=1e-6)
    assert curve[-1] > curve[0]
