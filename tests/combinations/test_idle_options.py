"""An option that is accepted acts, or is named once: every option of sampling and of vLLM, for every sampler in every place."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest

from combinations.handed import OPTIONS, PLACEMENTS, SAMPLERS, USUAL, other_than_usual, recording, values_of
from covey import GRPOConfig
from covey.config import combinations
from covey.config.combinations import FEATURES, IDLE, RECORDS
from covey.config.options import DECLARED
from covey.data.live import LiveDataset
from covey.errors import ConfigError
from covey.training.agents import Agents
from covey.training.build_algorithm import choose_algorithm
from covey.training.build_sampler import name_idle_options


def is_repeated(sampler: str, place: str) -> bool:
    """True for a cell whose builders take the paths of others."""
    return place == "several processes" or (place == "ahead by Ray" and sampler != "native")


CELLS = [
    pytest.param(sampler, place, marks=[pytest.mark.nightly] * is_repeated(sampler, place))
    for sampler, place in product(SAMPLERS, PLACEMENTS)
    if sampler != "generate" or "ahead" not in place  # refused, with staleness
]


def silent_and_contradicted(sampler: str, place: str, caplog: Any) -> tuple[list[str], list[str]]:
    """Options that neither act nor are named nor refused, and those that act and are named as idle."""
    cell = {**USUAL, **SAMPLERS[sampler], **PLACEMENTS[place]}
    silent, contradicted = [], []
    with recording(2 if place == "several processes" else 1):
        usual = values_of(GRPOConfig(**cell))
        for name in (name for name in OPTIONS if name not in {**SAMPLERS[sampler], **PLACEMENTS[place]}):
            caplog.clear()
            try:
                acts = values_of(GRPOConfig(**{**cell, name: other_than_usual(name)})) != usual
            except ConfigError:
                continue
            names = [text for text in caplog.messages if text.startswith(f"{name}=") and "changes nothing" in text]
            assert len(names) <= 1, names
            if not acts and not names:
                silent.append(name)
            if acts and names:
                contradicted.append(name)
    return silent, contradicted


@pytest.mark.parametrize(("sampler", "place"), CELLS)
def test_an_option_acts_or_is_named_or_refused(sampler, place, caplog):
    assert silent_and_contradicted(sampler, place, caplog) == ([], [])


def test_without_its_line_in_the_table_an_idle_option_would_be_noticed(caplog, monkeypatch):
    monkeypatch.setattr(combinations, "IDLE", tuple(line for line in IDLE if "attention" not in line.options))
    assert silent_and_contradicted("vLLM in process", "one process", caplog)[0] == [
        *("rollout_cache_fraction", "cuda_graphs", "attention")
    ]


def test_the_table_names_options_and_features_that_exist():
    assert {name for line in IDLE for name in line.options} <= DECLARED.keys()
    conditions = {name for line in IDLE for name in (*line.needs, *line.idle_in)}
    options = {name.partition("=")[0] for name in conditions if "=" in name}
    assert {name for name in conditions if "=" not in name} <= FEATURES.keys() | RECORDS.keys()
    assert options <= DECLARED.keys()


def messages(caplog: Any, **options: Any) -> list[str]:
    caplog.clear()
    GRPOConfig(**{**USUAL, **options})
    return caplog.messages


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        ({"vllm_server_base_url": "http://localhost:1"}, {"vllm_server_port": 9}, "vllm_server_base_url is the address"),
        ({"vllm_transport": "gloo"}, {"vllm_directory": "there"}, "weights are broadcast"),
        ({"vllm_transport": "directory"}, {"vllm_group_port": 9}, "weights travel by a folder"),
        ({"vllm_transport": "ipc"}, {"vllm_group_port": 9}, "weights travel within a machine"),
    ],
)  # fmt: skip
def test_an_option_that_another_one_replaces_is_named(options, name, why, caplog):
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert messages(caplog, **server, **name) == []
    (option, value), *_ = name.items()
    assert messages(caplog, **server, **options, **name) == [f"{option}={value!r} changes nothing here: {why}."]


@pytest.mark.parametrize(("is_ahead", "names"), [(True, []), (False, ["rollout_max_rows=4 changes nothing here"])])
def test_the_rows_of_a_server_that_evaluates_averages_are_its_own(is_ahead, names, caplog):
    options = {
        "use_vllm": True,
        "vllm_mode": "server",
        "ema_decay": 0.5,
        "async_rollouts": is_ahead,
        "rollout_max_rows": 4,
    }
    assert [text.split(":")[0] for text in messages(caplog, **options)] == names


def test_a_limit_of_processes_that_one_process_waits_for_is_named(caplog):
    assert messages(caplog, ddp_timeout=99) == ["ddp_timeout=99 changes nothing here: there is one process."]


@pytest.mark.parametrize("is_live", [True, False])
def test_a_limit_of_a_live_source_is_named_without_it(is_live, caplog):
    args = GRPOConfig(**USUAL, live_timeout_seconds=9.0)
    caplog.clear()
    name_idle_options(Agents(), args, dataset=LiveDataset.__new__(LiveDataset) if is_live else [])
    why = "live_timeout_seconds=9.0 changes nothing here: its prompts come from no live source."
    assert caplog.messages == [why] * (not is_live)


@pytest.mark.parametrize(
    ("options", "acts"),
    [
        ({}, True),
        ({"top_p": 0.5}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"generation_kwargs": {"top_k": 5}}, False),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, False),
    ],
)
def test_a_correction_without_log_probabilities_of_the_policy_is_named(options, acts, caplog):
    args = GRPOConfig(**USUAL, vllm_importance_sampling_mode="token_mask", **options)
    caplog.clear()
    name_idle_options(Agents(), args)
    assert [text.split("=")[0] for text in caplog.messages] == ["vllm_importance_sampling_mode"] * (not acts)


def test_members_of_an_ensemble_have_log_probabilities(caplog):
    args = GRPOConfig(
        **USUAL, vllm_importance_sampling_mode="token_mask", generation_kwargs={"no_repeat_ngram_size": 3}
    )
    caplog.clear()
    name_idle_options(Agents(), args, has_members=True)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, []),
        ({"loss_type": "dapo", "sapo_temperature_neg": 2.0}, ["sapo_temperature_neg"]),
        ({"loss_type": "sapo", "epsilon": 0.3, "delta": 4.0}, ["epsilon", "delta"]),
        ({"loss_type": "cispo", "epsilon": 0.3, "epsilon_high": 5.0}, ["epsilon"]),
        ({"entropy_target": 0.5, "use_adaptive_entropy": True}, []),
        ({"entropy_target": 0.5}, ["entropy_target"]),
        ({"use_bias_correction_kl": False, "beta": 0.1}, []),
        ({"use_bias_correction_kl": False}, ["use_bias_correction_kl"]),
        ({"beta": 0.1, "ref_model_sync_steps": 8}, ["ref_model_sync_steps"]),
        ({"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}, ["scale_rewards"]),
        ({"vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask"},
            ["vllm_importance_sampling_mode"]),
    ],
)  # fmt: skip
def test_an_option_that_no_part_of_the_loss_reads_is_named(options, idle, caplog):
    args = GRPOConfig(**USUAL, **options)
    caplog.clear()
    choose_algorithm(args, None)
    assert [text.split("=")[0] for text in caplog.messages if "no part of the loss reads it" in text] == idle


def test_a_correction_beside_an_algorithm_is_refused():
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction=False both say what the loss is"):
        GRPOConfig(**USUAL, algorithm="gspo", vllm_importance_sampling_correction=False)
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mode both say what the loss is"):
        choose_algorithm(GRPOConfig(**USUAL, vllm_importance_sampling_mode="token_mask"), "gspo")


@pytest.mark.parametrize(("staleness", "is_named"), [(1, True), (2, False)])
def test_a_depth_that_staleness_does_not_allow_is_named(staleness, is_named, caplog):
    with recording(1), caplog.at_level(logging.WARNING):
        values_of(GRPOConfig(**USUAL, async_rollouts=True, max_staleness=staleness, pipeline_depth=2))
    assert ["pipeline_depth=2 orders no more rollouts ahead than 1" in text for text in caplog.messages] == [
        True
    ] * is_named
