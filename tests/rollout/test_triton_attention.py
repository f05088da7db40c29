"""The Triton kernels against PyTorch's operations, in Triton's interpreter on a CPU. `pip install triton` to run them.

On a machine with CUDA `test_rollout_on_cuda.py` runs the real ones instead.
"""

import os
import subprocess
import sys

import numpy
import pytest
import torch
from test_samplers import TEXTS, collect, ids_of, plain_logprobs
from test_windows import LOCAL, PROMPTS, build

from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.attention import HIDDEN, AttentionPart, RowMap, by_one_softmax, wide
from kit import tiny_model, tiny_tokenizer

triton = pytest.importorskip("triton", reason="triton is not installed (286 MB, so not among the development tools)")
IS_TOO_OLD = triton.__version__.startswith("3.6") and not numpy.__version__.startswith(
    ("1.", "2.0", "2.1", "2.2", "2.3")
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(IS_TOO_OLD, reason="the interpreter of triton 3.6 needs a numpy below 2.4"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # triton 3.6
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without CUDA"),
]


@pytest.fixture
def kernels():
    """The module, run by Triton's interpreter (`tests/conftest.py` asks for it)."""
    from covey.kernels import triton_attention

    assert triton_attention.is_interpreted()
    return triton_attention


def both(
    kernels,
    *,
    device="cpu",
    width,
    heads,
    repeats,
    owners,
    lengths,
    starts,
    step_column,
    columns,
    dtype=torch.float32,
    **options,
):
    """What the kernels give for random keys, and what one softmax in float32 over all of them gives, [R, Hq, D] each."""
    rows, prompts, held = len(owners), len(lengths), max([1, *lengths]) + 5
    query = torch.randn(rows, heads * repeats, width).to(dtype)
    own, shared = torch.randn(2, rows + 2, heads, columns, width), torch.randn(2, prompts, heads, held, width)
    own, shared = own.to(dtype), shared.to(dtype)
    own_bias = torch.full((rows + 2, columns), HIDDEN).to(dtype)
    for row, start in enumerate(starts):
        own_bias[row, start : step_column + 1] = 0
    bias = torch.where(torch.arange(held) < torch.tensor(lengths)[:, None], 0.0, HIDDEN).to(dtype)
    members = [[row for row, owner in enumerate(owners) if owner == p] for p in range(prompts)]
    size = max(map(len, members))
    spans = kernels.Spans(
        members=torch.tensor([rows + [0] * (size - len(rows)) for rows in members]),
        counts=torch.tensor([len(rows) for rows in members], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        owned=torch.ones(rows, dtype=torch.int32),
        first=torch.tensor(starts, dtype=torch.int32),
        step_column=torch.tensor([step_column]),
    )
    scale, softcap = width**-0.5, options.pop("softcap", None)
    there = lambda x: x.to(device)
    spans = kernels.Spans(**{name: there(table) for name, table in vars(spans).items()})
    given = map(there, (query, own, own_bias, shared, bias))
    out = kernels.decode(*given, spans, scale, softcap, **options).cpu()
    parts = [
        AttentionPart(slab[0].float(), slab[1].float(), bias.float(), wide(bias.float(), heads))
        for slab, bias in ((own[:, :rows], own_bias[:rows]), (shared, bias))
    ]
    row_map = RowMap.of(owners, prompts, torch.device("cpu"))
    grouped = query.float().view(rows, heads, repeats, width)
    return out, by_one_softmax(grouped, *parts, row_map, scale, softcap).view(out.shape)


PLAIN = {
    "width": 64,
    "heads": 2,
    "repeats": 3,
    "owners": [1, 0, 1, 1],
    "lengths": [7, 39],
    "starts": [0, 5, 17, 36],
    "step_column": 36,
    "columns": 64,
}
SHAPES = {
    "heads of 80": {"width": 80},
    "heads of 96": {"width": 96, "heads": 1},
    "heads of 128": {"width": 128, "heads": 1},
    "one head for each": {"repeats": 1},
    "groups of one row": {"owners": [0, 2, 1, 3], "lengths": [7, 39, 1, 64]},
    "a prompt without keys": {"lengths": [0, 39]},
    "a prompt without rows": {"lengths": [7, 39, 12]},
    "no prompt has keys": {"lengths": [0, 0]},
    "rows with one key": {"starts": [36, 36, 36, 36]},
    "the last column": {"step_column": 63},
    "more queries than a program takes": {"owners": [0] * 12 + [1], "starts": [0] * 13, "heads": 1},
    "more queries of a row than a program takes": {"repeats": 40, "heads": 1, "owners": [0, 1], "starts": [3, 0]},
    "capped scores": {"softcap": 2.0},
    "split prompts": {"lengths": [7, 150], "splits": (3, 1)},
    "split rows": {"columns": 160, "step_column": 140, "starts": [0, 130, 77, 140], "splits": (1, 3)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_equal_one_softmax_over_all_keys(kernels, shape):
    out, expected = both(kernels, **PLAIN | SHAPES[shape])
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.03), (torch.float16, 0.003)])
def test_half_precision_is_off_by_the_rounding_of_its_weights_and_result(kernels, dtype, bound):
    out, expected = both(kernels, **PLAIN, dtype=dtype, splits=(2, 1))
    assert out.dtype == dtype
    assert 0 < float((out.float() - expected).abs().max()) < bound


def test_a_row_that_belongs_to_no_prompt_is_finite_and_disturbs_nobody(kernels):
    rows, width = 3, 16
    own, shared = torch.randn(2, rows, 1, 32, width), torch.randn(2, 1, 1, 8, width)
    query = torch.randn(rows, 1, width)
    spans = kernels.Spans(
        members=torch.tensor([[0, 1]]),
        counts=torch.tensor([2], dtype=torch.int32),
        lengths=torch.tensor([8], dtype=torch.int32),
        owned=torch.tensor([1, 1, 0], dtype=torch.int32),
        first=torch.tensor([0, 0, 2**30], dtype=torch.int32),
        step_column=torch.tensor([4]),
    )
    biases = torch.zeros(rows, 32), torch.zeros(1, 8)
    out = kernels.decode(query, own, biases[0], shared, biases[1], spans, 0.25)
    assert torch.equal(out[2], torch.zeros(1, width))
    keys, values = torch.cat((shared[:, 0, 0], own[:, 1, 0, :5]), 1)
    torch.testing.assert_close(out[1, 0], (query[1, 0] @ keys.T * 0.25).softmax(-1) @ values)


def test_new_keys_go_to_the_clocks_column_of_their_row(kernels):
    slab = torch.zeros(2, 4, 2, 8, 10)
    heads = torch.randn(3, 7, 10)  # queries, keys and values side by side, as a fused projection gives them
    key, value = heads[:, 3:5], heads[:, 5:]
    kernels.append(key, value, slab, torch.tensor([6]))
    assert torch.equal(slab[0, :3, :, 6], key)
    assert torch.equal(slab[1, :3, :, 6], value)
    slab[:, :3, :, 6] = 0
    assert not slab.any()


def test_long_parts_are_split_when_there_are_too_few_programs(kernels):
    assert kernels.pieces(keys=4096, programs=8, enough=528) == 16
    assert kernels.pieces(keys=4096, programs=200, enough=528) == 3
    assert kernels.pieces(keys=4096, programs=2000, enough=528) == 1
    assert kernels.pieces(keys=100, programs=8, enough=528) == 1
    assert kernels.pieces(keys=0, programs=0, enough=528) == 1


@pytest.mark.parametrize("arch", ["qwen2", "gpt2"])
def test_the_engine_writes_the_same_completions_with_the_kernels(kernels, arch):
    """Queries of several heads, prompts of different lengths, rows that end at different times."""
    model, tokenizer = tiny_model(arch, layers=2, seed=3), tiny_tokenizer()
    params = SamplingParams(max_tokens=8, seed=2)
    sampler = NativeSampler(model, tokenizer, dtype="float32", attention="triton", max_rows=4)
    assert sampler.attention == "triton"
    groups = collect(sampler, TEXTS[:3], 2, params)
    expected = collect(NativeSampler(model, tokenizer, dtype="float32"), TEXTS[:3], 2, params)
    assert ids_of(groups) == ids_of(expected)
    for group, other in zip(groups, expected, strict=True):
        for completion, plain in zip(group.completions, other.completions, strict=True):
            torch.testing.assert_close(completion.logprobs, plain.logprobs, atol=1e-5, rtol=0)


def test_kernels_that_compute_something_else_are_not_used(kernels, monkeypatch, caplog):
    """Every model is checked with the kernels that will decode; auto takes PyTorch's and says why."""
    from covey.rollout.kernel_choice import verified_attention

    decode = kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *args, **options: decode(*args, **options).roll(1, 0))
    model = tiny_model(layers=2)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    assert verified_attention(sampler.forward, model, "auto") == "torch"
    (record,) = caplog.records
    assert "Decoding with PyTorch's attention kernels: the engine's logits differ" in record.message


