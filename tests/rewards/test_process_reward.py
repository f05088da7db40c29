"""Process rewards: steps as TRL's PRMTrainer encodes them, the likelihood of their labels, aggregates, and the two commands."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForTokenClassification
from transformers.utils import logging as hf_logging

from covey.cli import main
from covey.errors import ConfigError, DataError, ModelError
from covey.rewards.builtin.process_reward import ProcessReward
from covey.rewards.builtin.registry import resolve
from covey.rewards.preference import PreferenceOptions
from covey.rewards.steps import ScoredSteps, judge, load_examples, scored_steps, train
from kit import tiny_model, tiny_reward_model, tiny_tokenizer

RIGHT, WRONG = "{n} apples", "{n} pears"


def row(n):
    """Two steps; each is right that speaks of apples."""
    labels = (n % 3 != 0, n % 2 != 0)
    return ScoredSteps(f"{n} =", tuple((RIGHT if one else WRONG).format(n=n) for one in labels), labels)


ROWS = [row(n) for n in range(24)]


def reward_of(**options):
    config = tiny_reward_model(hidden=32).config
    config.num_labels, config.classifier_dropout = 2, 0.0
    torch.manual_seed(0)
    reward = ProcessReward(Qwen2ForTokenClassification(config), tokenizer=tiny_tokenizer(), **options)
    reward.frozen.model.requires_grad_(True)
    return reward


def test_steps_end_with_their_separator_and_are_judged_there():
    """TRL's PRMTrainer.tokenize_row: each step is encoded alone, the separator behind it, the label at its last token."""
    reward = reward_of(step_separator="\n\n")
    ids = lambda text: reward.frozen.tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [reward.frozen.tokenizer.bos_token_id] if reward.frozen.tokenizer.bos_token_id is not None else []
    first = [*start, *ids("2 ="), *ids("a b"), *ids("\n\n")]
    whole = [*first, *ids("c"), *ids("\n\n")]
    assert reward.encode("2 =", ["a b", "c"]) == (whole, [len(first) - 1, len(whole) - 1])
    assert reward.steps_of("a b\n\nc\n\n\n\n ") == ["a b", "c"]


def test_an_update_is_that_of_the_likelihood_of_the_labels():
    """AdamW's first step is the rate times the sign of the gradient, which is that of the definition."""
    reward = reward_of()
    model = reward.frozen.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for one in ROWS[:3]:
        ids, places = reward.encode(one.prompt, one.steps)
        probabilities = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        losses += [-probabilities[place, int(label)].log() for place, label in zip(places, one.labels, strict=True)]
    torch.stack(losses).mean().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    told = []
    options = PreferenceOptions(per_device_train_batch_size=3, learning_rate=1e-4, max_grad_norm=0.0)
    train(reward, ROWS[:3], options, lambda step, total, loss: told.append(loss))
    assert told == [pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)]
    for name, parameter in model.named_parameters():
        clear = wanted[name].abs() > 1e-4
        assert torch.equal((parameter - before[name]).sign()[clear], -wanted[name].sign()[clear])


def save_for_trl(folder):
    """A classifier, its tokenizer and rows of one to three steps, as `tests/parity/trl_prm.py` reads them."""
    reward = reward_of()
    reward.frozen.model.save_pretrained(folder)
    reward.frozen.tokenizer.save_pretrained(folder)
    texts = ["2 + 3 = 5", "5 + 4 = 8", "so the answer is 8"]
    rows = [{"prompt": f"What is {n} + 3 + 4?", "completions": texts[: n % 3 + 1]} for n in range(6)]
    rows = [{**row, "labels": [n % 2 == 0 for n in range(len(row["completions"]))]} for row in rows]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tokens_labels_loss_and_gradient_are_those_of_trls_prm_trainer():
    """Written by `tests/parity/trl_prm.py`: PRMTrainer's data set, and compute_loss of one batch of all rows, padded on the left."""
    trl = json.loads((Path(__file__).parent / "trl_prm.json").read_text())
    reward = reward_of()
    rows = [scored_steps(row, "a row") for row in trl["rows"]]
    for one, ids, labels in zip(rows, trl["input_ids"], trl["labels"], strict=True):
        mine, places = reward.encode(one.prompt, one.steps)
        assert mine == ids
        assert [place for place, label in enumerate(labels) if label != -100] == places
        assert [labels[place] for place in places] == list(map(int, one.labels))
    told, gradients = [], {}
    for name, weight in reward.frozen.model.named_parameters():
        weight.register_hook(lambda gradient, name=name: gradients.update({name: gradient.clone()}))
    options = PreferenceOptions(per_device_train_batch_size=len(rows), max_grad_norm=0.0)
    train(reward, rows, options, lambda step, total, loss: told.append(loss))
    assert told == [pytest.approx(trl["loss"], rel=1e-6)]
    torch.testing.assert_close(gradients["score.weight"], torch.tensor(trl["gradient_of_head"]), rtol=1e-5, atol=1e-7)
    assert gradients.keys() == trl["gradient_norms"].keys()
    for name, norm in trl["gradient_norms"].items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=1e-5), name


