"""The native engine: the trainer's own weights, computed in the fastest exact way that this model and machine allow."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from covey.data import num_embeddings
from covey.errors import ConfigError, MediaUnsupported, MemoryLimitError, Unsupported
from covey.kernels import DecodeKernels
from covey.models import context_limit, unwrapped
from covey.models.modalities import banned_ids, reason_against
from covey.process.device import free_on
from covey.process.memory import is_out_of_memory, release
from covey.rollout.autocast import SamplerPrecision, expect_precision
from covey.rollout.environments import Environment
from covey.rollout.forward import ModulesForward
from covey.rollout.graph_scheduler import GraphScheduler
from covey.rollout.kernel_choice import AttentionChoice, best_forward, captures, verified_attention, verified_kernels
from covey.rollout.prompts import PromptLike, as_prompts, expect_readable, occurrences
from covey.rollout.requests import GroupRequest
from covey.rollout.sampler import DEFAULT_ROWS, SamplingParams, update_metrics
from covey.rollout.sampling import fresh_seed, sequence_key
from covey.rollout.scheduler import Scheduler
from covey.rollout.static_buffers import StaticStates
from covey.rollout.static_kv_cache import Attention, bucket_below
from covey.rollout.stopping import checked_eos_ids
from covey.rollout.thinking import may_answer
from covey.types import Group, Metric, Prompt, merge_metrics

logger = logging.getLogger(__name__)


def _check_bounds(cache_fraction: float, max_rows: int | None) -> None:
    if not 0 < cache_fraction <= 1:
        raise ConfigError(f"cache_fraction is {cache_fraction}; give a share in (0, 1].")
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows is {max_rows}; give at least 1.")


class NativeSampler:
    """Samples groups with the trainer's own weights: prompts computed and stored once, finished rows replaced at once.

    `NativeSampler(model, tokenizer)` then `for group in sampler.sample(prompts, n=8, params=SamplingParams(...))`.
    Groups come in the order in which they finish. Raises `Unsupported`, with the reason, for a model it cannot run exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] | None = None,
        dtype: SamplerPrecision = "auto",
        max_rows: int | None = None,
        cache_bytes: int | None = None,
        cache_fraction: float = 0.5,
        environment: Environment | None = None,
        cuda_graphs: bool | None = None,
        attention: AttentionChoice = "auto",
        float32_head: bool = False,
        records_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`eos_ids` default to those of the model's generation config and the tokenizer.

        `dtype` is the compute dtype: the model's own with "auto", except that a CPU which multiplies bfloat16 in
        hardware uses a bfloat16 copy of a float32 model that is not tiny. "float32" never copies and is exact; "bfloat16" and
        "float16" copy the linear weights of a float32 model, at 2 bytes each, and match the learner under autocast.

        At most `max_rows` completions, and groups that can hold at most `cache_bytes` of KV cache, are decoded
        at once (but always one group). By default `cache_fraction` of the memory that is free when sampling begins, and
        256 rows on a CPU, on an accelerator as many as those bytes hold with their logits.

        `float32_head` computes the output layer in float32 while the rest runs in lower precision. `records_experts` gives each
        completion the experts that the model's routers chose, for routing replay.

        `environment` is called whenever a completion ends by itself, and may reply with tokens that enter its context.

        On CUDA, decode steps are replayed as CUDA graphs unless `cuda_graphs` is False or the variable COVEY_CUDA_GRAPHS
        is 0, and attend with Triton's kernels where these run, with PyTorch's otherwise or with `attention="torch"`.

        On a CPU, all operations of a decode step but its matmuls run in C++ kernels, compiled once on this machine. PyTorch's
        operations replace them where they cannot run, with COVEY_CPU_KERNELS=0 or with `attention="torch"`;
        `attention="compiled"` raises ConfigError, with the reason, where they cannot run.
        """
        _check_bounds(cache_fraction, max_rows)
        if attention not in ("auto", "torch", "triton", "compiled"):
            raise ConfigError(
                f"attention {attention!r} is not known to the sampler; take auto, torch, triton or compiled."
            )
        self.dtype = expect_precision(model, dtype)
        self.tokenizer = tokenizer
        self.eos_ids = checked_eos_ids(eos_ids, unwrapped(model), tokenizer)
        self.max_rows, self.cache_bytes, self.cache_fraction = max_rows, cache_bytes, cache_fraction
        self.environment = environment
        self.check_stop = check_stop
        """Callback between tokens; its exception ends the sampling."""
        self.graphs_option, self.attention_option, self.float32_head = cuda_graphs, attention, float32_head
        self.records_experts = records_experts
        self._measured: dict[str, Metric] = {}
        self.static = StaticStates(next(unwrapped(model).parameters()).device)
        self._take(model)
        self.version = 0
        self._running: Callable[[], Scheduler | None] = lambda: None

    def _take(self, model: nn.Module) -> None:
        """Choose the fastest forward pass and kernels that reproduce this model's logits."""
        self.forward = best_forward(model, self.dtype, self.float32_head)
        if self.records_experts:
            if not isinstance(self.forward, ModulesForward):
                raise Unsupported(f"{type(unwrapped(model)).__name__} has no experts to choose from")
            self.forward.record_experts()
        device = self.forward.device
        self.static.restart(device, captures(self.graphs_option, device))
        self.attention: Attention = "torch"
        """Decode attention: Triton's kernels or PyTorch's operations."""
        self.is_static = (device.type == "cuda" or self.attention_option == "triton") and not self.forward.is_indexed
        """True if decode steps use static buffers (fixed addresses), which only pay on a GPU."""
        self.kernels: DecodeKernels | None = None
        """C++ decode kernels for a CPU; None: PyTorch's operations decode."""
        if self.is_static:
            self.attention = verified_attention(self.forward, model, self.attention_option)
        else:
            self.kernels = verified_kernels(self.forward, model, self.attention_option)
        self.model = model
        self.banned = banned_ids(model)
        self._media_reason: tuple[str | None] | None = None

    def load(self, policy: nn.Module, version: int) -> None:
        """Sample with the current weights of this model from now on."""
        started = time.perf_counter()
        if policy is not self.model or not self.forward.refresh():
            self._take(policy)
        self.version = version
        update = update_metrics(time.perf_counter() - started, self.forward.copied_bytes)
        self._measured = merge_metrics([self._measured, update])

    def take_metrics(self) -> dict[str, Metric]:
        """The updates of its weights since the last call; on a GPU without the copies that were queued."""
        measured, self._measured = self._measured, {}
        return measured

    def runs(self, scheduler: Scheduler) -> None:
        """From now on `change_weights` reaches this scheduler."""
        self._running = weakref.ref(scheduler)

    @property
    def is_running(self) -> bool:
        """True if completions are being written, so that `change_weights` may be called between two of their tokens."""
        return self._running() is not None

    def change_weights(self, version: int) -> None:
        """In-flight weight update (PipelineRL): running completions continue with the model's current weights.

        Their cached keys and values stay. Piché et al. 2025, <https://arxiv.org/abs/2509.19128>.
        """
        running = self._running()
        assert running is not None
        self.forward.refresh()
        self.version = version
        running.change_weights(version)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish."""
        return self._groups(self._requests(prompts, n, params), n, params)

    def begin(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Scheduler:
        """Scheduler of such a call, whose steps the caller makes."""
        return self._scheduler(self._requests(prompts, n, params), params)

    def _requests(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> deque[GroupRequest]:
        context = context_limit(unwrapped(self.model))
        encoded = as_prompts(prompts, self.tokenizer, context, num_embeddings(self.model), n)
        expect_readable(encoded, self.banned, self._expect_media)
        seed = fresh_seed(params)
        requests: deque[GroupRequest] = deque()
        for prompt, occurrence in zip(encoded, occurrences(encoded), strict=True):
            room = params.max_tokens if context is None else min(params.max_tokens, context - len(prompt.token_ids))
            keys = tuple(sequence_key(seed, prompt.uid, occurrence, sample) for sample in range(n))
            requests.append(GroupRequest(prompt, keys, room))
        return requests

    def _expect_media(self, prompt: Prompt) -> None:
        """Raise MediaUnsupported for media that the engine cannot prefill."""
        if (reason := self.reason_against_media(prompt)) is not None:
            raise MediaUnsupported(f"{type(unwrapped(self.model)).__name__}: {reason}")

    def reason_against_media(self, prompt: Prompt) -> str | None:
        """Reason why prompts with media cannot be computed by this engine, told by one of them, once; None if they can."""
        if self._media_reason is None:
            reason = reason_against(self.model, prompt) or self.forward.text_only
            if reason is None and self.forward.is_indexed and may_answer(self.environment):  # its answers may be media
                reason = "its layers keep more than keys and values"
            self._media_reason = (reason,)
        return self._media_reason[0]

    def _groups(self, requests: deque[GroupRequest], n: int, params: SamplingParams) -> Iterator[Group]:
        while requests:
            scheduler = self._scheduler(requests, params)
            self.runs(scheduler)
            failed = None
            while scheduler.is_busy and failed is None:
                try:
                    with self.forward.evaluating():
                        groups = scheduler.run()
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    failed = str(error)
                else:
                    yield from groups
            if failed is None:
                if isinstance(scheduler, GraphScheduler):
                    self.static.keep(scheduler.static)
                del scheduler
                if self.is_static:
                    self.static.end_call(self.version)
                return
            requests, rows, held = deque(scheduler.unfinished), scheduler.max_rows, scheduler.budget
            del scheduler
            release()
            self._halve(n, rows, held, failed)

    def _halve(self, n: int, rows: int, held: int, reason: str) -> None:
        """Halve the number of rows decoded at once. Each completion has its own seed, so none of them changes."""
        if rows <= n:
            raise MemoryLimitError(
                f"One group of {n} completions does not fit in memory while it is sampled ({reason.splitlines()[0]}); lower "
                "max_completion_length or num_generations."
            )
        self.max_rows, self.cache_bytes = max(n, rows // 2), held // 2
        logger.warning("Memory ran out with %d completions in flight; from now on at most %d.", rows, self.max_rows)

    def state_dict(self) -> dict[str, Any]:
        """Batch limits found by running out of memory."""
        return {"max_rows": self.max_rows, "cache_bytes": self.cache_bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the batch limits found to fit; smaller ones given to the constructor win."""
        smaller = lambda *bounds: min((bound for bound in bounds if bound is not None), default=None)
        self.max_rows = smaller(self.max_rows, state["max_rows"])
        self.cache_bytes = smaller(self.cache_bytes, state["cache_bytes"])

    def _scheduler(self, requests: deque[GroupRequest], params: SamplingParams) -> Scheduler:
        budget = self.budget()
        options: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "eos_ids": self.eos_ids,
            "max_rows": self.rows_at_once(requests, budget),
            "cache_bytes": budget,
            "context": context_limit(unwrapped(self.model)),
            "version": self.version,
            "environment": self.environment,
            "check_stop": self.check_stop,
            "banned": self.banned,
            "expect_media": self._expect_media,
        }
        if not self.is_static:
            return Scheduler(self.forward, requests, params, **options, kernels=self.kernels)
        return GraphScheduler(
            self.forward, requests, params, **options,
            static=self.static.begin_call(self.version), attention=self.attention, choice=self.attention_option,
        )  # fmt: skip

    def rows_at_once(self, requests: Sequence[GroupRequest], budget: int) -> int:
        """Completions decoded at once: `max_rows`, or on an accelerator as many as `budget` holds with their logits.

        A row takes its share of the largest group's KV cache, and four float32 numbers per vocabulary entry.
        Rounded down to a captured batch size.
        """
        if self.max_rows is not None:
            return self.max_rows
        if self.forward.device.type == "cpu":
            return DEFAULT_ROWS
        n = len(requests[0].keys)
        a_row = max(request.cache_bytes(self.forward) for request in requests) // n + 16 * self.forward.vocab_size
        return max(n, bucket_below(budget // a_row))

    def budget(self) -> int:
        """Upper bound of the KV cache in bytes. Kept buffers count as free; the memory pool of captured steps does not."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        return int(self.cache_fraction * max(0, free_on(self.forward.device) + self.static.reusable))
