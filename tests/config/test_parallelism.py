"""`parallelism_config`: the size of context parallelism from every form in which it is written, and a sentence for the rest."""

import json

import pytest

from covey import GRPOConfig
from covey.config.parallelism import expect_processes
from covey.errors import ConfigError


class Options:
    def __init__(self, value):
        self.parallelism_config = value


def size_of(value):
    from covey.config.parallelism import settle_parallelism

    return settle_parallelism(Options(value))


def accelerates(**sizes):
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


@pytest.mark.parametrize(
    "value, size",
    [
        (None, 1),
        ({"cp_size": 2}, 2),
        ({"sp_size": 4}, 4),
        ('{"cp_size": "2"}', 2),
        ({"cp_size": 2, "dp_shard_size": 4, "cp_backend": "torch"}, 2),
        (lambda: accelerates(cp_size=2), 2),
        (lambda: accelerates(sp_size=2, dp_shard_size=2), 2),
        (lambda: accelerates(), 1),
    ],
)
def test_the_size_is_read_from_a_mapping_json_and_accelerates_object(value, size):
    assert size_of(value() if callable(value) else value) == size


@pytest.mark.parametrize(
    "value, said",
    [
        ({"tp_size": 2}, "tp_size=2.*vllm_tensor_parallel_size"),
        ({"cp_size": 2, "sp_size": 2}, "same tokens; keep cp_size"),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, "leave dp_replicate_size out"),
        ({"cp_sise": 2}, "'cp_sise', which is not known. Did you mean cp_size"),
        ({"cp_size": 0}, "at least 1"),
        ({"cp_size": True}, "at least 1"),
        ({"cp_size": 1.5}, "at least 1"),
        ("{cp_size", "is no JSON"),
        ([2], "no mapping"),
    ],
)
def test_what_cannot_be_honoured_is_refused(value, said):
    with pytest.raises(ConfigError, match=said):
        size_of(value)


def test_the_launchers_sizes_are_read_and_those_of_the_run_win(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    assert size_of(None) == 4
    assert size_of({"cp_size": 2}) == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match="tp_size=2"):
        size_of(None)


def test_a_size_has_to_divide_the_processes_and_changes_nothing_for_one(caplog):
    assert expect_processes(2, 8) == 2
    with pytest.raises(ConfigError, match="cp_size=3, which does not divide the 8 processes"):
        expect_processes(3, 8)
    assert expect_processes(2, 1) == 1
    assert "changes nothing here: there is one process" in caplog.text


def test_a_run_records_it_as_a_plain_mapping(tmp_path):
    args = GRPOConfig(str(tmp_path), parallelism_config=accelerates(cp_size=2), report_to="none", use_cpu=True)
    assert args.context == 1, "one process"
    assert json.loads(args.to_json_string())["parallelism_config"] == {"cp_size": 2}
    assert args.parallelism_config == {"cp_size": 2}
