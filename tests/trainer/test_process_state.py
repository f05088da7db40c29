"""Training leaves the user's model and process as they were, but for what docs/process-state.md lists."""

import gc
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.config.checks import processor_has_bfloat16
from covey.errors import CoveyError
from kit import rest_nightly, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("thawed_heap")

ROWS = Dataset.from_list([{"prompt": f"What is {i} + {i}?"} for i in range(8)])
BY_OPTION = {"training", "gradient_checkpointing", "_gradient_checkpointing_func"}
"""Attributes of modules that options change for good."""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGRTMAX)


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) / 8 for text in completions]


def fails(completions, **kwargs):
    raise ZeroDivisionError


def state_of(model):
    """Everything of the model but its weights, and of the process."""
    home = sys.modules[type(model).__module__]
    return {
        "attention": model.config._attn_implementation,
        "attributes": [sorted(set(vars(module)) - BY_OPTION) for module in model.modules()],
        "forwards": [type(module).forward for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "rotation": home.apply_rotary_pos_emb,
        "torch": (torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention),
        "numbers": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "precision": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "hooks of Python": (sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning),
        "streams": (sys.stdout, sys.stderr),
        "bars": (transformers.utils.logging.is_progress_bar_enabled(), datasets.is_progress_bar_enabled()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "frozen": gc.get_freeze_count(),
        "environment": dict(os.environ),
    }


def trainer(model, folder, reward, **options):
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        max_completion_length=6,
        num_generations=4,
        per_device_train_batch_size=8,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        reward_timeout_seconds=60,
        **options,
    )
    return GRPOTrainer(
        model, reward, args=config, train_dataset=ROWS, processing_class=tiny_tokenizer(), eval_dataset=ROWS
    )


def test_the_page_names_files_that_exist():
    root = Path(__file__).parents[2]
    names = re.findall(r"`([a-z_/]+\.py)`", (root / "docs/process-state.md").read_text())
    assert len(names) > 10
    assert not [name for name in names if not (root / "src/covey" / name).is_file()]


needs_bfloat16 = pytest.mark.skipif(not processor_has_bfloat16(), reason="this processor does not multiply bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [{}, pytest.param({"bf16": True}, marks=[needs_bfloat16, pytest.mark.nightly])],
    ids=["float32", "bf16"],
)
@pytest.mark.parametrize("recomputes", rest_nightly([True, False], 1), ids=["recomputed", "kept"])
def test_after_training_and_evaluation_everything_is_as_before(tmp_path, recomputes, precision):
    model = tiny_model(layers=2, hidden=64)
    one = trainer(model, tmp_path, digits, gradient_checkpointing=recomputes, **precision)
    before = state_of(model)
    seen = []
    real = one._build_session

    def watched(learner, *args, **kwargs):
        measure = learner.policy.measure
        learner.policy.measure = lambda *a, **k: (measure(*a, **k), seen.append(model.config._attn_implementation))[0]
        return real(learner, *args, **kwargs)

    one._build_session = watched
    one.train()
    assert "covey" in seen, "prompts were shared on the way"
    assert state_of(model) == before
    one.evaluate()
    signal.signal(signal.SIGRTMAX, before["signals"][-1])  # outside of a run it is left ignored
    assert state_of(model) == before


@pytest.mark.slow
def test_after_a_run_that_failed_everything_is_as_before(tmp_path):
    model = tiny_model(layers=2, hidden=64)
    one = trainer(model, tmp_path, fails, on_reward_error="raise")
    before = state_of(model)
    with pytest.raises(CoveyError):
        one.train()
    assert state_of(model) == before
