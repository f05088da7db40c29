"""Processors from folders: what a run has written is read back, and a package that is missing is named."""

import json

import pytest
from models import GRID, picture, tiny_vlm
from sound_models import SPECIAL, tiny_hearing_model, tone
from transformers.utils import is_timm_available

from covey.data.prompts import to_prompt
from covey.errors import DataError, ModelError
from covey.models import load_model
from covey.models.modalities import load_processing
from kit import rest_nightly


def ids_of(processor, **items):
    row = {"prompt": [{"role": "user", "content": "Which?"}], **items}
    return to_prompt(row, "0:0", "row 0", processor.tokenizer, {}, processor).token_ids


@pytest.mark.parametrize("kind", rest_nightly((*GRID, "qwen2_5_omni"), ("qwen2_5_vl", "qwen2_5_omni")))
def test_a_processor_that_was_written_without_its_part_for_videos_is_read_back(tmp_path, kind):
    """So a run leaves it where torchvision is missing."""
    model, processor = tiny_vlm(kind) if kind in GRID else tiny_hearing_model(kind)
    processor.save_pretrained(tmp_path)
    if kind == "qwen2_5_omni":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["extra_special_tokens"] = {f"{name}_token": text for name, text in SPECIAL.items()}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    back = load_processing(model, tmp_path)
    assert type(back).__name__ == type(processor).__name__
    items = {"image": picture(2)} | ({"audio": tone(440)} if kind == "qwen2_5_omni" else {})
    assert ids_of(back, **items) == ids_of(processor, **items)
    with pytest.raises(DataError, match="has videos, but .* alone; give a model whose processor reads videos"):
        ids_of(back, video=[picture(1)])


@pytest.mark.skipif(is_timm_available(), reason="timm is installed")
def test_a_package_that_the_models_code_needs_is_named(tmp_path):
    model, _ = tiny_hearing_model("gemma3n")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"could not be loaded: .* requires the timm library .*`pip install timm`"):
        load_model(str(tmp_path))
