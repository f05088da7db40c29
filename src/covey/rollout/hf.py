"""A sampler for every causal LM: a loop over the model's plain forward with transformers' cache, or transformers' `generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from covey.data import num_embeddings
from covey.errors import ConfigError, ModelError
from covey.kernels import cache_keyword, other_layers
from covey.models import accepts, context_limit, evaluating, unwrapped
from covey.models.modalities import banned_ids, computes_positions, media_inputs, refuse_loose_places, watched_positions
from covey.rollout.autocast import SamplerPrecision, expect_precision, in_precision
from covey.rollout.forward import head_in_float32
from covey.rollout.prompts import PromptLike, as_prompts, occurrences
from covey.rollout.sampler import DEFAULT_ROWS, SamplingParams, decoding_threads
from covey.rollout.sampling import draw, fresh_seed, sequence_key, uniforms
from covey.rollout.stopping import StopStrings, check_finite, checked_eos_ids, completion
from covey.types import Completion, Group, Prompt, widest_float

SHRINK_BELOW = 0.8
"""Finished rows are dropped when less than this fraction of the batch is running; each drop copies the cache."""


Way = Literal["cache", "generate", "alone"]
"""Decoding over one KV cache; by the model's `generate`, prompts of one length together; by `generate`, each completion alone."""


@dataclass(frozen=True)
class _Row:
    """A completion to generate."""

    group: int
    prompt: Prompt
    key: int


class TransformersSampler:
    """Samples with any causal LM of transformers, adapters included; all completions of a batch decode together.

    The prompt is computed once for its completions. A model with a state other than the usual cache (Mamba, RWKV, RecurrentGemma,
    MiniMax) decodes by transformers' `generate`, prompts of one length together. The model runs in eval mode; its training mode is restored afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] | None = None,
        max_rows: int | None = None,
        dtype: SamplerPrecision = "auto",
        float32_head: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`eos_ids` default to those of the model's generation config and the tokenizer.

        `dtype` runs the forward of a float32 model under autocast, `float32_head` the output layer in float32. Raises ModelError
        for a model that cannot generate text.
        """
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; give at least 1.")
        self.tokenizer = tokenizer
        self.eos_ids = checked_eos_ids(eos_ids, unwrapped(model), tokenizer)
        self.max_rows = max_rows or DEFAULT_ROWS
        self.dtype, self.float32_head = expect_precision(model, dtype), float32_head
        self.check_stop = check_stop
        """Callback between tokens; its exception ends the sampling."""
        self.way: Way = "cache" if keeps_usual_cache(model) and not other_layers(model) else "generate"
        self.load(model, version=0)

    def load(self, policy: Any, version: int) -> None:
        """Sample with this model from now on. Its weights are read in place, never copied."""
        config = unwrapped(policy).config
        if config.is_encoder_decoder:
            raise ModelError(f"{type(policy).__name__} is an encoder-decoder; give a causal language model.")
        if getattr(policy, "active_peft_config", None) is not None and policy.active_peft_config.is_prompt_learning:
            raise ModelError("Prompt-learning adapters put virtual tokens before the prompt; use LoRA or another kind.")
        self.banned = banned_ids(policy)
        self.takes = {name for name in ("position_ids", "logits_to_keep") if accepts(policy, name)}
        self.keyword = str(cache_keyword(policy))
        self.model, self.version = policy, version

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, in the order of the prompts."""
        context = context_limit(unwrapped(self.model))
        encoded = as_prompts(prompts, self.tokenizer, context, num_embeddings(self.model), n)
        refuse_loose_places(encoded, self.banned)
        seed = fresh_seed(params)
        rows = [
            _Row(group, prompt, sequence_key(seed, prompt.uid, occurrence, sample))
            for group, (prompt, occurrence) in enumerate(zip(encoded, occurrences(encoded), strict=True))
            for sample in range(n)
        ]
        return self._groups(encoded, rows, n, params)

    def _groups(self, prompts: list[Prompt], rows: list[_Row], n: int, params: SamplingParams) -> Iterator[Group]:
        size = max(self.max_rows // n * n, min(n, self.max_rows))
        written: list[Completion] = []
        next_group = 0
        for start in range(0, len(rows), size):
            written += self._write(rows[start : start + size], params)
            while len(written) >= n:
                yield Group(prompt=prompts[next_group], completions=tuple(written[:n]))
                written, next_group = written[n:], next_group + 1

    def _write(self, rows: list[_Row], params: SamplingParams) -> list[Completion]:
        """One completion for each row, all in one batch."""
        device = next(self.model.parameters()).device
        head = head_in_float32(self.model) if self.float32_head else nullcontext()
        with evaluating(self.model), decoding_threads(self.model), in_precision(self.model, self.dtype), head:
            if self.way == "cache":
                return _CachedBatch(self, rows, params, device).run()
            key = (lambda i: i) if self.way == "alone" else (lambda i: len(rows[i].prompt.token_ids))
            written = dict[int, Completion]()
            for _, members in groupby(sorted(range(len(rows)), key=key), key=key):
                places = list(members)
                done = _StatefulBatch(self, [rows[i] for i in places], params, device).run()
                written |= zip(places, done, strict=True)
            return [written[i] for i in range(len(rows))]


def keeps_usual_cache(model: nn.Module) -> bool:
    """True if the model's forward takes a `DynamicCache`, by its signature and by transformers."""
    return cache_keyword(model) is not None and bool(unwrapped(model)._supports_default_dynamic_cache())


