"""The longest micro-batch of a run that has a model and options, and neither data nor rewards yet."""

from __future__ import annotations

from typing import Any

from covey.build import Given, as_dict, build_algorithm, build_learner
from covey.config import GRPOConfig
from covey.data import eos_ids, prepare_tokenizer
from covey.doctor import plan
from covey.doctor.finding import Finding, attempt, failed
from covey.learner.longest import Longest, try_longest
from covey.models import context_limit, disable_dropout, load_model, load_tokenizer, prepare_for_training, with_adapter
from covey.world import World


def try_without_data(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Finding:
    """Load the model and take the longest micro-batch forward and backward; FAIL where one completion does not fit."""
    found, wrong = attempt("memory", lambda: _tried(model, args, peft_config, prompt_tokens))
    return plan.longest_batch(found) if found is not None else wrong or failed("memory", "not tried.")


def _tried(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Longest:
    loaded = load_model(model, as_dict(args.model_init_kwargs), trust_remote_code=args.trust_remote_code)
    tokenizer = prepare_tokenizer(load_tokenizer(loaded, trust_remote_code=args.trust_remote_code), loaded)
    ends = eos_ids(loaded, tokenizer)
    limit = context_limit(loaded)
    loaded = with_adapter(loaded, peft_config)
    if args.disable_dropout:
        disable_dropout(loaded)
    loaded = prepare_for_training(loaded.to(args.device), args)
    algorithm, no_rewards, no_data = build_algorithm(args), None, None
    given = Given(args, loaded, tokenizer, ends, algorithm, no_rewards, no_data, World.of(args))  # type: ignore[arg-type]
    learner = build_learner(given, 1, (None, None), is_off_policy=False)
    return try_longest(
        learner,
        algorithm.resolve(algorithm.initial_controllers()),
        prompt_tokens=prompt_tokens if limit is None else min(prompt_tokens, limit - args.max_completion_length),
        group=args.num_generations,
        vocabulary=loaded.get_input_embeddings().num_embeddings,
    )
