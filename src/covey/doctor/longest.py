"""The longest micro-batch of a run that has a model and options, and neither data nor rewards yet."""

from typing import Any, cast

from covey.config import GRPOConfig
from covey.data import vocabulary_size
from covey.doctor import plan
from covey.doctor.finding import Finding, attempt, failed
from covey.learner.worst_case import Longest, try_longest
from covey.models import context_limit, rope_factors, take_factors
from covey.process.world import World
from covey.training.build_algorithm import build_algorithm
from covey.training.build_learner import RunInputs, build_learner
from covey.training.loading import load_for_training


def try_without_data(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Finding:
    """Load the model and take the longest micro-batch forward and backward; FAIL where one completion does not fit."""
    outcome, wrong = attempt("memory", lambda: _try_longest(model, args, peft_config, prompt_tokens))
    return plan.longest_batch(outcome) if outcome is not None else wrong or failed("memory", "not tried.")


def _try_longest(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Longest:
    loaded = load_for_training(model, args, args.device, peft_config=peft_config)
    limit = context_limit(loaded.model)
    if limit is not None and prompt_tokens + args.max_completion_length > limit and rope_factors(loaded.model):
        take_factors(loaded.model, "long")
        limit = context_limit(loaded.model)
    algorithm, nothing = build_algorithm(args), cast(Any, None)  # one forward pass needs no rewards and no data
    inputs = RunInputs(
        args, loaded.model, loaded.tokenizer, loaded.eos_ids, algorithm, nothing, nothing, World.of(args)
    )
    learner = build_learner(inputs, 1, (None, None), is_off_policy=False)
    return try_longest(
        learner,
        algorithm.resolve(algorithm.initial_controllers()),
        prompt_tokens=prompt_tokens if limit is None else min(prompt_tokens, limit - args.max_completion_length),
        group=args.num_generations,
        vocabulary=vocabulary_size(loaded.model),
    )
