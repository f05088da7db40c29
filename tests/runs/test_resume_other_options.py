"""A run is gone on with under the options it had; those that do no harm may change and are named, others are refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from resume_cases import Case, trainer
from transformers import AutoModelForCausalLM

from covey import algorithms as alg
from covey.cli import main
from covey.errors import ConfigError, CoveyError
from covey.rewards import RewardSpec, Scorer
from covey.runs import checkpoint
from kit import tiny_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed") / "run"
    trainer(Case("first", {"max_steps": 2}), folder).train()
    return folder


def again(run: Path, elsewhere: Path, **changed: Any) -> Any:
    """Go on with the run in a folder of its own, so that the run stays as it is for the next test."""
    return trainer(Case("again", {"max_steps": 3, **changed}), elsewhere).train(str(run / "checkpoint-2"))


def test_what_does_no_harm_is_named_and_allowed(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        assert again(run, tmp_path / "run", learning_rate=2e-2, temperature=0.9).global_step == 3
    (said,) = [record.message for record in caplog.records if record.name == "covey.runs.resuming"]
    assert said.endswith(
        "goes on with other options: learning_rate 0.01 -> 0.02; max_steps 2 -> 3; temperature 1.0 -> 0.9."
    )


def test_other_weights_of_the_rewards_are_named_wherever_they_come_from(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        again(run, tmp_path / "option", max_steps=2, reward_weights=[2.0])
        spec = trainer(Case("again", {"max_steps": 2}), tmp_path / "spec")
        spec.scorer = Scorer([RewardSpec(name="reward", call=spec.scorer.rewards[0].call, weight=3.0)])
        spec.train(str(run / "checkpoint-2"))
    said = [record.message for record in caplog.records if record.name == "covey.runs.resuming"]
    assert said[0].endswith("goes on with other options: reward_weights None -> [2.0].")
    assert said[1].endswith("goes on with other options: the weights of the rewards [1.0] -> [3.0].")
    trainer(Case("again", {"max_steps": 2, "reward_weights": [2.0]}), run).train(str(run / "checkpoint-2"))
    described = json.loads((run / "run.json").read_text())
    assert described["attempts"][-1]["changed"]["reward_weights"] == [[1.0], [2.0]]
    trainer(Case("again", {"max_steps": 2}), run).train(str(run / "checkpoint-2"))  # for the other tests


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        again(run, tmp_path / "run", max_steps=2)
        again(
            run, tmp_path / "masked", max_steps=2, hub_token="hf_secret"
        )  # a former version masked an unset one as well
    assert not [record for record in caplog.records if record.name == "covey.runs.resuming"]


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 8},
        {"shuffle_dataset": False},
        {"curriculum": "difficulty"},
        {"optim": "sgd"},
        {"num_iterations": 2},
        {"num_generations": 2},
        {"steps_per_generation": 2},
        {"per_device_train_batch_size": 4},
        {"loss_type": "dr_grpo"},
        {"algorithm": "rloo"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_a_run_cannot_change_is_refused_before_any_step(
    changed: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot be gone on with: .* Give it as it was( \(per_device_train_batch_size=\d+ on the processes .*\))?, or start a new run",
    ) as raised:
        again(run, tmp_path / "run", **changed)
    assert raised.value.exit_code == 2
    assert not checkpoint.checkpoints(tmp_path / "run")


def test_a_batch_of_other_processes_is_refused_with_the_rows_that_make_it(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"generation_batch_size=8 .* \(per_device_train_batch_size=8 on the processes"
    ):
        again(run, tmp_path / "run", per_device_train_batch_size=4)  # as on half as many


@pytest.mark.parametrize(
    "changed",
    [{"optim": "sgd"}, {"num_generations": 2}, {"per_device_train_batch_size": 4}, {"loss_type": "dr_grpo"}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_checkpoint_that_was_copied_alone_remembers_what_a_run_cannot_change(
    changed: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "checkpoint-2", tmp_path / "copied" / "checkpoint-2")  # without the run.json beside it
    with pytest.raises(ConfigError, match=r"checkpoint-2 had .*cannot be gone on with") as raised:
        again(tmp_path / "copied", tmp_path / "run", **changed)
    assert raised.value.exit_code == 2
    (tmp_path / "copied" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be gone on with"):
        again(tmp_path / "copied", tmp_path / "run", **changed)
    assert not checkpoint.checkpoints(tmp_path / "run")


def with_algorithm(folder: Path, algorithm: Any, as_option: bool, steps: int) -> Any:
    """A trainer with the algorithm in its options, or as an argument of its own."""
    made = trainer(Case("with", {"max_steps": steps, **({"algorithm": algorithm} if as_option else {})}), folder)
    made.algorithm = algorithm
    return made


def own_kl(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    return (logp - ref_logp).square()


class NoBonus:
    """A part that is an object, whose `repr` has its address."""

    def __call__(self, tokens: Any) -> torch.Tensor:
        return torch.zeros_like(tokens.logp)


@pytest.mark.parametrize("as_option", [True, False], ids=["option", "argument"])
def test_an_algorithm_that_is_an_object_is_compared_part_by_part(
    as_option: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = alg.grpo(kl=alg.KL(own_kl, 0.1))
    with_algorithm(tmp_path / "run", algorithm, as_option, 1).train()
    file = tmp_path / "run" / "run.json"
    of_another_process = lambda text: re.sub(r"0x[0-9a-f]+", "0x7fffffff0000", text)
    file.write_text(of_another_process(file.read_text()))
    go_on = lambda other: with_algorithm(tmp_path / "again", other, as_option, 1).train(
        str(tmp_path / "run" / "checkpoint-1")
    )
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        go_on(algorithm)
    assert not [record for record in caplog.records if record.name == "covey.runs.resuming"]
    for other, what in (
        (alg.grpo(low=0.4, kl=algorithm.kl), r"the algorithm.objective.low=0.2 and this one has 0.4"),
        (alg.rloo(), r"the algorithm.advantage=GroupNormalized and this one has LeaveOneOut"),
        (alg.grpo(), r"the algorithm.kl.estimator=own_kl and this one has k3"),
        (algorithm.replace(critic=alg.Critic()), r"the algorithm.critic=None and this one has Critic"),
        (algorithm.replace(regularizers=alg.entropy_bonus(0.1)), r"the algorithm.regularizers=0 and this one has 1"),
    ):
        with pytest.raises(ConfigError, match=what):
            go_on(other)
    file.write_text(re.sub(r'"sha256": "[0-9a-f]+"', '"sha256": "0"', file.read_text()))
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        go_on(algorithm)
    (said,) = [record.message for record in caplog.records if record.name == "covey.runs.resuming"]
    assert "the source of the algorithm's parts" in said


def test_an_algorithm_of_options_may_change_by_them_and_no_object_may_take_its_place(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        again(run, tmp_path / "run", max_steps=2, epsilon=0.3, beta=0.1)
    (said,) = [record.message for record in caplog.records if record.name == "covey.runs.resuming"]
    assert said.endswith("goes on with other options: beta 0.0 -> 0.1; epsilon 0.2 -> 0.3.")
    option, argument = (with_algorithm(tmp_path / "run", alg.dapo(), is_option, 2) for is_option in (True, False))
    with pytest.raises(ConfigError, match=r"the algorithm.objective.high=None and this one has 0.28"):
        option.train(str(run / "checkpoint-2"))
    with caplog.at_level(logging.WARNING, logger="covey.runs.resuming"):
        argument.train(str(run / "checkpoint-2"))  # it may be one of options of another version of Covey
    said = [record.message for record in caplog.records if record.name == "covey.runs.resuming"][-1]
    assert said.endswith("goes on with other options: the algorithm.objective.high None -> 0.28.")


def test_an_average_of_another_kind_begins_with_the_weights_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 3, "ema_decay": 0.9}
    trainer(Case("average", options), tmp_path / "run").train()
    soup = trainer(Case("average", {"max_steps": 4, "soup_steps": 1}), tmp_path / "soup")
    with caplog.at_level(logging.WARNING, logger="covey.training.evaluator"):
        soup.train(str(tmp_path / "run" / "checkpoint-3"))
    assert "averaged weights of the other kind" in caplog.text
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "soup" / "checkpoint-4").state_dict()
    for name, weight in soup.model.state_dict().items():
        assert torch.equal(weight, last[name]), "a soup of one step is that step"


def test_another_model_adapter_or_data_set_is_refused(run: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    options = {"max_steps": 3}
    other = trainer(Case("again", options, peft=lora), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="the model's class=Qwen2ForCausalLM"):
        other.train(str(run / "checkpoint-2"))
    larger = trainer(Case("again", options), tmp_path / "larger", layers=3)
    with pytest.raises(ConfigError, match="the number of the model's parameters"):
        larger.train(str(run / "checkpoint-2"))
    fewer = trainer(Case("again", options), tmp_path / "fewer")
    fewer.train_dataset = Dataset.from_list([{"prompt": "2 + 2 =", "difficulty": 1.0}])
    with pytest.raises(ConfigError, match=r"the number of rows of the data set=6 and this one has 1"):
        fewer.train(str(run / "checkpoint-2"))


def test_without_a_run_json_nothing_is_compared(run: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (run / "checkpoint-2").rename(tmp_path / "copy" / "checkpoint-2")
    try:
        assert again(tmp_path / "copy", tmp_path / "run").global_step == 3
    finally:
        (tmp_path / "copy" / "checkpoint-2").rename(run / "checkpoint-2")


def test_the_command_line_refuses_before_the_model_is_loaded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")  # no weights beside it: loading it would say so
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n' * 6)
    words = ["train", "--model", str(tmp_path / "model"), "--dataset", str(rows), "--reward", "format"]
    words += ["--output-dir", str(run), "--resume", "auto", "--seed", "9"]
    assert main(words) == CoveyError.exit_code + 1 == 2
    said = capsys.readouterr().err
    assert "had seed=7 and this one has 9" in said
    assert "config.json" not in said, "the folder holds no model"
