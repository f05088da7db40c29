"""`covey doctor plan --cluster`: the combinations that fit, their memory by part, and the nearest cluster where none does."""

import json
from dataclasses import replace

import peft
import pytest
import yaml
from transformers import AutoConfig

from covey import algorithms as alg
from covey.config.combinations import refusal_of
from covey.doctor.roofline.cluster import Choice, _shortage, choices, completions_of, nearest, ways, with_learners
from covey.doctor.roofline.estimate import Setup, estimate
from covey.doctor.roofline.gpus import GPUS
from covey.doctor.roofline.options import division, planned, teachers_of
from covey.errors import ConfigError

MODEL = AutoConfig.for_model(
    "llama", hidden_size=256, num_hidden_layers=2, intermediate_size=512, vocab_size=2048, num_attention_heads=8
)
OPTIONS = {"output_dir": "unused", "report_to": "none", "num_generations": 4, "max_completion_length": 128}
pytestmark = pytest.mark.slow  # each way to hold the weights is a step of the learner on fake tensors
LORA = peft.LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear")


def gpu(gigabytes):
    return replace(GPUS["H100"], name=f"GPU of {gigabytes} GB", memory_gb=gigabytes)


def setup_of(gigabytes=80.0, gpus=4, **options):
    config, *_ = planned({**OPTIONS, "per_device_train_batch_size": 8, **options})
    return Setup(args=config, model_config=MODEL, gpu=gpu(gigabytes), gpus=gpus, prompt_tokens=32)


@pytest.fixture(scope="module")
def four():
    setup = setup_of()
    made = ways(setup, LORA)
    return setup, made, choices(setup, made)


def test_the_fastest_stands_first_and_every_kind_is_tried(four):
    plans = four[2]
    assert all(choice.plan.fits for choice in plans)
    steps = [choice.plan.seconds.step for choice in plans]
    assert steps == sorted(steps)
    names = {feature for choice in plans for feature in choice.features}
    assert names >= {
        "all weights",
        "LoRA",
        "QLoRA",
        "DDP",
        "FSDP2",
        "native",
        "vLLM server",
        "vLLM in process",
        "asynchronous",
    }
    assert len({choice.features for choice in plans}) == len(plans) == 30
    assert not names & {"offload", "context parallel"}, "they are for what does not fit otherwise"
    known = lambda choice: [name for name in choice.features if name not in ("all weights", "native")]
    assert all(refusal_of(known(choice)) is None for choice in plans)


def test_every_combination_takes_the_same_completions_and_all_gpus(four):
    setup, _, plans = four
    for choice in plans:
        plan = choice.plan
        assert plan.completions == completions_of(setup) == 32
        assert plan.gpus == 4
        assert ("vLLM server" in choice.features or "asynchronous" in choice.features) == (plan.setup.writers > 0)


def test_seconds_and_memory_are_the_sums_of_their_parts(four):
    for choice in four[2]:
        seconds, held, plan = choice.plan.seconds, choice.plan.held, choice.plan
        learning = seconds.scoring + seconds.teacher + seconds.update
        together = max(seconds.rollout, learning) if "asynchronous" in choice.features else seconds.rollout + learning
        assert seconds.step == pytest.approx(together + seconds.sync)
        stays = held.weights + held.reference + held.critic + held.teacher + held.optimizer
        learns = stays + held.gradients + held.activations + held.gathered
        assert held.peak == max(learns, stays + held.sampler + held.cache)
        assert (held.sampler + held.cache == 0) == bool(plan.setup.writers), "who learns only holds no keys and values"
        assert (plan.writer >= plan.decoding.weights / plan.decoding.gpus) == bool(plan.setup.writers)


