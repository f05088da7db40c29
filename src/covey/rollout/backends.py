"""Choice of the sampler for a model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from covey.errors import RAW_ERRORS, ConfigError, MediaUnsupported, ModelError, Unsupported
from covey.kernels import choices
from covey.models import context_limit, reads_media, unwrapped
from covey.models.modalities import banned_ids
from covey.rollout.agreement import price, raw_reason, reason_against, refusal
from covey.rollout.engine import NativeSampler
from covey.rollout.environments import Environment
from covey.rollout.generate import GenerateSampler
from covey.rollout.hf import TransformersSampler, Way
from covey.rollout.prompts import PromptLike, as_prompts
from covey.rollout.sampler import SamplingParams, TokenSampler
from covey.rollout.sampling import fresh_seed
from covey.rollout.thinking import ThinkingBudget, may_answer
from covey.rollout.turns import TurnSampler
from covey.rollout.vllm import ServerSampler, VLLMSampler
from covey.rollout.whole_keys import WholeKeysForward
from covey.types import Group, Prompt

logger = logging.getLogger(__name__)

Backend = Literal["auto", "native", "transformers", "generate", "vllm", "vllm-server"]
"""Samplers by name; `auto` is the native engine where the model allows it."""


EXACT_UP_TO = ("keep_window_size", "lsh_attn_chunk_length")
"""Fields of a configuration: tokens up to which no key is left out by a score that several have (Doge) or at random (Reformer)."""


class SplitSampler(NativeSampler):
    """The native engine, except for prompts with media that it cannot compute: plain transformers samples those."""

    _other: TokenSampler | None = None
    _media_answers = ""
    """The reason against media that an environment has replied with; empty: it has with none that the engine cannot compute."""

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish."""
        if may_answer(self.environment):
            return self._until_shown(as_prompts(prompts, self.tokenizer, None, n=n), n, params)
        seen = [prompt for prompt in prompts if isinstance(prompt, Prompt) and prompt.media is not None]
        reason = self.reason_against_media(seen[0]) if seen else None
        if reason is None:
            return super().sample(prompts, n, params)
        return self._split(prompts, seen, n, params, reason)

    def _until_shown(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Iterator[Group]:
        """Groups of the engine, until a prompt or a reply shows it media that it cannot compute; plain transformers writes the others."""
        left, params = list(prompts), replace(params, seed=fresh_seed(params))
        if not self._media_answers:
            try:
                for group in super().sample(prompts, n, params):
                    left = [prompt for prompt in left if prompt is not group.prompt]
                    yield group
                return
            except MediaUnsupported as error:
                self._media_answers = str(error)
        yield from self._split(left, left, n, params, self._media_answers)

    def state_dict(self) -> dict[str, Any]:
        """Of the engine, and whether it still writes the completions that an environment answers."""
        return {**super().state_dict(), "media_answers": self._media_answers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` holds."""
        super().load_state_dict(state)
        self._media_answers = state.get("media_answers", "")

    def _split(
        self, prompts: Sequence[PromptLike], seen: Sequence[Prompt], n: int, params: SamplingParams, reason: str
    ) -> Iterator[Group]:
        if self._other is None:
            warnings.warn(
                f"Completions of prompts with media are written by plain transformers, which is slower: {reason}.",
                UserWarning,
                stacklevel=3,
            )
            plain = TransformersSampler(
                self.model,
                self.tokenizer,
                eos_ids=self.eos_ids,
                max_rows=self.max_rows,
                float32_head=self.float32_head,
                check_stop=self.check_stop,
            )
            self._other = with_turns(plain, self.tokenizer, self.model, self.environment)
        self._other.load(self.model, self.version)
        yield from self._other.sample(seen, n, params)
        rest = [prompt for prompt in prompts if not any(prompt is other for other in seen)]
        if rest:
            yield from super().sample(rest, n, params)


def choose_sampler(
    model: Any,
    tokenizer: Any,
    *,
    eos_ids: Sequence[int] | None = None,
    backend: Backend = "auto",
    thinking_tokens: int | None = None,
    **options: Any,
) -> TokenSampler:
    """The fastest sampler that is exact for this model.

    `auto` takes the native engine and falls back to plain transformers with a warning that names the reason;
    `native` raises `Unsupported` instead. Each is tried, and ModelError raised if none gives a plain forward's
    log-probabilities. `options` go to the constructor of the chosen sampler. `thinking_tokens`: see `ThinkingBudget`.
    """
    if thinking_tokens is not None:
        options["environment"] = ThinkingBudget.of(tokenizer, thinking_tokens, options.get("environment"))
    if backend not in get_args(Backend):
        raise ConfigError(f"sampler backend {backend!r} does not exist; take one of {', '.join(get_args(Backend))}.")
    if backend not in ("auto", "native"):
        environment = options.pop("environment", None)
        make: dict[str, Callable[..., TokenSampler]] = {
            "vllm": VLLMSampler,
            "vllm-server": ServerSampler,
            "generate": GenerateSampler,
            "transformers": _by_transformers,
        }
        chosen = make[backend](model, tokenizer, eos_ids=eos_ids, **options)
        if backend in ("transformers", "generate"):
            logger.warning("Completions are written by plain transformers, as asked. %s", price(chosen, model))
        return with_turns(chosen, tokenizer, model, environment)
    try:
        return _native(model, tokenizer, eos_ids, backend, options)
    except Unsupported as reason:
        if options.get("records_experts"):
            raise Unsupported(
                f"router_replay needs Covey's own engine, which does not sample this model: {reason}; leave router_replay out."
            ) from reason
        if backend == "native":
            raise
        supported: dict[str, Any] = {
            name: options[name] for name in ("max_rows", "check_stop", "float32_head", "dtype") if name in options
        }
        lost = sorted(name for name in options.keys() - {*supported, "environment", "cache_fraction"})
        plain = _by_transformers(model, tokenizer, eos_ids, **supported)
        warnings.warn(
            f"Completions are written by plain transformers, which is slower: {reason}. {price(plain, model)}"
            + (f" Without effect there: {', '.join(lost)}." if lost else ""),
            UserWarning,
            stacklevel=2,
        )
        return with_turns(plain, tokenizer, model, options.get("environment"))


def with_turns(
    sampler: TokenSampler,
    tokenizer: Any,
    model: Any,
    environment: Environment | None = None,
    thinking_tokens: int | None = None,
) -> TokenSampler:
    """The sampler, whose completions the environment may answer, turn by turn, with a budget for the thoughts of each turn."""
    if thinking_tokens is not None:
        environment = ThinkingBudget.of(tokenizer, thinking_tokens, environment)
    if environment is None:
        return sampler
    context = getattr(sampler, "context", None) or context_limit(unwrapped(model))
    return TurnSampler(sampler, environment, tokenizer, context, banned_ids(model))


def _native(
    model: Any, tokenizer: Any, eos_ids: Sequence[int] | None, backend: Backend, options: dict[str, Any]
) -> NativeSampler:
    """The native engine. Raises Unsupported where it cannot run the model, or gives other log-probabilities."""
    chosen = SplitSampler if backend == "auto" and reads_media(model) else NativeSampler
    try:
        sampler = chosen(model, tokenizer, eos_ids=eos_ids, **options)
    except RAW_ERRORS as error:
        raise Unsupported(f"{type(unwrapped(model)).__name__}: {raw_reason(error)}") from error
    is_whole = isinstance(sampler.forward, WholeKeysForward)
    if is_whole and backend == "auto" and not choices(unwrapped(model)):
        # plain transformers over its cache took a third of the time (Bloom, StableLM on a CPU)
        raise Unsupported(f"{type(unwrapped(model)).__name__}: its own attention would read all keys anew in each step")
    environment, sampler.environment = sampler.environment, None  # it expects the finished sampler
    if reason := reason_against(sampler, model):
        raise Unsupported(f"{type(unwrapped(model)).__name__}: {reason}")
    sampler.environment = environment
    if is_whole:
        _warn_of_length(model)
    return sampler


def _by_transformers(model: Any, tokenizer: Any, eos_ids: Sequence[int] | None, **options: Any) -> TransformersSampler:
    """The fallback, by the first of its ways that gives a plain forward's log-probabilities; ModelError if none does."""
    sampler = TransformersSampler(model, tokenizer, eos_ids=eos_ids, **options)
    ways: tuple[Way, ...] = ("cache", "generate", "alone")
    reason: str | None = None
    for way in ways[ways.index(sampler.way) :]:
        sampler.way = way
        if (reason := reason_against(sampler, model)) is None:
            _warn_of_length(model)
            return sampler
    raise ModelError(refusal(model, reason or ""))


def _warn_of_length(model: Any) -> None:
    """Warn if texts may be longer than any trial, and a layer then chooses other keys than in a plain forward."""
    config, context = unwrapped(model).config.get_text_config(), context_limit(unwrapped(model))
    limits = {name: int(getattr(config, name)) for name in EXACT_UP_TO if getattr(config, name, None)}
    name = min(limits, key=lambda name: limits[name], default="")
    if limits and (context is None or context > limits[name]):
        warnings.warn(
            f"{type(unwrapped(model)).__name__} is not sampled with a plain forward's log-probabilities once a text has more than "
            f"{limits[name]:,} tokens ({name}); keep prompt and completion together within that.",
            UserWarning,
            stacklevel=2,
        )
