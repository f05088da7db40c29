"""Flags from the command line and from YAML, by any spelling; a wrong one is answered with the nearest name."""

import pytest

from covey.cli import main
from covey.cli.flags import Flag, describe, read_flags, read_yaml, typed
from covey.errors import ConfigError

FLAGS = (
    Flag(name="max_steps", help="", type=int),
    Flag(name="learning_rate", help="", type=float),
    Flag(name="use_cpu", help="", type=bool),
    Flag(name="bf16", help="", type="bool | None"),
    Flag(name="reward", help="", type=list[str]),
    Flag(name="reward_weights", help="", type=list[float]),
    Flag(name="model", help=""),
    Flag(name="fsdp", help="", bare="true"),
    Flag(name="config", help=""),
)
TYPES = {flag.name: flag.type for flag in FLAGS} | {"bf16": bool | None, "options": dict | str | None}


@pytest.mark.parametrize(
    "words, given",
    [
        (["--max-steps", "10"], {"max_steps": "10"}),
        (["--max_steps=10"], {"max_steps": "10"}),
        (["--max-steps", "-1"], {"max_steps": "-1"}),
        (["--use-cpu"], {"use_cpu": True}),
        (["--use-cpu", "false"], {"use_cpu": "false"}),
        (["--no-use-cpu"], {"use_cpu": False}),
        (["--no_bf16"], {"bf16": False}),
        (["--use-cpu", "--model", "m"], {"use_cpu": True, "model": "m"}),
        (["--reward", "a", "b", "--reward", "c.py:d"], {"reward": ["a", "b", "c.py:d"]}),
        (["--fsdp", "--model", "m"], {"fsdp": "true", "model": "m"}),
        (["--fsdp", "shard_grad_op"], {"fsdp": "shard_grad_op"}),
        (["--reward-weights", "1", "-0.5"], {"reward_weights": ["1", "-0.5"]}),
        (["run.yaml", "--model=m=1"], {"config": "run.yaml", "model": "m=1"}),
    ],
)
def test_every_spelling_is_read(words, given):
    assert read_flags(words, FLAGS, positional=("config",)) == given


@pytest.mark.parametrize(
    "words, said",
    [
        (["--lerning-rate", "1"], "--lerning-rate is not an option here. Did you mean --learning-rate?"),
        (["--lerning_rate=1"], "--lerning_rate is not an option here. Did you mean --learning-rate?"),
        (["-m", "x"], "-m is not an option here."),
        (["--max-steps"], "--max-steps needs a value."),
        (["--max-steps", "--use-cpu"], "--max-steps needs a value."),
        (["--reward"], "--reward needs a value."),
        (["a.yaml", "b"], "'b' follows no flag; every value needs one, such as --max-steps b."),
        (["demo", "--config", "x.yaml"], "demo and --config x.yaml are two values of one option; give one."),
        (["--config=x.yaml", "demo"], "demo and --config x.yaml are two values of one option; give one."),
        (["--old-name", "1"], "--old-name is not an option here. Use max_steps."),
        (
            ["--max-stpes", "3", "--zzz=1", "--use-pcu", "--old-name", "a", "b"],
            "--max-stpes is not an option here. Did you mean --max-steps? --zzz is not an option here. --use-pcu is not an "
            "option here. Did you mean --use-cpu? --old-name is not an option here. Use max_steps. --help-all shows every option.",
        ),
    ],
)
def test_a_wrong_flag_is_answered_in_one_sentence(words, said):
    with pytest.raises(ConfigError) as caught:
        read_flags(words, FLAGS, positional=("config",), hints={"old_name": "Use max_steps."})
    assert said in str(caught.value)


def test_of_a_flag_that_is_there_twice_the_last_counts_and_the_other_is_named(caplog):
    twice = ["--model", "a", "--model=b", "--use-cpu", "--use-cpu", "--reward", "x", "--reward", "y"]
    assert read_flags(twice, FLAGS) == {"model": "b", "use_cpu": True, "reward": ["x", "y"]}
    key = (Flag(name="api_key", help="A key."),)
    assert read_flags(["--api-key", "one-secret", "--api-key", "another"], key) == {"api_key": "another"}
    assert [record.getMessage() for record in caplog.records] == [
        "--model is there twice: b counts, and a does not.",
        "--api-key is there twice: *** counts, and *** does not.",
    ]


