"""A model that FSDP2 splits over two processes, with teachers, examples, images, averages and ensembles: the run of one process."""

from __future__ import annotations

import pytest

from combinations.combined_run import apart, moved, run, teacher_folder
from kit import rest_nightly

TERMS = {
    "teacher": lambda folder: f"dapo, regularizer=distill(teacher='{teacher_folder(folder)}', weight=0.5)",
    "own teacher": lambda folder: "dapo, regularizer=distill(teacher='policy', feedback='best')",
    "examples": lambda folder: f"dapo, regularizer=sft(dataset='{examples(folder)}', weight=0.3, batch_size=3)",
}


def examples(folder):
    path = folder / "examples.jsonl"
    path.write_text("".join(f'{{"prompt": "{i} + {i} =", "completion": "{2 * i}"}}\n' for i in range(9)))
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("term", rest_nightly(TERMS, ["teacher"]))
def test_a_split_model_learns_from_a_second_signal_as_a_whole_one(term, tmp_path):
    options = {"algorithm": TERMS[term](tmp_path)}
    run(tmp_path / "1", options=options)
    run(tmp_path / "2", 2, options={**options, "fsdp": True})
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", rest_nightly(["qwen2_5_vl", "idefics3", "llava", "gemma3"], ["qwen2_5_vl"]))
@pytest.mark.parametrize("images", rest_nightly([[2, 1], [1, 0]], 1), ids=["each prompt", "one prompt of two"])
def test_a_split_model_reads_images_as_a_whole_one(kind, images, tmp_path):
    case = {"images": images, "vlm": kind, "options": {"learning_rate": 0.1}}
    run(tmp_path / "1", **case)
    case["options"]["fsdp"] = True
    run(tmp_path / "2", 2, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("split", rest_nightly([{}, {"fsdp": True}], 1), ids=["whole", "split"])
@pytest.mark.parametrize("images", rest_nightly([[1, 0], [2, 1]], 1), ids=["one prompt of two", "each prompt"])
def test_processes_that_share_out_tokens_read_images_as_one_process(split, images, tmp_path):
    case = {"images": images, "vlm": "qwen2_5_vl"}
    options = {"learning_rate": 0.1, "beta": 0.1}
    run(tmp_path / "1", options=options, **case)
    run(tmp_path / "2", 2, options={**options, **split, "parallelism_config": {"cp_size": 2}}, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.nightly  # in CI an agent whose prompts have images, in test_seeing_agents.py
@pytest.mark.parametrize("feature", ["agent", "environment"])
def test_a_split_model_learns_from_episodes_as_a_whole_one(feature, tmp_path):
    case = {"features": [feature], "others": str(tmp_path), "url": None, "chat": True}
    run(tmp_path / "1", **case)
    run(tmp_path / "2", 2, options={"fsdp": True}, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.nightly
@pytest.mark.parametrize("roles", ["sibling rescue", "baseline"])
def test_a_split_model_learns_from_the_members_of_an_ensemble_as_a_whole_one(roles, tmp_path):
    place = teacher_folder(tmp_path)
    members = [f"{place},role={role},name={role}" for role in roles.split()]
    one = run(tmp_path / "1", members=members, options={"per_device_train_batch_size": 8})
    two = run(tmp_path / "2", 2, members=members, options={"per_device_train_batch_size": 4, "fsdp": True})
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6
    counts = [[{k: v for k, v in entry.items() if k.startswith("ensemble/")} for entry in log] for log in (one, two)]
    assert counts[1] == [pytest.approx(entry, abs=2e-6, nan_ok=True) for entry in counts[0]]
    assert all(any(entry.get(f"ensemble/{role}/used", 0) > 0 for entry in one) for role in roles.split())


HOST = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.05, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(["all weights", "LoRA"], 1))
def test_shards_in_host_memory_learn_as_a_whole_model_and_go_on_to_the_bit(kind, tmp_path):
    case = {"lora": {}} if kind == "LoRA" else {}
    run(tmp_path / "1", options=HOST, **case)
    options = {**HOST, "fsdp": "full_shard auto_wrap offload"}
    run(tmp_path / "2", 2, options=options, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 5e-5  # Adam divides what is all but zero
    run(tmp_path / "again", 2, options=options, resume=str(tmp_path / "2" / "checkpoint-2"), **case)
    assert apart(tmp_path / "2", tmp_path / "again") == 0


@pytest.mark.nightly
def test_a_split_model_trains_tokens_of_an_adapter_as_a_whole_one(tmp_path):
    lora = {"trainable_token_indices": [*range(5, 60)]}
    run(tmp_path / "1", lora=lora)
    run(tmp_path / "2", 2, lora=lora, options={"fsdp": True})
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


SAVED = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
AVERAGES = {
    "moving": {"ema_decay": 0.5},
    "soup": {"soup_steps": 1},
    "of the best": {
        "soup_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "greater_is_better": False,
    },
}


def evaluated(log):
    """The evaluations of a run, without what the clock says."""
    clock = ("runtime", "seconds", "per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(clock)}
        for entry in log
        if "eval_reward" in entry
    ]


@pytest.fixture(scope="module")
def averages(tmp_path_factory):
    """Runs of one whole model and of one split over two processes, by average, made when asked for."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("averages")
            case = {"options": {**AVERAGES[name], **SAVED}, "evaluated": 4}
            one = run(folder / "1", **case)
            two = run(folder / "2", 2, evaluated=4, options={**case["options"], "fsdp": True})
            made[name] = folder, one, two
        return made[name]

    return get


@pytest.mark.nightly
@pytest.mark.parametrize("average", AVERAGES)
def test_a_split_model_ends_with_the_average_of_a_whole_one(average, averages):
    folder, one, two = averages(average)
    assert moved(folder / "1") > 1e-3
    assert apart(folder / "1", folder / "2") < 2e-6
    assert evaluated(two) == [pytest.approx(entry, abs=2e-6) for entry in evaluated(one)]
    assert len(evaluated(one)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after"),
    rest_nightly([(2, 2), (1, 2), (2, 1)], [(2, 2)]),
    ids=lambda processes: "split" if processes == 2 else "whole",
)
def test_an_average_goes_on_split_or_whole(before, after, averages, tmp_path):
    folder, *_ = averages("moving")
    options = {**AVERAGES["moving"], **SAVED, "fsdp": after == 2}
    checkpoint = str(folder / str(before) / "checkpoint-2")
    run(tmp_path / "again", after, options=options, evaluated=4, resume=checkpoint)
    assert apart(tmp_path / "again", folder / str(after)) <= (0.0 if before == after else 2e-6)
