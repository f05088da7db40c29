"""`covey train`: what is wrong is said before anything is loaded, what would happen can be seen, and it trains."""

import json
import shutil
from importlib.util import find_spec

import pytest
import yaml

from covey.cli import main
from covey.cli.columns import column_map
from covey.cli.flags import read_flags
from covey.cli.train import adapter, flags, load_held_out, resume_command
from covey.errors import ConfigError
from kit import tiny_model, tiny_tokenizer

REWARD = "def digits(completions, answer, **kwargs):\n    return [float(len(c)) for c in completions]\n"


CHANNELS = (
    "{% for m in messages %}{% if m.thinking %}<|start|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model folder, a data set with a column `question`, and a reward in a file."""
    where = tmp_path_factory.mktemp("train")
    tiny_model(layers=1).save_pretrained(where / "model")
    tiny_tokenizer().save_pretrained(where / "model")
    rows = [{"question": f"What is {i} + {i}?", "solution": str(2 * i)} for i in range(6)]
    (where / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (where / "mine.py").write_text(REWARD)
    return where


def words(place, *more):
    given = ["--model", place / "model", "--dataset", place / "sums.jsonl", "--prompt-column", "question"]
    given += ["--answer-column", "solution", "--reward", f"{place / 'mine.py'}:digits", "--output-dir", place / "run"]
    return ["train", *map(str, given), "--max-completion-length", "8", "--use-cpu", *map(str, more)]


@pytest.mark.parametrize(
    "more, said",
    [
        (["--vllm-structured-outputs-regex", "a"], "cannot be honoured without vLLM"),
        (["--num-generations", "6"], "Try num_generations=8 or 4"),
        (["--learning-rate", "fast"], "learning_rate=fast cannot be read as a number."),
        (["--lora-alpha", "8"], "--lora-alpha needs --lora-r"),
        (["--columns", "answer"], "--columns answer: write new=old"),
        (["--prompt-column", "qestion"], "has no column 'qestion'"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--reward", "nowhere.py:fn"], "nowhere.py does not exist"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(place, capsys, more, said):
    assert main(words(place, *more, "--dry-run")) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_said_before_a_model_is_loaded(place, capsys, monkeypatch):
    monkeypatch.setattr("covey.training.loading.load_model", None)
    assert main(words(place, "--use-vllm")) == 2
    assert "needs vLLM in this environment" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "dataset", "reward"])
def test_what_is_missing_is_named(place, capsys, name):
    given = words(place)
    at = given.index(f"--{name}")
    del given[at : at + 2]
    assert main(given) == 2
    assert f"--{name} is missing: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_shows_options_arithmetic_and_memory_and_writes_nothing(place, capsys):
    assert main(words(place, "--learning-rate", "1e-4", "--gradient-accumulation-steps", "2", "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert "learning_rate: 0.0001 (1e-06)" in shown
    assert "2 prompts x 8 completions = 16 completions a generation batch" in shown
    assert "9 optimizer steps in all, 3 passes over the prompts" in shown
    assert "peak" in shown
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--curriculum", "frontir"], "curriculum='frontir' is neither none, nor frontier, nor a column"),
        (["--reward-weights", "1", "--reward-weights", "2"], "weights"),
        (["--eval-strategy", "steps"], "there is no eval_dataset"),
        (["--eval-dataset", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["stray"], "'stray' is neither an option nor a configuration file."),
        (["--algorithm", "gpro"], "Did you mean grpo?"),
        (["--reward", "math(tolerence=1)"], "reward 'math' is a function, which takes no parameters"),
    ],
)
def test_a_dry_run_refuses_whatever_the_run_would(more, sentence, place, capsys):
    assert main(words(place, *more, "--dry-run")) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "more", "sentence"),
    [
        ({"prompt": "Why? " * 200}, [], "of the data set has a prompt of 1000 tokens"),
        ({"prompt": "What is this?", "image": "cat.png"}, [], "image"),
        ({"prompt": "What?"}, ["--max-completion-length", "600"], "max_completion_length takes the whole context"),
    ],
)
def test_a_dry_run_refuses_prompts_that_the_run_would(row, more, sentence, place, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "prompt": prompt}) + "\n" for prompt in ("2 + 2 =", row["prompt"])))
    given = [
        "train",
        "--model",
        place / "model",
        "--dataset",
        file,
        "--reward",
        "length",
        "--output-dir",
        tmp_path / "run",
    ]
    given += ["--max-completion-length", "8", "--use-cpu", *more]
    said = []
    for last in (["--dry-run"], []):
        assert main([*map(str, given), *last]) == 2
        said.append(capsys.readouterr().err.strip().splitlines()[-1])
        assert sentence in said[-1]
    assert said[0] == said[1]


def test_a_dry_run_refuses_a_budget_of_thoughts_that_stand_in_a_channel(place, tmp_path, capsys):
    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHANNELS)
    given = words(place, "--dry-run", "--thinking-token-budget", "4")
    given[given.index("--model") + 1] = str(tmp_path / "model")
    assert main(given) == 2
    assert "thinking_token_budget closes thoughts by a mark" in capsys.readouterr().err


