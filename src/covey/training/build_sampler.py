"""Construction of the sampler of a run, from its options: a part of `build.py`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from covey.config import GRPOConfig
from covey.config.checks import token_limit
from covey.config.combinations import FEATURES, expect_together, features_of, name_idle
from covey.data import EngineLength
from covey.data.live import LiveDataset
from covey.errors import ConfigError, did_you_mean
from covey.process.cores import processes_here
from covey.process.sharding import Shards
from covey.process.world import World
from covey.rollout import SamplingParams
from covey.rollout.asynchronous import AsynchronousSampler
from covey.rollout.backends import with_turns
from covey.rollout.central import CentralSampler
from covey.rollout.remote import RemoteSampler
from covey.rollout.thinking import ClosedThoughts
from covey.rollout.thread_worker import ThreadWorker
from covey.rollout.vllm import Server, ServerSampler
from covey.rollout.vllm.ahead import ServedWeights
from covey.rollout.worker import Setup
from covey.rollout.worker_process import AskingWorker, ProcessWorker, Tell, Worker, halves
from covey.runs import rollouts, traces
from covey.training.agents import AgentOptions, Agents
from covey.types import Prompt, Stages

if TYPE_CHECKING:
    from covey.serving import Trace

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_implementation", "pad_token_id", "bos_token_id", "return_dict_in_generate"}
)
"""Arguments of `generate` that affect no completion."""


def as_dict(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dict option, typed as a dict: GRPOConfig has made one of every mapping and of JSON."""
    return dict(option) if isinstance(option, dict) else {}


