"""Reward models from pairs: the Bradley-Terry gradient, the forms of a pair, and the accuracy that is told."""

import json
from dataclasses import fields

import pytest
import torch
from transformers import TrainingArguments

from covey.cli import main
from covey.errors import DataError
from covey.rewards.builtin.registry import resolve
from covey.rewards.builtin.reward_model import ModelReward
from covey.rewards.preference import Pair, PreferenceOptions, by_prompt, judge, parted_by_prompt, train
from covey.rewards.steps import load_examples
from kit import tiny_reward_model, tiny_tokenizer

PAIRS = [Pair(f"{n} + {n} =", f" {2 * n} apples", f" {2 * n}") for n in range(24)]


def reward_of(**config):
    reward = ModelReward.of(tiny_reward_model(**config), tiny_tokenizer())
    reward.model.requires_grad_(True)
    return reward


def test_an_update_is_that_of_the_bradley_terry_likelihood():
    """AdamW's first step is the rate times the sign of the gradient, which is that of the definition."""
    reward = reward_of()
    before = {name: p.detach().clone() for name, p in reward.model.named_parameters()}
    score = lambda one, text: reward.model(input_ids=torch.tensor([reward.encode(one.prompt, text)])).logits[0, 0]
    margins = torch.stack([score(one, one.chosen) - score(one, one.rejected) for one in PAIRS[:4]])
    (-torch.log(1 / (1 + (-margins).exp()))).mean().backward()
    wanted = {name: p.grad.clone() for name, p in reward.model.named_parameters()}
    reward.model.zero_grad()
    losses = []
    options = PreferenceOptions(per_device_train_batch_size=4, learning_rate=1e-4, max_grad_norm=0.0)
    train(reward, PAIRS[:4], options, lambda step, total, loss: losses.append(loss))
    assert losses == [pytest.approx(torch.log1p((-margins).exp()).mean().item(), rel=1e-4)]
    for name, parameter in reward.model.named_parameters():
        clear = wanted[name].abs() > 1e-4
        assert torch.equal((parameter - before[name]).sign()[clear], -wanted[name].sign()[clear])


def test_it_learns_the_order_and_centring_keeps_rewards_around_zero():
    spread = {}
    for coefficient in (0.0, 0.1):
        reward = reward_of(hidden=32)
        options = PreferenceOptions(
            num_train_epochs=10,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            center_rewards_coefficient=coefficient,
        )
        train(reward, PAIRS[:16], options, lambda *told: None)
        assert judge(reward, PAIRS[16:]).right == [1.0] * 8
        both = [reward([p.prompt], [text])[0].item() for p in PAIRS[16:] for text in (p.chosen, p.rejected)]
        spread[coefficient] = abs(sum(both) / len(both))
    assert spread[0.1] < 0.5


@pytest.mark.parametrize("max_steps, updates", [(-1, 3), (2, 2), (7, 7)])
def test_max_steps_is_the_number_of_updates_whatever_the_epochs(max_steps, updates):
    told = []
    options = PreferenceOptions(per_device_train_batch_size=8, max_steps=max_steps)
    train(reward_of(), PAIRS, options, lambda step, total, loss: told.append((step, total)))
    assert told == [(step, updates) for step in range(1, updates + 1)]


@pytest.mark.parametrize("word, said", [("--max-steps", "max_steps=0 must be 1 or more"), ("--steps", "--max-steps")])
def test_a_wrong_number_of_updates_is_said_before_anything_is_read(tmp_path, capsys, word, said):
    (tmp_path / "a.jsonl").write_text("no pairs")
    data, output = str(tmp_path / "a.jsonl"), str(tmp_path / "judge")
    assert main(["reward", "train", "--model", "demo", "--dataset", data, "-o", output, word, "0"]) == 2
    assert said in capsys.readouterr().err


