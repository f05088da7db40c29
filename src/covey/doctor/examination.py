"""The whole examination, in the order in which a run would fail; skipped checks are reported."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from covey.adapters import has_adapter
from covey.algorithms.advice import SMALL_MODEL
from covey.config import GRPOConfig
from covey.config.batches import batch_arithmetic
from covey.data import vocabulary_size
from covey.doctor import data, model, plan, rewards, signal, trial
from covey.doctor.environment import environment
from covey.doctor.finding import Finding, attempt, failed, passed
from covey.learner.worst_case import try_longest
from covey.models import context_limit
from covey.process.counting import counted
from covey.process.lean import set_seed
from covey.process.memory import is_out_of_memory
from covey.process.world import World
from covey.training.agents import Agents
from covey.training.build import advice_for, build_scorer
from covey.training.build_algorithm import build_algorithm
from covey.training.build_learner import RunInputs
from covey.training.build_sampler import engine_length
from covey.training.datasets import checked_dataset
from covey.training.loading import choose_factors, expect_engine, load_for_training

AREAS = ("environment", "options", "data", "model", "rewards", "batches", "memory", "disk", "signal", "time")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that has not started: its options, and loaders for its model, data and rewards."""

    model: str
    rewards: list[Any]
    configure: Callable[[], GRPOConfig]
    load_dataset: Callable[[], Any]
    load_held_out: Callable[[], Any] = lambda: None
    adapter: Callable[[], Any] = lambda: None
    predict_memory: Callable[[GRPOConfig, Any, int], int] | None = None
    """Bytes at the peak, from options and data set. None: not predicted."""
    prompts: int = 16
    """Prompts that the trial answers; 0: no trial."""


@dataclass
class _Loaded:
    """Parts loaded by the examination so far; None: could not be loaded."""

    args: Any = None
    dataset: Any = None
    held_out: Any = None
    scorer: Any = None
    model: Any = None
    tokenizer: Any = None
    processor: Any = None
    eos: tuple[int, ...] = ()
    peft_config: Any = None
    counts: Any = None
    server: Any = None
    """Connection to a vLLM server that fits."""
    longest_prompt: int = 0
    """Tokens."""
    has_failed: set[str] = field(default_factory=set)


def examine(case: Case) -> Iterator[Finding]:
    """Findings as they come. After a FAIL, independent checks still run."""
    so_far = _Loaded()
    for stage in counted((_options, _data, _model, _rewards, _plan, _trial), "parts looked at"):
        for finding in stage(case, so_far):
            if finding.status == "FAIL":
                so_far.has_failed.add(finding.area)
            yield finding


