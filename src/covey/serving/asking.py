"""Parsing of a request's JSON body: prompts as token ids, sampling parameters, and the form of the answer."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from covey.data import num_embeddings
from covey.data.thoughts import thought_marks
from covey.errors import CoveyError, did_you_mean
from covey.models import context_limit, unwrapped
from covey.models.modalities import banned_ids, refuse_loose_places
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.prompts import as_prompts
from covey.rollout.sampler import DEFAULT_ROWS
from covey.serving.chats import chat_prompt, messages_in, reader_of, rendered, tools_in
from covey.serving.content import MediaReader
from covey.serving.engine import PromptRequest
from covey.serving.errors import APIError, bad
from covey.serving.fields import Fields
from covey.serving.limits import Limits
from covey.serving.turns import TurnReader
from covey.types import Prompt

_LONG = 50_000
"""Characters from which a prompt is long: tokenizing it takes more than some hundredths of a second."""


class Tokenizers:
    """Fast tokenizers may not be used by two threads at once."""

    def __init__(self) -> None:
        self._short, self._long = threading.Lock(), threading.Lock()
        self._copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @contextmanager
    def of(self, sampler: NativeSampler, size: int) -> Iterator[Any]:
        """A sampler's tokenizer, for a prompt of `size` characters."""
        if size < _LONG:
            with self._short:
                yield sampler.tokenizer
            return
        with self._long:
            if sampler.tokenizer not in self._copies:
                with self._short:
                    self._copies[sampler.tokenizer] = copy.deepcopy(sampler.tokenizer)
            yield self._copies[sampler.tokenizer]


MOST_TOP = 20
"""Likeliest tokens that one may ask for; OpenAI's limit."""
COMPLETION_TOKENS = 16
"""Default `max_tokens` of /v1/completions; OpenAI's."""
LONG_BYTES = 1 << 17
"""Bytes of a body from which a request is long: it is read on a thread and with tokenizers of its own kind."""
_CHARACTERS_PER_TOKEN = 32
"""Characters of a prompt for each token of the context beyond which it is refused without being tokenized."""


@dataclass(frozen=True, kw_only=True, eq=False)
class APIRequest:
    """A parsed request: its prompts, and the form of the answer."""

    model: str
    prompt_requests: tuple[PromptRequest, ...]
    is_chat: bool
    is_streamed: bool
    includes_usage: bool
    returns_ids: bool
    names_by_id: bool = False
    """True if log-probabilities name tokens as `token_id:7`."""
    echoes: bool = False
    user: str | None = None
    """Who asks, by the client's own word."""
    reader: TurnReader | None = None
    """Reader of the turns of a chat. None: this is none."""
    includes_reasoning: bool = True
    """False: thoughts are read apart, and left out of the answer."""

    @property
    def n(self) -> int:
        return self.prompt_requests[0].n


