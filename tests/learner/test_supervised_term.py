"""The supervised term: its gradient by hand, the same examples after a resume, and the forms of an example."""

import json

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.data.examples import encode_example, load_examples
from covey.errors import ConfigError, DataError
from covey.learner import Policy
from covey.training.teaching import build_supervised
from kit import group, learner_of, prompt, tiny_model, tiny_tokenizer

EXAMPLES = [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "12 + 30 =", "completion": " 42 #### 42"}]
EOS = tiny_tokenizer().eos_token_id


def supervised(policy, algorithm, seed=0):
    return build_supervised(algorithm, policy, tiny_tokenizer(), (EOS,), {}, seed)


def test_the_gradient_is_the_weighted_mean_over_completion_tokens():
    model = tiny_model("qwen2")
    policy = Policy(model, pad_id=0, temperature=0.5)
    algorithm = alg.dapo().replace(objective=alg.zero, regularizers=alg.sft(Dataset.from_list(EXAMPLES), 0.3, 2))
    term = supervised(policy, algorithm)
    learner = learner_of(
        policy, torch.optim.SGD(model.parameters(), lr=1.0), max_completion_length=8, max_grad_norm=0.0, supervised=term
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    from dataclasses import replace

    drawn = replace(group(["4", "5"], rewards=[[1.0], [0.0]]), advantages=torch.tensor([1.0, -1.0]))
    report = learner.step([drawn], algorithm, 1)
    got = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    losses = []
    for one in term.rows(1):
        ids = torch.tensor([[*one.prompt.token_ids, *one.completion.token_ids.tolist()]])
        logp = torch.log_softmax(model(ids).logits[0, len(one.prompt.token_ids) - 1 : -1], -1)
        losses.append(-logp.gather(-1, one.completion.token_ids[:, None]).squeeze(-1))
    model.zero_grad()
    (0.3 * torch.cat(losses).mean()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5)
    assert report["sft/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_a_step_draws_its_examples_by_its_number_and_an_epoch_takes_each_once():
    examples = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(5)]
    algorithm = alg.dapo().replace(regularizers=alg.sft(Dataset.from_list(examples), 0.1, 2))
    policy = Policy(tiny_model("qwen2"), pad_id=0)
    uids = lambda term, steps: [one.prompt.uid for step in steps for one in term.rows(step)]
    first = uids(supervised(policy, algorithm), range(1, 6))
    assert sorted(first[:5]) == sorted(first[5:]) == [f"sft:{n}" for n in range(5)]
    assert first[:5] != first[5:]
    assert uids(supervised(policy, algorithm), [3, 5]) == first[4:6] + first[8:10]
    assert uids(supervised(policy, algorithm, seed=1), range(1, 6)) != first


def test_text_is_encoded_as_the_model_meets_it_and_ends_with_the_end():
    tokenizer = tiny_tokenizer()
    done = encode_example(prompt("2 + 2 =", tokenizer=tokenizer), " 4", tokenizer, (EOS,), {})
    assert done.token_ids.tolist() == [*tokenizer(" 4")["input_ids"], EOS]


def test_a_chat_is_cut_at_the_token_where_the_model_stops():
    tokenizer = tiny_tokenizer()
    chat = prompt([{"role": "user", "content": "2 + 2?"}], tokenizer=tokenizer)
    for wanted in ("4", [{"role": "assistant", "content": "4"}]):
        done = encode_example(chat, wanted, tokenizer, (EOS,), {})
        assert tokenizer.decode(done.token_ids) == "4<|im_end|>"


def test_messages_are_parted_at_the_assistants_last(tmp_path):
    file = tmp_path / "chats.jsonl"
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    file.write_text(json.dumps({"messages": talk}) + "\n")
    found = load_examples(str(file))[0]
    assert [m["content"] for m in found["prompt"]] == ["a", "b", "c"]
    assert [m["content"] for m in found["completion"]] == ["d"]


def test_what_is_no_example_is_refused_in_a_sentence():
    with pytest.raises(DataError, match="it needs columns 'prompt' and 'completion', 'messages' or.*it has text"):
        load_examples(Dataset.from_list([{"text": "a"}]))
    with pytest.raises(DataError, match="does not end with a message of the assistant"):
        load_examples(Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}]))
    with pytest.raises(ConfigError, match="weight=0 must be above 0"):
        alg.sft("a", 0)
    twice = alg.dapo().replace(regularizers=(alg.sft("a"), alg.sft("b")))
    with pytest.raises(ConfigError, match="several sft terms"):
        supervised(Policy(tiny_model("qwen2"), pad_id=0), twice)


def test_it_trains_by_name_beside_a_reward(tmp_path):
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in EXAMPLES))
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, max_steps=5, max_completion_length=6, learning_rate=1e-2,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        algorithm=f"dapo, regularizer=sft(dataset='{file}', weight=1.0, batch_size=4)",
    )  # fmt: skip
    one = GRPOTrainer(
        model=tiny_model("qwen2"), reward_funcs=lambda completions, **columns: [float(len(c)) for c in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": "Tom has 3 apples."}] * 4), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    one.train()
    curve = [entry["sft/loss"] for entry in one.state.log_history if "sft/loss" in entry]
    assert len(curve) == 5
    assert curve[-1] < curve[0] - 0.5
