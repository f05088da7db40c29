"""A run's own folder: nothing is overwritten, nothing logged twice, and what ran can be read back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.errors import RunFolderError
from covey.runs import RunFolder, checkpoint, manifest, rollouts
from covey.runs.masking import mask, mask_command, mask_text
from covey.runs.metrics import read
from covey.types import Alert, Completion, Event, Group, Prompt
from forked import Forked


def a_group() -> Group:
    completion = Completion(token_ids=torch.tensor([1, 2]), text="4", finish="stop")
    return Group(
        prompt=Prompt(uid="0:0", token_ids=(1,), text="2+2"),
        completions=(completion,),
        rewards=torch.tensor([[1.0]]),
        advantages=torch.tensor([0.0]),
    )


def a_run(path: Path, steps: int = 4, save_every: int = 2, resume: Path | None = None) -> RunFolder:
    """A run that logs every step and saves every other one."""
    run = RunFolder.create(path, resume=resume)
    run.describe(args={"seed": 7, "learning_rate": 1e-6})
    start = 0 if resume is None else checkpoint.step_of(resume)
    for step in range(start + 1, steps + 1):
        run.append_metrics(step, {"reward": step / 10}, {"rollout": 0.5})
        run.write_rollouts(step, [a_group()], ["match"])
        if step % save_every == 0:
            checkpoint.save(run.path, step, lambda folder: None, {"step": step})
    return run


def logged(path: Path) -> list[int]:
    return [row["step"] for row in read(path / "metrics.jsonl")]


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir() if not item.name.startswith("."))


def test_a_run_writes_what_the_design_promises(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "first")
    run.append_events(
        4, [Event(kind="reward_failed", said="It failed.", details={"error": ValueError("x"), "n": math.nan})]
    )
    run.append_alert(
        Alert(rule="dead_groups", severity="warning", said="Dead.", step=4, evidence={"share": torch.tensor(0.5)})
    )
    run.close()
    assert names(run.path) == [
        *("alerts.jsonl", "checkpoint-2", "checkpoint-4", "events.jsonl", "metrics.jsonl", "rollouts", "run.json")
    ]
    row = read(run.path / "metrics.jsonl")[-1]
    assert (row["step"], row["reward"], row["seconds/rollout"]) == (4, 0.4, 0.5)
    assert read(run.path / "events.jsonl")[0]["details"] == {"error": "ValueError('x')", "n": "nan"}
    assert read(run.path / "alerts.jsonl")[0]["evidence"] == {"share": 0.5}
    assert rollouts.steps(run.path / "rollouts") == [1, 2, 3, 4]
    found = manifest.read(run.path / "run.json")
    assert found is not None
    assert (found["state"], found["step"], found["name"], found["seeds"]) == ("finished", 4, "first", {"seed": 7})


def test_a_second_run_in_the_same_folder_sets_the_first_aside_whole(tmp_path: Path) -> None:
    a_run(tmp_path).close()
    (tmp_path / "model.safetensors").touch()  # what save_model() left: the next save_model() replaces it, as in TRL
    with pytest.warns(UserWarning, match=r"held a run already; it is now in .*previous-1"):
        run = a_run(tmp_path, steps=2)
    run.close()
    assert logged(tmp_path) == [1, 2]
    assert names(tmp_path / "previous-1") == ["checkpoint-2", "checkpoint-4", "metrics.jsonl", "rollouts", "run.json"]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-2"
    assert (
        checkpoint.latest(tmp_path / "previous-1") == tmp_path / "previous-1" / "checkpoint-4"
    )  # can be resumed from there
    assert (tmp_path / "model.safetensors").exists()
    with pytest.warns(UserWarning, match="previous-2"):
        RunFolder.create(tmp_path).close()


def test_checkpoints_of_another_trainer_are_set_aside_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    with pytest.warns(UserWarning, match="previous-1"):
        RunFolder.create(tmp_path).close()
    assert (tmp_path / "previous-1" / "checkpoint-500").is_dir()


def test_the_command_line_refuses_a_folder_with_another_run(tmp_path: Path) -> None:
    a_run(tmp_path).close()
    before = names(tmp_path)
    with pytest.raises(
        RunFolderError, match=r"holds a run already \(step 4\); go on with it with --resume auto"
    ) as caught:
        RunFolder.create(tmp_path, strict=True)
    assert caught.value.exit_code == 2
    assert names(tmp_path) == before


def test_the_command_line_refuses_a_folder_with_foreign_files(tmp_path: Path) -> None:
    for name in ("thesis.tex", "data.csv", "slurm-1.out", ".gitignore"):
        (tmp_path / name).touch()
    with pytest.raises(RunFolderError, match=r"not a run's \(data.csv, thesis.tex\)"):
        RunFolder.create(tmp_path, strict=True)
    RunFolder.create(tmp_path).close()  # from Python, as TRL: it writes beside them
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_that_failed_at_the_door_may_be_started_again(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, strict=True)
    run.describe(args={"seed": 0})
    run.close("failed")
    RunFolder.create(tmp_path, strict=True).close()


def test_a_run_that_failed_in_its_first_step_is_set_aside_by_the_next(tmp_path: Path) -> None:
    a_run(tmp_path, steps=0).close("failed")
    (tmp_path / "checkpoint-0").mkdir()
    with pytest.warns(UserWarning, match="previous-1"):
        RunFolder.create(tmp_path, strict=True).close()
    assert "checkpoint-0" in names(tmp_path / "previous-1")


def test_resuming_logs_no_step_twice_and_keeps_the_identity(tmp_path: Path) -> None:
    killed = a_run(tmp_path, steps=5)  # killed after step 5: never closed
    for step in (4, 5):
        killed.write_completions(step, [a_group()], ["match"])
    start = checkpoint.resolve("auto", tmp_path)
    run = RunFolder.create(tmp_path, resume=start, strict=True)
    before = json.loads((tmp_path / "run.json").read_text())
    found = run.describe(args={"seed": 7, "learning_rate": 2e-6})
    assert logged(tmp_path) == [1, 2, 3, 4]
    assert rollouts.steps(tmp_path / "rollouts") == [1, 2, 3, 4]
    assert names(tmp_path / "completions") == ["completions_00004.parquet"]
    run.append_metrics(5, {"reward": 0.5})
    run.close("stopped")
    assert logged(tmp_path) == [1, 2, 3, 4, 5]
    after = json.loads((tmp_path / "run.json").read_text())
    assert after["id"] == before["id"] == found["id"]
    assert [attempt["from_step"] for attempt in after["attempts"]] == [0, 4]
    assert after["attempts"][1]["changed"] == {"config.learning_rate": [1e-6, 2e-6]}
    assert (after["state"], after["attempts"][1]["to_step"]) == ("stopped", 5)
    assert after["parent"] is None


def test_going_back_to_an_earlier_checkpoint_keeps_the_later_ones_elsewhere(tmp_path: Path) -> None:
    a_run(tmp_path, steps=6).close()
    with pytest.warns(UserWarning, match=r"from step 2; 2 later checkpoint\(s\) are now in previous-1"):
        run = RunFolder.create(tmp_path, resume=tmp_path / "checkpoint-2")
    run.close()
    assert logged(tmp_path) == [1, 2]
    assert logged(tmp_path / "previous-1") == [1, 2, 3, 4, 5, 6]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-2"
    assert checkpoint.latest(tmp_path / "previous-1") == tmp_path / "previous-1" / "checkpoint-6"


def test_resuming_elsewhere_names_the_parent(tmp_path: Path) -> None:
    a_run(tmp_path / "a").close()
    start = checkpoint.resolve(tmp_path / "a", tmp_path / "b")
    run = RunFolder.create(tmp_path / "b", resume=start, strict=True)
    found = run.describe(args={"seed": 7})
    run.close()
    theirs = manifest.read(tmp_path / "a" / "run.json")
    assert theirs is not None
    assert found["parent"] == {"run": str(tmp_path / "a"), "id": theirs["id"], "checkpoint": "checkpoint-4"}
    assert found["attempts"][0]["from_step"] == 4
    assert logged(tmp_path / "a") == [1, 2, 3, 4]


def test_a_copied_run_resumes(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run = RunFolder.create(tmp_path / "b", resume=checkpoint.resolve("auto", tmp_path / "b"))
    assert run.path == tmp_path / "b"
    run.close()


HOLD = "import sys, time; from covey.runs import RunFolder; run = RunFolder.create(sys.argv[1]); print('held', flush=True); time.sleep(60)"


def test_a_folder_in_use_is_refused_and_freed_by_a_kill(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with Forked("-c", HOLD, tmp_path, stdout=theirs) as other, open(ours) as told:
        os.close(theirs)
        assert told.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"is in use: process {other.pid} on .* trains in it now"):
            RunFolder.create(tmp_path)
        other.kill()
    RunFolder.create(tmp_path).close()


def test_the_same_process_may_start_again(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path)
    second = RunFolder.create(tmp_path)
    first.close()
    second.close()


@pytest.mark.parametrize("bad", ["", "a\0b"])
def test_a_path_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(RunFolderError, match="not the path of a folder"):
        RunFolder.create(bad)


def test_a_file_a_long_name_and_a_place_without_permission_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "file")
    for path in (tmp_path / "file" / "run", tmp_path / ("x" * 300), Path("/sys/covey")):
        for strict in (False, True):
            with pytest.raises(RunFolderError, match="cannot be made"):
                RunFolder.create(path, strict=strict)


# -- run.json -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Clip:
    low: float
    scale: Any

    def __call__(self, tokens: Any) -> Any:
        return tokens


def described(tmp_path: Path, **parts: Any) -> dict[str, Any]:
    with RunFolderClosing(tmp_path) as run:
        return json.loads(json.dumps(run.describe(**parts), allow_nan=False))


class RunFolderClosing:
    def __init__(self, path: Path) -> None:
        self.run = RunFolder.create(path)

    def __enter__(self) -> RunFolder:
        return self.run

    def __exit__(self, *_: object) -> None:
        self.run.close()


def test_ones_own_parts_are_stored_with_source_parameters_and_what_they_hold(tmp_path: Path) -> None:
    floor = 0.25
    scale = lambda reward: max(reward, floor)
    found = described(tmp_path, args={}, algorithm={"objective": Clip(0.2, scale), "name": "mine"})
    objective = found["algorithm"]["objective"]
    assert objective["name"].endswith(":Clip")
    assert "class Clip:" in objective["source"]
    assert len(objective["sha256"]) == 64
    assert objective["fields"]["low"] == 0.2
    assert objective["fields"]["scale"]["holds"] == {"floor": 0.25}
    (file,) = found["sources"]
    assert file == __file__
    assert "def test_ones_own_parts_are_stored" in found["sources"][file]["text"]


def test_built_in_parts_are_named_without_their_source(tmp_path: Path) -> None:
    found = described(tmp_path, args={}, algorithm=[torch.sigmoid, Prompt, Group.take], rewards=[len])
    assert found["sources"] == {}
    assert found["algorithm"][1] == {"name": "covey.types.values:Prompt"}
    assert found["rewards"][0]["name"] == "builtins:len"


def test_a_function_typed_at_a_prompt_has_a_hash_of_its_code(tmp_path: Path) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def one(x): return x + 1\ndef two(x): return x + 2", space)
    found = described(tmp_path, args={}, rewards=[space["one"], space["two"]])
    assert found["rewards"][0]["source"] is None
    assert found["rewards"][0]["sha256"] != found["rewards"][1]["sha256"]


def test_a_closure_over_a_whole_data_set_stays_small(tmp_path: Path) -> None:
    data = list(range(100_000))
    found = described(tmp_path, args={}, rewards=[lambda completions: data])
    assert found["rewards"][0]["holds"] == {"data": "list of 100000 items"}


def test_versions_hardware_and_data_are_stored(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    found = described(tmp_path, args={"seed": 3, "data_seed": None}, dataset=dataset)
    what = {"fingerprint": dataset._fingerprint, "rows": 2, "columns": ["prompt", "answer"], "system_prompt": None}
    assert found["dataset"] == what
    assert (
        found["versions"]["torch"] == torch.__version__.partition("+")[0]
        or found["versions"]["torch"] == torch.__version__
    )
    assert found["hardware"]["cpus"] == os.cpu_count()
    assert found["seeds"] == {"seed": 3, "data_seed": None}


def test_a_system_prompt_in_parts_is_stored_as_its_text(tmp_path: Path) -> None:
    import datasets

    parts = [{"type": "text", "text": "Add."}, {"type": "text", "text": "Be brief."}]
    rows = [{"prompt": [{"role": "system", "content": parts}]}]
    found = described(tmp_path, args={}, dataset=datasets.Dataset.from_list(rows))
    assert "Add." in found["dataset"]["system_prompt"]
    assert "type" not in found["dataset"]["system_prompt"]


def test_the_commit_and_what_differs_from_it_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIT_DIR")  # conftest.py
    work = tmp_path / "work"
    work.mkdir()
    git = lambda *words: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=work, check=True, capture_output=True
    )
    git("init")
    (work / "train.py").write_text("learning_rate = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (work / "train.py").write_text("learning_rate = 2\npassword = 'hunter2222'\n")
    (work / "new.py").touch()
    git("config", "core.fsmonitor", "touch canary")
    git("config", "diff.external", "touch canary")
    monkeypatch.chdir(work)
    found = described(tmp_path / "run", args={})["git"]
    assert found["is_dirty"]
    assert "+learning_rate = 2" in found["diff"]
    assert "hunter2222" not in found["diff"]
    assert found["untracked"] == ["new.py"]
    assert len(found["commit"]) == 40
    assert not (work / "canary").exists()  # a repository cannot make git run its programs
    monkeypatch.chdir(tmp_path)
    assert described(tmp_path / "run2", args={})["git"] is None


def test_a_config_with_anything_in_it_is_still_json(tmp_path: Path) -> None:
    found = described(
        tmp_path, args={"path": Path("a"), "nan": math.nan, "set": {1}, "dtype": torch.bfloat16, 3: (1, 2)}
    )
    assert found["config"] == {"path": "a", "nan": "nan", "set": "{1}", "dtype": "torch.bfloat16", "3": [1, 2]}


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"format": "other"}', "[" * 100_000])
def test_a_manifest_that_is_none_reads_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    assert manifest.read(tmp_path / "run.json") is None


# -- secrets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, masked",
    [
        ("https://me:hunter2@host/x?api_key=abcdef", "https://me:***@host/x?api_key=***"),
        ("HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrSt python x.py", "HF_TOKEN=*** python x.py"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("key sk-proj-abcdefghijklmnop1234 end", "key *** end"),
        ("github_pat_11ABCDEFG0abcdefghij_x", "***"),
        ("wandb_api_key: 'deadbeef1234'", "wandb_api_key: '***'"),
        ("eos_token = '<|im_end|>', num_tokens=4096", "eos_token = '<|im_end|>', num_tokens=4096"),
    ],
)
def test_secrets_are_masked_and_the_words_of_the_field_are_not(text: str, masked: str) -> None:
    assert mask_text(text) == masked


def test_values_under_secret_names_are_masked() -> None:
    config = {
        "hub_token": "abc",
        "pad_token": "<pad>",
        "nested": {"API_KEY": "x", "list": ["sk-" + "a" * 20]},
        "secret": None,
    }
    assert mask(config) == {
        "hub_token": "***",
        "pad_token": "<pad>",
        "nested": {"API_KEY": "***", "list": ["***"]},
        "secret": None,
    }
    assert mask_command(["covey", "--hub-token", "abc", "--api_key=abcd", "--seed", "3"]) == [
        *("covey", "--hub-token", "***", "--api_key=***", "--seed", "3")
    ]


def test_no_secret_reaches_any_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "SecretSecretSecret12"
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub-token", secret])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = RunFolder.create(tmp_path)
    run.describe(args={"hub_token": secret, "note": f"see {secret}"}, rewards=[Clip(0.1, secret)])
    run.close()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()


def test_a_run_says_which_model_it_started_from(tmp_path):
    from kit import tiny_model

    model = tiny_model()
    model.config._name_or_path = "org/tiny"
    next(model.parameters()).requires_grad_(False)
    run = RunFolder.create(tmp_path / "run")
    found = run.describe(args={"seed": 7}, model=model)["model"]
    run.close()
    assert (found["name"], found["class"], found["dtype"]) == ("org/tiny", type(model).__name__, "float32")
    assert 0 < found["trained"] < found["parameters"]
