"""What training needs of a tokenizer."""

from __future__ import annotations

import pytest

from covey.data import eos_ids, prepare_tokenizer
from covey.errors import ModelError
from kit import tiny_model, tiny_tokenizer


def test_a_missing_padding_token_becomes_eos_with_a_warning(caplog):
    tokenizer = prepare_tokenizer(tiny_tokenizer(pad=False, padding_side="right"))
    assert tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"
    assert "no padding token" in caplog.text


def test_a_complete_tokenizer_keeps_its_tokens(caplog):
    tokenizer = tiny_tokenizer()
    assert prepare_tokenizer(tokenizer, tiny_model()) is tokenizer
    assert tokenizer.pad_token == "<|endoftext|>"
    assert caplog.text == ""


def test_eos_is_collected_from_everywhere_the_tokenizers_first():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [0, 2, 5]
    model.config.eos_token_id = 7
    assert eos_ids(model, tokenizer) == (2, 0, 5, 7)
    assert eos_ids(None, tokenizer) == (2,)


def test_a_tokenizer_without_eos_takes_the_models():
    tokenizer = prepare_tokenizer(tiny_tokenizer(eos=False), tiny_model())
    assert tokenizer.eos_token == "<|im_end|>"


def test_no_eos_anywhere_is_told_with_the_fix():
    with pytest.raises(ModelError, match=r"names an end-of-text token.*set tokenizer.eos_token"):
        prepare_tokenizer(tiny_tokenizer(eos=False))


def test_a_tokenizer_of_another_model_is_told():
    with pytest.raises(ModelError, match="token ids up to 319, but the model has only 100 embeddings"):
        prepare_tokenizer(tiny_tokenizer(), tiny_model(vocab_size=100))
    with pytest.raises(ModelError, match="processing_class is a str"):
        prepare_tokenizer("qwen")
