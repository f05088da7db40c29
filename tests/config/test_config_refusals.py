"""A wrong option fails at construction, in one sentence that says what to do."""

import copy
import dataclasses
import json
import pickle
from types import MappingProxyType

import numpy as np
import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from covey.config import GRPOConfig, checks
from covey.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, RunFolderError
from covey.rollout import SamplingParams
from covey.training.build_sampler import sampling_params


def make(**given):
    return GRPOConfig(output_dir="unused", **given)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"epsilon_hihg": 0.3}, "epsilon_hihg is not an option of GRPOConfig. Did you mean epsilon_high?"),
        ({"loss_type": "dr-grpo"}, "loss_type='dr-grpo' is not known. Did you mean dr_grpo?"),
        ({"loss_type": "xyz"}, "It is one of grpo, dr_grpo, dapo"),
        ({"eval_strategy": "step"}, "Did you mean steps?"),
        ({"optim": "adamw_8bt"}, "Did you mean adamw_8bit?"),
        ({"optim": "galore_adamw"}, "cannot be honoured"),
        ({"lr_scheduler_type": "cosin"}, "Did you mean cosine?"),
        ({"lr_scheduler_type": "greedy"}, "it follows an evaluation loss"),
        ({"use_vllm": True, "rollout_backend": "native"}, "contradict each other"),
        ({"vllm_structured_outputs_regex": "a+"}, "cannot be honoured without vLLM"),
        ({"vllm_tensor_parallel_size": 0}, "must be at least 1"),
        ({"rollout_dtype": "bflaot16"}, "Did you mean bfloat16"),
        ({"cuda_graphs": True, "rollout_backend": "transformers"}, "the native engine's"),
        ({"attention": "flash"}, "attention='flash' is not known. It is one of auto, torch, triton, compiled"),
        ({"rollout_max_rows": 0}, "rollout_max_rows=0 must be at least 1"),
        ({"rollout_cache_fraction": 1.5}, "rollout_cache_fraction=1.5 must be above 0 and at most 1"),
        ({"temperature": 0}, "temperature=0 must be at least 0.0001 and at most 10000. GRPO compares different completions"),
        ({"temperature": float("nan")}, "temperature=nan must be a number"),
        ({"num_generations": "8"}, "num_generations='8' must be a number"),
        ({"bf16": "no"}, "bf16='no' must be True or False, not text"),
        ({"shuffle_dataset": "false"}, "shuffle_dataset='false' must be True or False, not text"),
        ({"mask_truncated_completions": float("nan")}, "mask_truncated_completions=nan must be True or False"),
        ({"log_completions": -1}, "log_completions=-1 must be True or False"),
        ({"save_total_limit": "2"}, "save_total_limit='2' must be a number"),
        ({"save_total_limit": 0.5}, "save_total_limit=0.5 must be a whole number"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan must be a number"),
        ({"vespo_k_pos": True, "loss_type": "vespo"}, "vespo_k_pos=True must be a number"),
        ({"num_generations": 1}, "at least 2 completions a prompt"),
        ({"num_iterations": 1.5}, "num_iterations=1.5 must be a whole number"),
        ({"top_p": 1.2}, "top_p=1.2 must be above 0 and at most 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1. 0 keeps no token; 1 keeps all."),
        ({"max_completion_length": None}, "max_completion_length=None sets no limit"),
        ({"num_train_epochs": 0}, "num_train_epochs=0 must be above 0, or set max_steps"),
        ({"sync_ref_model": True}, "sync_ref_model=True has no reference model to move"),
        ({"algorithm": "gspo", "epsilon": 0.1}, "algorithm='gspo' and epsilon=0.1 both say what the loss is"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True needs evaluations"),
        ({"save_strategy": "best"}, "save_strategy='best' needs evaluations"),  # without them it never saves
        ({"save_strategy": SaveStrategy.BEST}, "save_strategy='best' needs evaluations"),
        ({"early_stopping_patience": 3}, "early_stopping_patience=3 needs evaluations"),
        ({"vllm_importance_sampling_clip_min": 4.0}, "must be below vllm_importance_sampling_clip_max=3.0"),
        ({"fp16": True, "bf16": True}, "contradict each other"),
        ({"reward_timeout_seconds": 0}, "None sets no limit"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_in_one_sentence(given, said):
    with pytest.raises(ConfigError) as caught:
        make(**given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1, 0, 1e-9, 9e-5, 1e-4, 0.5, 1, 1.5, 1e4, 1.1e4, 1e9, float("inf")])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p", "min_p"])
def test_a_sampling_option_is_refused_when_it_is_set_where_the_sampler_would_refuse_it_later(name, value):
    """But greedy decoding, which a sampler has and GRPO cannot learn from."""

    def is_taken(of):
        try:
            of(**{name: value})
        except ConfigError:
            return False
        return True

    assert is_taken(make) == (is_taken(SamplingParams) and (name, value) != ("temperature", 0))


def test_an_option_that_does_not_exist_is_a_type_error_as_in_trl():
    with pytest.raises(TypeError, match="Did you mean epsilon_high"):
        make(epsilon_hihg=0.3)
    with pytest.raises(ValueError, match="must be at least 1"):
        make(num_generations=0)


@pytest.mark.parametrize("wrong", [ConfigError, DataError, ModelError, RewardError, RunFolderError, CheckpointError])
def test_every_error_of_a_wrong_argument_is_a_value_error(wrong):
    assert issubclass(wrong, ValueError)


def test_what_transformers_refuses_is_a_configuration_error_too():
    with pytest.raises(ConfigError, match="save and eval strategy to match"):
        make(load_best_model_at_end=True, eval_strategy="steps", eval_steps=10, save_strategy="epoch")


def test_bfloat16_is_refused_where_the_processor_cannot(monkeypatch):
    monkeypatch.setattr(checks, "processor_has_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match="bf16=True, but this processor does not compute in bfloat16: leave bf16 out"):
        make(bf16=True, use_cpu=True)


def test_bfloat16_runs_on_a_processor_that_has_it(monkeypatch):
    monkeypatch.setattr(checks, "processor_has_bfloat16", lambda: True)
    config = make(bf16=True, use_cpu=True)
    assert config.bf16
    assert config.device.type == "cpu"


def test_precision_is_float32_on_a_processor_unless_asked():
    config = make(use_cpu=True)
    assert config.bf16 is False
    assert config.fp16 is False


def test_spellings_of_trl_mean_what_they_mean_there():
    assert make(scale_rewards=True).scale_rewards == "group"
    assert make(scale_rewards=False).scale_rewards == "none"
    assert make(model_init_kwargs='{"dtype": "float32"}').model_init_kwargs == {"dtype": "float32"}
    assert make(gradient_checkpointing=False).gradient_checkpointing is False
    assert make(eval_strategy="steps", eval_steps=5).do_eval is True


def test_numbers_of_numpy_are_numbers():
    options = make(learning_rate=np.float32(0.5), max_steps=np.int64(3), shuffle_dataset=np.bool_(False))
    values = options.learning_rate, options.max_steps, options.shuffle_dataset
    assert values == (0.5, 3, False)
    assert [type(value) for value in values] == [float, int, bool]


def test_a_whole_number_with_a_decimal_point_is_that_number():
    options = make(num_generations=4.0, gradient_accumulation_steps=2.0, seed=1.0, learning_rate=1.0)
    values = options.num_generations, options.gradient_accumulation_steps, options.seed, options.learning_rate
    assert [repr(value) for value in values] == ["4", "2", "1", "1.0"]
    options = make(max_steps=2.0, save_total_limit=3.0, dataloader_num_workers=0.0)
    assert [repr(value) for value in (options.max_steps, options.save_total_limit)] == ["2", "3"]


def test_the_best_checkpoint_is_picked_by_reward_unless_told():
    config = make(eval_strategy="steps", eval_steps=500, load_best_model_at_end=True)
    assert config.metric_for_best_model == "reward"
    assert config.greater_is_better is True


def test_a_configuration_copies_and_serializes_like_training_arguments():
    config = make(per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-6)
    assert isinstance(config, TrainingArguments)
    rebuilt = GRPOConfig(**config.to_dict())
    assert rebuilt.to_dict() == config.to_dict()
    assert rebuilt.hub_token is None, "a token that was not set is not masked, or the copy would log in with the mask"
    assert dataclasses.replace(config, beta=0.1).beta == 0.1
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).learning_rate == 2e-6
    assert json.loads(config.to_json_string())["learning_rate"] == 2e-6
    assert config.to_sanitized_dict()["train_batch_size"] == 4


@pytest.mark.parametrize(
    "loss, level, said",
    [("luspo", "token", "is meant for"), ("vespo", "sequence", "by itself"), ("dapo", "sequence", "by its length")],
)
def test_a_ratio_level_that_a_loss_was_not_made_for_is_advised_against(loss, level, said, caplog):
    make(loss_type=loss, importance_sampling_level=level)
    assert said in caplog.text


def test_a_parser_of_transformers_leaves_the_options_as_they_are(tmp_path):
    from transformers import HfArgumentParser

    HfArgumentParser(GRPOConfig)  # it changes the types of a dataclass's fields in place
    assert GRPOConfig(output_dir=str(tmp_path), report_to="none").bf16 in (True, False)
    with pytest.raises(ConfigError, match="must be True or False, not text"):
        GRPOConfig(output_dir=str(tmp_path), report_to="none", shuffle_dataset="false")


def test_the_mode_of_vllm_without_vllm_is_named(caplog, tmp_path):
    GRPOConfig(output_dir=str(tmp_path), use_cpu=True, vllm_mode="server")
    assert "vllm_mode='server' changes nothing here: it acts with use_vllm=True." in caplog.messages


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"accelerator_config": {"evn_batches": True}},
            "'evn_batches', which is not known. Did you mean even_batches?",
        ),
        ({"deepspeed": {"zero_optimisation": {"stage": 3}}}, "has no zero_optimization, only 'zero_optimisation'"),
    ],
)
def test_a_misspelt_key_of_accelerate_and_deepspeed_is_told_as_such(tmp_path, given, said):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **given)
    assert said in str(caught.value)


KWARGS = ("activation_checkpointing_kwargs", "lr_scheduler_kwargs", "generation_kwargs", "model_init_kwargs")
"""Options that hold arguments of others; transformers 5.17 lacks the first."""


@pytest.mark.parametrize("name", [name for name in KWARGS if name in GRPOConfig.__dataclass_fields__])
@pytest.mark.parametrize("value", ["text", 3, [1]])
def test_arguments_that_are_no_mapping_are_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"{name}=.* is no mapping of arguments"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("value", ['{"top_k": 5}', MappingProxyType({"top_k": 5})])
def test_arguments_may_be_json_or_any_mapping(tmp_path, value):
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, generation_kwargs=value)
    assert config.generation_kwargs == {"top_k": 5}
    assert sampling_params(config).top_k == 5
