"""The formulas between a layer's products, compiled: once for all layers and lengths, and the same numbers as PyTorch's operations."""

import functools
import importlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from covey.kernels import LogitKernels, fuse, fused_layers, triton_unavailable_reason
from covey.kernels import compile as compiled
from covey.kernels.gates import gated, gated_halves, recognised_gate
from covey.kernels.rotations import KINDS, recognised, rotated
from covey.learner import Policy
from covey.learner.memory_estimate import bytes_a_token
from covey.learner.packing import rows_of
from covey.learner.preparation import checkpoint_activations, on_accelerator, short_pass
from covey.learner.worst_case import groups_of
from kit import forgotten, tiny_model


@pytest.fixture(autouse=True)
def with_kernels_as_before():
    """What COVEY_CPU_KERNELS=0 says of the C++ kernels is forgotten with each test."""
    with forgotten(compiled.load):
        yield


@pytest.fixture
def counter():
    """A backend that counts the graphs that it compiles."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_model_of_three_layers_compiles_each_formula_once_for_all_lengths(counter, monkeypatch):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    model = tiny_model("qwen2", layers=3, hidden=64).train()
    checkpoint_activations(model)
    fuse(model, functools.lru_cache(lambda function: torch.compile(function, backend=counter)))
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
    policy.shares_prompts()
    for length in (16, 23, 40):
        measured = policy.measure(rows_of(groups_of(8, 20, length, 4, 300)), entropy=True)
        measured.logp.sum().backward()
        policy.measure(rows_of(groups_of(8, 20, length, 4, 300)))
    assert counter.frame_count == 6 + 1, (
        "three formulas forward and backward; gradients of SDPA's parts lie in another order"
    )


@pytest.mark.slow
def test_the_trial_of_a_models_own_forms_is_their_compilation(counter, monkeypatch):
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    model = tiny_model("qwen2", layers=2, hidden=96).train()
    compile_it = functools.lru_cache(lambda function: torch.compile(function, backend=counter))
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
    fuse(model, compile_it, partial(short_pass, policy))
    assert counter.frame_count == 6, "norms, rotations and gates, forward and backward"
    policy.shares_prompts()
    policy.measure(rows_of(groups_of(8, 20, 16, 4, 300))).logp.sum().backward()
    assert counter.frame_count == 6 + 1, "gradients of SDPA's parts lie in another order; nothing else is another form"


def test_a_shape_that_the_compiler_fails_for_is_computed_by_the_formula_and_named_once(monkeypatch, caplog):
    def fails(*given):
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(fused_layers, "strictly_compiled", lambda function: fails)
    run = fused_layers.compiled.__wrapped__(fused_layers.gated)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(run(x, y), fused_layers.gated(x, y))
    assert caplog.text.count("gated is computed by PyTorch's operations from now on: out of resources") == 1

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused_layers, "strictly_compiled", lambda function: full)
    with pytest.raises(torch.OutOfMemoryError):
        fused_layers.compiled.__wrapped__(fused_layers.gated)(x, y)


@pytest.mark.slow
def test_a_memory_estimate_leaves_the_formulas_compiled(monkeypatch):
    """A call in the estimate's dispatch mode would make torch skip the compiled code for the rest of the process."""
    torch._dynamo.reset()
    runs = []
    backend = lambda graph, inputs: lambda *args: runs.append(graph) or graph.forward(*args)
    monkeypatch.setattr(
        fused_layers, "strictly_compiled", functools.lru_cache(lambda f: torch.compile(f, backend=backend))
    )
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    model = tiny_model("qwen2", layers=1).train()
    fuse(model, functools.lru_cache(fused_layers.compiled.__wrapped__))
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention="sdpa")
    bytes_a_token(policy)
    assert not runs
    policy.measure(rows_of(groups_of(4, 5, 6, 2, 300)))
    assert len({id(graph) for graph in runs}) >= 3, "norms, rotations and gated MLPs"
    torch._dynamo.reset()


