"""Whole runs on a GPU, through GRPOConfig: `make gpu`, or `pytest -m gpu`. QLoRA is in `tests/learner/test_quantized.py`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from gpu_runs import PROMPTS, flat, numbers, trained, trainer_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from covey.process.device import PeakBytes
from kit import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9, first compilation
]
needs_bfloat16 = pytest.mark.skipif(
    torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False),
    reason="needs a GPU with bfloat16",
)


@needs_bfloat16
def test_full_fine_tuning_computes_in_bfloat16_with_float32_weights_by_default(tmp_path):
    one, before = trained(tmp_path)
    assert one.args.bf16
    assert {parameter.device.type for parameter in one.model.parameters()} == {"cuda"}
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.float32}
    assert one._running.learner.policy.compute_dtype == torch.bfloat16
    assert not torch.equal(flat(one.model), before)
    assert all(size > 0 for size in numbers(one, "grad_norm"))


@needs_bfloat16
def test_rollouts_are_drawn_on_the_gpu_from_what_the_learner_computes(tmp_path):
    one, _ = trained(tmp_path, max_steps=1)
    assert max(numbers(one, "sampling/sampling_logp_difference/mean")) < 0.05


@pytest.mark.parametrize("kernel", ["flex", "sdpa"])
def test_a_first_step_in_float32_is_that_of_a_cpu(tmp_path, kernel):
    """Greedy completions are the same on both devices."""
    options = {"max_steps": 1, "bf16": False, "tf32": False, "generation_kwargs": {"do_sample": False}, "beta": 0.1}
    here, _ = trained(tmp_path / "gpu", shared_attention=kernel, **options)
    there, _ = trained(tmp_path / "cpu", use_cpu=True, **options)
    assert here._running.learner.policy.kernel == kernel
    for name in ("reward", "completions/mean_length"):
        assert numbers(here, name) == pytest.approx(numbers(there, name))
    assert numbers(here, "entropy") == pytest.approx(numbers(there, "entropy"), rel=1e-3)


def test_lora_trains_the_adapter_alone_and_compares_with_the_base_model(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    one = trainer_of(tmp_path, peft_config=lora, beta=0.04, learning_rate=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    one.train()
    changed = {name for name, parameter in one.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert numbers(one, "kl")[0] == pytest.approx(0.0, abs=1e-3)


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    """Dropout draws from CUDA's generator, whose state is in the checkpoint."""
    dropping = {"disable_dropout": False, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "bf16": False}
    model = lambda: tiny_model("gpt2", layers=2, hidden=64, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0)
    with sdpa_kernel(SDPBackend.MATH):  # the others may add in any order
        whole, _ = trained(tmp_path, model=model(), shared_attention="sdpa", **dropping)
        expected = flat(whole.model)
        resume = str(tmp_path / "checkpoint-2")
        with pytest.warns(UserWarning, match="goes on from step 2"):
            again, _ = trained(tmp_path, resume=resume, model=model(), shared_attention="sdpa", **dropping)
    assert torch.equal(flat(again.model), expected)
    assert numbers(again, "reward") == numbers(whole, "reward")


def test_memory_that_runs_out_halves_the_micro_batch_and_the_run_goes_on(tmp_path):
    options = {"max_steps": 1, "max_completion_length": 200, "per_device_train_batch_size": 64, "num_generations": 8}
    make = lambda: tiny_model(layers=6, hidden=256, max_position_embeddings=512)
    options |= {"gradient_checkpointing": False, "max_tokens_per_microbatch": None}
    trained(tmp_path / "warm", model=make(), **options)  # what is loaded and compiled on first use
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    whole, _ = trained(tmp_path / "whole", model=make(), **options)
    peak = torch.cuda.max_memory_allocated()
    rows = whole._running.learner.micro_batcher.limits.max_rows
    del whole
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((start + 0.6 * (peak - start)) / total)
    try:
        less, before = trained(tmp_path / "less", model=make(), **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert less.state.global_step == 1
    assert less._running.learner.micro_batcher.limits.max_rows < rows
    assert not torch.equal(flat(less.model), before)


def test_readers_of_the_peak_of_memory_count_each_from_its_own_moment():
    one, two, size = PeakBytes(torch.device("cuda")), PeakBytes(), 2**22
    one.restart()
    held = torch.cuda.memory_allocated()
    torch.empty(size, dtype=torch.uint8, device="cuda")
    two.restart()
    assert (one.read() - held, two.read() - held) == (size, 0)


def test_evaluation_draws_and_scores_on_the_gpu(tmp_path):
    held_out = Dataset.from_dict({"prompt": PROMPTS[:2]})
    one, _ = trained(tmp_path, eval_dataset=held_out, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    assert len(numbers(one, "eval_reward")) >= 1


def test_decode_steps_are_replayed_as_cuda_graphs(tmp_path):
    one, _ = trained(tmp_path)
    assert one._running.sampler.static.captures, "a run's steps are captured, and nothing refused it"


def test_fp16_scales_its_loss_and_a_resumed_run_keeps_the_scale(tmp_path):
    options = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    one, before = trained(tmp_path, **options)
    assert one._running.learner.policy.compute_dtype == torch.float16
    assert not torch.equal(flat(one.model), before)
    scale = one._running.learner.scaler.get_scale()
    with pytest.warns(UserWarning, match="goes on from step 2"):
        again, _ = trained(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert again._running.learner.scaler.get_scale() == scale


def test_gradient_checkpointing_and_offloaded_activations_train(tmp_path):
    for options in ({"gradient_checkpointing": True}, {"gradient_checkpointing": False, "activation_offloading": True}):
        one, before = trained(tmp_path / str(len(options)), max_steps=1, **options)
        assert not torch.equal(flat(one.model), before)


TWO = """
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]) / "trainer")]
import torch
from gpu_runs import flat, numbers, trained

folder = Path(sys.argv[2])
one, _ = trained(folder / "run", per_device_train_batch_size=8, bf16=False, optim="sgd", learning_rate=0.1)
rank = torch.distributed.get_rank()
torch.save((flat(one.model), numbers(one, "reward"), numbers(one, "grad_norm")), folder / f"{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_the_steps_that_one_takes(tmp_path):
    alone, _ = trained(tmp_path / "alone", bf16=False, optim="sgd", learning_rate=0.1)
    script = tmp_path / "two.py"
    script.write_text(TWO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    command = [
        sys.executable,
        *launch,
        "--master_port",
        str(port),
        str(script),
        str(Path(__file__).parents[1]),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == numbers(alone, "reward")
    assert first[2] == pytest.approx(numbers(alone, "grad_norm"), rel=1e-3)
    assert (first[0] - flat(alone.model)).norm() < 1e-4 * first[0].norm()
