"""Two sets of rotary frequencies (`longrope`): sampler and learner take the same one, whatever else is in a batch."""

import logging

import pytest
import torch
from plain_sampling import plain_logprobs
from transformers import Phi3Config, Phi3ForCausalLM

from covey.config import GRPOConfig
from covey.errors import ConfigError
from covey.learner.packing import Row
from covey.learner.policy import Policy
from covey.models import context_limit
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from covey.training.loading import load_for_training, refuse_long_rope
from covey.types import Prompt
from kit import tiny_tokenizer

SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]


def phi3(short_factor=SHORT) -> Phi3ForCausalLM:
    """Frequencies change past 16 of 64 tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short_factor, "long_factor": LONG}
    config = Phi3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=64, original_max_position_embeddings=16, sliding_window=None,
        rope_parameters={**rope, "partial_rotary_factor": 1.0, "factor": 4.0}, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        weight.data.mul_(8.0 if "proj" in name else 1.0)
    return model


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("short_factor, lengths", [(SHORT, (5, 12)), (LONG, (5, 30))], ids=["two sets", "one set"])
def test_sampler_learner_and_a_row_alone_agree_at_every_length(engine, short_factor, lengths):
    """A short prompt beside a long one; completions run into the limit, or past the length at which frequencies would change."""
    model, params = phi3(short_factor), SamplingParams(max_tokens=20, seed=3)
    options = {"dtype": "float32"} if engine == "native" else {}
    sampler = {"native": NativeSampler, "transformers": TransformersSampler}[engine](
        model, tiny_tokenizer(), eos_ids=[319], **options
    )
    prompts = [Prompt(uid=f"0:{n}", token_ids=tuple(3 + i * 7 % 200 for i in range(n))) for n in lengths]
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
    longest = max(len(row.prompt.token_ids) + row.completion.num_tokens for row in rows)
    assert longest == (16 if short_factor is SHORT else 50)


def test_the_start_names_the_limit_and_a_vllm_that_exceeds_it_is_refused(caplog, tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with caplog.at_level(logging.WARNING):
        load_for_training(phi3(LONG), args, torch.device("cpu"), tokenizer=tiny_tokenizer())
        assert "longrope" not in caplog.text
        loaded = load_for_training(phi3(), args, torch.device("cpu"), tokenizer=tiny_tokenizer())
    assert "takes those of rows up to 16 tokens, prompt and completion together; for longer ones put" in caplog.text
    assert (context_limit(loaded.model), context_limit(phi3(LONG))) == (16, 64)
    refuse_long_rope(loaded.model.config, 16, "vllm_max_model_length")
    refuse_long_rope(phi3(LONG).config, 64, "vllm_max_model_length")
    with pytest.raises(
        ConfigError, match="vllm_max_model_length is 17, and above 16 .* lower it to 16; for longer ones put"
    ):
        refuse_long_rope(loaded.model.config, 17, "vllm_max_model_length")