class Reader:
    """Reads request bodies for these models."""

    def __init__(self, samplers: Mapping[str, NativeSampler], limits: Limits, processor: Any = None) -> None:
        """`processor`: the models', for images, sounds and videos; None: only text is read."""
        self.samplers, self.limits = samplers, limits
        self.media = None if processor is None else MediaReader(processor)
        self.tokenizers = Tokenizers()

    def chat(self, body: Any) -> APIRequest:
        """Request to /v1/chat/completions. Raises APIError."""
        fields = Fields(body)
        name, sampler = self._model(fields)
        if not getattr(sampler.tokenizer, "chat_template", None):
            raise bad(f"The tokenizer of {name} has no chat template; use /v1/completions.", "messages")
        marks = thought_marks(sampler.tokenizer)  # tokenizes nothing
        media, items = self.media, dict[str, Any]()
        messages = messages_in(fields, None if marks is None else marks.field, media is not None)
        options = fields.mapping("chat_template_kwargs")
        tools = tools_in(fields, options)
        add_prompt = fields.flag("add_generation_prompt", True)
        separates, includes = fields.flag("separate_reasoning", True), fields.flag("include_reasoning", True)
        options |= {"tools": tools} if tools else {}
        size = _refuse_long([messages, options], context_of(sampler))

        def render(messages: Sequence[Mapping[str, Any]], add_prompt: bool) -> list[int]:
            if media is not None:
                return list(media.prompt(messages, options, add_prompt, items).token_ids)
            with self.tokenizers.of(sampler, size) as tokenizer:
                return rendered(tokenizer, messages, options, add_prompt)

        with self.tokenizers.of(sampler, size) as tokenizer:
            spoken = options if media is None else {**media.template, **options}
            reader = reader_of(tokenizer, sampler.eos_ids, spoken, render, marks, separates=separates)
            prompt = chat_prompt(tokenizer if media is None else media, messages, options, add_prompt, items)
        logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MOST_TOP)
        if top is not None and not logprobs:
            raise bad("top_logprobs needs logprobs: true.", "top_logprobs")
        most, older = (fields.whole(field, None, 1) for field in ("max_completion_tokens", "max_tokens"))
        most = older if most is None else most
        num_top = (top or 0) if logprobs else None
        n = fields.whole("n", 1, 1)
        return self._request(fields, name, sampler, [prompt], most, num_top, n, reader=reader, includes=includes)

    def completion(self, body: Any) -> APIRequest:
        """Request to /v1/completions. Raises APIError."""
        fields = Fields(body)
        name, sampler = self._model(fields)
        raw, echoes = fields.take("prompt"), fields.flag("echo")
        prompts = _plain_prompts(raw)
        most = fields.whole("max_tokens", COMPLETION_TOKENS, 0 if echoes else 1)
        num_top = fields.whole("logprobs", None, 0, MOST_TOP)
        n, best_of = fields.whole("n", 1, 1), fields.whole("best_of", None, 1)
        if best_of not in (None, n):
            raise bad("best_of other than n is not supported; leave it out.", "best_of")
        return self._request(fields, name, sampler, prompts, most, num_top, n, echoes=echoes)

    def tokenize(self, body: Any) -> dict[str, Any]:
        """Request to /tokenize: `{"prompt": text, "add_special_tokens": true}`."""
        fields = Fields(body)
        name, sampler = self._model(fields)
        text, special = fields.text("prompt"), fields.flag("add_special_tokens", True)
        fields.rest()
        if text is None:
            raise bad("prompt must be a text.", "prompt")
        _refuse_long([text], context_of(sampler))
        with self.tokenizers.of(sampler, len(text)) as tokenizer:
            ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
        return {"model": name, "count": len(ids), "max_model_len": context_of(sampler), "tokens": ids}

    def detokenize(self, body: Any) -> dict[str, Any]:
        """Request to /detokenize: `{"tokens": [...]}`."""
        fields = Fields(body)
        _, sampler = self._model(fields)
        ids = fields.take("tokens")
        fields.rest()
        if not _is_ids(ids) or not all(0 <= token < len(sampler.tokenizer) for token in ids):
            raise bad("tokens must be a list of token ids.", "tokens")
        with self.tokenizers.of(sampler, len(ids)) as tokenizer:
            return {"prompt": tokenizer.decode(ids)}

    def _model(self, fields: Fields) -> tuple[str, NativeSampler]:
        name = fields.text("model") or next(iter(self.samplers))
        if name not in self.samplers:
            sentence = f"There is no model {name!r} here.{did_you_mean(name, self.samplers)} Models: {', '.join(self.samplers)}."
            raise APIError(404, sentence, param="model", code="model_not_found")
        return name, self.samplers[name]

    def _request(
        self,
        fields: Fields,
        name: str,
        sampler: NativeSampler,
        prompts: Sequence[Any],
        most: int | None,
        num_top: int | None,
        n: int,
        *,
        echoes: bool = False,
        reader: TurnReader | None = None,
        includes: bool = True,
    ) -> APIRequest:
        self._check_choices(n, len(prompts), sampler)
        streams = fields.flag("stream")
        usage = _stream_options(fields, streams)
        returns_ids = fields.flag("return_token_ids")
        names_by_id = fields.flag("return_tokens_as_token_ids")
        ignores_eos, user = fields.flag("ignore_eos"), fields.text("user")
        seed = fields.whole("seed", None)
        most = self._most(most)
        params = _params(fields)
        fields.rest()
        context = context_of(sampler)
        prompt_requests = [
            PromptRequest(
                prompt=prompt,
                n=n,
                limit=_room(prompt, most, context),
                params=params,
                seed=random.SystemRandom().getrandbits(62) if seed is None else seed,
                num_top=num_top,
                is_heard=streams,
                scores_prompt=echoes and num_top is not None,
                ignores_eos=ignores_eos,
            )
            for prompt in self._encoded(prompts, sampler, context, needs_room=most != 0)
        ]
        return APIRequest(
            model=name,
            prompt_requests=tuple(prompt_requests),
            is_chat=reader is not None,
            is_streamed=streams,
            includes_usage=usage,
            returns_ids=returns_ids,
            names_by_id=names_by_id,
            echoes=echoes,
            user=user,
            reader=reader and replace(reader, stop=params.stop),
            includes_reasoning=includes,
        )

    def _check_choices(self, n: int, prompts: int, sampler: NativeSampler) -> None:
        most = sampler.max_rows or DEFAULT_ROWS
        if n > most:
            raise bad(f"n is {n}, and at most {most} completions are written at once.", "n")
        if n * prompts > self.limits.max_choices:
            raise bad(f"The request asks for {n * prompts} answers; at most {self.limits.max_choices} are given.", "n")

    def _most(self, requested: int | None) -> int | None:
        limit = self.limits.max_output_tokens
        if requested is not None and limit is not None and requested > limit:
            raise bad(f"max_tokens is {requested}, and this server writes at most {limit}.", "max_tokens")
        return limit if requested is None else requested

    def _encoded(
        self, prompts: Sequence[Any], sampler: NativeSampler, context: int | None, *, needs_room: bool
    ) -> list[Prompt]:
        """Each with uid "0", "1", ...: a seed gives what `NativeSampler.sample` writes for the same list."""
        size = _refuse_long(prompts, context)
        try:
            with self.tokenizers.of(sampler, size) as tokenizer:
                encoded = as_prompts(prompts, tokenizer, None, num_embeddings(sampler.model))
            refuse_loose_places(encoded, places := banned_ids(sampler.model))
        except CoveyError as error:
            raise bad(str(error), "prompt") from error
        for prompt in encoded:
            length = len(prompt.token_ids)
            if prompt.token_ids and prompt.token_ids[-1] in places:
                raise bad("The prompt ends with an image, a sound or a video; put the question behind it.", "prompt")
            if context is not None and length + needs_room > context:
                raise bad(
                    f"The prompt has {length} tokens, and the model's context of {context} leaves no room for an answer; "
                    "shorten it.",
                    "prompt",
                    "context_length_exceeded",
                )
        return encoded


