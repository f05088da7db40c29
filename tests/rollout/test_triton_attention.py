"""The Triton kernels against PyTorch's operations, in Triton's interpreter on a CPU. `pip install triton` to run them.

On a machine with CUDA `test_rollout_on_cuda.py` runs the real ones instead.
"""

import json
import os
import subprocess
import sys

import numpy
import pytest
import torch
from plain_sampling import TEXTS, collect, ids_of, plain_logprobs
from triton_attention_cases import PLAIN, SHAPES, both
from windowed_models import LOCAL, PROMPTS, build

from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
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
    biases = torch.zeros(rows, 32), torch.zeros(rows, 8)
    key, value = torch.randn(2, rows, 1, width)
    for splits in ((1, 1), (1, 2)):
        out = kernels.decode(query, key, value, own, biases[0], shared, biases[1], spans, 0.25, splits=splits)
        torch.testing.assert_close(out[2], value[2])  # its new key alone
    keys, values = torch.cat((shared[:, 0, 0], own[:, 1, 0, :5]), 1)
    torch.testing.assert_close(out[1, 0], (query[1, 0] @ keys.T * 0.25).softmax(-1) @ values)


@pytest.mark.parametrize("dtype, has_norm", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_queries_and_keys_are_normed_and_rotated_inside_the_kernel(kernels, dtype, has_norm):
    """Heads as a merged projection gives them; float32 as the learner's autocast computes, 16 bits as modules of 16 bits."""
    rows, heads, key_heads, width = 3, 4, 2, 24
    rounds = dtype == torch.bfloat16
    # the interpreter cuts a float32 number to bfloat16, where a GPU rounds it
    turn = lambda x: (x.contiguous().view(torch.int32) & -65536).view(torch.float32) if rounds else x
    projected = torch.randn(rows, heads + 2 * key_heads, width).to(dtype)
    query, key, value = projected.split((heads, key_heads, key_heads), 1)
    angles = torch.rand(50, width // 2) * 6
    cosines, sines = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    positions, norms = torch.tensor([4, 49, 0]), torch.rand(2, width) if has_norm else (None, None)
    rotation = kernels.Rotation(cosines, sines, positions, *norms, epsilon=1e-5, rounds=rounds)

    def expected(x, norm):
        x = x.float()
        if norm is not None:
            x = turn(turn(x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()) * norm)
        cos, sin = turn(cosines[positions])[:, None], turn(sines[positions])[:, None]
        return turn(turn(x * cos) + turn(x.roll(width // 2, -1) * sin))

    own, shared = (
        torch.randn(2, rows, key_heads, 8, width).to(dtype),
        torch.zeros(2, 1, key_heads, 0, width).to(dtype),
    )
    spans = kernels.Spans(
        members=torch.tensor([[0, 1, 2]]),
        counts=torch.tensor([3], dtype=torch.int32),
        lengths=torch.tensor([0], dtype=torch.int32),
        owned=torch.ones(rows, dtype=torch.int32),
        first=torch.tensor([0, 5, 6], dtype=torch.int32),
        step_column=torch.tensor([6]),
    )
    out = kernels.decode(query, key, value, own, None, shared, None, spans, 0.2, rotation=rotation)
    torch.testing.assert_close(own[0, :, :, 6].float(), expected(key, norms[1]), atol=1e-5, rtol=0)
    assert torch.equal(own[1, :, :, 6], value)
    for row, start in enumerate((0, 5, 6)):
        keys, values = own[:, row, :, start:7].float().repeat_interleave(heads // key_heads, 1)
        scores = torch.einsum("hd,hkd->hk", expected(query, norms[0])[row], keys) * 0.2
        result = torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(out[row].float(), result, atol=2e-2 if rounds else 1e-5, rtol=0)


def test_long_parts_are_split_when_there_are_too_few_programs(kernels):
    assert kernels.pieces(keys=4096, programs=8, enough=528) == 16
    assert kernels.pieces(keys=4096, programs=200, enough=528) == 2
    assert kernels.pieces(keys=4096, programs=512, enough=528) == 1  # a split costs a launch
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
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from covey.kernels import triton_attention, triton_layer, triton_sampling

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOATS = {"scale", "softcap", "epsilon", "temperature", "penalty", "top_p", "log_min_p"}
KINDS = {"fp32": "cosines sines query_norm key_norm outs lses weight thresholds tops totals logprobs",
         "i64": "members positions tokens next_token position written limit output_row", "fp64": "uniforms",
         "i32": "counts first owned", "u8": "seen live stopped is_eos",
         None: "query key value keys values bias result x update out gate up logits sinks"}
WHOLE = {"V", "width"} | {f"{x}_row" for x in ("query", "key", "value", "update", "gate", "up")}
WHOLE |= {"query_head", "key_head", "value_head", "batch_stride", "head_stride", "row_stride"}

def compiled(kernel, target, dtype, fixed, warps=4, **types):
    # as a launch specializes: pointers and strides are multiples of 16
    types |= {name: "*" + (kind or dtype) for kind, names in KINDS.items() for name in names.split() if name not in types}
    known = {name: "constexpr" if name in fixed else "fp32" if name in FLOATS else types.get(name, "i32")
             for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
                  if name in WHOLE or known[name].startswith("*")}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=known, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", said).groups())
    facts = {"kernel": kernel.fn.__name__, "dtype": dtype, "registers": registers, "spilled": stack}
    print(json.dumps(facts | {"shared": done.metadata.shared, "tensor_cores": "mma" in done.asm["ptx"], **fixed}))

target = int(sys.argv[1])
for dtype in sys.argv[2:]:
    wide = dtype != "fp32"
    for is_shared in (True, False):
        for width in (64, 128):
            fixed = {"D": width, "IS_SHARED": is_shared, "MERGES": not is_shared, "HAS_BIAS": False, "HAS_SOFTCAP": False}
            fixed |= {"HAS_SINKS": width == 64, "ROTATES": True, "HAS_NORM": width == 128, "ROUNDS": width == 128 and wide, "WIDEN": False}
            fixed |= {"BLOCK_D": width, "BLOCK_Q": (64 if wide else 32) if is_shared else 16}
            fixed |= {"BLOCK_K": (64 if wide else 32) // (width // 64)}
            warps = 4 if fixed["BLOCK_Q"] * width <= 4096 else 8
            compiled(triton_attention._part, target, dtype, fixed, warps, stop="*i32" if is_shared else "*i64")
    compiled(triton_attention._merge, target, dtype, {"BLOCK_S": 4, "BLOCK_D": 64})
    norm = {"HAS_UPDATE": True, "HAS_WEIGHT": True, "OFFSET": 1.0, "ROUNDS": wide, "BLOCK": 4096}
    compiled(triton_layer._add_norm, target, dtype, norm, 8)
    compiled(triton_layer._rotate, target, dtype, {"PAIRS": wide, "BY_PAIR": wide, "BLOCK": 256}, 1)
    compiled(triton_layer._gated, target, dtype, {"BLOCK": 1024})
    scan = {"HAS_SEEN": True, "HAS_THRESHOLD": True, "BLOCK_V": 4096}
    compiled(triton_sampling._scan, target, dtype, scan)
    compiled(triton_sampling._pick, target, dtype, scan | {"ENDS": True, "IS_GREEDY": False, "BLOCK_B": 64})
    search = {"HAS_SEEN": True, "HAS_K": True, "HAS_P": True, "N": 8, "PASSES": 12, "BLOCK_V": 1024}
    compiled(triton_sampling._threshold, target, dtype, search, 8)
"""


@pytest.mark.parametrize("target", [80, 90, 100])
def test_the_kernels_compile_without_a_device(target):
    """Triton brings its own assembler. In 16 bits products run on tensor cores, registers are not spilled, and all fits the
    99 KiB of a consumer's card."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(target), "bf16", *(["fp32"] if target == 80 else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert {fact["kernel"] for fact in facts} == {
        "_part",
        "_merge",
        "_add_norm",
        "_gated",
        "_rotate",
        "_scan",
        "_pick",
        "_threshold",
    }
    for fact in facts:
        assert fact["shared"] <= 99 * 1024, fact
        if fact["dtype"] == "bf16":
            assert fact["spilled"] <= 16, fact  # bytes of the stack
            assert fact["tensor_cores"] == (fact["kernel"] == "_part"), fact


FEWER_LAYERS = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
}
"""A layer of each kind: the interpreter takes seconds for each."""


@pytest.mark.parametrize("arch", LOCAL)
def test_windows_and_chunks_are_those_of_a_plain_forward(kernels, arch):
    """Biases mask what a window of 12 hides, before it, where it begins and behind it; sinks take part there."""
    model = build(arch, **FEWER_LAYERS.get(arch, {}))
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", max_rows=6, attention="triton")
    params = SamplingParams(max_tokens=4, seed=4, temperature=0.8)
    for group in sampler.sample([prompt for prompt in PROMPTS if len(prompt) in (3, 11, 13, 25)], 2, params):
        for one, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(one.logprobs, expected, atol=1e-4, rtol=0)
