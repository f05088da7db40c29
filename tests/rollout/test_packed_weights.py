"""Packed weights of the sampler: every `load` writes the same memory, and live weights are only ever read."""

import copy

import pytest
import torch
from torch import nn

from covey.kernels import SamplerLinear
from covey.rollout.batches import DecodeBatch, PrefillBatch
from covey.rollout.decoder import DecoderForward
from covey.rollout.forward import ModulesForward, plain_cache
from kit import tiny_model


def logits_of(forward):
    """[2, V] after a prompt of three tokens and one token more in two rows."""
    cache = plain_cache(forward, 64)
    forward.reserve(4)
    with forward.evaluating(), torch.no_grad():
        slots = cache.add_prompts([3])
        forward.prefill(torch.tensor([[5, 6, 7]]), torch.arange(3)[None], PrefillBatch(cache, slots))
        cache.add_rows(2)
        cache.set_row_owners([0, 0])
        cache.begin_step()
        return forward.decode(torch.tensor([8, 9]), torch.tensor([3, 3]), DecodeBatch(cache)).float()


def trained(model):
    """One step of an optimizer."""
    optimizer = torch.optim.SGD((x for x in model.parameters() if x.requires_grad), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj", "lm_head"])
    return peft.get_peft_model(model, config)


CASES = {
    "copy": (torch.float32, torch.float16, False, False),
    "copy with an adapter merged": (torch.float32, torch.float16, False, True),
    "copy, output layer in float32": (torch.float32, torch.float16, True, False),
    "copy with an adapter, output layer in float32": (torch.float32, torch.float16, True, True),
    "bfloat16 copy": (torch.float32, torch.bfloat16, False, False),  # in oneDNN's or this processor's own layout
    "live": (torch.float32, torch.float32, False, False),
    "live, norms copied": (torch.float16, torch.float16, False, False),
    "live, norms and output layer copied": (torch.float16, torch.float16, True, False),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_refresh_reads_new_weights_into_the_same_memory_as_if_packed_anew(case):
    own, computed, float32_head, has_adapter = CASES[case]
    torch.manual_seed(0)
    model = tiny_model("qwen3", layers=2).to(own)
    model = adapted(model) if has_adapter else model
    forward = DecoderForward(model, computed, float32_head)
    first = copy.deepcopy(model.state_dict())
    logits = [logits_of(forward)]
    before = forward.capture_key()  # with tables of positions
    for change in (trained, lambda model: model.load_state_dict(first)):
        change(model)
        kept = copy.deepcopy(model.state_dict())
        assert forward.refresh()
        assert all(torch.equal(kept[name], x) for name, x in model.state_dict().items())
        assert case == "bfloat16 copy" or forward.capture_key() == before
        logits.append(logits_of(forward))
        assert torch.equal(logits[-1], logits_of(DecoderForward(model, computed, float32_head)))
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_memory_that_moved_changes_the_key_of_captured_steps():
    model = tiny_model("qwen2", layers=1)
    for forward in (DecoderForward(model, torch.float32), ModulesForward(model)):
        before = forward.capture_key()
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        assert forward.refresh()
        assert forward.capture_key() == before
        model.lm_head.weight.data = model.lm_head.weight.data.clone()  # as after an offload to the host and back
        assert forward.refresh()
        assert forward.capture_key() != before


def test_a_copy_is_never_written_into_live_weights():
    """A float32 output layer is read in place; with an adapter later it is a copy, which must not replace the weights."""
    linear = nn.Linear(8, 8)
    live = SamplerLinear.in_float32(linear)
    assert live.tensors[0].data_ptr() == linear.weight.data_ptr()
    kept = linear.weight.detach().clone()
    other = nn.Linear(8, 8).half()
    made = SamplerLinear.in_float32(other, into=live)
    assert torch.equal(linear.weight, kept)
    assert torch.equal(made.tensors[0], other.weight.float())
    again = SamplerLinear.in_float32(nn.Linear(8, 8).half(), into=made)
    assert again.tensors[0].data_ptr() == made.tensors[0].data_ptr()


def test_a_float32_output_layer_of_modules_keeps_its_address_between_contexts():
    model = tiny_model("gpt2", layers=1).to(torch.bfloat16)
    forward, addresses = ModulesForward(model, float32_head=True), []
    for _ in range(3):
        with forward.evaluating():
            addresses.append(forward.head.tensors[0].data_ptr())
            assert torch.equal(forward.head.tensors[0], model.lm_head.weight.float())
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    assert len(set(addresses)) == 1
