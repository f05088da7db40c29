"""The engine on a GPU: kernels, captured steps, and that both give what steps as written give. `pytest -m gpu` with CUDA."""

import gc

import causal_classes
import pytest
import torch
from causal_classes import WITH_STATES
from native_models import NATIVE, build
from plain_sampling import TEXTS, collect, ids_of
from static_runs import PROMPTS, WAYS, expect_states_of_replayed_steps, finishes_of, logprobs_of, writer

from covey.process.memory import release
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.cuda_graphs import Captured, CudaCapture
from kit import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"
    ),  # Triton 3.9, on its first compilation
]


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def shapes():
    """The cases of the interpreter's tests."""
    pytest.importorskip("triton")
    import triton_attention_cases

    return triton_attention_cases


def counted(sampler):
    """The sampler, and a list of the `Captured` of each of its calls."""
    made = []

    def new():
        made.append(Captured(CudaCapture(sampler.forward.device), sampler.static.refuse))
        return made[-1]

    sampler.static.new_steps = new
    return sampler, made


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.03), (torch.float16, 0.003)])
def test_compiled_kernels_equal_one_softmax_over_all_keys(shapes, dtype, bound):
    from covey.kernels import triton_attention

    for name, shape in shapes.SHAPES.items():
        out, expected = shapes.both(triton_attention, device="cuda", dtype=dtype, **shapes.PLAIN | shape)
        torch.testing.assert_close(
            out.float(), expected, atol=bound, rtol=0, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_the_compiled_draw_is_that_of_pytorch():
    pytest.importorskip("triton")
    from triton_cases import WAYS, compare

    from covey.kernels import triton_sampling

    torch.manual_seed(0)
    logits = (3 * torch.randn(8, 151_936)).bfloat16().cuda()
    uniforms = torch.rand(8, dtype=torch.float64).cuda()
    seen = torch.rand(8, 151_936).cuda() < 0.1
    for way in WAYS.values():
        compare(triton_sampling, logits, uniforms, seen if "repetition_penalty" in way else None, **way)


def test_long_prompts_split_over_programs_give_the_same(shapes):
    from covey.kernels import triton_attention

    long = shapes.PLAIN | {"lengths": [3000, 4096], "columns": 2048, "step_column": 2000, "starts": [0, 1999, 700, 1]}
    whole, expected = shapes.both(triton_attention, device="cuda", **long)
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("arch", NATIVE)
def test_greedy_completions_equal_generate(tokenizer, arch, attention):
    model = build(*NATIVE[arch]).cuda()
    sampler = NativeSampler(model, tokenizer, attention=attention, dtype="float32")
    for group in collect(sampler, TEXTS, 2, SamplingParams(max_tokens=40, temperature=0)):
        ids = torch.tensor([group.prompt.token_ids], device="cuda")
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        for completion in group.completions:
            assert completion.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("max_rows", [9, 256])
@pytest.mark.parametrize("way", WAYS)
def test_replayed_steps_change_no_bit(tokenizer, way, max_rows, attention):
    model, params = writer().cuda(), SamplingParams(max_tokens=80, seed=7, **WAYS[way])
    options = {"dtype": "float32", "max_rows": max_rows, "attention": attention}
    expected = collect(NativeSampler(model, tokenizer, cuda_graphs=False, **options), PROMPTS, 4, params)
    sampler, made = counted(NativeSampler(model, tokenizer, **options))
    groups = collect(sampler, PROMPTS, 4, params)
    (steps,) = made
    assert steps.reason is None
    assert steps.num_replayed > steps.num_captured > 1
    assert ids_of(groups) == ids_of(expected)
    assert finishes_of(groups) == finishes_of(expected)
    assert torch.equal(logprobs_of(groups), logprobs_of(expected))


@pytest.mark.parametrize("kind", WITH_STATES)
def test_replayed_steps_hand_on_the_states_of_layers(tokenizer, kind):
    """As recorded steps do on a CPU (test_hybrid_layers)."""
    model, options = causal_classes.build(kind).cuda(), {"dtype": "float32", "max_rows": 9, "eos_ids": [*range(3, 40)]}
    sampler, made = counted(NativeSampler(model, tokenizer, **options))
    expect_states_of_replayed_steps(sampler, made, NativeSampler(model, tokenizer, cuda_graphs=False, **options), 1e-3)


def test_kernels_of_both_kinds_write_the_same_completions(tokenizer):
    model, params = writer().cuda(), SamplingParams(max_tokens=80, seed=7)
    triton, plain = (
        collect(NativeSampler(model, tokenizer, dtype="float32", attention=kind), PROMPTS, 4, params)
        for kind in ("triton", "torch")
    )
    assert ids_of(triton) == ids_of(plain)
    torch.testing.assert_close(logprobs_of(triton), logprobs_of(plain), atol=1e-4, rtol=0)


def test_weights_that_change_in_place_are_seen_by_the_next_call(tokenizer):
    model, params = writer().cuda(), SamplingParams(max_tokens=30, seed=7)
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    before = ids_of(collect(sampler, PROMPTS, 2, params))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    sampler.load(model, 1)
    after = ids_of(collect(sampler, PROMPTS, 2, params))
    assert before != after
    assert after == ids_of(collect(NativeSampler(model, tokenizer, dtype="float32"), PROMPTS, 2, params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_are_captured_once_for_three_rollouts_with_new_weights_each(tokenizer, dtype):
    """ "bfloat16" reads a packed copy, which every `load` writes in place; greedy completions are those of eager steps."""
    torch.manual_seed(0)
    model, params = writer().cuda(), SamplingParams(max_tokens=40, temperature=0)
    model.lm_head.bias.data[2] = -1e4  # no completion ends early, so the sizes come back
    sampler, made = counted(NativeSampler(model, tokenizer, dtype=dtype))
    captured, written = [], []
    for version in range(3):
        if version:
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.02 * torch.randn_like(weight)
            sampler.load(model, version)
        written.append(ids_of(collect(sampler, PROMPTS, 4, params)))
        eager = NativeSampler(model, tokenizer, dtype=dtype, cuda_graphs=False)
        assert written[-1] == ids_of(collect(eager, PROMPTS, 4, params))
        (steps,) = made
        captured.append(steps.num_captured)
    assert written[0] != written[1] != written[2]
    assert captured[0] == captured[1] == captured[2] > 0
    assert steps.nbytes > 0
    release()
    collect(sampler, PROMPTS, 4, params)
    assert len(made) == 2  # memory ran out: nothing was kept


def test_a_step_that_asks_the_host_is_not_captured_and_the_device_still_works(tokenizer):
    model, params = writer("gpt2").cuda(), SamplingParams(max_tokens=30, seed=7)
    expected = collect(NativeSampler(model, tokenizer, cuda_graphs=False, dtype="float32"), PROMPTS, 2, params)
    forward = model.transformer.ln_f.forward
    model.transformer.ln_f.forward = lambda x: forward(x) * float(x.abs().max() > -1)
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    assert sampler.static.captures
    assert ids_of(collect(sampler, PROMPTS, 2, params)) == ids_of(expected)
    assert not sampler.static.captures
    assert ids_of(collect(sampler, PROMPTS, 2, params)) == ids_of(expected)


def test_a_call_gives_its_memory_back(tokenizer):
    model, params = writer().cuda(), SamplingParams(max_tokens=80, seed=7)
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    held = []
    for _ in range(3):
        collect(sampler, PROMPTS, 8, params)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1] == held[2]


def test_bfloat16_is_close_to_a_plain_forward(tokenizer):
    model = writer().cuda().to(torch.bfloat16)
    off = []
    for group in NativeSampler(model, tokenizer).sample(PROMPTS, 4, SamplingParams(max_tokens=40, seed=7)):
        for completion in group.completions:
            ids = torch.cat((torch.tensor(group.prompt.token_ids), completion.token_ids)).cuda()
            with torch.no_grad():
                logp = model(input_ids=ids[None, :-1]).logits[0].float().log_softmax(-1)
            written = logp[-completion.num_tokens :].gather(-1, ids[-completion.num_tokens :, None]).squeeze(-1)
            off.append((written.cpu() - completion.logprobs).abs())
    assert float(torch.cat(off).mean()) < 0.05


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_windows_chunks_and_sinks_are_those_of_a_plain_forward(tokenizer, attention):
    """Prompts shorter and longer than the window, steps captured."""
    from plain_sampling import plain_logprobs
    from windowed_models import LOCAL
    from windowed_models import PROMPTS as LENGTHS
    from windowed_models import build as local

    for arch in LOCAL:
        model = local(arch).cuda()
        params = SamplingParams(max_tokens=30, seed=4, temperature=0.8)
        sampler = NativeSampler(model, tokenizer, dtype="float32", max_rows=6, attention=attention)
        for group in sampler.sample(LENGTHS, 2, params):
            for one, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
                torch.testing.assert_close(one.logprobs.cpu(), expected.cpu(), atol=1e-3, rtol=0)