def test_pairs_are_texts_messages_or_whole_conversations(tmp_path):
    say = lambda role, text: {"role": role, "content": text}
    for name, row in {
        "texts": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "messages": {
            "prompt": [say("user", "a")],
            "chosen": [say("assistant", "b")],
            "rejected": [say("assistant", "c")],
        },
        "whole": {
            "chosen": [say("user", "a"), say("assistant", "b")],
            "rejected": [say("user", "a"), say("assistant", "c")],
        },
    }.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        (pair,) = load_examples(str(file))
        said = [pair.prompt, pair.chosen, pair.rejected]
        assert [one if isinstance(one, str) else one[0]["content"] for one in said] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "a", "completion": "b"}, "needs the columns chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no two different completions"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}, "different forms"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path, row, said):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=said):
        load_examples(str(file))


def test_held_out_pairs_have_prompts_of_their_own():
    pairs = [*PAIRS, *[Pair(p.prompt, p.chosen, "other") for p in PAIRS]]
    kept, held = parted_by_prompt(pairs, 0.25, seed=0)
    assert len(kept) + len(held) == 48
    assert len(held) == 12
    assert not {p.prompt for p in kept} & {p.prompt for p in held}
    assert parted_by_prompt(pairs, 0.25, seed=1)[1] != held


def test_pairs_without_a_prompt_are_each_their_own():
    pairs = [Pair("", f"right {n}", f"wrong {n}") for n in range(20)]
    kept, held = parted_by_prompt(pairs, 0.1, seed=0)
    assert (len(kept), len(held)) == (18, 2)
    assert by_prompt(pairs, range(20)) == [[n] for n in range(20)]


@pytest.mark.nightly
def test_many_pairs_of_few_prompts_tell_no_more_than_the_prompts(tmp_path, capsys):
    """Eighty pairs of eight prompts, all right: the interval is Wilson's for 8 of 8, from 1 / (1 + 1.96^2 / 8) on."""
    learnt, held = tmp_path / "learnt.jsonl", tmp_path / "held.jsonl"
    for file, pairs in ((learnt, PAIRS[:16]), (held, PAIRS[16:] * 10)):
        file.write_text("".join(json.dumps(vars(one)) + "\n" for one in pairs))
    words = ["reward", "train", "--model", "demo", "--dataset", str(learnt), "--eval-dataset", str(held), "--use-cpu"]
    words += ["-o", str(tmp_path / "judge"), "--learning-rate", "1e-3", "--num-train-epochs", "6", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["held_out"], told["held_out_prompts"], told["accuracy"]) == (80, 8, 1.0)
    assert told["interval"] == pytest.approx([0.676, 1.0], abs=5e-4)


@pytest.mark.slow
def test_the_command_writes_a_reward_and_tells_its_accuracy_with_an_interval(tmp_path, capsys):
    file, out = tmp_path / "pairs.jsonl", tmp_path / "judge"
    file.write_text("".join(json.dumps(vars(one)) + "\n" for one in PAIRS))
    words = [
        "reward",
        "train",
        "--model",
        "demo",
        "--dataset",
        str(file),
        "-o",
        str(out),
        "--use-cpu",
        "--held-out",
        "0.25",
    ]
    assert main([*words, "--num-train-epochs", "6", "--learning-rate", "1e-3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["held_out"] == 6
    assert told["interval"][0] <= told["accuracy"] <= told["interval"][1]
    assert told["accuracy"] == 1.0
    assert json.loads((out / "reward_training.json").read_text())["pairs"] == 18
    scores = resolve(str(out)).call(["5 + 5 ="] * 2, [" 10 apples", " 10"])
    assert scores[0] > scores[1]
    assert main([*words, "--json"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_training_options_have_the_names_of_transformers_and_trl():
    """Scored steps have two options of their own."""
    from covey.cli.reward_train import verb
    from covey.cli.serve import FLAGS

    theirs = {field.name for field in fields(TrainingArguments)} | {"center_rewards_coefficient"}
    training = {flag.name for flag in verb.flags() if flag.group == "training"}
    assert training - theirs == {"step_separator", "aggregate"}
    assert {"learning_rate", "per_device_train_batch_size"} <= {flag.name for flag in FLAGS} & theirs
