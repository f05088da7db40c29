"""The kernels that a CPU decodes with: compiled here, equal to PyTorch's operations, and done without where they cannot be."""

import logging
import subprocess

import pytest
import torch
from plain_sampling import TEXTS, ids_of

from covey.errors import ConfigError
from covey.kernels import compile as compiled
from covey.kernels.decode import SOURCE, DecodeKernels, decode_kernels, defines
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.kv_cache import KVCache, LayerShape
from covey.rollout.softmax_attention import ScoreRule
from kit import AVX2_ALONE, forgotten, rest_nightly, threads, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
REASON = compiled.unavailable_reason()
needs_kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def nothing_known(monkeypatch, tmp_path):
    """As on a machine where the kernels were never compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with forgotten(compiled.load):
        yield tmp_path / "covey"


def filled_cache(kernels, dtype, width, *, heads=2, steps=70, lengths=(5, 0, 600), seed=0):
    """Prompts of these lengths, the first of which has rows of two ages, after some steps; then one row has left."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache([LayerShape(heads, width)], CPU, dtype, 4096, kernels)
    cache.add_prompts(list(lengths))
    cache.add_rows(4)
    cache.set_row_owners([0, 1, 2, 2])
    for step in range(steps):
        if step == 20:
            cache.add_rows(2)
            cache.set_row_owners([0, 1, 2, 2, 0, 1])
        if step == 40:
            cache.drop_rows([1], [5], 5)
            cache.set_row_owners([0, 1, 2, 2, 0])
        cache.begin_step()
        cache.end_step()
    for slab in (cache.prefix[0], cache.suffix[0]):
        slab.copy_(torch.randn(slab.shape, generator=generator))
    cache.begin_step()
    return cache


def attended(kernels, dtype, width, repeats, **shape):
    heads = shape.get("heads", 2)
    cache = filled_cache(kernels, dtype, width, **shape)
    generator = torch.Generator().manual_seed(1)
    new = lambda count: torch.randn(cache.num_computed, count, width, generator=generator).to(dtype)
    query, key, value = new(heads * repeats), new(heads), new(heads)
    out = cache.attend_decode(0, query, key, value, ScoreRule(width**-0.5))[: cache.num_rows]
    return out.float(), cache.suffix[0][:, : cache.num_rows, :, : cache.step_column + 1].float()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "repeats"),
    [
        (16, 1),
        (64, 5),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((64, 7), (80, 3), (128, 4), (256, 2))),
    ],
)
def test_kernels_attend_as_pytorchs_operations_do(dtype, width, repeats):
    """Prompts of every length, none and more than a chunk of keys included, rows of different ages, any number of heads."""
    kernels = decode_kernels(CPU, dtype, width)
    assert kernels is not None
    found, kept = attended(kernels, dtype, width, repeats)
    expected, expected_kept = attended(None, dtype, width, repeats)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kept, expected_kept)


@needs_kernels
def test_in_bfloat16_kernels_are_nearer_to_the_exact_result_than_pytorchs_operations():
    exact, _ = attended(None, torch.float32, 64, 5)
    gap = lambda kernels: float((attended(kernels, torch.bfloat16, 64, 5)[0] - exact).abs().mean())
    assert gap(decode_kernels(CPU, torch.bfloat16, 64)) <= gap(None)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [48, 50, 7])
def test_a_norm_of_any_width_takes_the_update_in(dtype, size):
    kernels = decode_kernels(CPU, dtype, 16)
    x, update, weight = torch.randn(9, size), torch.randn(9, size).to(dtype), torch.rand(size)
    total = x + update
    expected = torch.nn.functional.rms_norm(total, (size,), weight, 1e-6)
    found = kernels.add_norm(x, update, weight, 1e-6)
    torch.testing.assert_close(x, total)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.to(dtype).float(), atol=1e-5, rtol=1e-2)