def test_texts_become_values_of_their_types():
    given = {
        "max_steps": "10",
        "learning_rate": "1e-6",
        "use_cpu": True,
        "bf16": "null",
        "reward_weights": ["1", "-0.5"],
    }
    assert typed(given, TYPES) == {
        "max_steps": 10,
        "learning_rate": 1e-6,
        "use_cpu": True,
        "bf16": None,
        "reward_weights": [1.0, -0.5],
    }
    assert typed({"reward_weights": ["[1, 0.1]"]}, TYPES) == {"reward_weights": [1.0, 0.1]}
    assert typed({"options": '{"a": 1}'}, TYPES) == {"options": {"a": 1}}


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("max_steps", "many", "max_steps=many cannot be read as a whole number."),
        ("learning_rate", "fast", "learning_rate=fast cannot be read as a number."),
        ("bf16", "maybe", "bf16=maybe cannot be read as true or false or null."),
        ("max_steps", [1, 2], "max_steps=[1, 2] cannot be read as a whole number."),
    ],
)
def test_a_value_of_another_type_is_named(name, value, said):
    with pytest.raises(ConfigError) as caught:
        typed({name: value}, TYPES)
    assert str(caught.value) == said


def test_types_are_described_in_words():
    assert describe(int | None) == "a whole number or null"
    assert describe(list[float]) == "a list"


def test_yaml_holds_the_same_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max-steps: 3\nlearning_rate: 1e-5\nreward: [a, b]\n")
    assert typed(read_yaml(file, FLAGS), TYPES) == {"max_steps": 3, "learning_rate": 1e-5, "reward": ["a", "b"]}
    file.write_text("")
    assert read_yaml(file, FLAGS) == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ("lerning_rate: 1", "run.yaml: lerning_rate is not an option here. Did you mean learning_rate?"),
        ("max_steps: 1\nmax_steps: 2", "run.yaml: max_steps is there twice; keep one."),
        ("- a\n- b", "run.yaml holds a list; it must hold options"),
        ("max_steps: [1", "run.yaml, line 1 is not YAML"),
        ("!!python/object/apply:os.system ['true']", "run.yaml"),
        ("dataset_name: x", "run.yaml: dataset_name is not an option here. Use dataset."),
    ],
)
def test_a_wrong_yaml_file_is_answered_in_one_sentence(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml("run.yaml", FLAGS, hints={"dataset_name": "Use dataset."})
    assert said in str(caught.value)


def test_a_missing_yaml_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file or directory."):
        read_yaml("nowhere.yaml", FLAGS)


def test_a_letter_after_one_dash_stands_for_the_option_that_names_it():
    flags = [Flag(name="output", help="", short="o")]
    assert read_flags(["-o", "x"], flags) == read_flags(["--output=x"], flags) == {"output": "x"}
    with pytest.raises(ConfigError, match="-p is not an option here"):
        read_flags(["-p", "x"], flags)


def test_json_that_is_indented_by_tabs_is_read_as_before():
    assert typed({"x": '{\n\t"a": 1\n}'}, {"x": dict[str, int]}) == {"x": {"a": 1}}


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["--max-steps", "1:30"], "", "max_steps: 1:30 is 90 in YAML"),
        (["--reward-weights", "1:30", "2"], "", "reward_weights: 1:30 is 90 in YAML"),
        ([], "max_steps: 010\n", "010 is 8 in YAML"),
        ([], "model_init_kwargs: {revision: 1:30}\n", "1:30 is 90 in YAML"),
        (["--max-steps", "010"], "seed: 007\nrun_name: '1:30'\n", None),
    ],
)
def test_a_number_that_yaml_reads_in_base_8_or_60_is_no_other_number(words, content, said, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(content)
    command = ["train", "--config", str(tmp_path / "run.yaml"), "--model", "demo", "--dataset", "demo", *words]
    is_fine = main([*command, "--print-config"]) == 0
    told = capsys.readouterr()
    assert (said is None) == is_fine
    assert said is None or said in told.err
    assert not is_fine or ("max_steps: 10\n" in told.out and "seed: 7\n" in told.out)
