"""`GRPOTrainer`: TRL's interface to Covey's loop, with the same arguments, callbacks and names in the logs."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers.utils.logging import set_verbosity

from covey.algorithms import Algorithm
from covey.config import GRPOConfig
from covey.config.alerts import late_checkpoint
from covey.config.trackers import refuse_absent_trackers
from covey.data.checks import length_of
from covey.errors import ArgumentTypeError, CoveyError, DataError
from covey.files.places import expect_model
from covey.learner import Learner, lower_rates
from covey.models import short_name
from covey.monitor import Progress, alert_shower, build_monitor, completions_shower
from covey.monitor.updates import UpdateMeter
from covey.process import lean
from covey.process.world import World
from covey.runs import RunFolder, StopRequest, checkpoint
from covey.runs.console import lasting_output
from covey.runs.disk import as_disk_errors, tell_stopped
from covey.runs.hub import Hub
from covey.runs.resuming import expect_resumable
from covey.training import loop
from covey.training.agents import Agents, with_environment_rewards, with_prompts
from covey.training.build import (
    advice_for,
    build_evaluator,
    build_parts,
    build_prompts,
    build_scorer,
    ensemble_of,
)
from covey.training.build_algorithm import check_columns, check_teacher, choose_algorithm, expect_servers
from covey.training.build_learner import RunInputs
from covey.training.datasets import checked_dataset, checked_eval, finite, loader_for_callbacks, refuse_no_data
from covey.training.evaluator import Evaluator, averaged, end_with_average
from covey.training.hooks import expect_as_made, handler_of, is_overridden, optimizers_of, refuse_dead_hooks
from covey.training.invariants import comparable_inputs, comparable_options, still_trained
from covey.training.loading import choose_factors, expect_engine, load_for_training
from covey.training.loop import Steps
from covey.training.parts import Parts
from covey.training.recording import Recording, load_best, restore_history, restore_tree
from covey.training.recovery import evaluation_undone_when_stopped
from covey.training.saving import NO_CHECKPOINT_AFTER, Saver
from covey.training.session import Session
from covey.training.state import TrainState
from covey.training.trl_interface import TRLInterface
from covey.types import Event

logger = logging.getLogger(__name__)


class GRPOTrainer(TRLInterface):
    """Post-trains a causal language model with GRPO or any algorithm of its family.

    Takes TRL 1.16's arguments: `model` (a hub id, a folder, or a loaded model, PEFT included), `reward_funcs` (callables,
    reward models, or names of built-in rewards), `args`, `train_dataset` (column `prompt`: text or chat messages; other
    columns reach the rewards), `eval_dataset` (one set or a dict of sets), `processing_class`,
    `reward_processing_classes`, `callbacks`, `optimizers`, `quantization_config`, `peft_config`; and `algorithm`, a
    preset's name, an import path or an `Algorithm`; `ensemble`, a `covey.Ensemble` or its members; `agent`, `main(row, client, model)`.

    A subclass may override `log`, `_calculate_rewards`, `evaluate` and the methods that save or upload; one that overrides a hook which
    is never called is refused when its class is defined. `TRLInterface` holds the attributes and methods that scripts use.

    Wrong input raises a `CoveyError` whose message names the input and the fix, before training starts.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_dead_hooks(cls, GRPOTrainer)

    def __init__(
        self,
        model: str | Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[lean.TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        algorithm: str | Algorithm | None = None,
        ensemble: Any = None,
        agent: Any = None,
    ) -> None:
        refuse_dead_hooks(type(self), GRPOTrainer)  # a class may have been changed since it was defined
        self.args = args if args is not None else GRPOConfig(f"{short_name(model)}-GRPO")
        if not isinstance(self.args, GRPOConfig):
            raise ArgumentTypeError(f"args is a {type(self.args).__name__}; pass a covey.GRPOConfig.")
        (lean.enable_full_determinism if self.args.full_determinism else lean.set_seed)(self.args.seed)
        set_verbosity(self.args.get_process_log_level())
        self.world = World.of(self.args)
        self.args.output_dir = self.world.broadcast(self.args.output_dir)  # generated names may differ
        self.output_dir = Path(str(self.args.output_dir))
        self.hub = Hub(self.args, self.output_dir, self._record)
        self.world.expect_same(comparable_options(self.args))
        self.algorithm = choose_algorithm(self.args, algorithm)
        is_main = self.world.is_main
        self.state = lean.TrainerState(is_local_process_zero=is_main, is_world_process_zero=is_main)
        self.agents = Agents.of(tools, environment_factory, rollout_func, agent)
        self.tools = [tool.call for tool in self.agents.tools]
        self.ensemble = ensemble_of(ensemble, self.agents, self.args)
        rewards, classes = with_environment_rewards(reward_funcs, reward_processing_classes, self.agents)
        self.scorer = build_scorer(
            self.args, rewards, classes, lambda: self.state, self.world.device, len(self.agents.environment_rewards(False)),
            self._calculate_rewards if is_overridden(self, "_calculate_rewards", GRPOTrainer) else None,
        )  # fmt: skip
        self._take_data(train_dataset, eval_dataset, model)
        if self.args.push_to_hub and self.world.is_main:
            self.hub.open_early()
        self._load(model, processing_class, quantization_config, peft_config)
        self.optimizers = (self.optimizer, self.lr_scheduler) = optimizers_of(optimizers)
        self.is_strict, self._restarts = False, False
        """True: refuse an output folder with another run, as on the command line, instead of moving that run aside."""
        self.raises_when_stopped = True
        """True: `train` raises after a stop signal, so that a script does not go on as if it had trained; False: sets `stopped_by`."""
        self.stopped_by: str | None = None
        self.exit_code = self.started_at = 0
        """`started_at`: number of steps done before the last `train()`; above 0 for a resumed run."""
        self.callback_handler, self.trackers = handler_of(callbacks, self.args, self.model, self.processing_class)
        self._options_made_from = {k: v.copy() if isinstance(v, list | dict) else v for k, v in vars(self.args).items()}
        self._handed_over = {"tools": tools, "rollout_func": rollout_func, "agent": agent, "peft_config": peft_config,
            "environment_factory": environment_factory, "quantization_config": quantization_config}  # fmt: skip
        self.control = self.callback_handler.on_init_end(self.args, self.state, lean.TrainerControl())

    # -- public methods ---------------------------------------------------------------------------------------------

    def steps(self, resume_from_checkpoint: str | bool | None = None) -> Steps[lean.TrainOutput]:
        """`train()` as a generator that pauses (`Steps`), so that runs can be interleaved (`train_together`)."""
        expect_as_made(self)
        if self.train_dataset is None:
            raise DataError("train() needs train_dataset: a data set with a column 'prompt'.")
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self._restarts = resume == "auto"
        start = self.world.broadcast(checkpoint.resolve(resume, self.output_dir) if self.world.is_main else None)
        inputs: dict[str, Any] = {"scorer": self.scorer, "algorithm": self.algorithm, "tells": self.world.is_main}
        expect_resumable(start, self.args, self.train_dataset, self.model, **inputs)
        disk_errors = as_disk_errors("A file of the run", self.output_dir, self.output_dir)
        scorer, trackers = closing(self.scorer), closing(self.trackers)
        with lasting_output(), disk_errors, StopRequest() as stop, scorer, trackers, self._folder(start) as folder:
            self._parts = parts = self._build_parts(stop, start, folder)
            state = TrainState(controllers=self.algorithm.initial_controllers())
            state = state if start is None else self._resume(parts, start)
            self.started_at = state.step
            num_rows = length_of(self.train_dataset)
            self.world.expect_same({"steps to train": self.state.max_steps, "rows of train_dataset": num_rows})
            state = yield from self._run(parts, state)
            summary = parts.session.end(state)
            if parts.session.is_stop_requested:
                stop.adopt(self.world.gather([stop.name]))
        best = load_best(self.model, self.args, self.state, self.world)
        end_with_average(parts, self.args, self.state, best, is_whole=stop.name is None)
        self.stopped_by, self.exit_code = stop.name, stop.exit_code
        if stop.name is not None and self.world.is_main:
            saves, tells = self.args.save_strategy != "no", self.raises_when_stopped
            tell_stopped(stop.name, state.step, self.output_dir, saves=saves, tells=tells)
        if stop.name is not None and self.raises_when_stopped:
            stop.leave()
        return lean.TrainOutput(state.step, summary["train_loss"], {**summary, "epoch": float(self.state.epoch or 0)})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Rewards and lengths on held-out prompts, named `<prefix>_reward`, `<prefix>_rewards/<name>/mean`, ...

        A dict of sets gives `<prefix>_<name>_reward` and so on; a name evaluates one set of the trainer's own dict. `ignore_keys` is there
        for TRL's signature, without effect on a language model. The seed is fixed, so two evaluations differ by the policy alone.
        """
        is_named = isinstance(eval_dataset, str | None)
        dataset = self._held_out(eval_dataset) if is_named else checked_eval(eval_dataset, self.args)
        metrics = self._evaluated(dataset, metric_key_prefix)
        self.log(dict(metrics))
        return {**metrics, "epoch": float(self.state.epoch or 0)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and pass it to the callbacks; training itself logs through this method."""
        logs.update(self._taken_metrics(logs))
        if self._parts is not None:
            self._parts.session.log(logs)
            self.control = self._parts.session.control
            return
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(logs))

    # -- construction -----------------------------------------------------------------------------------------------

    def _take_data(self, train_dataset: Any, eval_dataset: Any, model: Any) -> None:
        expect_model(model)
        num_rows = max(1, int(self.args.generation_batch_size or 1) // self.args.num_generations)
        train_dataset = with_prompts(train_dataset, self.agents, max_steps=self.args.max_steps, num_rows=num_rows)
        refuse_no_data(train_dataset, eval_dataset, self.args)
        self.train_dataset = checked_dataset(train_dataset, "train_dataset", self.args)
        self.eval_dataset = checked_eval(eval_dataset, self.args)
        check_columns(self.args, self.train_dataset, self.agents, self.scorer, self.algorithm)
        check_teacher(self.algorithm.role, self.train_dataset, has_agent=self.agents.agent is not None)
        if self.world.size > 1:
            self.world.expect_same(comparable_inputs(self.train_dataset, model, self.algorithm, self.scorer.rewards))
        expect_servers(self.scorer.rewards, self.algorithm.role, self.ensemble, self.args.server_timeout)

    def _load(self, model: Any, processing_class: Any, quantization_config: Any, peft_config: Any) -> None:
        refuse_absent_trackers(self.args.report_to)
        args, device = self.args, self.world.device
        options: dict[str, Any] = {"tokenizer": processing_class, "peft_config": peft_config}
        self._server = expect_engine(args, device, model, **options)
        loaded = load_for_training(model, args, device, quantization_config=quantization_config, **options)
        choose_factors(loaded, args, (self.train_dataset, self.eval_dataset), self.agents, self._server)
        self.model, self.eos_ids, self._loaded = loaded.model, loaded.eos_ids, loaded
        self.processing_class = loaded.tokenizer if loaded.processor is None else loaded.processor

    @property
    def _inputs(self) -> RunInputs:
        return RunInputs(
            args=self.args,
            model=self.model,
            tokenizer=self._loaded.tokenizer,
            processor=self._loaded.processor,
            eos_ids=self.eos_ids,
            algorithm=self.algorithm,
            scorer=self.scorer,
            train_dataset=self.train_dataset,
            world=self.world,
            agents=self.agents,
            trainer=self,
            frozen=self._frozen,
            server=self._server,
        )

    def _build_parts(self, stop: StopRequest, start: Path | None, folder: RunFolder | None) -> Parts:
        meter = UpdateMeter(self.model)
        session = partial(self._build_session, stop=stop, folder=folder, meter=meter)
        inputs = replace(
            self._inputs,
            ensemble=self.ensemble,
            before_update=partial(self._before_update, meter.before),
            after_update=partial(self._event, "on_optimizer_step", meter.after),
        )
        for remark in self._advice() if self.world.is_main else ():
            logger.warning("advice: %s", remark)
        parts = build_parts(inputs, session, self.optimizers, length_of(self.train_dataset), stop)
        late = late_checkpoint(self.args, parts.total_steps) if start is None and self.world.is_main else None
        if late is not None:
            logger.warning("advice: %s", late)
        return parts

    def _advice(self) -> list[str]:
        return advice_for(self.args, self.model, self.algorithm)

    def _folder(self, start: Path | None) -> AbstractContextManager[RunFolder | None]:
        options: dict[str, Any] = {"resume": start, "strict": self.is_strict, "restarts": self._restarts}
        return RunFolder.locked(self.output_dir, **options) if self.world.is_main else nullcontext()

    def _parts_without_training(self) -> Parts:
        """Parts for an evaluation without training in this process."""
        inputs, stop = replace(self._inputs, train_dataset=None), StopRequest()
        session = partial(self._build_session, stop=stop, folder=None, meter=None)  # no step is ever run
        return build_parts(inputs, session, self.optimizers, num_prompts=2**20, stop=stop)

    def _build_session(
        self,
        learner: Learner,
        total_steps: int,
        steps_per_epoch: float,
        *,
        stop: StopRequest,
        folder: RunFolder | None,
        meter: UpdateMeter | None,
    ) -> Session:
        args = self.args
        vars(self).update(optimizer=learner.optimizer, lr_scheduler=learner.scheduler)  # which are not the user's
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.state.max_steps, self.state.num_train_epochs = total_steps, -(-total_steps // max(1, int(steps_per_epoch)))
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, total_steps)
        is_shown = self.world.is_main and not args.disable_tqdm
        display = Progress(total_steps, enabled=is_shown, every=max(1, int(self.state.logging_steps)))
        outlets: list[Any] = (
            [] if folder is None else [folder.append_alert, self.trackers, alert_shower(display, is_shown)]
        )
        monitor = build_monitor(args, self.scorer.names, self.scorer.weight_options, learner, outlets, meter)
        of_run = self.model, self.processing_class, self.callback_handler, self.state, self._checkpoint_saved
        saver = Saver(args, *of_run, restore_folder=(lambda: None) if folder is None else folder.restore)
        session = Session(
            args=args,
            handler=self.callback_handler,
            trainer_state=self.state,
            control=self.control,
            recorder=Recording(
                folder, self.scorer.names, args.rollout_log_steps, args.rollout_total_limit, args.log_multimodal
            ),
            display=display,
            monitor=monitor,
            lower_learning_rate=partial(lower_rates, learner.optimizer, learner.scheduler),
            stop=stop,
            evaluate=self._evaluate_in_training,
            save=lambda state: saver.save(self._running, state),
            poll_saving=partial(self._poll_saving, saver),
            finish_saving=lambda: saver.finish(self._running),
            finish_uploads=lambda: self.hub.finish(lambda: stop.requested),
            announce=self.log,
            steps_per_epoch=steps_per_epoch,
            check_weights=still_trained(self.model, learner.optimizer),
            flos_per_token=6.0 * self.model.num_parameters(exclude_embeddings=True),
            agree=self.world.any,
            show_completions=completions_shower(args, self.scorer.names, folder, self.trackers),
        )
        if folder is not None:
            rewards = [spec.call for spec in self.scorer.rewards]
            described = folder.describe(
                args=args, algorithm=self.algorithm, rewards=rewards, reward_weights=self.scorer.weight_options,
                dataset=self.train_dataset, model=self.model,
            )  # fmt: skip
            self.trackers.follow(described["id"], lambda: session.is_stop_requested)
        return session

    def _record(self, event: Event) -> None:
        if self._parts is not None:
            self._parts.session.recorder.event(self.state.global_step, event)

    def _poll_saving(self, saver: Saver) -> None:
        saver.poll(self._running)
        self.hub.poll()

    def _before_update(self, measure: Callable[[], None]) -> None:
        for _ in range(self.args.gradient_accumulation_steps - 1):
            self._event("on_substep_end")
        self._event("on_pre_optimizer_step", measure)

    def _event(self, name: str, measure: Callable[[], None] = lambda: None) -> None:
        measure()
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control)

    # -- training ---------------------------------------------------------------------------------------------------

    def _run(self, parts: Parts, state: TrainState) -> Steps[TrainState]:
        """The loop; errors and stop signals leave a checkpoint of the last complete step."""
        parts.session.latest = state
        self.is_in_train = True
        self.callback_handler.train_dataloader = loader_for_callbacks(self.train_dataset, self.args)
        try:
            parts.session.begin(state)
            return (yield from loop.run(parts, state))
        except BaseException as error:
            is_shared = self.world.fails_together(error)  # out of step, no collective can complete
            saves = isinstance(error, (CoveyError, KeyboardInterrupt)) and not isinstance(error, NO_CHECKPOINT_AFTER)
            saves = saves and self.args.save_strategy != "no" and parts.session.latest.step > parts.session.last_saved
            if is_shared and saves:
                parts.session.save_after_error()
            parts.session.fail(error)
            raise
        finally:
            self.is_in_train = False
            with closing(self.agents):
                parts.close()

    def _evaluate_in_training(self) -> dict[str, float]:
        with evaluation_undone_when_stopped(self._running), averaged(self._running, self.state.global_step):
            return self.evaluate()

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        if self._parts is None:
            self._parts = self._parts_without_training()
        evaluator: Evaluator = build_evaluator(self._inputs, self._parts)
        if self._parts.evaluation_sampler is not None:
            self._parts.evaluation_sampler.load(self._parts.learner.policy.model, self._parts.session.latest.step)
        count = len(dataset := finite(dataset))
        prompts = build_prompts(self._inputs, dataset, shuffle=False, keeps_shares=False)
        latest = self._parts.session.latest
        self.callback_handler.eval_dataloader = self.get_eval_dataloader(dataset)
        on_batch = partial(self._event, "on_prediction_step")
        evaluate = partial(evaluator, prompts, count, latest.controllers, prefix, after_batch=on_batch)
        return self._parts.session.recorder.evaluation(latest.step, prefix, self.scorer.weights.tolist(), evaluate)

    @property
    def _running(self) -> Parts:
        return cast(Parts, self._parts)

    def _resume(self, parts: Parts, start: Path) -> TrainState:
        state = restore_tree(parts, start)
        restore_history(parts.session, start)
        more = ": nothing to do, all steps are done" if state.step >= self.state.max_steps else ""
        parts.session.display.show(f"resumed at step {state.step}, from {start}{more}")
        return state
