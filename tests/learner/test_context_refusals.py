"""What processes cannot share out is refused by name, before a step."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from covey import GRPOConfig
from covey import algorithms as alg
from covey.errors import ConfigError
from covey.learner import Policy, context_parallel
from covey.learner.context_parallel import expect_shared_out
from covey.process.context import ContextGroup
from covey.process.sharding import Sharding
from covey.process.world import World
from covey.training.build import media_example
from covey.training.build_learner import RunInputs
from kit import tiny_model
from modalities.media_prompts import prompts, tiny_of


def inputs(tmp_path, model, algorithm):
    args = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True)
    return RunInputs(args, model, None, (), algorithm, None, None, World())


def test_a_number_of_heads_that_does_not_divide_names_those_that_do():
    policy = Policy(tiny_model("qwen3", hidden=36, num_attention_heads=6, num_key_value_heads=3, head_dim=6), pad_id=0)
    assert policy.shares_prompts()
    with pytest.raises(
        ConfigError, match="cp_size=4, and Qwen3ForCausalLM .* it has 6 attention heads, so cp_size may be 2, 3, 6"
    ):
        expect_shared_out(policy.model, 4, policy.heads)
    expect_shared_out(policy.model, 3, policy.heads)


def test_a_model_whose_rows_cannot_be_packed_is_refused():
    from shared_rows import biased_by_distance

    policy = Policy(biased_by_distance(), pad_id=0)
    policy = replace(policy, context=ContextGroup(World(context=2)))
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match="BloomForCausalLM cannot share out .* rows cannot be packed"),
    ):
        context_parallel.expect_context(policy)


@pytest.mark.parametrize(
    "kind, reason",
    [("gemma3", "tokens of an image attend to each other in both directions"), ("gemma3n", "gets per_layer_inputs")],
)
def test_a_model_whose_media_are_more_than_embeddings_is_refused_by_name(kind, reason):
    model, processor = tiny_of(kind)
    seen = prompts(processor, kind)[0]
    policy = Policy(model, pad_id=0, packs_always=True, context=ContextGroup(World(context=2)))
    with pytest.raises(ConfigError, match=f"cp_size=2, and {type(model).__name__} cannot share out .*: .*{reason}"):
        context_parallel.expect_media(policy, seen)


def test_a_layer_with_a_state_is_refused():
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=64, state_size=4)
    with pytest.raises(ConfigError, match="layers with a state read the tokens of a row one after the other"):
        expect_shared_out(AutoModelForCausalLM.from_config(config), 2, set())


def test_media_in_later_rows_alone_is_named_before_a_model_is_split(tmp_path, caplog):
    model, processor = tiny_of("llava")
    start = inputs(tmp_path, model, alg.grpo())
    rows = Dataset.from_list([{"prompt": "hi", "image": None}] * 3)
    run = replace(start, tokenizer=processor.tokenizer, processor=processor, train_dataset=rows, world=World(size=2))
    run.args.context, run.args.sharding, run.args.max_completion_length = 2, Sharding(), 4
    assert media_example(run) is None
    assert "has the column image" in caplog.text
    caplog.clear()
    run.args.sharding = None  # tried at the first row with media
    assert media_example(run) is None
    assert media_example(replace(run, train_dataset=rows.remove_columns("image"))) is None
    assert caplog.text == ""
