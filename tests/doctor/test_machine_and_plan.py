"""What is judged by figures alone: versions, threads, memory, disk, time, learning rate."""

from types import SimpleNamespace

import pytest
import torch

from covey.doctor import environment, plan
from kit import tiny_model


def test_a_version_out_of_its_range_and_a_missing_package_fail_with_the_command_to_install():
    wanted = ["torch>=99", "covey-has-no-such-package>=1", "peft>=99; extra == 'peft'"]
    findings = list(environment.versions(wanted))
    assert [one.status for one in findings] == ["FAIL", "FAIL"]
    assert [one.fix for one in findings] == ["pip install 'torch>=99'", "pip install 'covey-has-no-such-package>=1'"]
    assert [one.status for one in environment.versions(["torch>=1", "numpy"])] == ["PASS"]


@pytest.mark.parametrize(
    "used, cores, on_cpu, status",
    [(8, 2, True, "WARN"), (1, 16, True, "WARN"), (1, 16, False, "PASS"), (1, 1, True, "PASS"), (4, 4, True, "PASS")],
)
def test_threads_are_as_many_as_cores(used, cores, on_cpu, status):
    assert environment.threads(used, cores, on_cpu=on_cpu).status == status


@pytest.mark.parametrize("predicted, status", [(50, "PASS"), (90, "WARN"), (101, "FAIL")])
def test_memory_is_compared_with_what_is_free(predicted, status):
    assert plan.memory(predicted, 100, "free").status == status


def test_a_disk_without_room_for_a_checkpoint_fails(tmp_path, monkeypatch):
    args = SimpleNamespace(save_only_model=False, save_strategy="steps", save_total_limit=2)
    model = tiny_model()
    needed = 3 * sum(weight.numel() * 4 for weight in model.parameters())
    for free, status in ((needed - 1, "FAIL"), (2 * needed - 1, "WARN"), (2 * needed, "PASS")):
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        finding = plan.disk(tmp_path / "not" / "yet", model, args)
        assert (finding.status, finding.facts["checkpoint"]) == (status, needed)


@pytest.mark.parametrize(
    "is_adapter, rate, said",
    [
        (False, 1e-3, "learning_rate=0.001 is high for training all weights"),
        (True, 1e-6, "learning_rate=1e-06 is low for LoRA"),
        (False, 1e-6, "within what is known to work"),
        (True, 1e-4, "within what is known to work"),
    ],
)
def test_the_learning_rate_is_judged_by_what_is_trained(is_adapter, rate, said):
    from covey.algorithms.advice import advise

    remarks = [str(one) for one in advise(learning_rate=rate, is_lora=is_adapter)]
    findings = list(plan.learning_rate(SimpleNamespace(learning_rate=rate), remarks, is_adapter=is_adapter))
    assert len(findings) == 1
    assert said in findings[0].said
    assert (findings[0].status == "PASS") == ("within" in said)


def test_the_time_of_a_step_is_the_trials_by_the_number_of_completions():
    from covey import GRPOConfig, batch_arithmetic
    from covey.doctor.trial import Trial
    from covey.types import StepReport
    from kit import group

    config = GRPOConfig(
        output_dir="unused", per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4,
        num_generations=4, max_steps=10,
    )  # fmt: skip
    counts = batch_arithmetic(config, num_prompts=8)
    groups = (group(["1", "2", "3", "4"]), group(["1", "2", "3", "4"]))
    seconds = {"rollout": 4.0, "reward": 1.0, "learn": 3.0}  # of 8 completions
    report = StepReport(step=1, metrics={}, seconds={}, events=())
    found = plan.expected_time(Trial(groups=groups, again=groups, report=report, seconds=seconds), counts)
    # 32 completions are drawn for two steps of 16: 5 s x 4 / 2, and 3 s x 2
    assert found.facts["seconds_a_step"] == pytest.approx(16.0)
    assert found.facts["seconds"] == pytest.approx(160.0)


def test_durations_are_told_in_words():
    assert [plan.in_words(s) for s in (90, 600, 5400, 260_000)] == ["90 s", "10 minutes", "1.5 hours", "3.0 days"]


def test_free_memory_of_a_processor_is_some():
    bytes_free, where = plan.available_memory(torch.device("cpu"))
    assert bytes_free > 2**20
    assert where == "free in memory"
