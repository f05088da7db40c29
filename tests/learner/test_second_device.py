"""No tensor on the wrong device, no hidden wait for the device: the learner and the decode step on a second device made in Python.

`tests/second_device.py` has real numbers and a GPU's rules. Each wait that is allowed is listed here.
"""

import json
from pathlib import Path

import pytest
import torch.utils.backend_registration
from filelock import FileLock

from forked import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot register a device in Python",
    ),
]

TRANSFORMERS = {"policy.py:hidden _local_scalar_dense"}
"""transformers looks once a forward pass of padded rows whether rows are packed."""
TRIED_ONCE = {
    "trials.py:splits_exactly _local_scalar_dense",
    "trials.py:_hidden_of _local_scalar_dense",
    "trials.py:splits_exactly allclose",
    "trials.py:_try _local_scalar_dense",
    "windows.py:_window_of equal",
    "windows.py:_window_of between the devices",
    "windows.py:attention_windows _local_scalar_dense",
}
"""A model is tried on its first use."""
NOTES = {"learner.py:_notes to the CPU", "learner.py:<dictcomp> to the CPU"}
"""What is measured at the rollout goes to the host, once a micro-batch."""
DECODE = {
    "graph_scheduler.py:_step _local_scalar_dense",  # has a row ended? where a group reaches its limit
    "graph_scheduler.py:next to the CPU",  # the same of a look ago; on CUDA a copy that nothing waits for
}
ROWS_CHANGE = {
    "static_kv_cache.py:set_row_owners to the device",
    "static_kv_cache.py:drop_rows between the devices",
    "static_kv_cache.py:drop_prompts between the devices",
    "static_kv_cache.py:add_prompts to the device",
    "kv_cache.py:add_prompts between the devices",
    "kv_cache.py:<genexpr> between the devices",
    "row_states.py:_index between the devices",
    "batches.py:_token_indices to the device",
    "decoder.py:prefill to the device",
    "graph_scheduler.py:__init__ between the devices",
    "scheduler.py:__init__ between the devices",
    "scheduler.py:__init__ to the device",
    "requests.py:<lambda> between the devices",
    "requests.py:<lambda> to the CPU",
    "scheduler.py:_drop_finished_prompts between the devices",
    "scheduler.py:_place between the devices",
    "scheduler.py:_place index from the CPU",
    "scheduler.py:_place to the device",
    "scheduler.py:_prefill_batch to the device",
    "scheduler.py:_retire between the devices",
    "scheduler.py:_retire nonzero",
    "scheduler.py:_retire to the CPU",
    "scheduler.py:_set_row_owners to the CPU",
}
"""Prompts are prefilled, rows begin and end."""
STOP_STRINGS = {
    "scheduler.py:_written to the CPU",
    "stopping.py:of to the device",
    "stopping.py:completed to the CPU",
    "stopping.py:completed nonzero",
}
"""Text is compared on the host."""


@pytest.fixture(scope="module", params=["quick", pytest.param("every", marks=pytest.mark.nightly)])
def found(request, tmp_path_factory, worker_id):
    """The cases of `second_device_cases.py`, in a process of their own: a device is registered for ever. One process for all workers."""
    if worker_id == "master":
        return computed(request.param)
    shared = tmp_path_factory.getbasetemp().parent / f"second_device_{request.param}.json"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            shared.write_text(json.dumps(computed(request.param)))
    return json.loads(shared.read_text())


CASES = """
import json
import sys

sys.path[:0] = json.loads(sys.argv.pop())
import second_device_cases

second_device_cases.main()
"""


def computed(cases):
    tests = Path(__file__).parents[1]
    done = run("-c", CASES, cases, json.dumps([*map(str, (tests, tests / "learner", tests / "rollout"))]), timeout=560)
    assert done.returncode == 0, done.err[-3000:]
    return json.loads(done.out.splitlines()[-1])


def test_the_device_has_a_gpus_rules(found):
    rules = found["rules"]
    assert "same device" in rules["mixed"]
    assert rules["one number"] == [2.0, 2.0, 2.0]
    assert [rules[name] for name in ("item", "tolist", "bool", "cpu", "nonzero", "mask", "from the host")] == [1] * 7
    assert rules["free"] == 0


def test_the_learner_computes_there_what_it_computes_on_a_cpu(found):
    for name, case in found["learner"].items():
        assert case["same"], name
        assert case["weights"] < (2e-2 if "bfloat16" in name else 5e-6), name
        assert max(case["metrics"].values()) < (2e-2 if "bfloat16" in name else 1e-5), name


def test_forward_and_backward_passes_of_a_step_wait_for_nothing(found):
    """Token ids and places of the next micro-batch are copied while the device computes."""
    for name, case in found["learner"].items():
        assert set(case["waits"]["micro-batches"]) <= TRANSFORMERS, name


def test_experts_are_counted_without_waiting(found):
    assert found["balanced"] == {}


def test_what_is_measured_at_the_rollout_goes_to_the_host_once_a_micro_batch(found):
    for name, case in found["learner"].items():
        waits = case["waits"]["annotate"]
        assert set(waits) <= TRANSFORMERS | TRIED_ONCE | NOTES, name
        assert sum(waits.get(place, 0) for place in NOTES) <= 3, name


def test_the_engine_writes_there_what_it_writes_on_a_cpu(found):
    for way, case in found["decode"].items():
        assert case["same"], way
        assert case["tokens"] > 0
        assert case["logprobs"] < 1e-4, way


def test_a_decode_step_waits_once_and_every_other_wait_is_known(found):
    for way, case in found["decode"].items():
        allowed = DECODE | ROWS_CHANGE | (STOP_STRINGS if way == "rich" else set())
        assert set(case["waits"]) <= allowed, way
        assert sum(case["waits"].get(name, 0) for name in DECODE) <= case["steps"], way


def test_rollouts_in_16_bits_are_as_near_to_float32_there_as_on_a_cpu(found):
    """Rounding falls differently there, so that completions part."""
    for dtype, (cpu, second) in found["precision"].items():
        assert 0 < second < 1.5 * cpu < 0.03, dtype


def test_tools_answer_there(found):
    assert found["tools"]["same"]
    assert found["tools"]["logprobs"] < 1e-4


def test_an_evaluation_gives_the_same_rewards_there(found):
    assert found["assessed"][0] == found["assessed"][1]
    assert len(set(found["assessed"][0][0])) > 1


def test_a_reward_model_scores_there_and_waits_a_few_times_a_batch(found):
    (scores, _), (own, waits) = found["scored"]
    assert own == pytest.approx(scores, abs=1e-5)
    assert len(set(scores)) > 1
    assert sum(waits.values()) <= 7, waits


def test_a_reference_is_moved_there_without_waiting(found):
    for case in found["reference"]:
        assert case["gap"] == 0
        assert not case["waits"]


def test_a_device_without_float64_learns_and_writes_the_same(found):
    case = found["without float64"]
    assert max(case["weights"].values()) < 5e-6
    assert case["same"]
    assert case["logprobs"] < 1e-4
