"""Two sets of rotary frequencies (`longrope`): sampler and learner take the same one, whatever else is in a batch."""

import json
import logging
import shutil

import pytest
import torch
from datasets import Dataset
from plain_sampling import plain_logprobs
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from covey import GRPOTrainer
from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.learner.packing import Row
from covey.learner.policy import Policy
from covey.models import can_take_long, context_limit, load_model, rope_factors, take_factors
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from covey.training.agents import Agents
from covey.training.loading import LoadedPolicy, choose_factors
from covey.types import Prompt
from kit import tiny_tokenizer

SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [4.0, 5.0, 6.0, 7.0]
ORIGINAL, MOST = 16, 64
WORDS = {"short": "one two", "long": "Tom has 3 apples and buys 4 more. How many?"}


def phi3(short_factor=SHORT) -> Phi3ForCausalLM:
    """Frequencies change past 16 of 64 tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short_factor, "long_factor": LONG}
    config = Phi3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=MOST, original_max_position_embeddings=ORIGINAL, sliding_window=None,
        rope_parameters={**rope, "partial_rotary_factor": 1.0, "factor": 4.0}, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        weight.data.mul_(8.0 if "proj" in name else 1.0)
    return model


def taking(factors) -> Phi3ForCausalLM:
    model = phi3(LONG if factors == "one set" else SHORT)
    take_factors(model, "long" if factors == "long" else "short")
    return model


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("factors, longest", [("short", 12), ("long", 30), ("one set", 30)])
def test_sampler_learner_and_a_row_alone_agree_at_every_length(engine, factors, longest):
    """A short prompt beside a long one; completions run into the limit, or past the length at which frequencies would change."""
    model, params = taking(factors), SamplingParams(max_tokens=20, seed=3)
    options = {"dtype": "float32"} if engine == "native" else {}
    sampler = {"native": NativeSampler, "transformers": TransformersSampler}[engine](
        model, tiny_tokenizer(), eos_ids=[319], **options
    )
    prompts = [Prompt(uid=f"0:{n}", token_ids=tuple(3 + i * 7 % 200 for i in range(n))) for n in (5, longest)]
    groups = sorted(sampler.sample(prompts, 2, params), key=lambda group: len(group.prompt.token_ids))
    rows = [
        Row(group.prompt, one, g, torch.tensor(1.0), torch.ones(one.num_tokens, dtype=torch.bool), index=2 * g + i)
        for g, group in enumerate(groups)
        for i, one in enumerate(group.completions)
    ]
    with torch.no_grad():
        learned = Policy(model, pad_id=0).measure(rows).logp
    alone = [logp for group in groups for logp in plain_logprobs(model, group, params)]
    for row, logp, expected in zip(rows, learned, alone, strict=True):
        torch.testing.assert_close(row.completion.logprobs, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(logp[: len(expected)], expected, atol=1e-4, rtol=0)
    assert max(len(row.prompt.token_ids) + row.completion.num_tokens for row in rows) == (
        16 if factors == "short" else 50
    )


def test_the_long_set_is_what_transformers_takes_for_a_long_row_and_then_for_a_short_one_too():
    plain, model, ids = phi3(), taking("long"), torch.arange(3, 43)[None]
    with torch.no_grad():
        before = plain(ids).logits
        assert torch.equal(model(ids).logits, before)
        first, alone = before[:, :8], plain(ids[:, :8]).logits
        torch.testing.assert_close(model(ids[:, :8]).logits, first, atol=1e-5, rtol=0)
        assert (alone - first).abs().max() > 0.1
        take_factors(model, "short")
        assert torch.equal(model(ids[:, :8]).logits, alone)


def loaded(model) -> LoadedPolicy:
    return LoadedPolicy(model, tiny_tokenizer(), (2,))


def options(folder, **changed) -> GRPOConfig:
    small = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6, "save_steps": 2}
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "steps"}
    return GRPOConfig(str(folder), **{**small, **quiet, "max_steps": 2, "learning_rate": 1e-12, **changed})


def rows(name) -> Dataset:
    return Dataset.from_list([{"prompt": "one two"}, {"prompt": WORDS[name]}])


CHOICES = {
    "short prompts": ({}, "short", "takes short_factor for every row: 16 tokens"),
    "a long prompt": (
        {"words": "long"},
        "long",
        "since a prompt has 19 tokens and max_completion_length is 6: more than 16",
    ),
    "a long prompt that is dropped": ({"words": "long", "on_long_prompt": "drop"}, "short", "takes short_factor"),
    "held-out prompts": ({"held_out": "long"}, "long", "since a prompt has"),
    "long completions": ({"max_completion_length": 40}, "long", "since max_completion_length is 40: more than 16"),
    "vLLM, long": ({"use_vllm": True, "vllm_max_model_length": 40}, "long", "since vllm_max_model_length is 40"),
    "vLLM, short": ({"words": "long", "use_vllm": True, "vllm_max_model_length": 16}, "short", "takes short_factor"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_run_takes_the_set_of_its_longest_row_or_that_of_its_vllm_and_says_so(name, tmp_path, caplog):
    changed, factors, sentence = CHOICES[name]
    data = rows(changed.pop("words", "short")), {"one": rows(changed.pop("held_out", "short"))}
    model = phi3()
    with caplog.at_level(logging.WARNING):
        choose_factors(loaded(model), options(tmp_path, **changed), data, Agents())
    assert sentence in caplog.text
    assert rope_factors(model) == factors
    assert context_limit(model) == {"short": 16, "long": 64}[factors]


def test_a_model_with_one_set_is_left_alone(tmp_path, caplog):
    model = phi3(LONG)
    choose_factors(loaded(model), options(tmp_path), [rows("long")], Agents())
    assert (caplog.text, rope_factors(model), context_limit(model)) == ("", None, 64)


def test_code_that_has_no_place_for_the_long_set_stays_short_and_a_longer_vllm_is_refused(tmp_path, caplog):
    """As Phi-3.5-MoE and code from the hub, whose modules rotate without these buffers."""
    model = phi3()
    del model.model.rotary_emb.original_inv_freq
    choose_factors(loaded(model), options(tmp_path), [rows("long")], Agents())
    assert "rows end at 16 tokens" in caplog.text
    assert (can_take_long(model), context_limit(model)) == (False, 16)
    vllm = options(tmp_path, use_vllm=True, vllm_max_model_length=17)
    with pytest.raises(ConfigError, match="takes long_factor where vllm_max_model_length is 17; lower it to 16"):
        choose_factors(loaded(model), vllm, [rows("long")], Agents())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of rows past 16 tokens, in float32, with a reference model."""
    folder = tmp_path_factory.mktemp("long")
    one = trainer(folder, "long", beta=0.1)
    one.train()
    return folder, one