class _Batch:
    """Decoding state of a batch of B completions. Row b of every tensor is completion `alive[b]`."""

    def __init__(self, sampler: TransformersSampler, rows: list[_Row], params: SamplingParams, device: Any) -> None:
        self.sampler, self.rows, self.params, self.device = sampler, rows, params, device
        config = unwrapped(sampler.model).config
        context = context_limit(unwrapped(sampler.model))
        self.lengths = torch.tensor([len(row.prompt.token_ids) for row in rows], device=device)  # [B]
        room = params.max_tokens if context is None else (context - self.lengths).clamp(max=params.max_tokens)
        self.last = (context or 1 << 31) - 1
        """Last position that the model has."""
        self.limits = torch.as_tensor(room, device=device).expand(len(rows)).clone()  # [B]
        self.steps = int(self.limits.max())
        self.uniforms = uniforms([row.key for row in rows], self.steps).to(device, widest_float(device))  # [B, T]
        self.tokens = torch.zeros(len(rows), self.steps, dtype=torch.int64, device=device)  # [B, T]
        self.logprobs = torch.zeros(len(rows), self.steps, device=device)  # [B, T]
        self.ended = torch.zeros(len(rows), dtype=torch.int64, device=device)  # [B], length of a finished completion
        self.stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)  # [B], ended by itself
        vocab_size = config.get_text_config().vocab_size
        self.is_eos = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(sampler.eos_ids)] = True
        self.stop = StopStrings.of(params.stop, sampler.tokenizer, vocab_size, device)
        self.alive = torch.arange(len(rows), device=device)  # [B now]
        self.seen: Tensor | None = None  # [B now, V], tokens of the prompt and the completion so far

    def _draw(self, logits: Tensor, t: int) -> Tensor:
        """[B now] tokens of step `t` from `logits` [B now, V], kept with their log-probabilities."""
        self.sampler.check_stop()
        drawn = draw(self._barred(logits), self.uniforms[self.alive, t], self.params, seen=self.seen)
        self.tokens[self.alive, t], self.logprobs[self.alive, t] = drawn.tokens, drawn.logprobs
        self._end(drawn.tokens, t)
        return drawn.tokens

    def _see(self, prompts: Sequence[Prompt], vocab_size: int) -> Tensor | None:
        """[P, V] the tokens that each prompt holds; None without a repetition penalty."""
        if self.params.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=self.device)
        for p, prompt in enumerate(prompts):
            seen[p, list(prompt.token_ids)] = True
        return seen

    def _barred(self, logits: Tensor) -> Tensor:
        """`logits` [B, V] with placeholder tokens masked out."""
        if self.sampler.banned:
            logits = logits.index_fill(-1, torch.tensor(self.sampler.banned, device=logits.device), -torch.inf)
        return logits

    def _end(self, tokens: Tensor, t: int) -> None:
        """Mark the completions that end with `tokens` [B now] at step `t`."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        is_writing = self.ended[self.alive] == 0
        stops = self.is_eos[tokens]
        if self.params.stop:
            stops = stops | self.stop.completed(tokens, lambda b: self.tokens[self.alive[b], : t + 1])
        ends = is_writing & (stops | (t + 1 >= self.limits[self.alive]))
        self.ended[self.alive[ends]] = t + 1
        self.stopped[self.alive[ends & stops]] = True

    def _completions(self) -> list[Completion]:
        tokens, logprobs = self.tokens.cpu(), self.logprobs.cpu()
        # Finished rows stay in the batch for a while.
        is_written = torch.arange(logprobs.shape[1]) < self.ended.cpu()[:, None]
        check_finite(logprobs[is_written])
        ends = zip(self.ended.tolist(), self.stopped.tolist(), strict=True)
        return [
            completion(
                tokens[b, :length].clone(),
                logprobs[b, :length].clone(),
                "stop" if stopped else "length",
                tokenizer=self.sampler.tokenizer,
                version=self.sampler.version,
            )
            for b, (length, stopped) in enumerate(ends)
        ]


class _CachedBatch(_Batch):
    """A batch of prompts padded on the left, over one KV cache."""

    def run(self) -> list[Completion]:
        logits = self._prefill()
        for t in range(self.steps):
            tokens = self._draw(logits, t)
            is_writing = self.ended[self.alive] == 0  # [B now]
            left = int(is_writing.sum())
            if not left:
                break
            if left < SHRINK_BELOW * len(self.alive):
                tokens = self._keep(is_writing.nonzero().squeeze(-1), tokens)
            places = (self.first[self.alive] + t).clamp(max=self.last)  # beyond it: of finished rows, unread
            logits = self._forward(tokens[:, None], places[:, None])
        return self._completions()

    def _prefill(self) -> Tensor:
        """[B, V] logits after the prompts. Each prompt is computed once, then repeated for its completions."""
        first = [i for i, row in enumerate(self.rows) if i == 0 or row.group != self.rows[i - 1].group]
        prompts = [self.rows[i].prompt.token_ids for i in first]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)  # [P, L], padded on the left
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for p, prompt in enumerate(prompts):
            ids[p, longest - len(prompt) :] = torch.tensor(prompt)
            mask[p, longest - len(prompt) :] = 1
        self.cache = self._new_cache()
        self.mask = mask.to(self.device)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        logits, follows = self._read(ids.to(self.device), positions, [self.rows[i].prompt for i in first])
        bounds = [*first[1:], len(self.rows)]
        repeats = torch.tensor([end - start for start, end in zip(first, bounds, strict=True)], device=self.device)
        index = torch.arange(len(prompts), device=self.device).repeat_interleave(repeats)  # [B]
        self.mask, self.first = self.mask[index], follows[index]
        self.cache.reorder_cache(index)
        seen = self._see([self.rows[i].prompt for i in first], logits.shape[-1])
        self.seen = None if seen is None else seen[index]
        return logits[index]

    def _read(self, ids: Tensor, positions: Tensor, prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
        """Prefill with media: [P, V] logits after the prompts, and [P] the position of each prompt's next token."""
        model, width = self.sampler.model, ids.shape[1]
        media = media_inputs(model, prompts, width, [width - len(prompt.token_ids) for prompt in prompts])
        if not media:
            return self._forward(ids, positions, grow=False), positions[:, -1] + 1
        if not computes_positions(model):
            return self._forward(ids, positions, grow=False, **media), positions[:, -1] + 1
        with watched_positions(model) as seen:
            logits = self._forward(ids, None, grow=False, **media)
        return logits, seen[0][-3:].amax(0)[:, -1].to(self.device) + 1

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=unwrapped(self.sampler.model).config)

    def _forward(self, ids: Tensor, positions: Tensor | None, grow: bool = True, **media: Tensor) -> Tensor:
        """[B, V] logits after the last of `ids` [B, L], which enter the KV cache; `positions` None: computed by the model."""
        model = self.sampler.model
        if grow:
            self.mask = torch.nn.functional.pad(self.mask, (0, ids.shape[1]), value=1)
        extra = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in extra.items() if name in self.sampler.takes and value is not None}
        extra |= media | {self.sampler.keyword: self.cache}
        out = model(input_ids=ids, attention_mask=self.mask, use_cache=True, **extra)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _keep(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Keep only the rows `index` of the batch. Returns their last tokens."""
        self.alive, self.mask = self.alive[index], self.mask[index]
        self.cache.reorder_cache(index)
        self.seen = None if self.seen is None else self.seen[index]
        return tokens[index]


class _StatefulBatch(_Batch):
    """A batch of prompts of one length, hence without padding, which a recurrent state would remember.

    `generate` hands the model its state from token to token; a logits processor draws the token.
    """

    def run(self) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        model, prompts = self.sampler.model, [row.prompt for row in self.rows]
        ids = torch.tensor([prompt.token_ids for prompt in prompts], device=self.device)  # [B, L]
        self.start = ids.shape[1]
        self.seen = self._see(prompts, len(self.is_eos))
        with plainly_generating(unwrapped(model)):
            unwrapped(model).generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(max_new_tokens=self.steps, do_sample=False, pad_token_id=0),
                logits_processor=LogitsProcessorList([self._forced]),
                stopping_criteria=StoppingCriteriaList([self._is_done]),
                **media_inputs(model, prompts, self.start, [0] * len(prompts)),
            )
        return self._completions()

    def _forced(self, ids: Tensor, scores: Tensor) -> Tensor:
        """A logits processor: `scores` [B, V] with all but the drawn token ruled out."""
        tokens = self._draw(scores, ids.shape[1] - self.start)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def _is_done(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """A stopping criterion: [B] the completions that have ended."""
        return self.ended > 0


@contextmanager
def plainly_generating(model: Any) -> Iterator[None]:
    """Context in which the model's generation config (penalties, suppressed tokens) has no effect on its `generate`."""
    from transformers import GenerationConfig

    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