@needs_kernels
@pytest.mark.parametrize("arch", rest_nightly(["qwen3", "gpt2", "gemma2", "qwen2", "llama"], 2))
def test_engines_with_and_without_kernels_draw_the_same_tokens(tokenizer, arch):
    model = tiny_model(arch, layers=2)
    samplers = [NativeSampler(model, tokenizer, dtype="float32", attention=name) for name in ("compiled", "torch")]
    assert samplers[0].kernels is not None
    assert samplers[1].kernels is None
    params = SamplingParams(max_tokens=30, seed=3)
    mine, theirs = (list(sampler.sample(TEXTS, 4, params)) for sampler in samplers)
    assert ids_of(mine) == ids_of(theirs)
    for one, two in zip(mine, theirs, strict=True):
        for a, b in zip(one.completions, two.completions, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads():
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(attended(decode_kernels(CPU, torch.bfloat16, 64), torch.bfloat16, 64, 5, heads=4)[0])
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@needs_kernels
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_for_a_processor_without_avx512_is_the_same(dtype, nothing_known):
    import ctypes

    plain = DecodeKernels(ctypes.CDLL(str(compiled.built(SOURCE, defines(dtype, 64), AVX2_ALONE))), dtype)
    expected, _ = attended(None, dtype, 64, 5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attended(plain, dtype, 64, 5)[0], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@needs_kernels
def test_kernels_are_compiled_once_and_kept(nothing_known, monkeypatch):
    assert decode_kernels(CPU, torch.float32, 16) is not None
    (library,) = nothing_known.iterdir()
    compiled.load.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda command: pytest.fail("compiled again"))
    assert decode_kernels(CPU, torch.float32, 16) is not None
    assert nothing_known.stat().st_mode & 0o077 == 0
    assert library.suffix == ".so"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("COVEY_CPU_KERNELS", "0", "COVEY_CPU_KERNELS is 0"), ("CXX", "no-such-compiler", "there is no C\\+\\+ compiler")],
)
def test_without_kernels_pytorchs_operations_decode_and_a_demand_is_refused(
    tokenizer, monkeypatch, nothing_known, name, value, reason
):
    monkeypatch.setenv(name, value)
    model = tiny_model()
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    assert sampler.kernels is None
    assert len(list(sampler.sample(TEXTS, 2, SamplingParams(max_tokens=5, seed=0)))) == len(TEXTS)
    with pytest.raises(ConfigError, match=f"attention='compiled' is not possible here: {reason}"):
        NativeSampler(model, tokenizer, dtype="float32", attention="compiled")


def test_a_switch_that_says_neither_is_refused(monkeypatch, nothing_known):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "no")
    with pytest.raises(ConfigError, match="COVEY_CPU_KERNELS is 'no'; give 0 to compute without"):
        decode_kernels(CPU, torch.float32, 16)


@needs_kernels
def test_a_compiler_that_fails_is_named_in_the_log_and_done_without(tokenizer, monkeypatch, nothing_known, caplog):
    broken = nothing_known.parent / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: disk on fire' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.INFO, "covey"):
        assert NativeSampler(tiny_model(), tokenizer, dtype="float32").kernels is None
    assert "not with compiled kernels: fatal error: disk on fire" in caplog.text
    assert not list(nothing_known.iterdir())


@needs_kernels
def test_a_compiler_that_is_late_is_named_in_a_warning_and_asked_again_at_the_next_start(
    tokenizer, monkeypatch, nothing_known, caplog
):
    slow = nothing_known.parent / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiled, "COMPILE_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING, "covey"):
        assert NativeSampler(tiny_model(), tokenizer, dtype="float32").kernels is None
    assert "the compiler took over 0.05 seconds; the next start tries again" in caplog.text
    assert not list(nothing_known.iterdir())


@needs_kernels
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(nothing_known, caplog):
    nothing_known.mkdir()
    nothing_known.chmod(0o777)
    with caplog.at_level(logging.INFO, "covey"):
        assert decode_kernels(CPU, torch.float32, 16) is None
    assert "others may write to" in caplog.text


@needs_kernels
def test_kernels_that_compute_something_else_are_found_out(tokenizer, monkeypatch, caplog):
    honest = DecodeKernels.attend

    def wrong(self, *args, **options):
        return honest(self, *args, **options) * 0.5

    monkeypatch.setattr(DecodeKernels, "attend", wrong)
    model = tiny_model("gpt2", layers=2, hidden=64)  # no decoder that is one call, attention included
    assert NativeSampler(model, tokenizer, dtype="float32").kernels is None
    assert "not with compiled kernels: the engine's logits differ" in caplog.text


@needs_kernels
def test_the_library_names_no_function_that_torch_does_not_bring():
    """It is linked without an OpenMP runtime of its own, or there would be two teams of threads."""
    library = compiled.built(SOURCE, defines(torch.float32, 16))
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "gomp" not in needed
