"""The doctor loads the policy as the trainer does: what one refuses, the other fails, in the same words."""

import warnings

import pytest

from covey import GRPOConfig
from covey.training.loading import load_for_training
from kit import tiny_model, tiny_tokenizer


def test_the_doctor_fails_a_quantized_model_on_a_cpu_as_the_trainer_refuses_it(case, found):
    from transformers import BitsAndBytesConfig

    in_4_bits = {"model_init_kwargs": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the package says of itself while it loads
        pytest.importorskip("bitsandbytes")
        said = found(case(in_4_bits), "FAIL", "model")
    assert "quantized model cannot be trained on a CPU" in said


def test_a_model_spread_by_device_map_stays_where_it_is(tmp_path):
    model = tiny_model()
    model.hf_device_map = {"": "cpu"}
    model.to = lambda *device: pytest.fail("it was moved")
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert load_for_training(model, args, args.device, tokenizer=tiny_tokenizer()).model is model