def sampling_params(args: GRPOConfig) -> SamplingParams:
    """Sampling parameters from the options; `generation_kwargs` take precedence. Raises ConfigError for an unknown name."""
    options = {
        "max_tokens": token_limit(args),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    return SamplingParams(**{**options, **_split(args)[0]})


def generate_options(args: GRPOConfig) -> dict[str, Any]:
    """`generation_kwargs` that only transformers' `generate` supports, such as `num_beams`."""
    return _split(args)[1]


def _split(args: GRPOConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """`generation_kwargs` split into those of every sampler and those of `generate` alone."""
    extra = as_dict(args.generation_kwargs)
    extra = without(extra, "max_new_tokens", "max_tokens")  # see `token_limit`
    if extra.pop("do_sample", True) is False:
        extra["temperature"] = 0.0
    if "stop_strings" in extra:
        stop = extra.pop("stop_strings")
        extra["stop"] = tuple(stop) if isinstance(stop, list) else stop
    names = set(inspect.signature(SamplingParams).parameters)
    others = {name: value for name, value in extra.items() if name not in names and name not in _WITHOUT_EFFECT}
    if others:
        _refuse_unknown(others, names, args)
    return {name: value for name, value in extra.items() if name in names}, others


def _refuse_unknown(others: Mapping[str, Any], names: set[str], args: GRPOConfig) -> None:
    from transformers import GenerationConfig

    of_generate = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    for name in others:
        if name not in of_generate:
            hint = did_you_mean(name, names | of_generate) or f" The samplers know {', '.join(sorted(names))}."
            raise ConfigError(f"generation_kwargs has {name!r}, which no sampler knows.{hint}")
        if args.rollout_backend in ("native", "vllm"):
            raise ConfigError(
                f"generation_kwargs has {name!r}, which only transformers' generate knows, and "
                f"rollout_backend={args.rollout_backend!r} does not use it; leave one of them out."
            )


def sampler_options(
    args: GRPOConfig, world: World, server: Any = None, example: Prompt | None = None, *, is_second: bool = False
) -> dict[str, Any]:
    """Arguments of `choose_sampler` that differ from its defaults; `server`: a connection that `expect_engine` made.

    `example`: a prompt with media for its attestation. `is_second`: of one more sampler of the run, about which nothing is said again.
    """
    others = generate_options(args)
    if others and not is_second:
        logger.warning(
            "generation_kwargs has %s: completions are drawn by transformers' generate, which takes longer and gives no "
            "log-probabilities of its own.",
            ", ".join(sorted(others)),
        )
    recorded = {"records_experts": True} if args.router_replay else {}
    if recorded:
        writer = "transformers' generate" if others else args.rollout_backend
        expect_together("router_replay", "generate" if others else writer in FEATURES and writer, writer=writer)
    options = computing_options(args, world)
    if others:
        return {**options, "backend": "generate", "generate": others}
    if args.rollout_backend == "vllm":
        precision = {} if args.vllm_mode == "server" else {"dtype": options.get("dtype", "auto")}
        options = {"backend": vllm_backend(args), **vllm_options(args, world, server, example), **precision}
        return options | thinking_options(args) | recorded
    if args.rollout_backend == "transformers":
        return {**options, "backend": "transformers"}
    choices = {
        "cuda_graphs": (args.cuda_graphs, None),
        "attention": (args.attention, "auto"),
    }
    options |= {"backend": args.rollout_backend, "cache_fraction": args.rollout_cache_fraction}
    options |= {"backend": "native", **recorded} if recorded else {}
    return options | {name: value for name, (value, default) in choices.items() if value != default}


def computing_options(args: GRPOConfig, world: World) -> dict[str, Any]:
    """Arguments of every sampler in this process: its rows and its precision."""
    dtype = _dtype(args, world)
    options: dict[str, Any] = {"max_rows": args.rollout_max_rows}
    options |= {} if dtype == "auto" else {"dtype": dtype}
    options |= thinking_options(args)
    return options | ({"float32_head": True} if args.cast_lm_head_to_fp32 else {})


def thinking_options(args: GRPOConfig) -> dict[str, int]:
    """Argument of `choose_sampler` for the budget of thoughts."""
    return {} if args.thinking_token_budget is None else {"thinking_tokens": args.thinking_token_budget}


def thinking_stages(args: GRPOConfig) -> Stages:
    """Stages of a run with a budget of thoughts."""
    return Stages() if args.thinking_token_budget is None else Stages(before_advantages=(ClosedThoughts(),))


def _dtype(args: GRPOConfig, world: World) -> str:
    """Compute dtype of the sampler: the learner's, but not float16 on a CPU, which is slow there."""
    if args.rollout_dtype != "auto":
        return args.rollout_dtype
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 and world.device.type != "cpu" else "auto"


def vllm_backend(args: GRPOConfig) -> str:
    """Sampler backend of `vllm_mode`."""
    return "vllm-server" if args.vllm_mode == "server" else "vllm"


def engine_length(args: GRPOConfig, server: Server | None, context: int | None) -> EngineLength | None:
    """Context length of vLLM where it is less than the model's, `context`; None for other samplers."""
    length = vllm_length(args, server)
    if length is None or (context is not None and length[0] >= context):
        return None
    return EngineLength(length[0], args.max_completion_length, length[1])


def vllm_length(args: GRPOConfig, server: Server | None) -> tuple[int, str] | None:
    """Context length of vLLM and the option that sets it; None for other samplers, and where vLLM takes the model's."""
    if args.rollout_backend != "vllm":
        return None
    option = "vllm_max_model_length" if server is None else "the vLLM server's --max-model-len"
    tokens = args.vllm_max_model_length if server is None else server.facts.max_model_length
    return None if tokens is None else (tokens, option)


def vllm_options(args: GRPOConfig, world: World, server: Any = None, example: Prompt | None = None) -> dict[str, Any]:
    """Options of vLLM, in this process or as a server."""
    shared: dict[str, Any] = {"regex": args.vllm_structured_outputs_regex}
    if args.vllm_mode == "server":
        return shared | {
            "base_url": args.vllm_server_base_url,
            "host": args.vllm_server_host,
            "port": args.vllm_server_port,
            "timeout": args.vllm_server_timeout,
            "group_port": args.vllm_group_port,
            "transport": args.vllm_transport,
            "directory": args.vllm_directory or f"{args.output_dir}/vllm-weights",
            "run": args.run_name or Path(str(args.output_dir)).name,
            "attest": args.vllm_attestation,
            "deadlines": args.vllm_deadlines if isinstance(args.vllm_deadlines, dict) else None,
            "world": world,
            "server": server,
            "example": example,
        }
    return shared | {
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_length": args.vllm_max_model_length,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "model_impl": args.vllm_model_impl,
        "sleeps": args.vllm_enable_sleep_mode,
        "max_rows": args.rollout_max_rows,
    }


def sampler_ahead(
    args: GRPOConfig,
    model: torch.nn.Module,
    tokenizer: Any,
    eos_ids: Sequence[int],
    world: World,
    agents: Agents,
    check_stop: Callable[[], None],
    shards: Shards | None = None,
    server: Any = None,
    example: Prompt | None = None,
    processor: Any = None,
) -> AsynchronousSampler:
    """The asynchronous sampler. Raises ConfigError for options that workers cannot honour, before any is started."""
    options = {"eos_ids": tuple(eos_ids), **sampler_options(args, world, server, example)}
    _refuse(args, options, agents)
    options |= {"processor": processor} if options.get("backend") == "vllm" else {}
    more = agent_options(args, world.rank, processor)
    drives = lambda make: agents.sampler(make, more, tokenizer, eos_ids, None, is_ahead=True)
    held: dict[str, Any] = {"keeps_columns": agents.reads_rows, "forget": agents.forget} | _repeats(args)
    if options.get("backend") == "vllm-server":
        served = ServerSampler(model, tokenizer, shards=shards, **without(options, "backend", "thinking_tokens"))
        weights = ServedWeights(served, **_repeats(args))
        writer = drives(partial(with_turns, served, tokenizer, model, thinking_tokens=args.thinking_token_budget))
        return CentralSampler(
            model,
            tokenizer,
            lambda model, content, version, tell, place: ThreadWorker(writer, weights, tell),
            check_stop=check_stop,
            pack=lambda model, tokenizer: b"",
            world=world,
            collect=weights.collect,
            **held,
        )
    devices = worker_devices(args.rollout_device, world.device)
    setup = _setup(args, options, agents, devices[0], world.device)

    def far(model: torch.nn.Module, content: bytes, version: int, place: int = 0) -> RemoteSampler:
        is_ray = args.rollout_placement == "ray"  # which chooses the devices of its actors
        mine = setup if is_ray else replace(setup, device=devices[place % len(devices)])
        begin = lambda tell: _worker(is_ray, model, content, version, mine, tell)
        return RemoteSampler(model, tokenizer, eos_ids, version, begin)

    def start(model: torch.nn.Module, content: bytes, version: int, tell: Tell, place: int) -> Worker:
        remote = far(model, content, version, place)
        return ThreadWorker(drives(remote.over), remote, tell) if agents.are_used else remote.start(tell)

    drives(far(model, b"", 0).over)  # refuses what cannot be driven before a worker is started
    host = shards.copy_on_host() if shards is not None and world.is_main else None

    def collect(policy: Any, version: int) -> Any:
        if shards is None:
            return policy
        shards.fill(host)
        return policy if host is None else host

    model = model if host is None else host
    return CentralSampler(
        model, tokenizer, start, args.rollout_workers, check_stop, world=world, collect=collect, **held
    )


def name_whole_completions(args: GRPOConfig, backend: str) -> None:
    """Name `in_flight_weights` where the workers' sampler cannot change weights inside a completion."""
    writers = {"transformers": "transformers", "generate": "transformers' generate", "vllm": "vLLM in the workers"}
    if args.in_flight_weights and args.max_staleness and backend in writers:
        logger.warning(
            "in_flight_weights=True changes no completion here: %s ends each with the weights that began it, and new ones are taken "
            "between rollouts.",
            writers[backend],
        )


def _repeats(args: GRPOConfig) -> dict[str, bool]:
    """`takes_newest`; False: a rollout is written by the weights of its order, so that runs repeat."""
    return {"takes_newest": args.in_flight_weights or args.pipeline_depth > 1}


def _setup(args: GRPOConfig, options: Mapping[str, Any], agents: Agents, device: str, learner: torch.device) -> Setup:
    return Setup(
        options=options,
        device=device,
        threads=_threads(args, learner),
        in_flight=args.in_flight_weights,
        **_repeats(args),
        has_turns=agents.have_turns,
        has_calls=agents.agent is not None,
    )


def _worker(is_ray: bool, model: Any, content: bytes, version: int, setup: Setup, tell: Tell) -> AskingWorker:
    """A worker of rollouts: a process, or an actor."""
    if is_ray:
        from covey.rollout.on_ray import RayWorker

        return RayWorker(model, content, version, setup, tell)
    return ProcessWorker(model, content, version, setup, tell)


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _refuse(args: GRPOConfig, options: dict[str, Any], agents: Agents) -> None:
    is_uncorrected = options.get("backend") == "generate" and bool(args.max_staleness)
    expect_together(*features_of(args), *agents.features, is_uncorrected and "generate")
    name_whole_completions(args, str(options.get("backend")))


def worker_devices(name: str | None, learner: torch.device) -> list[str]:
    """Devices of the workers, which take them in turn. Raises ConfigError for an absent device."""
    if name is None:
        if learner.type != "cuda":
            return [learner.type]
        behind = max((learner.index or 0) + 1, processes_here())
        return [f"cuda:{i}" for i in range(behind, torch.cuda.device_count())] or [str(learner)]
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"rollout_device={name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return [name]


def _threads(args: GRPOConfig, device: torch.device) -> int:
    """Intra-op threads of a worker: all if learner and worker alternate, else its share of half of them."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or not args.max_staleness:
        return threads
    return max(1, halves(threads)[1] // args.rollout_workers)


def agent_options(args: GRPOConfig, rank: int, processor: Any = None) -> AgentOptions:
    """Options of episodes and agents; the traces of steps whose rollouts are written are written by the process `rank`."""
    return AgentOptions(
        chat_template_kwargs=args.chat_template_kwargs,
        max_tokens=args.max_completion_length,
        max_turns=args.max_tool_calling_iterations,
        episode_seconds=args.episode_timeout_seconds,
        agent_seconds=args.agent_timeout_seconds,
        concurrency=args.agent_concurrency,
        record=partial(_record, args, rank),
        processor=processor,
    )


def _record(args: GRPOConfig, rank: int, version: int, recorded: Sequence[Trace]) -> None:
    """Write the traces of the steps whose rollouts are written."""
    from covey.serving import lines_of

    if not rollouts.is_due(version + 1, args.rollout_log_steps) or args.rollout_log_steps == 0:
        return
    folder = Path(str(args.output_dir)) / traces.FOLDER
    traces.append(folder, version + 1, lines_of(recorded), rank)
    if args.rollout_total_limit is not None:
        traces.thin(folder, args.rollout_total_limit)


def name_idle_options(agents: Agents, args: GRPOConfig, *, has_members: bool = False, dataset: Any = None) -> None:
    """Warn about each option that has no effect with the arguments of the trainer.

    `has_members`: other models write too. `dataset`: that of the prompts.
    """
    is_by_generate = bool(generate_options(args))
    more = {
        "generate": is_by_generate,
        "no log-probabilities": is_by_generate and agents.rollout_func is None and not has_members,
        "another distribution": draws_otherwise(args),
        "live source": isinstance(dataset, LiveDataset),
    }
    features = [*features_of(args), *agents.features, *(name for name, is_so in more.items() if is_so)]
    name_idle(args._changed(), features, args, of_options=False)


def draws_otherwise(args: GRPOConfig) -> bool:
    """True if completions are drawn from another distribution than the policy's at its temperature."""
    sampling = sampling_params(args)
    return sampling.truncates or bool(args.vllm_structured_outputs_regex) or sampling.repetition_penalty != 1.0
