"""The memory estimate against what a real small model holds."""

from dataclasses import replace

import pytest
import torch

from covey.kernels import matmul as products
from covey.learner.memory import _LIBRARIES, _ROW_COUNTS, Shape, estimate, in_gib
from covey.learner.packing import rows_of
from covey.learner.policy import Policy
from kit import group, tiny_model

SMALL = {"layers": 3, "hidden": 64}


def elsewhere():
    """The small model's shape where no kernels of a CPU compute its layers."""
    return replace(Shape.of(tiny_model(**SMALL).config), is_fused=False, is_paired=False)


def guess(shape, **changed):
    given = {
        "weight_bytes": 4,
        "compute_bytes": 4,
        "optimizer": "adamw_torch_fused",
        "rows": 2,
        "prompt_tokens": 30,
        "completion_tokens": 50,
        "max_tokens": None,
        "logits_chunk": 1024,
        "is_checkpointed": False,
        "has_reference": False,
        "adapter_rank": None,
        "prompts": 3,
        "group": 4,
    }
    return estimate(shape, **{**given, **changed})


@pytest.mark.parametrize("arch", ["qwen2", "llama", "gpt2"])
def test_parameters_are_counted_without_loading_weights(arch):
    model = tiny_model(arch, **SMALL)
    assert Shape.of(model.config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_weights_gradients_and_optimizer_are_those_of_a_real_step():
    model = tiny_model(**SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(10)[None]).logits.sum().backward()
    optimizer.step()
    memory = guess(Shape.of(model.config))
    size = lambda tensors: sum(tensor.nbytes for tensor in tensors)
    states = [s for state in optimizer.state.values() for name, s in state.items() if name != "step"]
    assert memory.weights == size(model.parameters())
    assert memory.gradients == size(parameter.grad for parameter in model.parameters())
    assert memory.optimizer == size(states)


@pytest.mark.parametrize("intermediate", [128, 352])
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("dtype, compute_bytes", [(None, 4), (torch.bfloat16, 2)])
def test_activations_are_what_a_forward_pass_of_packed_rows_keeps(dtype, compute_bytes, rank, intermediate):
    model = tiny_model(**SMALL, intermediate_size=intermediate)
    shape = Shape.of_model(model)
    if rank is not None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    policy = Policy(model, pad_id=0, compute_dtype=dtype)
    judged = replace(group(["x" * 85] * 8, question="y" * 60), advantages=torch.ones(8))
    rows = rows_of([judged])
    policy.shares_prompts()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        measured = policy.measure(rows, entropy=True)
    assert measured.logp.requires_grad
    given = {"rows": 8, "group": 8, "prompt_tokens": 60, "completion_tokens": 85, "compute_bytes": compute_bytes}
    memory = guess(shape, **given, adapter_rank=rank, is_on_heap=True)
    assert memory.activations == pytest.approx(sum(kept.values()), rel=0.1)


def test_the_cache_stores_a_prompt_once_a_group():
    shape = Shape.of(tiny_model(**SMALL).config)
    tokens = 3 * (30 + 4 * 50)
    assert guess(shape).cache == tokens * 3 * 2 * 32 * 4  # layers, keys and values, 1 head of 32, bytes


def test_a_reference_costs_the_weights_once_more_and_an_adapter_saves_it():
    shape = Shape.of(tiny_model(**SMALL).config)
    assert guess(shape, has_reference=True).reference == guess(shape).weights
    adapted = guess(shape, has_reference=True, adapter_rank=8)
    assert adapted.reference == 0
    assert adapted.optimizer == 2 * 4 * shape.adapter_parameters(8)


def test_an_adapter_is_counted_as_peft_makes_it():
    peft = pytest.importorskip("peft")
    model = tiny_model(**SMALL)
    shape = Shape.of(model.config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert shape.adapter_parameters(8) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_a_large_head_costs_its_gradient_twice_where_it_is_tied_to_an_embedding_that_is_trained():
    shape = replace(Shape.of(tiny_model(**SMALL).config), vocabulary=152_000, is_tied=True)
    head, chunk = 4 * shape.vocabulary * shape.hidden, 3 * 4 * 16 * shape.vocabulary
    memory = guess(shape, logits_chunk=16)
    assert memory.activations + memory.logits == 2 * head > chunk + head, "at the end, when the activations are gone"
    assert guess(shape, logits_chunk=16, is_on_heap=True).logits == 2 * head, "beside the heap that they leave"
    assert guess(replace(shape, is_tied=False), logits_chunk=16).logits == chunk + head
    assert guess(shape, logits_chunk=16, adapter_rank=4).logits == chunk
    assert guess(shape, logits_chunk=16, compute_bytes=2).logits == chunk + 2 * head, "its 16-bit copy and one product"


def test_a_layer_that_is_computed_again_and_the_logits_never_exist_together():
    shape = replace(elsewhere(), vocabulary=50_000)
    tokens = 2 * 50 + 30
    memory = guess(shape, logits_chunk=64, is_checkpointed=True)
    alone = guess(shape, logits_chunk=64).logits
    assert memory.logits == alone - tokens * shape.layer_bytes(4)


def test_the_state_of_an_optimizer_is_known_by_its_name():
    shape = Shape.of(tiny_model(**SMALL).config)
    one = guess(shape, weight_bytes=2, optimizer="lion_8bit").optimizer
    assert guess(shape, weight_bytes=2, optimizer="paged_adamw_32bit").optimizer == 8 * one
    assert guess(shape, weight_bytes=2, optimizer="adamw_torch").optimizer == 4 * one
    assert guess(shape, weight_bytes=2, optimizer="ademamix_8bit").optimizer == 3 * one


def test_options_that_save_memory_do():
    shape = elsewhere()
    assert guess(shape, is_checkpointed=True).activations < guess(shape).activations
    long = guess(shape, rows=4, max_tokens=80).activations
    assert long == 80 * shape.activation_bytes(4, False) < guess(shape, rows=4).activations
    assert guess(shape, optimizer="adamw_8bit").optimizer == guess(shape).optimizer // 4
    assert guess(shape, optimizer="sgd").optimizer == 0
    assert guess(shape, logits_chunk=16).logits < guess(shape).logits


def test_a_micro_batch_holds_enough_groups_or_one_that_is_larger():
    shape = elsewhere()
    tokens = lambda **given: guess(shape, rows=8, **given).activations / shape.activation_bytes(4, False)
    assert tokens() == 460, "two groups of four completions of 50 tokens, each behind a prompt of 30"
    assert tokens(max_tokens=400, enough_tokens=100) == 230, "one group"
    assert tokens(max_tokens=400, enough_tokens=300) == 300
    assert tokens(max_tokens=200, enough_tokens=100) == 200


def test_kernels_are_counted_on_a_cpu_alone():
    fused = replace(elsewhere(), is_fused=True)
    assert guess(fused, is_on_heap=True).activations < guess(elsewhere(), is_on_heap=True).activations
    assert guess(fused, is_on_heap=True).logits < guess(elsewhere(), is_on_heap=True).logits
    assert guess(fused) == guess(elsewhere()), "an accelerator"


def test_a_processors_heap_is_counted_where_it_keeps_holes():
    shape = elsewhere()  # kernels, where there are any, save more than holes take
    assert guess(shape).heap == 0
    assert guess(shape, is_on_heap=True).peak > guess(shape).peak
    assert guess(shape, is_on_heap=True, is_checkpointed=True).heap == 0, "large blocks go back to the system at once"


def test_every_size_of_product_costs_what_onednn_keeps_of_it():
    shape = replace(elsewhere(), linears=((64, 64), (64, 32), (64, 64), (128, 64)))
    assert shape.product_sizes(2) == 3 * 3, "forward, gradient of the input, gradient of the weight"
    assert shape.product_sizes(2, adapter_rank=4) == 2 * 3 + 3 * 4, "frozen weights; 64 and 128 to 4, 4 to 64 and 32"
    halves = {"compute_bytes": 2, "is_on_heap": True}
    more = guess(shape, **halves, adapter_rank=4).libraries - guess(shape, **halves).libraries
    assert more == 9 * _ROW_COUNTS * products.KEPT
    assert guess(shape, compute_bytes=2).libraries == 0, "on an accelerator"


def test_products_in_pairs_keep_neither_code_nor_cast_weights():
    shape = replace(elsewhere(), linears=((64, 64), (64, 32), (64, 8)))
    paired = replace(shape, is_paired=True)
    assert paired.product_sizes(4) == shape.product_sizes(4) == 3 * 3, "float32 stays oneDNN's"
    assert paired.product_sizes(2) == 3, "8 outputs are no panel"
    assert paired.product_sizes(2, adapter_rank=4) == 2 + 3 * 4, "nor are 4, and 4 inputs are no block"
    halves = {"compute_bytes": 2, "is_on_heap": True}
    assert guess(shape, **halves).sampler - guess(paired, **halves).sampler == 2 * (64 * 64 + 64 * 32)
    whole = replace(paired, linears=((64, 64), (64, 32)))
    assert guess(whole, **halves).libraries == _LIBRARIES, "what sampling leaves, and no more"
    tokens = lambda shape: guess(shape, rows=3, **halves).activations / shape.activation_bytes(2, False)
    assert tokens(shape) == tokens(whole) == 192, "padded to a length that returns"
    assert guess(whole, compute_bytes=2) == guess(replace(whole, is_paired=False), compute_bytes=2), "an accelerator"


def test_the_words_end_with_the_peak():
    memory = guess(Shape.of(tiny_model(**SMALL).config))
    assert memory.in_words().splitlines()[-1].startswith("peak")
    assert in_gib(memory.peak) in memory.in_words()
    assert in_gib(3 * 2**30) == "3.0 GiB"
