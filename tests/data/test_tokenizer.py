"""What training needs of a tokenizer."""

from __future__ import annotations

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from covey import GRPOConfig, GRPOTrainer
from covey.data import PromptStream, eos_ids, prepare_tokenizer
from covey.errors import DataError, ModelError
from covey.rewards.builtin.inference_model import read_tokenizer
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from kit import tiny_model, tiny_tokenizer


def test_a_missing_padding_token_becomes_eos_with_a_warning(caplog):
    tokenizer = prepare_tokenizer(tiny_tokenizer(pad=False, padding_side="right"))
    assert tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"
    assert "no padding token" in caplog.text


@pytest.mark.parametrize("kind", ["gemma2", "qwen2"])
def test_a_folder_with_a_model_alone_is_no_tokenizer(kind, tmp_path):
    """transformers makes one without words, which reads any text as <unk> or as nothing."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(set(tokenizer("Two and two?", add_special_tokens=False).input_ids)) < 2
    with pytest.raises(ModelError, match=r"has no words but control tokens.*; copy the model's tokenizer.json"):
        prepare_tokenizer(tokenizer)
    with pytest.raises(ModelError, match="has no words but control tokens"):
        read_tokenizer(str(tmp_path), "", "reward model", "reward_processing_classes")


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
    with pytest.raises(ModelError, match="processing_class is a str"):
        prepare_tokenizer("qwen")


def with_more(**special):
    """A tokenizer of one id more than `tiny_model()` has embeddings: 320."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    for name, token in special.items():
        setattr(tokenizer, name, token)
    return tokenizer


def test_an_id_without_embedding_is_told_once_and_no_more_where_nothing_uses_it(caplog):
    tokenizer, model = with_more(), tiny_model(vocab_size=320)
    assert len(tokenizer) == 321
    assert prepare_tokenizer(tokenizer, model) is prepare_tokenizer(tokenizer, model)
    assert [record.message for record in caplog.records if "<extra>" in record.message] == [
        "The tokenizer has ids up to 320, but the model has only 320 embeddings; a prompt that holds '<extra>' or another of "
        "the 1 ids beyond them is refused."
    ]


def test_an_id_without_embedding_that_training_uses_is_refused():
    model = tiny_model(vocab_size=320)
    with pytest.raises(ModelError, match="padding token '<extra>' has id 320, but the model has only 320 embeddings"):
        prepare_tokenizer(with_more(pad_token="<extra>"), model)
    with pytest.raises(ModelError, match="end-of-text token '<extra>' has id 320"):
        prepare_tokenizer(with_more(eos_token="<extra>"), model)
    template = "{% for message in messages %}<extra>{{ message['content'] }}{% endfor %}"
    with pytest.raises(ModelError, match=r"chat template's token '<extra>' has id 320.*resize_token_embeddings\(321\)"):
        prepare_tokenizer(with_more(chat_template=template), model)


def test_a_template_that_wants_other_messages_is_judged_with_the_data():
    template = "{{ raise_exception('a system message must come first') }}"
    prepare_tokenizer(with_more(chat_template=template), tiny_model(vocab_size=320))


def test_a_prompt_with_such_an_id_is_refused_before_any_work():
    rows = Dataset.from_dict({"prompt": ["2 + 2 =", "3 <extra> ="]})
    with pytest.raises(DataError, match="Row 1 .*its prompt has token id 320, but the model has only 320 embeddings"):
        PromptStream(rows, with_more(), num_embeddings=320)
    assert len(PromptStream(rows.select([0]), with_more(), num_embeddings=320).take(1)) == 1


@pytest.mark.parametrize("sampler", [NativeSampler, TransformersSampler])
def test_a_sampler_refuses_such_a_prompt(sampler):
    drawn = sampler(tiny_model(vocab_size=320), with_more())
    with pytest.raises(DataError, match="prompt 0 has token id 320"):
        list(drawn.sample(["3 <extra> ="], 1, SamplingParams(max_tokens=2)))


def test_a_folder_whose_tokenizer_has_an_id_more_than_the_model_is_trained(tmp_path):
    tiny_model(vocab_size=320).save_pretrained(tmp_path / "model")
    with_more().save_pretrained(tmp_path / "model")
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", num_generations=2,
        per_device_train_batch_size=2, max_completion_length=4, max_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=lambda completions, **columns: [float(len(one)) for one in completions],
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 ="]}),
        args=args,
    )
    assert trainer.train().global_step == 1
