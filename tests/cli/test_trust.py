"""Code of a run folder that someone sent: every option that can name code is asked about before anything is imported."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from covey.cli import main, train, trust
from kit import rest_nightly, tiny_model, tiny_tokenizer

TRAP = """
open({marker!r}, "a").write("imported ")
def make(*args, **kwargs):
    open({marker!r}, "a").write("called ")
    return lambda completions, **columns: [0.0] * len(completions)
class Environment:
    pass
"""
PLAIN = {"reward": ["format"], "learning_rate": 1e-3, "max_completion_length": 4, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}  # fmt: skip
FORMS = [
    "trap.py:make(x=1)",
    "trap.py:make",
    "trap:make",
    "trap:make(x=1)",
    "./trap.py:make",
    "nowhere:make",
    "trap.py:make, high=0.3",
]
SPECIAL = {
    "dataset": ["follow:trap.py:make", "0.5*sums.jsonl + 0.5*follow:trap:make", "verifiers:trap"],
    "eval_dataset": ["follow:trap.py:make", "verifiers:trap"],
    "algorithm": [*FORMS, "grpo, advantage=trap.py:make", "grpo, advantage=trap:make(k=2)", "grpo, kl=PKPO(k='trap.py:make'", "PKPO(k='trap.py:make')"],
    "reward": [*FORMS, "code(allow_unisolated=True)", "judge(url='trap.py:make'"],
    "environment_factory": [*FORMS, "gymnasium:trap:Game-v0", "trap"],
    "tools": [*FORMS, "mcp:touch marker", "mcp:httpx"],
    "agent": [*FORMS, "verifiers:trap"],
}  # fmt: skip
TEXT = {
    flag.name
    for flag in (*train.other_flags(), *train.flags())
    if any(word in str(flag.type) for word in ("str", "Any", "dict"))
}
OF_THE_CALL = {"config", "from_run", "resume", "vary", "output_dir", "recipe", "hub_token", "max_steps"}


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A folder with a run of one step, as it is on the machine of whoever made it."""
    place = tmp_path_factory.mktemp("sent")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        tiny_model(layers=1).save_pretrained("model")
        tiny_tokenizer().save_pretrained("model")
        rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(4)]
        Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("run.yaml").write_text(yaml.safe_dump({"model": "model", "dataset": "sums.jsonl", **PLAIN}))
        assert main(["train", "run.yaml", "--output-dir", "runs/a"]) == 0
    return place


@pytest.fixture
def again(sent, tmp_path, monkeypatch):
    """Repeats the run with one option changed in its folder; `is_ours`: run.json names this machine."""
    shutil.copytree(sent, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    Path("trap.py").write_text(TRAP.format(marker=str(Path("marker").resolve())))

    def repeat(option, value, is_ours):
        recipe = yaml.safe_load(Path("runs/a/train.yaml").read_text())
        Path("runs/a/train.yaml").write_text(yaml.safe_dump({**recipe, option: value}))
        found = json.loads(Path("runs/a/run.json").read_text())
        if not is_ours:
            found["hardware"]["host"] = "elsewhere"
        Path("runs/a/run.json").write_text(json.dumps({**found, "working_folder": str(Path.cwd())}))
        return main(["train", "--from-run", "runs/a", "--output-dir", "runs/b"])

    return repeat


NAMED = [(name, form) for name in trust.CODE for form in SPECIAL.get(name, FORMS)]
FIRST = {part: named for named in reversed(NAMED) for part in named}
IN_CI = [(*named, place % 2 == 0) for place, named in enumerate(named for named in NAMED if named in FIRST.values())]
"""Each option and each form, in turns of our own run and of one that was sent."""


@pytest.mark.parametrize(
    ("option", "value", "is_ours"),
    rest_nightly([(*named, is_ours) for named in NAMED for is_ours in (True, False)], IN_CI),
)
def test_code_is_asked_about_before_it_is_imported(again, capsys, option, value, is_ours):
    is_list = "list" in str({flag.name: flag.type for flag in (*train.other_flags(), *train.flags())}[option])
    assert again(option, [value] if is_list else value, is_ours) == 2
    assert "was not started" in capsys.readouterr().err
    assert not Path("marker").exists()


def test_the_refusal_names_the_command_that_was_called(again, capsys):
    assert again("reward", ["trap.py:REWARD"], is_ours=True) == 2
    assert "--from-run runs/a was not started" in capsys.readouterr().err
    assert main(["reward", "audit", "runs/a"]) == 2
    assert "covey reward audit runs/a was not started" in capsys.readouterr().err
    assert not Path("marker").exists()


@pytest.mark.parametrize("value", [{"trust_remote_code": True}, '{"trust_remote_code": true}', {"attn_implementation": "evil/kernel"}, {"code_revision": "x"}, "{"])  # fmt: skip
def test_code_of_the_hub_in_the_arguments_of_a_model_is_asked_about(again, capsys, value):
    assert again("model_init_kwargs", value, True) == 2
    assert "model_init_kwargs has" in capsys.readouterr().err


def test_a_sent_run_without_code_is_repeated(again):
    assert again("max_steps", 1, False) == 0


@pytest.mark.slow
@pytest.mark.parametrize("option", rest_nightly(sorted(TEXT - set(trust.CODE) - OF_THE_CALL), 5))
def test_no_other_option_imports_what_it_names(again, capsys, option):
    """An option that names code, and that is not in `trust.CODE`, fails here."""
    for value in ("trap.py:make", "trap:make", ["trap.py:make"], {"trap": "trap.py:make"}):
        with contextlib.suppress(Exception):  # a value of the wrong kind may be refused in any way
            again(option, value, False)
        assert not Path("marker").exists(), option
        shutil.rmtree("runs/b", ignore_errors=True)
