"""A model that FSDP2 splits over two processes, with teachers, examples and images: the run of one process."""

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


@pytest.mark.slow
@pytest.mark.parametrize("term", rest_nightly(TERMS, ["teacher"]))
def test_a_split_model_learns_from_a_second_signal_as_a_whole_one(term, tmp_path):
    options = {"algorithm": TERMS[term](tmp_path)}
    run(tmp_path / "1", options=options)
    run(tmp_path / "2", 2, options={**options, "fsdp": True})
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(["qwen2_5_vl", "idefics3", "llava", "gemma3"], ["qwen2_5_vl"]))
@pytest.mark.parametrize("images", [[2, 1], [1, 0]], ids=["each prompt", "one prompt of two"])
def test_a_split_model_reads_images_as_a_whole_one(kind, images, tmp_path):
    case = {"images": images, "vlm": kind, "options": {"learning_rate": 0.1}}
    run(tmp_path / "1", **case)
    case["options"]["fsdp"] = True
    run(tmp_path / "2", 2, **case)
    assert moved(tmp_path / "1") > 1e-3
    assert apart(tmp_path / "1", tmp_path / "2") < 2e-6
