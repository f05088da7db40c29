"""Tasks in Harbor's format as rows, without containers; what is refused before a model is loaded; rewards that wait side by side."""

import asyncio
import importlib.util
import json
import math
import shutil
import sys

import huggingface_hub
import pytest
import torch

from covey.cli import main
from covey.data import load
from covey.data.harbor import task_folders
from covey.environments import EnvironmentPool, HarborEnv, HarborSpec
from covey.environments.harbor import AGENTS
from covey.errors import ConfigError, DataError
from covey.rewards import Scorer, reward
from covey.types import Group
from environments.harbor_tasks import WRITE_4, task
from kit import completion, prompt

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")


@pytest.fixture
def folder(tmp_path):
    task(
        tmp_path / "tasks" / "b",
        '[metadata]\ndifficulty = "hard"\nminutes = 2.5\ntags = ["git", "c"]\nauthor = {name = "x"}',
    )
    task(tmp_path / "tasks" / "a", '[metadata]\ndifficulty = "easy"\nminutes = 3\n')
    (tmp_path / "tasks" / "notes").mkdir()
    return tmp_path


def test_a_row_is_the_instruction_as_it_is_with_the_metadata_of_its_task_and_nothing_of_its_tests(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "tasks/b/instruction.md").write_text("# terminal-bench-canary GUID 1\n\n  Do *this*.\n")
    rows = list(load("harbor:tasks/"))
    assert [row["task"] for row in rows] == ["a", "b"]
    assert rows[0]["prompt"] == [{"role": "user", "content": WRITE_4}]
    assert rows[1]["prompt"][0]["content"] == "Do *this*.\n"
    assert [row["task_dir"] for row in rows] == ["tasks/a", "tasks/b"]  # with the folder, they can move
    assert [(row["difficulty"], row["minutes"], row["tags"]) for row in rows] == [
        ("easy", 3.0, None),
        ("hard", 2.5, ["git", "c"]),
    ]
    assert json.loads(rows[1]["author"]) == {"name": "x"}
    assert "solution" not in str(rows)
    assert "verifier" not in str(rows)
    assert next(iter(load(f"harbor:{folder}")))["task_dir"] == str(folder / "tasks" / "a")


def test_a_column_of_pictures_is_none_of_the_metadata(folder):
    """`image` in a task's metadata is a container's, and no picture for the model."""
    task(folder / "tasks" / "c", '[metadata]\nimage = "ubuntu:24.04"\nprompt = "x"\ncategory = "c"\n')
    rows = load(f"harbor:{folder}")
    assert {"image", "images"}.isdisjoint(rows.column_names)
    assert (rows[2]["category"], rows[2]["prompt"][0]["content"]) == ("c", WRITE_4)


def test_a_data_set_of_the_hub_is_looked_up_once_for_all_environments(folder, monkeypatch):
    hub = folder / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    stored = hub / "datasets--org--tasks"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder / "tasks", stored / "snapshots" / ("0" * 40))
    assert [path.name for path in task_folders("org/tasks")] == ["a", "b"]
    (stored / "refs" / "main").unlink()  # a second look-up would fail
    assert [row["task"] for row in HarborSpec("org/tasks", num_tasks=1).train_dataset] == ["a"]


def test_the_spec_chooses_tasks_by_their_number_or_place(folder):
    assert [row["task"] for row in HarborSpec(folder, num_tasks=1).train_dataset] == ["a"]
    assert [row["task_index"] for row in HarborSpec(folder, indices=[1, 0]).train_dataset] == [1, 0]
    assert "difficulty" not in HarborSpec(folder, include_metadata=False).train_dataset.column_names
    functions = HarborSpec(folder, rewards=["right", "short"]).reward_funcs
    assert [function.__name__ for function in functions] == ["right", "short"]
    assert HarborSpec(folder, rewards="right").reward_funcs.__name__ == "right"


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"indices": [2]}, "indices=2 is no place in the 2 tasks"),
        ({"num_tasks": 1, "indices": [0]}, "give one of them"),
        ({"num_tasks": 0}, r"num_tasks=0 must be .*at least 1"),
        ({"num_tasks": "2"}, "num_tasks='2' must be"),
        ({"indices": 1}, "indices=1 must be"),
        ({"at_once": 0}, r"at_once=0 must be .*at least 1"),
        ({"agent": "bahs"}, "Did you mean bash"),
        ({"agent": dict}, "a subclass of HarborEnv"),
    ],
)
def test_a_spec_that_chooses_nothing_is_refused(folder, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        _ = HarborSpec(folder, **options).train_dataset


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("task.toml", "x = = 1", r"a/task\.toml cannot be read: Invalid value"),
        ("task.toml", "[[steps]]\nname = 'one'", r"a has \[\[steps\]\]"),
        ("task.toml", "[environment]\nos = 'Windows'", "a needs Windows"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'x'", "a has mcp_servers"),
        ("instruction.md", " \n", "is empty"),
        ("instruction.md", None, r"a has no instruction\.md"),
    ],
)
def test_a_broken_task_is_named(folder, file, text, sentence):
    path = folder / "tasks" / "a" / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        load(f"harbor:{folder}")


def test_a_folder_without_tasks_or_a_misspelt_one_ends_the_command_before_a_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    train = [
        "train",
        "--model",
        "nowhere/none",
        "--environment-factory",
        "harbor:x",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main([*train, "--dataset", f"harbor:{tmp_path / 'empty'}"]) == 2
    assert "has no tasks" in capsys.readouterr().err
    assert main([*train, "--dataset", f"harbor:{tmp_path / 'emty'}"]) == 2
    assert "Did you mean empty?" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed")
def test_without_the_library_one_sentence_says_what_is_missing(folder):
    with pytest.raises(ConfigError, match=r"Python 3\.12|pip install 'covey\[harbor\]'"):
        EnvironmentPool(HarborSpec(folder).environment_factory)


def test_tools_of_an_agent_of_the_users_own_wait_for_a_sandbox_to_start():
    class Agent(HarborEnv):
        def look(self) -> str:
            """Look around."""
            return self._exec("ls")

    assert Agent.look.__covey_tool__.seconds > 3600
    assert AGENTS["bash"].bash.__covey_tool__.seconds > 3600


class Judged:
    """An environment whose verifier waits until three of them have run at the same time."""

    running, most = 0, 0

    def reset(self, place: int = 0, **row):
        self.place = place

    @reward(timeout=math.inf)
    async def get_reward(self) -> float:
        if self.place == 3:
            raise RuntimeError("no reward file")
        Judged.running += 1
        Judged.most = max(Judged.most, Judged.running)
        for _ in range(200):
            if Judged.most >= 3:
                break
            await asyncio.sleep(0.01)
        Judged.running -= 1
        if Judged.most < 3:
            raise RuntimeError("the others were not asked")
        return float(self.place)


def test_asynchronous_rewards_of_environments_run_side_by_side_and_one_that_fails_is_not_scored():
    instances = [Judged() for _ in range(4)]
    for place, instance in enumerate(instances):
        instance.reset(place)
    completions = tuple(completion(columns={"environments": instance}) for instance in instances)
    scorer = Scorer(EnvironmentPool(Judged).rewards, error_limit=5)
    [scored] = scorer.score([Group(prompt=prompt("q"), completions=completions)])
    scorer.close()
    assert torch.equal(scored.measured[:, 0].isnan(), torch.tensor([False, False, False, True]))
    assert scored.measured[:3, 0].tolist() == [0.0, 1.0, 2.0]
    assert any("no reward file" in event.said for event in scored.events)
