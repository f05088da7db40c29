"""Runs that differ in nothing but their seed are one side; everything else that was recorded and differs is shown."""

import json

import pytest
from run_folders import write_run

from covey.errors import ConfigError, RunFolderError
from covey.evaluation.compare.run_data import read_runs
from covey.evaluation.compare.sides import differences, grouped, repeats
from covey.names import load


def read(*paths):
    return [run for path in paths for run in read_runs(str(path))]


def match(completions, **kwargs):
    """A reward of the user's own."""
    return [1.0 for _ in completions]


def other_match(completions, **kwargs):
    """Another."""
    return [0.5 for _ in completions]


def test_runs_that_differ_in_the_seed_alone_are_one_side(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"base-s{seed}", seed=seed)
        write_run(tmp_path / f"fast-s{seed}", seed=seed, learning_rate=1e-3)
    sides = grouped(read(tmp_path))
    assert [side.title for side in sides] == ["A (base)", "B (fast)"]
    assert [[run.seed for run in side.runs] for side in sides] == [[0, 1], [0, 1]]
    found = differences(sides)
    assert [(one.area, one.name, one.values) for one in found] == [("config", "learning_rate", ["1e-05", "0.001"])]


def test_sides_of_seeds_alone_are_named_by_the_folders_around_them(tmp_path):
    for name, rate in (("old", 1e-5), ("new", 1e-3)):
        for seed in (0, 1):
            write_run(tmp_path / name / f"seed-{seed}", seed=seed, learning_rate=rate)
    write_run(tmp_path / "third", learning_rate=1e-4)
    both = grouped(read(tmp_path / "old", tmp_path / "new"))
    assert [side.title for side in both] == ["A (old)", "B (new)"]
    assert [side.title for side in grouped(read(tmp_path / "old", tmp_path / "third"))] == ["A (old)", "B (third)"]
    single = grouped(read(tmp_path / "old" / "seed-0", tmp_path / "new" / "seed-0"))
    assert [side.title for side in single] == ["A (old)", "B (new)"]


def test_where_and_how_often_a_run_writes_is_no_difference(tmp_path):
    write_run(tmp_path / "a", run_name="x", logging_steps=1, max_steps=4)
    write_run(tmp_path / "b", seed=1, run_name="y", logging_steps=9, max_steps=4.0)
    (side,) = grouped(read(tmp_path / "a", tmp_path / "b"))
    assert len(side.runs) == 2


def test_another_source_text_of_a_reward_is_another_side_and_is_shown_as_a_diff(tmp_path):
    namespace = {}
    for name, value in (("one", "1.0"), ("two", "2.0")):
        file = tmp_path / f"{name}_place" / "my_reward.py"
        file.parent.mkdir()
        file.write_text(
            f"SCALE = {value}\n\n\ndef mine(completions, **kwargs):\n    return [SCALE for _ in completions]\n"
        )
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        namespace["mine"].__module__ = "my_reward"
        write_run(tmp_path / name, manifest={"rewards": [namespace["mine"]]})
    found = differences(grouped(read(tmp_path / "one", tmp_path / "two")))
    assert [(one.area, one.name) for one in found] == [("sources", "my_reward.py.source")], (
        "the constant it uses changed"
    )
    assert {"-SCALE = 1.0", "+SCALE = 2.0"} <= set(found[0].diff.splitlines())


def test_a_run_without_code_of_its_own_adds_no_file_to_what_differs(tmp_path):
    for name, sources in (("one", {}), ("two", {"mine.py": {"text": "x = 1\n", "sha256": "0"}})):
        write_run(tmp_path / name)
        manifest = json.loads((tmp_path / name / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps({**manifest, "sources": sources}))
    differing = differences(grouped(read(tmp_path / "one", tmp_path / "two")))
    assert [item.name for item in differing if item.area == "sources"] == ["mine.py.source"]


def test_another_reward_is_another_side(tmp_path):
    write_run(tmp_path / "one", manifest={"rewards": [match]})
    write_run(tmp_path / "two", manifest={"rewards": [other_match]})
    names = [one.name for one in differences(grouped(read(tmp_path / "one", tmp_path / "two")))]
    assert "0.name" in names


def test_a_reward_of_a_file_has_the_name_of_its_file_wherever_that_file_lies(tmp_path):
    def written(run, place, text="def right(completions, **kwargs):\n    return [0.0 for _ in completions]\n"):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        write_run(tmp_path / run, manifest={"rewards": [load(f"{file}:right", "reward")]})

    written("one", "here/mine.py")
    written("two", "there/mine.py")
    written("three", "there/yours.py")
    assert len(grouped(read(tmp_path / "one", tmp_path / "two"))) == 1, "the same text in another folder"
    named, mine, yours = differences(grouped(read(tmp_path / "one", tmp_path / "three")))
    assert (named.area, named.name, named.values) == ("rewards", "0.name", ["mine.py:right", "yours.py:right"])
    assert (mine.values, yours.values) == (["2 lines", "-"], ["-", "2 lines"])
    assert {line[0] for line in mine.diff.splitlines()[1:]} == {"-"}, "a file that the other has not is all removed"
    written("four", "else/mine.py", "def right(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert len(grouped(read(tmp_path / "one", tmp_path / "four"))) == 2


def test_versions_tell_sides_apart_only_where_nothing_else_does(tmp_path):
    import json

    for name in ("old", "new"):
        write_run(tmp_path / name)
    found = json.loads((tmp_path / "old" / "run.json").read_text())
    found["versions"]["torch"] = "2.1.0"
    (tmp_path / "old" / "run.json").write_text(json.dumps(found))
    sides = grouped(read(tmp_path / "old", tmp_path / "new"))
    assert [side.name for side in sides] == ["old", "new"]
    assert [one.name for one in differences(sides)] == ["torch"]


def test_two_runs_of_one_seed_on_one_side_are_named(tmp_path):
    for i, seed in enumerate((3, 3, 4)):
        write_run(tmp_path / f"run{i}", seed=seed)
    assert repeats(grouped(read(tmp_path))[0]) == [3]


def test_the_same_run_twice_is_refused(tmp_path):
    write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="named twice"):
        grouped(read(tmp_path / "a", tmp_path / "a"))


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "holds no run"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("{}")), "not written by Covey, or is damaged"),
    ],
)
def test_what_is_no_run_is_refused_by_name(tmp_path, make, said):
    make(tmp_path / "thing")
    with pytest.raises(RunFolderError, match=said) as error:
        read(tmp_path / "thing")
    assert str(tmp_path / "thing") in str(error.value)


def test_a_checkpoint_names_the_run_around_it(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-4").mkdir()
    with pytest.raises(RunFolderError, match="The run around it is"):
        read(tmp_path / "run" / "checkpoint-4")
