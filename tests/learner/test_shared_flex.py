"""FlexAttention for packed rows: its mask, when it is chosen, and that one compiled kernel serves every length."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from datasets import Dataset
from shared_rows import ROWS, assert_same, biased_by_distance, gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.kernels import flex_attention as shared_flex
from covey.kernels.attention_product import Layout
from covey.kernels.flex_attention import AttentionHeads, _KeyRanges, mask_of, tried
from covey.learner.policy import Policy
from kit import tiny_model, tiny_tokenizer

LAYOUTS = {
    "one prompt, answers of many lengths": (Layout(0, 40, (150, 30, 0, 292)),),
    "a prompt of whole blocks": (Layout(0, 256, (128, 128)),),
    "prompts, one without answers, and padding": (
        Layout(0, 300, (1, 200)), Layout(501, 7, ()), Layout(508, 1, (260,)), Layout(769, 127, ()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_the_blocks_are_those_that_torch_finds_by_looking_at_every_pair(layouts):
    mask = mask_of(layouts, torch.device("cpu"))
    size = mask.seq_lengths[0]
    dense = create_block_mask(_KeyRanges.of(layouts).allows(), None, None, size, size, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):  # keys of a block of queries, and queries of a block of keys
        counts, order = f"{kind}_num_blocks", f"{kind}_indices"
        assert getattr(mask, order).is_contiguous()
        assert torch.equal(getattr(mask, counts), getattr(dense, counts))
        for row, count in enumerate(getattr(mask, counts)[0, 0].tolist()):
            found, wanted = (getattr(one, order)[0, 0, row, :count].sort().values for one in (mask, dense))
            assert torch.equal(found, wanted)
    assert torch.equal(mask.to_dense(), dense.to_dense())


def test_a_token_sees_its_prompt_and_its_own_completion_up_to_itself():
    place = torch.arange(9)
    seen = _KeyRanges.of((Layout(0, 2, (3, 2)), Layout(7, 2, ()))).allows()(None, None, place[:, None], place[None])
    assert ["".join("x" if one else "." for one in row) for row in seen.tolist()] == [
        "x........", "xx.......",
        "xxx......", "xxxx.....", "xxxxx....",
        "xx...x...", "xx...xx..",
        ".......x.", ".......xx",
    ]  # fmt: skip


def heads(dtype=torch.float32, device="cpu"):
    return AttentionHeads(4, 2, 16, 16, dtype, torch.device(device))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in (torch.float64, torch.bfloat16))],
)
def test_the_trial_that_decides_passes_where_the_kernel_is_right(dtype, flex_on_a_cpu):
    assert tried(heads(dtype)) is None


def test_the_trial_finds_a_kernel_that_is_wrong(flex_on_a_cpu, monkeypatch):
    unmasked = lambda *given, block_mask, **options: flex_attention(*given, **options)
    monkeypatch.setattr(shared_flex, "flex_attention", unmasked)
    assert "its values differ from explicit attention's by" in tried(heads())


def test_sinks_take_part_in_the_softmax_and_the_trial_finds_a_kernel_without_them(flex_on_a_cpu, monkeypatch):
    """A model with sinks: `test_shared_windows.py`."""
    with_sinks = replace(heads(torch.float64), has_sinks=True)
    assert tried(with_sinks) is None
    tried.cache_clear()
    whole = shared_flex._attention
    monkeypatch.setattr(shared_flex, "_attention", lambda q, k, v, sinks, **options: whole(q, k, v, None, **options))
    assert "does not compile or run here" in tried(with_sinks)  # sinks without a gradient
    tried.cache_clear()
    monkeypatch.setattr(shared_flex, "_attention", lambda q, k, v, s, **options: whole(q, k, v, 2 * s, **options))
    assert "its values differ from explicit attention's by" in tried(with_sinks)


def test_the_trial_says_why_a_kernel_fails(flex_on_a_cpu, monkeypatch):
    def fails(*given, **options):
        raise NotImplementedError("no kernel for this width")

    monkeypatch.setattr(shared_flex, "flex_attention", fails)
    assert tried(heads()) == "it does not compile or run here (NotImplementedError: no kernel for this width)"


def test_memory_that_runs_out_in_the_trial_is_no_verdict(flex_on_a_cpu, monkeypatch):
    def runs_out(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(shared_flex, "flex_attention", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        tried(replace(heads(), query=8))


def test_asked_for_where_it_cannot_be_had_it_is_refused_with_the_reason():
    policy = Policy(tiny_model(), pad_id=0, shared_attention="flex")
    with pytest.raises(ConfigError, match="shared_attention='flex', but .* compiled for CUDA, and the model is on cpu"):
        policy.shares_prompts()


def test_attention_that_drops_weights_at_random_goes_by_part(flex_on_a_cpu):
    policy = Policy(tiny_model(attention_dropout=0.1), pad_id=0, shared_attention="flex")
    with pytest.raises(ConfigError, match="at random"):
        policy.shares_prompts()


def test_a_kernel_asked_for_of_a_model_that_shares_nothing_is_refused():
    policy = Policy(biased_by_distance(), pad_id=0, shared_attention="sdpa")
    with pytest.raises(ConfigError, match="each prompt once a completion: its attention is biased by the distance"):
        policy.shares_prompts()


def test_the_option_is_refused_on_a_cpu_before_any_work(tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 2}
    trainer = GRPOTrainer(
        model=tiny_model(),
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completions, **columns: pytest.fail("work was spent"),
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 ="]}),
        args=GRPOConfig(**given, shared_attention="flex", per_device_train_batch_size=2, max_steps=1),
    )
    with pytest.raises(ConfigError, match="shared_attention='flex', but FlexAttention is not used"):
        trainer.train()
    with pytest.raises(ConfigError, match="Did you mean flex"):
        GRPOConfig(**given, shared_attention="felx")


@pytest.mark.slow
def test_a_compiled_kernel_serves_every_length(flex_on_a_cpu, monkeypatch):
    """By torch's own tracing, all but the code of the kernel: rows of seven lengths are compiled at most twice, and are right."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(shared_flex, "flex_attention", torch.compile(flex_attention, dynamic=True, backend=counter))
    for answers in (100, 200, 300, 400, 500, 700, 900):
        assert shared_flex._gap(heads(torch.float64), Layout(0, 30, (answers, 40))) < 1e-9
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_the_trial_compiles_the_attention_of_all_passes_once(flex_on_a_cpu, monkeypatch):
    """Heads as many as blocks, the scale that a model names, passes without gradients: all are served by one forward and backward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(shared_flex, "_compiles_on", lambda device: True)
    monkeypatch.setattr(shared_flex, "_compiled", lambda: whole)
    whole = torch.compile(shared_flex._attention, dynamic=True, backend=counter)
    assert tried(heads(torch.bfloat16)) is None
    for answers in (200, 500):
        tokens = 56 + answers
        size = shared_flex.padded(tokens)
        layouts = Layout(0, 30, (answers, 26)), Layout(tokens, size - tokens, ())
        inputs = [torch.randn(1, size, n, 16).bfloat16().transpose(1, 2).requires_grad_() for n in (4, 2, 2)]
        with torch.autocast("cpu", torch.bfloat16):
            mask = mask_of(layouts, torch.device("cpu"))
            out = shared_flex.attend(*inputs, mask, 16**-0.5)
            with torch.no_grad():
                scored = shared_flex.attend(*inputs, mask, 16**-0.5)
        out.sum().backward()
        assert not scored.requires_grad
        torch.testing.assert_close(scored, out)
    torch._dynamo.reset()
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_on_a_gpu_the_compiled_kernel_equals_one_row_at_a_time(architecture, dtype):
    model = tiny_model(architecture, hidden=64).cuda().eval()
    long = [
        replace(one, completion=replace(one.completion, token_ids=one.completion.token_ids.repeat(50))) for one in ROWS
    ]
    apart = gradients(Policy(model, pad_id=0, compute_dtype=dtype), [[one] for one in long])
    policy = Policy(model, pad_id=0, compute_dtype=dtype)
    together = gradients(policy, [long])
    assert policy.kernel == "flex"
    if dtype is None:
        assert_same(together, apart)
        return
    flat = lambda found: torch.cat([gradient.flatten() for gradient in found[1].values()])
    assert (flat(together) - flat(apart)).norm() < 3e-2 * flat(apart).norm()