def test_triton_is_refused_on_a_cpu_outside_of_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"attention='triton' is not possible here: .* the model is on cpu"):
        NativeSampler(tiny_model(), tiny_tokenizer(), attention="triton")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.kernels import triton_attention as kernels

def compiled(kernel, target, kind, integers, pointers, fixed):
    types = {name: "fp32" if name in ("scale", "softcap") else "i32" for name in kernel.arg_names}
    types |= {name: kind for name in pointers} | integers | {name: "constexpr" for name in fixed}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", target, 32))

SHAPES = {"fp32": (32, 32), "bf16": (64, 64), "fp16": (64, 64)}
for target, dtype in ((t, d) for t in (80, 90, 100) for d in SHAPES):
    queries, keys = SHAPES[dtype]
    for is_shared in (True, False):
        integers = {"members": "*i64", "counts": "*i32", "first": "*i32", "outs": "*fp32", "lses": "*fp32"}
        integers["stop"] = "*i32" if is_shared else "*i64"
        fixed = {"HAS_FIRST": not is_shared, "HAS_MEMBERS": is_shared, "HAS_SOFTCAP": False, "WIDEN": False}
        fixed |= {"BLOCK_D": 64, "BLOCK_Q": queries, "BLOCK_K": keys}
        tensors = ("query", "keys", "values", "bias")
        done = compiled(kernels._part, target, "*" + dtype, integers, tensors, fixed)
        print(target, dtype, "mma" in done.asm["ptx"], done.metadata.shared)
    compiled(kernels._append, target, "*" + dtype, {"step_column": "*i64"}, ("key", "value", "keys", "values"), {"BLOCK_D": 64})
    others = {"outs": "*fp32", "lses": "*fp32", "owned": "*i32"}
    compiled(kernels._merge, target, "*" + dtype, others, ("result",), {"BLOCK_S": 4, "BLOCK_D": 64})
"""


def test_the_kernels_compile_for_compute_capability_8_and_9_and_10():
    """Triton brings its own assembler. In 16 bits the products run on tensor cores; all fits a consumer card's 99 KiB."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    kinds = ("fp32", "fp32", "bf16", "bf16", "fp16", "fp16")
    assert [tuple(line[:2]) for line in lines] == [(target, kind) for target in ("80", "90", "100") for kind in kinds]
    assert all(is_on_tensor_cores == "True" for _, kind, is_on_tensor_cores, _ in lines if kind != "fp32")
    assert all(int(shared) <= 99 * 1024 for *_, shared in lines)


@pytest.mark.parametrize("arch", LOCAL)
def test_windows_and_chunks_are_those_of_a_plain_forward(arch):
    """Biases mask what a window hides; layers with sinks go through PyTorch's operations."""
    model = build(arch)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", max_rows=6, attention="triton")
    params = SamplingParams(max_tokens=20, seed=4, temperature=0.8)
    for group in sampler.sample(PROMPTS[:5], 2, params):
        for one, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(one.logprobs, expected, atol=1e-4, rtol=0)
