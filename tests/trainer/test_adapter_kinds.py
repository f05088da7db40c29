"""Kinds and options of adapters that a run would not train as PEFT describes them: refused in one sentence, before work is spent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covey.adapters import with_adapter
from covey.errors import ConfigError, ModelError
from covey.learner.live_memory import LiveBytes
from covey.monitor.updates import UpdateMeter
from covey.process.sharding import Sharding, Shards
from covey.process.world import World
from kit import tiny_model

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*'eva' but `eva_config` is not specified"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]
TARGETS = ["q_proj", "down_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})


def kind(name: str, **options: Any) -> Any:
    return getattr(peft, name)(target_modules=TARGETS, **options)


REFUSED = {
    "AdaLoRA": (lambda: kind("AdaLoraConfig", init_r=6, target_r=4, total_step=10), "ADALORA, moves ranks between"),
    "COFT": (lambda: kind("OFTConfig", oft_block_size=8, r=0, coft=True), "COFT, writes to its weights in each pass"),
    "OFT with dropout": (
        lambda: kind("OFTConfig", oft_block_size=8, r=0, module_dropout=0.1),
        "do not apply their module_d",
    ),
    "Lily": (lambda: kind("LilyConfig", r=4), "LILY, mixes the tokens of a batch"),
    "Poly": (lambda: kind("PolyConfig", r=4), "POLY, reads the number of a task"),
    "PVeRA": (lambda: peft.PveraConfig(r=4, target_modules=["q_proj"]), "PVERA, draws its weights anew"),
    "MonteCLoRA": (lambda: lora(monteclora_config=peft.MontecloraConfig()), "MONTECLORA, draws its weights anew"),
    "EVA without its data": (lambda: lora(init_lora_weights="eva"), "init_lora_weights='eva' begins from data"),
    "LoRA-GA without its data": (lambda: lora(init_lora_weights="lora_ga"), "init_lora_weights='lora_ga' begins from"),
    "a text of modules": (lambda: lora(modules_to_save="lm_head"), r"the text 'lm_head', read by the letter; give \['"),
    "LoRA of alpha 0": (lambda: lora(lora_alpha=0), "has layers of scale 0, where no gradient reaches it"),
    "one layer of alpha 0": (lambda: lora(alpha_pattern={"q_proj": 0}), "has layers of scale 0, where no gradient"),
    "LoKr of alpha 0": (lambda: kind("LoKrConfig", alpha=0), "has layers of scale 0, where no gradient reaches it"),
    "no token": (lambda: lora(trainable_token_indices=[]), "trainable_token_indices names no token"),
    "a token beyond the vocabulary": (
        lambda: lora(trainable_token_indices=[9999]),
        "cannot be used .* index 9999 is out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_would_be_trained_as_another_is_refused(name):
    config, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        with_adapter(tiny_model("qwen2"), config())


def test_a_merged_adapter_which_gets_no_gradient_is_refused_until_it_is_taken_out():
    model = peft.get_peft_model(tiny_model("qwen2"), lora(init_lora_weights=False))
    model.merge_adapter()
    with pytest.raises(ConfigError, match="merged into its base, where no gradient reaches it; call unmerge_adapter"):
        with_adapter(model, None)
    model.unmerge_adapter()
    assert with_adapter(model, None) is model


UNSPLITTABLE = {
    "OSF": (lambda: kind("OSFConfig", effective_rank=4), r"U_low has a hook on its gradient, which is lost"),
    "VB-LoRA": (
        lambda: peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, target_modules=["q_proj"]),
        "vblora_vector_bank.* is shared by several blocks of layers",
    ),
}


@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_an_adapter_that_a_split_model_would_train_otherwise_is_refused_there(name):
    """OSF's factors left the subspace that its hooks keep them in: 0.002 from one process after three steps."""
    config, sentence = UNSPLITTABLE[name]
    model = with_adapter(tiny_model("qwen2", layers=2), config())
    with pytest.raises(ModelError, match=sentence):
        Shards(model, World(), Sharding())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_lora_ga_begins_where_its_gradients_were_measured():
    config, model = lora(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig()), tiny_model("qwen2")
    ids = torch.arange(3, 15)[None]
    peft.preprocess_loraga(model, config, lambda: model(ids, labels=ids).loss.backward())
    with_adapter(model, config)


def test_modules_to_save_that_no_module_has_are_named(caplog):
    with_adapter(tiny_model("qwen2"), lora(modules_to_save=["norm", "lm_haed"]))
    assert [record.getMessage() for record in caplog.records if "modules_to_save" in record.getMessage()] == [
        "modules_to_save holds 'lm_haed', which ends no module's name."
    ]


def test_layers_to_transform_that_the_model_lacks_are_named(caplog):
    with_adapter(tiny_model("qwen2", layers=2), lora(layers_to_transform=[1, 7]))
    with_adapter(tiny_model("qwen2", layers=2), lora(layers_to_transform=1))
    named = [record.getMessage() for record in caplog.records]
    assert named == ["layers_to_transform holds 7, where no layer gets an adapter."]


def test_a_head_that_is_trained_whole_is_not_named_as_left_out(caplog):
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with_adapter(model, lora(target_modules="all-linear", modules_to_save=["lm_head"]))
    assert not caplog.records


def test_factors_in_blocks_are_measured_as_weights():
    """BD-LoRA's: their shapes are those of no product `B A`."""
    blocks = peft.tuners.lora.config.BdLoraConfig(
        nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"]
    )
    model = with_adapter(tiny_model("qwen2"), lora(use_bdlora=blocks))
    meter = UpdateMeter(model)
    meter.before()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter, alpha=0.1 * parameter.requires_grad)
    meter.after()
    assert meter.take()["update/all"].value == pytest.approx(0.1 / 1.1, rel=1e-3)


def test_bytes_are_counted_around_sparse_tensors():
    """SHiRA's and FRoD's layers make them in each pass; they have no storage of their own."""
    place, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
    with LiveBytes() as live, torch.sparse.check_sparse_tensor_invariants(enable=True):
        dense = torch.sparse_coo_tensor(place, values, (2, 2)).to_dense()
    assert dense.tolist() == [[0, 1], [1, 0]]
    assert live.now >= dense.untyped_storage().nbytes()