def test_it_learns_steps_it_has_not_seen_and_gives_their_least_product_or_mean():
    reward = reward_of()
    train(
        reward,
        ROWS[:16],
        PreferenceOptions(num_train_epochs=25, per_device_train_batch_size=8, learning_rate=5e-3),
        lambda *told: None,
    )
    for one, found in zip(ROWS[16:], judge(reward, ROWS[16:]), strict=True):
        assert [score > 0.5 for score in found] == list(one.labels)
    one = row(9)  # a wrong step, then a right one
    steps = judge(reward, [one])[0]
    text = "\n".join(one.steps)
    for aggregate, value in (("min", steps[0]), ("prod", math.prod(steps)), ("mean", sum(steps) / 2)):
        reward.aggregate = aggregate
        assert reward([one.prompt, one.prompt], [text, ""]) == [pytest.approx(value, rel=1e-5), 0.0]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"completions": ["a"], "labels": [True, False]}, "1 steps and 2 labels"),
        ({"completions": "a", "labels": [True]}, "has no scored steps"),
        ({"completions": [" "], "labels": [True]}, "an empty one"),
        ({"steps": ["a"], "labels": [0.5]}, "true for a right step"),
    ],
)
def test_rows_that_are_no_scored_steps_are_refused(tmp_path, given, said):
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps({"prompt": "p", **given}) + "\n")
    with pytest.raises(DataError, match=said):
        load_examples(str(file))


def test_what_would_be_read_otherwise_than_it_was_trained_is_refused():
    with pytest.raises(DataError, match="separator"):
        train(reward_of(), [ScoredSteps("p", ("a\nb",), (True,))], PreferenceOptions(), lambda *told: None)
    with pytest.raises(ConfigError, match="min, prod, mean"):
        reward_of(aggregate="sum")
    with pytest.raises(ModelError, match="has 1 labels"):
        ProcessReward(tiny_reward_model(), tokenizer=tiny_tokenizer())


@pytest.mark.slow
def test_the_commands_train_a_reward_and_examine_it_on_other_steps(tmp_path, capsys, monkeypatch):
    for part, rows in (("train", ROWS), ("other", [row(n) for n in range(40, 52)])):
        lines = [{"prompt": one.prompt, "completions": one.steps, "labels": one.labels} for one in rows]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny_model(layers=1).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = f"reward train --model {tmp_path}/model --dataset {tmp_path}/train.jsonl -o {tmp_path}/judge --use-cpu --json".split()
    assert main([*words, "--center-rewards-coefficient", "0.1"]) == 2
    assert "belongs to pairs" in capsys.readouterr().err
    assert (
        main(
            [*words, "--num-train-epochs", "20", "--learning-rate", "1e-2", "--held-out", "0.25", "--aggregate", "prod"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["held_out"], told["steps"], told["auc"], told["aggregate"]) == (6, 12, 1.0, "prod")
    assert told["interval"][0] < 1.0 == told["interval"][1]
    monkeypatch.setattr(hf_logging, "_tqdm_active", True)  # as it is outside of tests
    monkeypatch.setattr(hf_logging.hf_hub_utils, "enable_progress_bars", lambda: None)
    spec = resolve(str(tmp_path / "judge"))
    assert "Loading weights" not in capsys.readouterr().err  # a bar would tear the progress line of a run
    assert spec.call.aggregate == "prod"
    assert resolve(f"process(model='{tmp_path}/judge', aggregate='min')").call.aggregate == "min"
    scores = spec.call(["41 ="] * 2, ["41 apples\n41 apples", "41 apples\n41 pears"])
    assert scores[0] > 0.5 > scores[1]
    words = f"reward test --reward {tmp_path}/judge --dataset {tmp_path}/other.jsonl --rows 1".split()
    main([*words, "--json"])  # fails for texts longer than this tiny model reads
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rewards"]
    assert (found["steps"]["steps"], found["steps"]["auc"]) == (24, 1.0)
    assert found["steps"]["calibration_error"] < 0.2
    assert not [verdict for verdict in found["verdicts"] if verdict["check"] == "steps"]