def _options(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    so_far.args, wrong = attempt("options", case.configure)
    if wrong is not None:
        yield wrong
        return
    set_seed(so_far.args.seed)
    so_far.peft_config, wrong = attempt("options", case.adapter)
    if wrong is not None:
        yield wrong
    algorithm, wrong = attempt("options", lambda: build_algorithm(so_far.args), is_foreign=True)
    yield wrong or passed("options", f"the options fit together; the algorithm is {_name(so_far.args, algorithm)}")
    yield from environment(so_far.args)
    yield _output_folder(so_far.args)


def _name(args: GRPOConfig, algorithm: Any) -> str:
    return str(args.algorithm if isinstance(args.algorithm, str) else getattr(algorithm, "name", "") or args.loss_type)


def _output_folder(args: GRPOConfig) -> Finding:
    folder = Path(str(args.output_dir))
    if (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size:
        fix = "choose another --output-dir, or go on with that run: --resume auto"
        return failed("disk", f"{folder} holds a run already.", fix)
    return passed("disk", f"{folder} is free for a run")


def _data(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    args = so_far.args
    check = checked_dataset if args is not None else lambda dataset, name, args: dataset
    so_far.dataset, wrong = attempt("data", lambda: check(case.load_dataset(), "the data set", args))
    if wrong is not None:
        yield wrong
    so_far.held_out, wrong = attempt("data", lambda: check(case.load_held_out(), "the held-out set", args))
    if wrong is not None:
        yield wrong


def _model(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    if so_far.args is None:
        return
    expect = partial(expect_engine, so_far.args, so_far.args.device, case.model, peft_config=so_far.peft_config)
    so_far.server, wrong = attempt("environment", expect)
    if wrong is not None:
        yield wrong
        return
    _, wrong = attempt("model", lambda: _load(case, so_far))
    if wrong is not None:
        yield wrong
        return
    rows = data.first_rows(so_far.dataset) if so_far.dataset is not None else []
    is_chat = not isinstance(rows[0]["prompt"], str) if rows else None
    yield from model.model_findings(so_far.model, so_far.tokenizer, so_far.eos, so_far.args, is_chat=is_chat)
    if so_far.dataset is not None:
        limit = context_limit(so_far.model)
        engine = engine_length(so_far.args, so_far.server, limit)
        for finding in data.data_findings(
            so_far.dataset, so_far.held_out, so_far.tokenizer, so_far.args, limit, so_far.processor, engine
        ):
            so_far.longest_prompt = finding.facts.get("longest", so_far.longest_prompt)
            yield finding


def _load(case: Case, so_far: _Loaded) -> None:
    args = so_far.args
    loaded = load_for_training(case.model, args, args.device, peft_config=so_far.peft_config)
    choose_factors(loaded, args, (so_far.dataset, so_far.held_out), Agents(), so_far.server)
    so_far.model, so_far.tokenizer, so_far.eos = loaded.model, loaded.tokenizer, loaded.eos_ids
    so_far.processor = loaded.processor


def _rewards(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    if so_far.args is None:
        return
    so_far.scorer, wrong = attempt("rewards", lambda: _scorer(case, so_far), is_foreign=True)
    yield wrong or passed("rewards", f"{', '.join(so_far.scorer.names)} can be called with the columns of the data")


def _scorer(case: Case, so_far: _Loaded) -> Any:
    scorer = build_scorer(so_far.args, case.rewards, None, lambda: None, so_far.args.device)
    if so_far.dataset is not None:
        scorer.check(so_far.dataset.column_names)
    return scorer


def _plan(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    args, dataset = so_far.args, so_far.dataset
    if args is None or dataset is None:
        return
    num_prompts = len(dataset) if hasattr(dataset, "__len__") else None
    so_far.counts, wrong = attempt("batches", lambda: batch_arithmetic(args, args.world_size, num_prompts))
    if wrong is not None:
        yield wrong
        return
    yield from plan.batches(so_far.counts, num_prompts)
    if so_far.model is None:
        return
    if case.predict_memory is not None and "options" not in so_far.has_failed:
        peak = case.predict_memory(args, dataset, so_far.longest_prompt)
        yield plan.memory(peak, *plan.available_memory(args.device, so_far.model))
    yield plan.disk(Path(str(args.output_dir)), so_far.model, args)
    is_small = sum(weight.numel() for weight in so_far.model.parameters()) < SMALL_MODEL
    algorithm = None if "options" in so_far.has_failed else build_algorithm(args)
    yield from plan.learning_rate(
        args, advice_for(args, so_far.model, algorithm), is_adapter=has_adapter(so_far.model), is_small=is_small
    )


def _trial(case: Case, so_far: _Loaded) -> Iterator[Finding]:
    if not case.prompts:
        return
    if None in (so_far.dataset, so_far.model, so_far.scorer, so_far.counts) or "data" in so_far.has_failed:
        yield failed("signal", "no trial: fix the failures above first.", "fix them and run covey doctor again")
        return
    outcome: trial.Trial | None = None
    try:
        bench, wrong = attempt("options", lambda: _bench(so_far))
        if bench is not None:
            if "memory" not in so_far.has_failed:
                yield _longest(bench, so_far)
            outcome, wrong = attempt("rewards", lambda: trial.attempt_step(bench, case.prompts))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        outcome, wrong = (
            None,
            failed(
                "memory",
                f"memory ran out in the trial: {error}",
                "lower --per-device-train-batch-size or --max-completion-length",
            ),
        )
    finally:
        so_far.scorer.close()
    if wrong is not None or outcome is None:
        yield from filter(None, [wrong])
        return
    weights = so_far.scorer.weights
    yield from rewards.reward_findings(outcome, so_far.scorer.names, weights.tolist())
    if "rewards" not in so_far.has_failed:
        each = outcome.seconds["reward"] / max(1, outcome.num_completions)
        yield from rewards.tested(so_far.scorer.rewards, data.first_rows(so_far.dataset), each)
    args = so_far.args
    limit, masks = args.max_completion_length, bool(args.mask_truncated_completions)
    yield from signal.signal_findings(outcome, weights, max_tokens=limit, masks_truncated=masks)
    yield plan.expected_time(outcome, so_far.counts)


def _longest(bench: trial.Bench, so_far: _Loaded) -> Finding:
    """Trial of the longest micro-batch that the run can meet: does it fit into memory?"""
    args = so_far.args
    algorithm = bench.inputs.algorithm.resolve(bench.inputs.algorithm.initial_controllers())
    room = context_limit(so_far.model)
    prompt = so_far.longest_prompt if room is None else min(so_far.longest_prompt, room - args.max_completion_length)
    vocabulary = vocabulary_size(so_far.model)
    sizes = {"prompt_tokens": prompt, "group": args.num_generations, "vocabulary": vocabulary}
    outcome, wrong = attempt("memory", lambda: try_longest(bench.learner, algorithm, **sizes))
    return plan.longest_batch(outcome) if outcome is not None else wrong or failed("memory", "not tried.")


def _bench(so_far: _Loaded) -> trial.Bench:
    args = so_far.args
    inputs = RunInputs(
        args=args,
        model=so_far.model,
        tokenizer=so_far.tokenizer,
        processor=so_far.processor,
        eos_ids=so_far.eos,
        algorithm=build_algorithm(args),
        scorer=so_far.scorer,
        train_dataset=so_far.dataset,
        world=World.of(args),
        server=so_far.server,
    )
    return trial.Bench.of(inputs, so_far.counts.total_steps)
