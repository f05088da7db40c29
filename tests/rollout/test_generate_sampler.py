"""`generation_kwargs` that only transformers' `generate` knows: beams, bans and penalties draw through it, with one warning."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.process.world import World
from covey.rollout import SamplingParams
from covey.rollout.generate import GenerateSampler
from covey.training.build_sampler import generate_options, sampler_options, sampling_params
from kit import tiny_model, tiny_tokenizer

PROMPTS = ["Tom has 3 apples", "What is", "Anna had 20 pens and"]


def config(**given):
    return GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", **given)


def drawn(options, n=2, prompts=PROMPTS, model=None, **params):
    model = tiny_model("qwen2", layers=2).eval() if model is None else model
    sampler = GenerateSampler(model, tiny_tokenizer(), generate=options)
    return list(sampler.sample(prompts, n, SamplingParams(**{"max_tokens": 8, "seed": 3, **params})))


def test_beams_are_those_of_generate():
    model, tokenizer = tiny_model("qwen2", layers=2).eval(), tiny_tokenizer()
    beams = {"num_beams": 4, "length_penalty": 0.1}
    groups = drawn(beams, n=1, model=model, temperature=0.0)
    for group in groups:
        given = torch.tensor([group.prompt.token_ids])
        settings = GenerationConfig(
            **beams, do_sample=False, max_new_tokens=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )  # fmt: skip
        want = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)[
            0, given.shape[1] :
        ]
        got = group.completions[0].token_ids
        assert got.tolist() == want[: len(got)].tolist()
        assert group.completions[0].logprobs is None


def test_a_banned_token_never_comes_and_the_rest_is_drawn():
    model = tiny_model("qwen2", layers=2).eval()
    free = [one for group in drawn({"num_beams": 1}, model=model) for one in group.completions]
    common = int(torch.cat([one.token_ids for one in free]).mode().values)
    held = [one for group in drawn({"suppress_tokens": [common]}, model=model) for one in group.completions]
    assert any(common in one.token_ids for one in free)
    assert not any(common in one.token_ids for one in held)
    assert len({tuple(one.token_ids.tolist()) for one in held}) > 1


def test_a_seed_repeats_the_draws_and_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, other = drawn({"typical_p": 0.9}), drawn({"typical_p": 0.9})
    assert [c.text for g in one for c in g.completions] == [c.text for g in other for c in g.completions]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_completion_ends_at_its_first_end():
    groups = drawn({"forced_eos_token_id": tiny_tokenizer().eos_token_id})
    for one in (completion for group in groups for completion in group.completions):
        assert one.finish == "stop"
        assert one.token_ids[-1] == tiny_tokenizer().eos_token_id
        assert (one.token_ids[:-1] != tiny_tokenizer().eos_token_id).all()


def test_a_signal_is_heard_between_tokens():
    class EnoughError(Exception):
        pass

    def stop():
        raise EnoughError

    sampler = GenerateSampler(tiny_model(), tiny_tokenizer(), generate={"num_beams": 2}, check_stop=stop)
    with pytest.raises(EnoughError):
        list(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=8)))


def test_options_are_parted_by_who_takes_them(caplog):
    args = config(generation_kwargs={"top_k": 5, "num_beams": 4, "use_cache": True, "max_new_tokens": 9})
    assert sampling_params(args).top_k == 5
    assert sampling_params(args).max_tokens == 9
    assert generate_options(args) == {"num_beams": 4}
    options = sampler_options(args, World())
    assert options == {"backend": "generate", "generate": {"num_beams": 4}, "max_rows": None}
    assert sampler_options(args, World(), is_second=True) == options, "one more sampler of a run says nothing again"
    assert [record.getMessage() for record in caplog.records if "num_beams" in record.getMessage()] == [
        "generation_kwargs has num_beams: completions are drawn by transformers' generate, which takes longer and gives no "
        "log-probabilities of its own."
    ]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"generation_kwargs": {"num_beems": 4}}, "has 'num_beems', which no sampler knows. Did you mean num_beams?"),
        (
            {"generation_kwargs": {"num_beams": 4}, "rollout_backend": "native"},
            "rollout_backend='native' does not use it",
        ),
    ],
)
def test_what_nobody_knows_and_what_contradicts_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        sampling_params(config(**given))


def test_a_second_count_of_completions_is_refused():
    with pytest.raises(ConfigError, match="num_generations counts completions"):
        GenerateSampler(tiny_model(), tiny_tokenizer(), generate={"num_return_sequences": 2})


def test_a_run_trains_on_beams(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, generation_kwargs={"num_beams": 2},
    )  # fmt: skip
    rewards = lambda completions, **columns: [float(len(one)) for one in completions]
    data = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    run = GRPOTrainer(tiny_model(), rewards, args, data, processing_class=tiny_tokenizer())
    assert run.train().global_step == 2
    assert isinstance(run._running.sampler, GenerateSampler)


@pytest.mark.parametrize(
    "setting",
    [{"min_p": 0.9}, {"typical_p": 0.05}, {"no_repeat_ngram_size": 1}, {"num_beams": 3}],
    ids=lambda setting: next(iter(setting)),
)
def test_the_models_own_generation_config_changes_no_draw(setting):
    model = tiny_model("qwen2", layers=2).eval()
    model.generation_config.update(**setting)
    tokens = lambda groups: [one.token_ids.tolist() for group in groups for one in group.completions]
    assert tokens(drawn({"top_h": None}, model=model)) == tokens(drawn({"top_h": None}))
    assert getattr(model.generation_config, next(iter(setting))) == next(iter(setting.values()))


@pytest.mark.parametrize("arch", ["gpt2", "qwen2"])
def test_no_completion_goes_past_the_models_positions(arch):
    model = tiny_model(arch, max_position_embeddings=16).eval()
    prompts = [[5] * 14, [6] * 3, [7] * 4, [8] * 10, [9] * 15]
    groups = drawn({"suppress_tokens": [2]}, model=model, prompts=prompts, max_tokens=10)
    assert [group.prompt.token_ids[0] for group in groups] == [5, 6, 7, 8, 9]
    assert [{one.num_tokens for one in group.completions} for group in groups] == [{2}, {10}, {10}, {6}, {1}]


def test_a_repetition_penalty_leaves_padding_out():
    model, tokenizer = tiny_model("qwen2", layers=2, seed=1).eval(), tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # transformers 5.19 counts it, so that shorter rows end later
    sampler = GenerateSampler(model, tokenizer, generate={"num_beams": 1})
    params = SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=5.0)
    tokens = lambda prompts: [group.completions[0].token_ids.tolist() for group in sampler.sample(prompts, 1, params)]
    prompts = [*PROMPTS, "Tom has 3 apples and buys 4 more. How many apples does Tom have?"]
    alone = [row for prompt in prompts for row in tokens([prompt])]
    assert min(map(len, alone)) < 40, "one ends with the end of text"
    assert tokens(prompts) == alone
    plain = GenerationConfig(
        do_sample=False, max_new_tokens=40, repetition_penalty=5.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    ids = torch.tensor([tokenizer(prompts[0])["input_ids"]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)[0, ids.shape[1] :]
    assert alone[0] == want.tolist()