def test_a_dry_run_looks_at_the_folder_and_at_what_is_resumed(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    given, at = words(place, "--dry-run"), words(place).index("--output-dir") + 1
    for folder, sentence in {
        "file": "is a file; give the path of a folder",
        "file/under": "is a file; give the path of a folder",
        "run": "holds a run already (step 3)",
        "mine": "holds files that are not a run's (thesis.tex)",
    }.items():
        assert main([*given[:at], str(tmp_path / folder), *given[at + 1 :]]) != 0
        assert sentence in capsys.readouterr().err
    assert main([*given, "--resume", str(tmp_path / "nowhere")]) == 4
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_dry_run_names_the_column_that_a_reward_needs(place, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def right(completions, gold): return [0.0] * len(completions)")
    assert main(words(place, "--reward", f"{tmp_path}/mine.py:right", "--dry-run")) == 2
    assert "needs a column gold" in capsys.readouterr().err


def test_a_run_stands_for_the_model_that_it_ended_with(place, tmp_path, capsys):
    shutil.copytree(place / "model", tmp_path / "earlier" / "model")
    given = words(place, "--dry-run")
    given[given.index("--model") + 1] = str(tmp_path / "earlier")
    assert main(given) == 0
    assert "peak" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "earlier" / "model")
    assert main(given) == 2
    assert "holds neither a model (config.json) nor a checkpoint of a run" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_dry_run_is_one_json_object_when_asked(place, capsys):
    assert main(words(place, "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["arithmetic"]["total_steps"] == 18
    assert plan["config"]["max_completion_length"] == 8
    assert plan["memory"]["peak"] > plan["memory"]["weights"] > 0


def test_a_printed_configuration_is_read_back_and_flags_win(place, capsys):
    assert main(words(place, "--learning-rate", "1e-4", "--print-config")) == 0
    first = capsys.readouterr().out
    file = place / "run.yaml"
    file.write_text(first)
    assert main(["train", str(file), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)
    assert (
        main(
            [
                "train",
                "--config",
                str(file),
                "--learning_rate=2e-4",
                "--per-device-train-batch-size",
                "16",
                "--print-config",
            ]
        )
        == 0
    )
    changed = yaml.safe_load(capsys.readouterr().out)
    assert changed["learning_rate"] == 2e-4
    assert changed["per_device_train_batch_size"] == 16
    assert changed["prompt_column"] == "question"


def test_the_word_demo_stands_for_the_shipped_model_data_and_reward(capsys):
    assert main(["train", "demo", "--max-steps", "3", "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["model"], shown["dataset"], shown["reward"]) == ("demo", "demo", ["demo"])


@pytest.mark.nightly
def test_the_word_demo_brings_the_settings_that_the_shipped_model_learns_with(capsys):
    from covey.demo import DEMO_SETTINGS

    assert main(["train", "demo", "--max-completion-length", "40", "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for name in ("learning_rate", "per_device_train_batch_size"):
        assert shown[name] == DEMO_SETTINGS[name]
    assert shown["max_completion_length"] == 40  # a flag wins over it, as over a file
    assert main(["train", "demo", "--dry-run", "--json"]) == 0
    assert 80 <= json.loads(capsys.readouterr().out)["arithmetic"]["total_steps"] <= 120


def test_every_option_can_be_reached():
    from covey.config import options

    reachable = {flag.name for flag in flags()}
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    assert options.HONOURED - newer <= reachable
    assert all(flag.help for flag in flags())


def test_debug_is_the_command_line_s_own_and_not_the_option_of_transformers(place):
    with pytest.raises(ConfigError, match="needs --lora-r"):
        main(words(place, "--lora-alpha", "8", "--debug"))


def test_several_rewards_are_given_one_by_one_or_together():
    assert read_flags(["--reward", "a", "--reward", "b.py:c", "d"], flags())["reward"] == ["a", "b.py:c", "d"]


def test_columns_are_new_names_for_old_ones():
    assert column_map(["answer=solution", "level=difficulty"]) == {"answer": "solution", "level": "difficulty"}
    with pytest.raises(ConfigError, match="names 'answer' twice"):
        column_map(["answer=a", "answer=b"])


def test_an_adapter_is_asked_for_by_its_rank():
    assert adapter({}) is None
    chosen = adapter({"lora_r": 8})
    assert (chosen.r, chosen.lora_alpha, chosen.target_modules) == (8, 16, "all-linear")


def test_layers_of_an_adapter_are_ends_of_names_or_one_expression():
    layers = lambda *words: adapter({"lora_r": 8, "lora_target_modules": list(words)}).target_modules
    assert layers("q_proj", "mlp.up_proj") == {"q_proj", "mlp.up_proj"}
    assert layers(r".*language_model.*\.(q_proj|v_proj)") == r".*language_model.*\.(q_proj|v_proj)"
    for words, said in (((".*x", "q_proj"), "give it alone"), (("(x",), "is no regular expression")):
        with pytest.raises(ConfigError, match=said):
            layers(*words)


@pytest.mark.parametrize(
    "typed, again",
    [
        (
            ["covey", "train", "run.yaml", "--output-dir", "a b"],
            "covey train run.yaml --output-dir 'a b' --resume auto",
        ),
        (["covey", "train", "x.yaml", "--resume", "never"], "covey train x.yaml --output-dir runs/1 --resume auto"),
        (["/bin/covey", "train", "--output_dir=o", "--resume=auto"], "covey train --output_dir=o --resume auto"),
    ],
)
def test_the_command_that_goes_on_is_the_one_that_started(typed, again):
    assert resume_command(typed, "runs/1") == again


def test_a_mixture_to_evaluate_has_each_row_once_also_where_the_run_reads_streams(tmp_path):
    for name, count in (("a", 3), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count)))
    mixture = f"0.5*{tmp_path}/a.jsonl + 0.5*{tmp_path}/b.jsonl"
    assert len(load_held_out({"eval_dataset": mixture, "streaming": True})) == 23
    assert not hasattr(load_held_out({"eval_dataset": f"{tmp_path}/a.jsonl", "streaming": True}), "__len__")
    assert load_held_out({"streaming": True}) is None