def trainer(folder, words, **changed) -> GRPOTrainer:
    return GRPOTrainer(
        phi3(), lambda completions, **columns: [float(len(text)) for text in completions], options(folder, **changed),
        rows(words), processing_class=tiny_tokenizer(),
    )  # fmt: skip


def expect_agreement(history):
    """Nothing was learned: sampler, learner and reference are of the same weights."""
    assert max(entry["completions/max_length"] for entry in history) == 6
    assert max(entry["kl"] for entry in history) < 1e-6
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in history) < 1e-4


def test_sampler_learner_and_reference_of_a_run_take_one_set(run):
    expect_agreement([entry for entry in run[1].state.log_history if "kl" in entry])


@pytest.mark.slow
def test_workers_take_the_set_of_the_run(tmp_path):
    one = trainer(tmp_path, "long", async_rollouts=True, beta=0.1)
    one.train()
    expect_agreement([entry for entry in one.state.log_history if "kl" in entry])


def test_what_is_saved_has_the_configuration_as_it_came_and_is_read_as_it_was_trained(run, tmp_path, caplog):
    folder, one = run
    stored = json.loads((folder / "checkpoint-2" / "config.json").read_text())
    assert stored["rope_parameters"]["short_factor"] == SHORT
    assert "rope_factors" not in stored
    model = load_model(str(folder / "checkpoint-2"))
    assert (rope_factors(model), context_limit(model)) == ("long", 64)
    assert "rotates every row by long_factor, as the run in" in caplog.text
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, one.model.eval()(ids).logits)
        plain = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2")
        assert not torch.equal(plain(ids).logits, one.model(ids).logits)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_resume_with_the_other_set_is_refused(run, has_manifest, tmp_path):
    shutil.copytree(run[0] / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    if has_manifest:
        shutil.copy(run[0] / "run.json", tmp_path / "run" / "run.json")
    again = trainer(tmp_path / "out", "short", beta=0.1, max_steps=4)
    with pytest.raises(ConfigError, match=r"the set of rotary factors \(longrope\)=long and this one has short"):
        again.train(str(tmp_path / "run" / "checkpoint-2"))