def test_four_bits_hold_less_and_a_split_model_a_share(four):
    held = {choice.features: choice.plan.held for choice in four[2]}
    for split in ("DDP", "FSDP2"):
        assert held["QLoRA", split, "native"].weights < held["LoRA", split, "native"].weights
    whole, share = held["all weights", "DDP", "native"], held["all weights", "FSDP2", "native"]
    assert share.optimizer == -(-whole.optimizer // 4)


def test_the_options_of_four_bits_are_yaml_that_loads_such_a_model(four):
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoQuantizationConfig

    shown = next(choice.options for choice in four[2] if "QLoRA" in choice.features)["model_init_kwargs"]
    loaded = yaml.safe_load(json.dumps(shown))
    read = AutoQuantizationConfig.from_dict(loaded["quantization_config"])
    assert isinstance(read, BitsAndBytesConfig)
    assert read.load_in_4bit


def test_too_little_host_memory_leaves_out_what_is_offloaded(four):
    _, made, _ = four
    way = next(way for way in made if way.features == ("all weights", "FSDP2"))
    on_hosts = lambda memory: estimate(replace(way.setup, offloads=True, host_memory=memory), way.measurement)
    needed = on_hosts(None).host
    assert on_hosts(None).fits
    assert on_hosts(needed).fits
    poor = on_hosts(needed - 1)
    assert not poor.fits
    assert not estimate(replace(way.setup, gpu=gpu(0.001), host_memory=1), way.measurement).fits
    sentence = _shortage(Choice(features=("all weights", "FSDP2", "offload"), plan=poor, options={}))
    assert sentence.endswith("in the host memory of a node")


@pytest.mark.nightly
def test_more_gpus_are_not_slower_and_longer_completions_not_faster(four):
    setup, made, plans = four
    more = replace(with_learners(setup, 8, completions_of(setup)), gpus=8)
    eight = choices(more, [replace(way, setup=replace(way.setup, gpus=8)) for way in made])
    assert eight[0].plan.completions == plans[0].plan.completions
    assert eight[0].plan.seconds.step <= plans[0].plan.seconds.step
    longer = setup_of(max_completion_length=512)
    assert choices(longer, ways(longer, LORA))[0].plan.seconds.step > plans[0].plan.seconds.step


def test_less_memory_fits_fewer_and_brings_host_memory_and_shared_rows(four):
    setup, made, plans = four
    sizes, counts = sorted(choice.plan.held.learning for choice in plans), []
    for limit in (sizes[20], sizes[10], 0.9 * sizes[0]):
        tight = replace(setup, gpu=gpu(limit / 0.94e9))
        found = choices(tight, [replace(way, setup=replace(way.setup, gpu=tight.gpu)) for way in made])
        assert all(choice.memory <= tight.gpu.memory for choice in found if choice.plan.fits)
        counts.append(
            len(
                [
                    choice
                    for choice in found
                    if choice.plan.fits and not {"offload", "context parallel"} & {*choice.features}
                ]
            )
        )
    assert len(plans) > counts[0] > counts[1] > counts[2] == 0
    assert {"offload", "context parallel"} <= {feature for choice in found for feature in choice.features}


def test_a_cluster_that_is_too_small_gets_one_sentence_with_the_nearest_that_fits(four):
    setup, made, _ = four
    tiny = replace(setup, gpus=1, gpu=gpu(0.02))
    alone = [
        replace(way, features=way.features[:1], setup=replace(way.setup, gpus=1, gpu=tiny.gpu, is_split=False))
        for way in made
    ]
    plans = choices(tiny, alone)
    assert not any(choice.plan.fits for choice in plans)
    sentence = nearest(tiny, alone, plans)
    assert sentence.startswith("no combination fits 1 x GPU of 0.02 GB: the nearest, ")
    assert "would fit" in sentence
    assert sentence.count(". ") == 0, "one sentence"


def test_shared_rows_divide_activations_and_cost_an_exchange(four):
    made = four[1]
    way = next(way for way in made if way.features == ("all weights", "FSDP2"))
    small = replace(way.setup, gpu=gpu(0.2))
    one, two = (estimate(replace(small, context=size), way.measurement) for size in (1, 2))
    assert one.held.activations // 2 <= two.held.activations < one.held.activations
    assert two.seconds.update > one.seconds.update
    assert two.held.weights == one.held.weights


@pytest.mark.nightly
def test_a_teacher_in_the_process_takes_a_pass_and_its_weights(tmp_path):
    setup = setup_of()
    config = setup.args
    config.algorithm = alg.dapo().replace(regularizers=(alg.distill("other/model"),))
    (teacher,) = teachers_of(config, MODEL, lambda name, trusted: MODEL)
    assert teacher.weights == 2 * teacher.parameters > 0
    config.algorithm = alg.dapo().replace(
        regularizers=(alg.distill("http://host:8000/v1", served_model_name="big", top_k=5),)
    )
    assert teachers_of(config, MODEL, lambda name, trusted: MODEL) == ()
    config.algorithm = None
    way = ways(replace(setup, gpus=1), None)[0]
    plain, taught = (estimate(replace(way.setup, teachers=given), way.measurement) for given in ((), (teacher,)))
    assert plain.seconds.teacher == 0.0 < taught.seconds.teacher
    assert taught.held.peak == plain.held.peak + teacher.weights


@pytest.mark.parametrize(
    "options, gpus, writers, said",
    [
        ({"use_vllm": True}, 8, None, "--rollout-gpus is missing"),
        ({"use_vllm": True}, 8, 8, "leaves none to learn"),
        ({"async_rollouts": True}, 1, None, "leaves none to learn"),
        ({}, 8, 2, "add --use-vllm true"),
    ],
)
def test_who_writes_has_to_be_known_and_leave_some_to_learn(options, gpus, writers, said):
    config, *_ = planned({**OPTIONS, "vllm_mode": "server", **options})
    with pytest.raises(ConfigError, match=said):
        division(config, gpus, writers)


def test_a_server_and_workers_have_gpus_of_their_own():
    server, *_ = planned({**OPTIONS, "use_vllm": True, "vllm_mode": "server"})
    assert division(server, 8, 2) == (2, False)
    workers, *_ = planned({**OPTIONS, "async_rollouts": True, "rollout_workers": 3})
    assert division(workers, 8, None) == (3, True)
    both, *_ = planned({**OPTIONS, "use_vllm": True, "vllm_mode": "server", "async_rollouts": True})
    assert division(both, 8, 4) == (4, True)
