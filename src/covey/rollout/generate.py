"""A sampler over transformers' `generate`, for options that the other samplers lack: beams, length penalty, bans, biases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from covey.config.combinations import expect_together
from covey.data import num_embeddings
from covey.errors import ConfigError
from covey.models import context_limit, evaluating, unwrapped
from covey.models.modalities import banned_ids, media_inputs, refuse_loose_places
from covey.rollout.autocast import SamplerPrecision, expect_precision, in_precision
from covey.rollout.forward import head_in_float32
from covey.rollout.hf import plainly_generating
from covey.rollout.prompts import PromptLike, as_prompts
from covey.rollout.sampler import DEFAULT_ROWS, SamplingParams, decoding_threads
from covey.rollout.sampling import fresh_seed, sequence_key
from covey.rollout.stopping import StopStrings, checked_eos_ids, completion
from covey.types import Completion, Group, Prompt

NO_SIBLINGS = ("num_return_sequences", "max_length", "prompt_lookup_num_tokens", "assistant_model")
"""Refused arguments: they change the number of completions or the meaning of a limit."""


class GenerateSampler:
    """A `Sampler` that draws each batch by one call of transformers' `generate`; the argument `generate` holds further options of it.

    Completions carry no log-probabilities: with beams or penalties they are not drawn from the policy's own distribution. One seed
    draws a whole batch, so a completion depends on its neighbours, as in TRL.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        generate: Mapping[str, Any],
        eos_ids: Sequence[int] | None = None,
        max_rows: int | None = None,
        environment: Any = None,
        dtype: SamplerPrecision = "auto",
        float32_head: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ConfigError for an argument that `generate` cannot take here, and for tools or environments."""
        for name in NO_SIBLINGS:
            if name in generate:
                raise ConfigError(
                    f"generation_kwargs has {name!r}, which cannot be handed to generate: num_generations counts completions and "
                    "max_completion_length their tokens; leave it out."
                )
        names = ", ".join(map(repr, generate))
        expect_together("generate", environment is not None and "sampler's environment", names=names)
        self.tokenizer, self.options = tokenizer, dict(generate)
        eos_option = self.options.pop("eos_token_id", None)
        eos_ids = (
            eos_ids if eos_option is None else eos_option if isinstance(eos_option, (list, tuple)) else [eos_option]
        )
        self.eos_ids = checked_eos_ids(eos_ids, unwrapped(model), tokenizer)
        self.max_rows, self.check_stop, self.float32_head = max_rows or DEFAULT_ROWS, check_stop, float32_head
        self.dtype = expect_precision(model, dtype)
        self.load(model, version=0)

    def load(self, policy: Any, version: int) -> None:
        """Sample with this model from now on. Its weights are read in place, never copied."""
        self.model, self.version, self.banned = policy, version, banned_ids(policy)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, in the order of the prompts."""
        context = context_limit(unwrapped(self.model))
        encoded = as_prompts(prompts, self.tokenizer, context, num_embeddings(self.model), n)
        refuse_loose_places(encoded, self.banned)
        for prompt in encoded:
            count = 0 if prompt.media is None else prompt.media.count
            searches = count > 1 and self.options.get("num_beams", 1) > 1
            expect_together("generate", "media", searches and "several beams", uid=prompt.uid, count=count)
        return self._groups(encoded, n, params, fresh_seed(params))

    def _groups(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, seed: int) -> Iterator[Group]:
        size, start = max(1, self.max_rows // n), 0
        context = context_limit(unwrapped(self.model))
        room = lambda prompt: params.max_tokens if context is None else context - len(prompt.token_ids)
        limits = [min(params.max_tokens, room(prompt)) for prompt in prompts]
        while start < len(prompts):
            alike = [*takewhile(limits[start].__eq__, limits[start : start + size])]  # a batch has one limit
            part, bounded = prompts[start : start + len(alike)], replace(params, max_tokens=limits[start])
            tokens = self._generate(part, n, bounded, sequence_key(seed, part[0].uid, start, n))
            for p, prompt in enumerate(part):
                rows = tokens[p * n : (p + 1) * n]
                yield Group(prompt=prompt, completions=tuple(self._completion(row, params) for row in rows))
            start += len(part)

    def _generate(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, seed: int) -> Tensor:
        """[len(prompts) * n, T] generated tokens, without the prompts."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        device = next(self.model.parameters()).device
        longest = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad_id, dtype=torch.int64)  # padded on the left
        mask = torch.zeros_like(ids)
        for p, prompt in enumerate(prompts):
            ids[p, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[p, longest - len(prompt.token_ids) :] = 1
        copies = [prompt for prompt in prompts for _ in range(n)]
        media = media_inputs(self.model, copies, longest, [longest - len(prompt.token_ids) for prompt in copies])
        never = [*self.banned, *(self.options.get("suppress_tokens") or ())]
        config = GenerationConfig(**{**self._config(params), **self.options, "suppress_tokens": never or None})
        stops, penalty = StoppingCriteriaList([self._interrupted]), config.repetition_penalty or 1.0
        config.repetition_penalty = 1.0  # that of transformers 5.19 counts padding, which may be an end of text
        penalties = LogitsProcessorList([partial(_penalized, penalty, mask.repeat_interleave(n, 0).to(device))])
        devices = [device] if device.type == "cuda" else []
        head = head_in_float32(self.model) if self.float32_head else nullcontext()
        precision = in_precision(self.model, self.dtype)
        with (
            torch.random.fork_rng(devices=devices),
            evaluating(self.model),
            plainly_generating(unwrapped(self.model)),
            precision,
            head,
            decoding_threads(self.model),
        ):
            torch.manual_seed(seed % 2**63)
            out: Tensor = self.model.generate(
                input_ids=ids.repeat_interleave(n, 0).to(device),
                attention_mask=mask.repeat_interleave(n, 0).to(device),
                generation_config=config,
                stopping_criteria=stops,
                logits_processor=penalties if penalty != 1.0 else None,
                **media,
                **({"tokenizer": self.tokenizer} if params.stop else {}),
            )
        return out[:, longest:].cpu()

    @property
    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else int(pad)

    def _config(self, params: SamplingParams) -> dict[str, Any]:
        """Sampling parameters by their names in `generate`."""
        config: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "do_sample": not params.is_greedy,
            "eos_token_id": list(self.eos_ids),
            "pad_token_id": self._pad_id,
            "repetition_penalty": params.repetition_penalty,
        }
        if not params.is_greedy:
            config |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
            config |= {} if params.min_p is None else {"min_p": params.min_p}
        return config | ({"stop_strings": list(params.stop)} if params.stop else {})

    def _interrupted(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """A stopping criterion that is always False; it calls `check_stop` between tokens."""
        self.check_stop()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def _completion(self, row: Tensor, params: SamplingParams) -> Completion:
        """Completion from the tokens [T] up to its end; padding follows."""
        ends = torch.isin(row, torch.tensor(self.eos_ids)).nonzero().flatten().tolist()
        if params.stop:
            size = unwrapped(self.model).config.get_text_config().vocab_size
            stop = StopStrings.of(params.stop, self.tokenizer, size)
            near = stop.enders[row].nonzero().flatten().tolist()
            ends += [t for t in near if stop.is_reached(row[: t + 1].tolist())]
        length = min(ends) + 1 if ends else len(row)
        return completion(
            row[:length].clone(), None, "stop" if ends else "length", tokenizer=self.tokenizer, version=self.version
        )


def _penalized(penalty: float, mask: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """[B, V], scores with a repetition penalty on the tokens of prompts and completions `ids` [B, S]; `mask` [B, P]: 0 on padding.

    Beams of a row follow each other.
    """
    mask = mask.repeat_interleave(len(ids) // len(mask), 0)
    real = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    seen = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(1, ids, real) > 0
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
