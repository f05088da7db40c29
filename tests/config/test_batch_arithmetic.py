"""Prompts, completions, micro-batches and steps: counted by hand."""

import pytest

from covey.config import GRPOConfig
from covey.config.batches import batch_arithmetic
from covey.errors import ConfigError


def make(**given):
    return GRPOConfig(output_dir="unused", **given)


def test_the_defaults_draw_one_group_and_take_one_step_on_it():
    config = make(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    counts = batch_arithmetic(config, world_size=1, num_prompts=10)
    assert config.generation_batch_size == 8
    assert config.steps_per_generation == 2
    assert (counts.prompts_per_generation, counts.completions_per_generation) == (1, 8)
    assert (counts.completions_per_step, counts.optimizer_steps_per_generation) == (8, 1)
    assert counts.total_steps == 30  # 3 epochs of 10 prompts, one a step
    assert counts.total_completions == 240
    assert counts.epochs == 3.0


def test_more_steps_a_generation_share_one_rollout():
    config = make(gradient_accumulation_steps=2, steps_per_generation=8, num_generations=4, num_iterations=3)
    counts = batch_arithmetic(config, world_size=2, num_prompts=100)
    assert counts.completions_per_generation == 8 * 2 * 8  # a device x processes x micro-batches
    assert counts.prompts_per_generation == 32
    assert counts.completions_per_step == 8 * 2 * 2
    assert counts.batches_per_generation == 4
    assert counts.optimizer_steps_per_generation == 12
    assert counts.total_steps == 113  # 300 prompts / 32 x 12 = 112.5


def test_a_generation_batch_smaller_than_a_step_is_drawn_for_the_whole_step():
    config = make(gradient_accumulation_steps=4, steps_per_generation=2)
    assert config.steps_per_generation == 4
    assert config.generation_batch_size == 32


def test_a_data_set_smaller_than_a_batch_still_trains():
    config = make(gradient_accumulation_steps=4, num_train_epochs=1)
    assert batch_arithmetic(config, world_size=1, num_prompts=1).total_steps == 1


def test_epochs_are_not_rounded_up_by_floating_point():
    config = make(num_train_epochs=1.1)
    assert batch_arithmetic(config, world_size=1, num_prompts=10).total_steps == 11  # 1.1 * 10 is 11.000000000000002


def test_a_stream_without_end_needs_a_number_of_steps():
    with pytest.raises(ConfigError, match="set max_steps"):
        batch_arithmetic(make(), world_size=1, num_prompts=None)
    assert batch_arithmetic(make(max_steps=7), world_size=1, num_prompts=None).total_steps == 7


def test_the_words_are_the_numbers():
    counts = batch_arithmetic(make(per_device_train_batch_size=16, max_steps=5), world_size=1, num_prompts=10)
    assert counts.in_words().splitlines() == [
        "2 prompts x 8 completions = 16 completions a generation batch",
        "16 completions an optimizer step, in micro-batches of 16 on each device",
        "1 optimizer step a generation batch",
        "5 optimizer steps in all, 1 passes over the prompts, 80 completions drawn",
    ]


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"num_generations": 6},
            "8 completions a device x 1 process x 1 micro-batch = 8 completions a generation batch",
        ),
        ({"num_generations": 6}, "Try num_generations=8 or 4, or gradient_accumulation_steps=3 (4 x 6 completions)"),
        ({"generation_batch_size": 12}, "must be a multiple of 8"),
        ({"generation_batch_size": 12}, "Try 8 or 16."),
        ({"generation_batch_size": 16, "steps_per_generation": 1}, "say two things"),
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "Try steps_per_generation=4",
        ),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "Try steps_per_generation=4"),
    ],
)
def test_sizes_that_do_not_divide_are_explained(given, said):
    with pytest.raises(ConfigError) as caught:
        make(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize("group", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("accumulation, steps", [(1, None), (3, None), (2, 4)])
def test_a_proposed_value_works(group, accumulation, steps):
    given = {"gradient_accumulation_steps": accumulation, "steps_per_generation": steps, "num_generations": group}
    if 8 * (steps or accumulation) % group == 0:
        return
    with pytest.raises(ConfigError) as caught:
        make(**given)
    for proposal in str(caught.value).split("Try ")[1].rstrip(".").split(", or "):
        name, value = proposal.split(" (")[0].split("=")
        for choice in value.split(" or "):
            make(**{**given, name: int(choice)})
