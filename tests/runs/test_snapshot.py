"""A snapshot holds what was there, whatever is done to the originals next; background work is told of once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.process.memory import free_memory
from covey.runs import serialization
from covey.runs.snapshot import Background, bytes_to_copy, weights_now
from covey.types import Media, Prompt
from kit import tiny_model


def test_a_snapshot_of_a_tree_keeps_every_value_of_its_moment(tmp_path: Path) -> None:
    live = {"x": torch.arange(4.0), "steps": [1, 2], "more": {"mean": torch.zeros(())}}
    live["tied"] = live["x"]
    held = serialization.snapshot(live)
    live["x"].zero_()
    live["more"]["mean"].add_(1)
    live["steps"].append(3)
    serialization.write(held, tmp_path / "state")
    back = serialization.read(tmp_path / "state")
    assert back["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert back["tied"] is back["x"]
    assert back["more"]["mean"].item() == 0.0
    assert back["steps"] == [1, 2]


def test_copied_weights_do_not_follow_the_model_and_stay_tied() -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    held = weights_now(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert list(held) == list(before)
    assert all(torch.equal(held[name], before[name]) for name in before)
    assert held["lm_head.weight"] is held["model.embed_tokens.weight"]


def test_frozen_weights_are_not_copied() -> None:
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    live, held = model.state_dict(), weights_now(model)
    shared = {name for name in live if held[name].data_ptr() == live[name].data_ptr()}
    assert {name for name in live if "lora_" not in name} == shared


def test_background_work_is_returned_once_and_its_error_raised_once() -> None:
    background, gate = Background[int](), threading.Event()
    assert background.finish() is None
    background.start(lambda: gate.wait(10) and 7, "seven")
    assert background.is_busy
    gate.set()
    assert background.finish() == 7
    assert background.finish() is None
    background.start(lambda: 1 // 0, "fails")
    with pytest.raises(ZeroDivisionError):
        background.finish()
    assert background.finish() is None


def test_the_size_of_a_copy_counts_what_is_trained_and_what_the_tree_holds() -> None:
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tree = {"a": torch.zeros(5, dtype=torch.float64), "b": [(torch.zeros(3),)], "c": 1}
    assert bytes_to_copy(model, tree) == 4 * adapter + 40 + 12


def test_free_memory_is_what_the_system_says() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = free_memory()
    assert free is not None
    assert 0 < free < total


GROUPS = {  # lines of /proc/self/cgroup, files under /sys/fs/cgroup, bytes that are free of 1 GiB
    "none": ("0::/", {}, 2**30),
    "version 2": ("0::/", {"memory.max": 5000, "memory.current": 2000, "memory.stat": "inactive_file 100"}, 3100),
    "around it": (
        "0::/job/task",
        {
            "job/task/memory.max": "max",
            "job/task/memory.current": 10,
            "job/memory.max": 5000,
            "job/memory.current": 4000,
        },
        1000,
    ),
    "version 1": (
        "9:name=systemd:/\n4:memory:/job",
        {
            **{"memory/job/memory.limit_in_bytes": 7000, "memory/job/memory.usage_in_bytes": 5000},
            **{"memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 30"},
            **{"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 9000},
        },
        2030,
    ),
    "a container's, under the host's path": (
        "4:cpu,memory:/docker/3f",
        {"memory/memory.limit_in_bytes": 7000, "memory/memory.usage_in_bytes": 5000},
        2000,
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_free_memory_is_that_of_the_tightest_control_group(kind: str, tmp_path: Path) -> None:
    lines, files, free = GROUPS[kind]
    contents = {"proc/meminfo": f"MemAvailable: {2**20} kB", "proc/self/cgroup": lines}
    contents |= {f"sys/fs/cgroup/{name}": str(text) for name, text in files.items()}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_prompts_with_images_of_earlier_checkpoints_are_read(tmp_path: Path) -> None:
    """Before sounds, `Media` was `PromptImages`, and the prompt's field `images`."""
    media = Media(tensors={"pixel_values": torch.arange(6.0).view(2, 3)}, count=2, previews=(b"\x89PNG",))
    prompt = Prompt(uid="0:1", token_ids=(3, 4), media=media, columns={"images": ["three.png"]})
    serialization.write(serialization.snapshot({"prompt": prompt}), tmp_path / "state")
    for path in tmp_path.rglob("*.json"):
        text = path.read_text()
        assert '"Media"' in text
        path.write_text(text.replace('"Media"', '"PromptImages"').replace('"media":', '"images":'))
    back = serialization.read(tmp_path / "state")["prompt"]
    assert back.media.names == media.names
    assert back.columns == {"images": ["three.png"]}
    assert torch.equal(back.media.tensors["pixel_values"], media.tensors["pixel_values"])