def context_of(sampler: Any) -> int | None:
    """Most tokens, prompt and completion together: of the engine where it has a limit of its own, else of the model."""
    return getattr(sampler, "context", None) or context_limit(unwrapped(sampler.model))


def _refuse_long(value: Any, context: int | None) -> int:
    """Characters and token ids in a value. Raises APIError where they cannot fit the context, before they are tokenized."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            left += part
        else:
            size += 1
    if context is not None and size > _CHARACTERS_PER_TOKEN * context:
        raise bad(
            f"The prompt has {size} characters, and the model's context of {context} tokens does not hold them; shorten it.",
            "prompt",
            "context_length_exceeded",
        )
    return size


def _room(prompt: Prompt, most: int | None, context: int | None) -> int:
    """Tokens that a completion may have."""
    room = None if context is None else context - len(prompt.token_ids)
    bounds = [bound for bound in (most, room) if bound is not None]
    if not bounds:
        raise bad("The model's context is not known; give max_tokens.", "max_tokens")
    return min(bounds)


def _params(fields: Fields) -> SamplingParams:
    stop: Any = fields.take("stop", ())
    if not isinstance(stop, str) and not (isinstance(stop, list | tuple) and all(isinstance(x, str) for x in stop)):
        raise bad("stop must be a text or a list of texts.", "stop")
    top_k = fields.whole("top_k", 0, -1)
    stops: Any = stop  # SamplingParams takes one text too
    try:
        return SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=max(top_k, 0),  # vLLM's -1 is no limit too
            min_p=fields.number("min_p", None),
            repetition_penalty=fields.number("repetition_penalty", 1.0),
            stop=stops,
        )
    except CoveyError as error:
        raise bad(str(error), str(error).split(" ", 1)[0]) from error


def _stream_options(fields: Fields, streams: bool) -> bool:
    options = fields.mapping("stream_options")
    if options and not streams:
        raise bad("stream_options needs stream: true.", "stream_options")
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise bad(f"stream_options has no {sorted(unknown)[0]!r}; it has include_usage.", "stream_options")
    return bool(options.get("include_usage"))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _plain_prompts(value: Any) -> list[Any]:
    """Texts or lists of token ids, from one of them or a list of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
            return value
    raise bad("prompt must be a text, a list of token ids, or a list of either.", "prompt")