def by_autograd(function, leaves):
    """Outputs and gradients of the leaves."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    parts = out if isinstance(out, tuple) else (out,)
    total = sum((part * torch.arange(part.numel()).view(part.shape).sin()).sum() for part in parts)
    return [*parts, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("family", ["llama", "glm4", "cohere", "gpt_oss", "phi3", "gemma4"])
@pytest.mark.parametrize("turning", [16, 8])
def test_rotations_of_all_forms_have_the_values_and_gradients_of_the_models_function(family, turning):
    """Halves and neighbours, tables by number and by pair, all numbers of a head or its first half, queries and keys or one tensor."""
    function = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    kind = recognised(function)
    angles = torch.randn(2, 5, turning // 2)
    angles = angles.repeat_interleave(2, -1) if family == "cohere" else torch.cat([angles, angles], -1)
    if family == "gpt_oss":
        angles = angles[..., : turning // 2]
    if turning == 8 and family not in ("glm4", "phi3"):
        with pytest.raises(RuntimeError):
            function(*torch.randn(2, 2, 3, 5, 16)[: 1 + kind.takes_two], angles.cos(), angles.sin())
        return
    xs = [torch.randn(2, 5, heads, 16).transpose(1, 2) for heads in (3, 1)[: 1 + kind.takes_two]]
    rest = torch.float32, kind.pairs, kind.by_pair
    tables = angles.cos(), angles.sin()
    fused = lambda *xs: fused_layers._Fused.apply(rotated, lambda f: f, len(xs) + 2, *xs, *tables, *rest)
    for mine, theirs in zip(by_autograd(fused, xs), by_autograd(lambda *xs: function(*xs, *tables), xs), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "activation, function", [("silu", F.silu), ("none", F.gelu), ("tanh", partial(F.gelu, approximate="tanh"))]
)
def test_gated_mlps_of_all_forms_have_the_values_and_gradients_of_autograd(activation, function):
    both = 2 * torch.randn(7, 24)
    apart = lambda formula, *xs: fused_layers._Fused.apply(formula, lambda f: f, len(xs), *xs, activation)
    want = by_autograd(lambda gate, up: function(gate) * up, both.chunk(2, -1))
    for mine, theirs in zip(by_autograd(partial(apart, gated), both.chunk(2, -1)), want, strict=True):
        torch.testing.assert_close(mine, theirs)
    out, gradient = by_autograd(partial(apart, gated_halves), [both])
    torch.testing.assert_close([out, *gradient.chunk(2, -1)], want)


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_a_gated_mlp_takes_no_tokens_at_all(arch):
    """As an expert may, that no token is routed to."""
    config = transformers.AutoConfig.for_model(arch, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    module = importlib.import_module(f"transformers.models.{arch}.modeling_{arch}")
    mlp = getattr(module, {"llama": "LlamaMLP", "phi3": "Phi3MLP"}[arch])(config)
    with torch.no_grad():
        kind = recognised_gate(mlp)
    x = torch.zeros(0, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_layers._mlp_forward(mlp, lambda f: f, kind, x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape


def test_a_rotation_that_computes_something_else_for_a_part_of_the_heads_is_left_alone():
    def scaled(q, k, cos, sin):
        whole = rotated(q, k, cos, sin, q.dtype, False, False)
        return whole if cos.shape[-1] == q.shape[-1] else tuple(2 * x for x in whole)

    assert recognised(lambda q, k, cos, sin: rotated(q, k, cos, sin, q.dtype, False, False)) == KINDS[0]
    assert recognised(scaled) is None


def test_nothing_is_compiled_for_a_cpu():
    assert triton_unavailable_reason(torch.device("cpu")).endswith("the model is on cpu")


def test_compiled_code_is_kept_where_the_next_process_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    find = compiled.keep_compiled_code.__wrapped__
    assert find() == tmp_path / "covey" / "compiled" == Path(os.environ[compiled.VARIABLE])
    monkeypatch.setenv(compiled.VARIABLE, default_cache_dir())
    assert find() == tmp_path / "covey" / "compiled" == Path(os.environ[compiled.VARIABLE]), "torch's own default"
    monkeypatch.setenv(compiled.VARIABLE, "/elsewhere")
    assert find() == Path("/elsewhere")


COMPILING = """
import torch
import transformers.models.qwen2.modeling_qwen2  # imports torch._dynamo, which names a folder in /tmp
from torch._dynamo.utils import counters
from covey.kernels.fused_layers import strictly_compiled
from covey.kernels.gates import gated

x = torch.randn(4, 6)
strictly_compiled(gated)(x, x, "silu")
print(counters["aot_autograd"]["autograd_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_second_process_compiles_nothing(tmp_path):
    """Both start with an empty /tmp, as after a reboot or in two containers."""
    met = []
    for number in ("first", "second"):
        (tmp_path / number).mkdir()
        folders = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path / number)}
        environment = {name: value for name, value in os.environ.items() if name != compiled.VARIABLE} | folders
        command = [sys.executable, "-c", COMPILING]
        met.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split())
    assert met == [["1", "0"], ["0", "1"]]


def test_a_cache_folder_that_others_may_write_is_not_used(monkeypatch, tmp_path, caplog):
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    assert compiled.keep_compiled_code.__wrapped__() is None
    assert "compiled again by every process" in caplog.text
    assert compiled.VARIABLE not in os.environ


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_on_a_gpu_a_prepared_policy_has_the_values_and_gradients_of_transformers_layers(arch, caplog):
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("needs bfloat16")
    device, rows = torch.device("cuda"), rows_of(groups_of(16, 100, 200, 8, 300))

    def passes(prepares):
        model = tiny_model(arch, layers=3, hidden=128, max_position_embeddings=512).to(device).train()
        checkpoint_activations(model)
        policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16)
        policy = on_accelerator(policy, is_split=False) if prepares else policy
        with policy.weights_of_a_step():
            for _ in range(2):
                measured = policy.measure(rows, entropy=True)
                (measured.logp.mean() + 0.1 * measured.entropy.mean()).backward()
        return measured.logp.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    assert triton_unavailable_reason(device) is None
    assert LogitKernels.on(device, torch.bfloat16, 300) is not None
    (logp, gradient), (own_logp, own_gradient) = passes(False), passes(True)
    assert "computed by PyTorch's operations" not in caplog.text
    assert (logp - own_logp).abs().mean() < 1e-2
    assert (gradient - own_gradient).norm() < 0.03 * gradient.norm()
