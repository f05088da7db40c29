"""Small things that a user meets: a version, help, slices of the shipped task, packages that are missing or do not start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import BloomConfig, FalconConfig, GraniteMoeHybridConfig, Qwen3MoeConfig

from covey import GRPOConfig, GRPOTrainer, __version__, demo
from covey.cli import main
from covey.data import PromptStream, follow, load, prepare_tokenizer
from covey.errors import ConfigError, DataError, ModelError, RunFolderError
from covey.evaluation.compare.run_data import read_runs
from covey.learner.trials import reason_against_sharing
from covey.models import load_model, load_tokenizer
from covey.monitor.sample_drift import SampleDrift
from covey.names import load as load_object
from covey.process.cluster import connected
from covey.runs.output_dir import checked
from covey.training.build_learner import auxiliary_coefficient
from covey.types import Group
from kit import completion


def test_the_version_is_a_verb_too(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_help_of_chat_shows_a_command_a_line(capsys):
    assert main(["chat", "--help"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("/")]
    assert lines == ["/reset", "/system", "/sample", "/quit"]


def test_a_part_of_the_shipped_task_can_be_named():
    whole = load("demo:test")
    assert load("demo:test[:24]")["prompt"][:] == whole["prompt"][:24]
    assert len(load("demo:train[10:30]")) == 20
    with pytest.raises(DataError, match="no split 'tset'; it has train, test. Did you mean test"):
        load("demo:tset[:3]")


def test_the_shipped_model_makes_vectors(tmp_path):
    words = ["--embedding-model", "demo", "--features", "embedding", "--output", str(tmp_path / "a.jsonl")]
    assert main(["features", "demo:test[:2]", *words]) in (0, None)
    assert (tmp_path / "a.jsonl").read_text().count("embedding") == 2


def test_a_tracker_that_is_missing_is_refused_before_the_model_is_looked_for(tmp_path):
    dataset = Dataset.from_list([{"prompt": "a"}] * 8)
    args = GRPOConfig(str(tmp_path), report_to="dagshub", num_generations=2, per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match="needs the package dagshub"):
        GRPOTrainer(model=str(tmp_path / "nowhere"), reward_funcs="length", args=args, train_dataset=dataset)


def test_a_live_source_without_max_steps_is_refused_before_the_model_is_looked_for(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    dataset = follow(str(tmp_path / "rows.jsonl"))
    args = GRPOConfig(str(tmp_path / "run"), num_generations=2, per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match="a stream, which has no length: set max_steps"):
        GRPOTrainer(model=str(tmp_path / "nowhere"), reward_funcs="length", args=args, train_dataset=dataset)


@pytest.mark.parametrize(
    "source, told",
    [
        ("import nowhere_at_all\n", r"ModuleNotFoundError: No module named 'nowhere_at_all' (FILE:1)"),
        ("def right(completions):\n    return 1 / 0\nright([])\n", "ZeroDivisionError: division by zero (FILE:2)"),
        ("def right(completions)\n", "SyntaxError: expected ':' (mine.py, line 1) (FILE:1)"),
        ("raise SystemExit\n", "SystemExit (FILE:1)"),
        ("import json\n\njson.loads('x')\n", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (FILE:3)"),
    ],
)
@pytest.mark.parametrize("path", ["mine.py:right", "mine:right"])
def test_a_file_that_fails_as_it_is_imported_is_named_with_the_line(tmp_path, monkeypatch, source, told, path):
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_object(path, "reward")
    assert f"fails when it is imported, with {told.replace('FILE', str(tmp_path / 'mine.py'))}." in str(error.value)


def test_a_variable_of_the_shell_makes_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"'\$HOME/runs/a' names a variable of the shell"):
        checked("$HOME/runs/a")
    assert checked("runs/5$") == Path("runs/5$")
    assert checked("runs/for_$5") == Path("runs/for_$5")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a$b").mkdir()
    assert checked("~/a$b") == tmp_path / "a$b"


@pytest.mark.parametrize(
    "words",
    [
        ["merge", "demo", "demo", "-o", "$HOME/out"],
        ["export", "pairs", "runs/a", "--output", "$HOME/out.jsonl"],
        ["init", "${HOME}/project"],
        ["features", "demo", "--features", "length", "--output", "$HOME/rows.jsonl"],
        ["plot", "runs/a", "-o", "$HOME/a.svg"],
    ],
)
def test_no_verb_makes_a_folder_of_a_variable_s_name(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    assert "HOME" in (said := capsys.readouterr().err)
    assert "names a variable of the shell, which is not read here" in said
    assert not list(tmp_path.iterdir())


def test_a_script_where_options_stand_is_told_how_to_run_it(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import covey")
    for verb in ("train", "sft"):
        assert main([verb, f"{tmp_path}/mine.py"]) == 2
        said = f"mine.py is a Python script, and covey {verb} reads options: python {tmp_path}/mine.py runs it."
        assert said in capsys.readouterr().err


def test_a_misspelt_model_or_data_set_is_told_the_nearest_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    for model, near in {"dmeo": "demo", "my-modle": "my-model"}.items():
        with pytest.raises(ModelError, match=rf"Did you mean {near}\?"):
            load_model(model)
    with pytest.raises(DataError, match=r"Did you mean demo\?"):
        load("dmeo")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ModelError, match=r"Did you mean demo\?"):
        load_model("dmeo")
    with pytest.raises(ModelError) as error:
        load_model("somebody/demo")
    assert "Did you mean" not in str(error.value)


def test_main_leaves_the_hook_of_exceptions_to_a_program_that_calls_it(monkeypatch, capsys):
    hook = lambda *given: None
    monkeypatch.setattr(sys, "excepthook", hook)
    assert main(["nothing"]) == 2
    assert sys.excepthook is hook


def test_an_aggregate_that_is_none_is_refused_before_rows_are_read(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("no rows")
    words = ["--model", "demo", "--dataset", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "judge")]
    assert main(["reward", "train", *words, "--aggregate", "max"]) == 2
    assert "--aggregate max is not known; use min, prod, mean." in capsys.readouterr().err


def test_a_ray_that_does_not_start_is_told_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "ray").mkdir()
    source = "is_initialized = lambda: False\ndef init(**given): raise RuntimeError('no port is free')\n"
    (tmp_path / "ray" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        ConfigError, match=r"Ray does not start on this machine \(RuntimeError: no port is free\).* or leave it out"
    ):
        connected("this", "leave it out")
    sys.modules.pop("ray")


def test_the_tokenizer_of_a_run_is_looked_for_in_the_model_that_it_ended_with(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="give '.*/model', what this run ended with"):
        load_tokenizer(None, tmp_path)


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GRANITE = {
    **SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "layer_types": ["attention"], "shared_intermediate_size": 32,
    "num_experts_per_tok": 1, "mamba_n_heads": 4, "mamba_d_head": 16,
}  # fmt: skip


def made(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_model_without_experts_has_no_balancing_loss_whatever_its_config_names(tmp_path):
    args = GRPOConfig(str(tmp_path), report_to="none")
    dense = made(GraniteMoeHybridConfig(**{**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0}))
    routed = made(GraniteMoeHybridConfig(**GRANITE, num_local_experts=2))
    assert (auxiliary_coefficient(args, dense), auxiliary_coefficient(args, routed)) == (0.0, 0.001)
    moe = {
        **SMALL,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    assert auxiliary_coefficient(args, made(Qwen3MoeConfig(**moe, mlp_only_layers=[0]))) == 0.0
    assert auxiliary_coefficient(args, made(Qwen3MoeConfig(**moe))) > 0


def test_a_bias_by_distance_is_named_as_the_reason():
    bloom = made(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    assert reason_against_sharing(bloom) == "its attention is biased by the distance of tokens (ALiBi)"
    assert reason_against_sharing(made(FalconConfig(**SMALL, alibi=True))) is not None
    assert reason_against_sharing(made(FalconConfig(**SMALL, alibi=False))) is None


def test_the_shuffled_prompts_of_the_demo_are_no_drift():
    tokenizer = prepare_tokenizer(load_tokenizer(None, demo.model_path()))
    stream = PromptStream(Dataset.from_list(demo.rows("train")), tokenizer, seed=0)
    drift, found = SampleDrift(), []
    for _ in range(20):
        answers = (completion("4"),) * 2
        groups = [
            Group(prompt=prompt, completions=answers, rewards=torch.tensor([[1.0], [0.0]]))
            for prompt in stream.take(16)
        ]
        found += [
            metric.value for name, metric in drift(groups, torch.tensor([1.0])).items() if name.startswith("prompts")
        ]
    assert len(found) == 2
    assert min(found) > 0.001


@pytest.mark.slow
def test_what_the_demo_says_of_held_out_problems_is_in_its_run(tmp_path, capsys):
    assert main(["demo", "--steps", "1", "--held-out", "6", "--output-dir", str(tmp_path / "run"), "--json"]) in (
        0,
        None,
    )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = read_runs(str(tmp_path / "run"))
    assert sorted(run.evaluated["eval"]) == [0, 1]
    assert len(run.answers("eval", 0)) == len(run.answers("eval", 1)) == said["held_out"] == 6
    right = sum(row["reward"] >= 0.5 for row in run.answers("eval", 1)) / 6
    assert right == pytest.approx(said["accuracy_after"])
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) in (0, None)
    assert "not evaluated on held-out" not in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_why_says_that_a_step_has_no_gradient(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say nothing.", "answer": "12345"}\n' * 4)
    words = [
        "--model",
        "demo",
        "--dataset",
        str(tmp_path / "rows.jsonl"),
        "--reward",
        "math",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    words += ["--max-steps", "2", "--save-steps", "1", "--rollout-log-steps", "1", "--report-to", "none"]
    words += ["--num-generations", "2", "--per-device-train-batch-size", "2", "--max-completion-length", "2"]
    assert main(["train", *words]) == 0
    assert main(["why", str(tmp_path / "run"), "--step", "2"]) in (0, None)
    assert "the step has no gradient" in capsys.readouterr().out
