"""Callbacks and hooks of a trainer, and transformers' interface besides training and saving."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from covey.config import GRPOConfig
from covey.config.options import ALGORITHM_OPTIONS, GROUPS
from covey.errors import ArgumentTypeError, ConfigError, DataError, MissingKeyError, NotOfferedError, did_you_mean
from covey.monitor.trackers import Trackers
from covey.process import lean
from covey.process.world import World
from covey.runs.disk import as_disk_errors
from covey.runs.storage import REFUSALS
from covey.training.datasets import checked_eval, checked_late, eval_loader, train_loader

HONOURED = frozenset(
    {
        *(
            "log",
            "_calculate_rewards",
            "evaluate",
            "train",
            "save_model",
            "save_state",
            "end",
            "predict",
            "num_examples",
        ),
        *("push_to_hub", "create_model_card", "log_metrics", "save_metrics", "add_callback", "__init__"),
        *("get_total_train_batch_size", "get_learning_rates", "get_num_trainable_parameters"),
    }
)
"""Methods that a subclass may replace; training itself calls `log`, `_calculate_rewards` and `evaluate`."""

_LOSS = (
    "write the loss as a part of an algorithm: algorithm=alg.grpo().replace(objective=..., regularizers=..., kl=...)"
)
_ROLLOUT = (
    "give rollout_func=, tools= or environment_factory=, which write completions, or a sampler in rollout_backend="
)
_REWARDS = "override _calculate_rewards, or give a function in reward_funcs="
_ADVANTAGES = "write the advantage as a part of an algorithm: algorithm=alg.grpo().replace(advantage=...)"
_ORDER = "order the data set itself and set shuffle_dataset=False, or choose a curriculum="
_OPTIMIZER = "give optimizers=(optimizer, scheduler), or set optim= and lr_scheduler_type="
_STEP = "watch or act in a TrainerCallback: on_step_begin, on_pre_optimizer_step, on_optimizer_step, on_step_end"
_EVALUATE = "override evaluate(), or pass another eval_dataset= to it"
_SAVE = "write further files in a TrainerCallback's on_save, or override save_model()"
_RESUME = "resuming is exact and reads the whole state by itself; a callback keeps its own in ExportableState.state()"
_DEVICES = "devices, precision and processes follow the options and the launcher"
_BATCHES = "set the options of batches: per_device_train_batch_size, gradient_accumulation_steps, num_generations"
_SEARCH = "search options with `covey tune`"
_HUB = "set hub_strategy=, hub_model_id= and hub_revision=, or override push_to_hub()"

_BY_COMPONENT: Mapping[str, tuple[str, ...]] = {
    _LOSS: (
        "compute_loss", "_compute_loss", "get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask",
        "_get_per_token_logps_and_entropies", "compute_liger_loss", "_get_last_hidden_state",
    ),
    _ROLLOUT: (
        "_generate", "_generate_single_turn", "_tool_call_loop", "_get_tool_suffix_ids", "_tokenize_prompts",
        "_move_model_to_vllm", "_sync_fsdp1_params_to_vllm", "_sync_fsdp2_params_to_vllm",
    ),
    _ADVANTAGES: ("_generate_and_score_completions", "_compute_advantages"),
    _REWARDS: ("_log_completion_extra", "_log_metric"),
    _ORDER: (
        "get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_remove_unused_columns",
        "_set_signature_columns_if_needed", "_get_collator_with_removed_columns",
    ),
    _OPTIMIZER: (
        "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs",
        "get_optimizer_group", "get_decay_parameter_names", "_get_learning_rate",
    ),
    _STEP: (
        "training_step", "_inner_training_loop", "_run_epoch", "_maybe_log_save_evaluate", "_clip_grad_norm",
        "_get_grad_norm", "_prepare_for_training", "_init_training_state", "_finalize_training",
        "_track_num_input_tokens", "_mixed_mesh_grad_norm", "_has_mixed_mesh_grads",
        "_sync_replicated_trainable_parameters", "_defer_fsdp_gradient_reduction", "store_flos", "floating_point_ops",
    ),
    _EVALUATE: (
        "prediction_step", "evaluation_loop", "prediction_loop", "_evaluate", "get_eval_dataloader",
        "get_test_dataloader", "_get_eval_sampler", "_determine_best_metric",
    ),
    _SAVE: (
        "_save", "_save_checkpoint", "_get_output_dir", "_save_optimizer_and_scheduler", "_save_rng_state",
        "_save_scaler", "_rotate_checkpoints",
    ),
    _RESUME: (
        "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler", "_load_best_model",
        "_load_callback_state", "_issue_warnings_after_load",
    ),
    _DEVICES: (
        "_wrap_model", "_move_model_to_device", "_build_accelerator_args", "create_accelerator_and_postprocess",
        "autocast_smart_context_manager", "compute_loss_context_manager", "_prepare_context_parallel_inputs",
        "_prepare_input", "get_cp_size", "get_sp_size", "get_tp_size", "call_model_init", "_nested_gather",
    ),
    _BATCHES: (
        "_prepare_inputs", "get_batch_samples", "_get_num_items_in_batch",
        "set_initial_training_values", "_update_auto_batch_size", "_validate_args",
    ),
    _SEARCH: ("hyperparameter_search", "_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint"),
    _HUB: ("init_hf_repo", "_push_from_checkpoint", "_finish_current_push"),
}  # fmt: skip

INSTEAD: Mapping[str, str] = {name: component for component, names in _BY_COMPONENT.items() for name in names}
"""Unsupported hooks of TRL 1.16's GRPOTrainer and transformers' Trainer, with their replacements."""


def refuse_set_hook(instance: object, name: str) -> None:
    """Raise ConfigError if `name` is a hook that training would not call if it were set on this trainer."""
    if name in INSTEAD:
        raise ConfigError(f"{name} is set on a {type(instance).__name__}, and nothing here calls it: {INSTEAD[name]}.")
    if name == "_calculate_rewards" and "scorer" in vars(instance):
        raise ConfigError("_calculate_rewards is set on a trainer that is made already; override it in a subclass.")


FIXED: Mapping[str, str] = {
    **dict.fromkeys(("reward_funcs", "reward_processing_classes"), "pass it to GRPOTrainer(...) when it is made"),
    **dict.fromkeys(("reward_weights", "beta"), "set it in GRPOConfig, before the trainer is made"),
    "ref_model": "it is a copy of the model; set beta above 0 and, to let it follow, sync_ref_model=True in GRPOConfig",
    **dict.fromkeys(("data_collator", "formatting_func"), "map the data set; rewards get its rows as they are"),
    **dict.fromkeys(("compute_metrics", "preprocess_logits_for_metrics"), "add a reward function with weight 0"),
    "generation_config": "set temperature, top_p and their kind, or generation_kwargs, in GRPOConfig",
    "compute_loss_func": _LOSS,
    "optimizer_cls_and_kwargs": _OPTIMIZER,
    **dict.fromkeys(("model_wrapped", "model_init"), "pass model= to GRPOTrainer(...)"),
    "accelerator": _DEVICES,
    "callbacks": "use add_callback() and remove_callback()",
}
"""Attributes that would have no effect on a trainer that is made, with their replacements."""

BUILT_FROM = (
    "optimizer", "lr_scheduler", "optimizers", "model", "processing_class", "train_dataset", "args", "algorithm", "scorer",
    "state", "callback_handler",
)  # fmt: skip
"""Attributes that a run reads where it begins."""

MADE_FROM = (
    *ALGORITHM_OPTIONS, *(name for name in GROUPS["rewards"] if name != "metrics_by"), "target_kl", "model_init_kwargs", "output_dir", "report_to", "early_stopping_patience",
)  # fmt: skip
"""Options that the constructor reads for the algorithm, the rewards, the model, the folder and the callbacks."""


def refuse_idle_attribute(instance: Any, name: str, value: object) -> None:
    """Raise ConfigError if setting this attribute would change nothing, at all or in the run that is under way."""
    handed = vars(instance).get("_handed_over", {})  # a subclass may keep the same again
    is_another = name in handed and (value or None) != (handed[name] or None)
    instead = FIXED.get(name, "pass it to GRPOTrainer(...) when it is made" if is_another else None)
    if instead is not None:
        raise ConfigError(
            f"{name} is set on a {type(instance).__name__} that is made already, without effect: {instead}."
        )
    if name in BUILT_FROM and instance.is_in_train and value is not getattr(instance, name, None):
        raise ConfigError(f"{name} is set in the middle of a run, which was built with another; set it before train().")


def expect_as_made(trainer: Any) -> None:
    """Raise ConfigError if a trainer's model, its tokenizer or an option that its constructor read was replaced since."""
    loaded, options = trainer._loaded, trainer._options_made_from
    originals = {
        "model": loaded.model,
        "processing_class": loaded.tokenizer if loaded.processor is None else loaded.processor,
    }
    for name in (name for name, value in originals.items() if getattr(trainer, name) is not value):
        raise ConfigError(f"{name} was replaced on a trainer that is made already; pass it to a new GRPOTrainer(...).")
    for name in (name for name in MADE_FROM if getattr(trainer.args, name) != options[name]):
        raise ConfigError(
            f"args.{name} was set on a trainer that is made already, which had read it; set it in GRPOConfig before."
        )


def refuse_dead_hooks(made: type, trainer: type) -> None:
    """Raise ConfigError if `made`, `trainer` or a subclass of it, overrides a hook that training never calls."""
    for name, owner in _subclass_names(made, trainer):
        if name in INSTEAD:
            where = made.__name__ if owner is made else f"{owner.__name__}, a base of {made.__name__},"
            raise ConfigError(f"{where} overrides {name}, which nothing here calls: {INSTEAD[name]}.")


def _subclass_names(made: type, trainer: type) -> Iterator[tuple[str, type]]:
    """Attributes of the subclass, its mixins and the trainer itself, without those of the trainer's bases."""
    bases = set(trainer.__mro__[1:])
    for owner in made.__mro__:
        if owner not in bases:
            yield from ((name, owner) for name in vars(owner))


def handler_of(callbacks: Any, args: Any, model: Any, processing_class: Any) -> tuple[lean.CallbackHandler, Trackers]:
    """The handler that calls transformers' own callbacks, the trackers', and those of the `callbacks` argument, in this order."""
    trackers = Trackers(args.report_to, lambda: handler.callbacks)
    chosen: list[Any] = [lean.DefaultFlowCallback, trackers, *trackers.theirs(), *callbacks_of(callbacks)]
    if args.early_stopping_patience is not None:
        chosen.append(lean.EarlyStoppingCallback(args.early_stopping_patience))
    handler = lean.CallbackHandler(chosen, model, processing_class, None, None)
    handler.train_dataloader = handler.eval_dataloader = None
    return handler, trackers


def callbacks_of(callbacks: Any) -> list[Any]:
    """The `callbacks` argument as a list of TrainerCallbacks, instances or classes. Raises ArgumentTypeError for anything else."""
    if not isinstance(callbacks, Iterable | None) or isinstance(callbacks, str):
        raise ArgumentTypeError(f"callbacks is a {type(callbacks).__name__}; give a list of TrainerCallbacks.")
    listed = list(callbacks or ())
    for callback in listed:
        if not hasattr(callback, "on_init_end"):
            raise ArgumentTypeError(
                f"callbacks has {callback!r}; give instances or classes of transformers' TrainerCallback."
            )
    return listed


def optimizers_of(optimizers: Any) -> tuple[Any, Any]:
    """The `optimizers` argument as (optimizer, schedule), each None for the run's own. Raises ArgumentTypeError for anything else."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        kind = type(optimizers).__name__
        raise ArgumentTypeError(f"optimizers is a {kind}; give (optimizer, scheduler), where each may be None.")
    return optimizers[0], optimizers[1]


def is_overridden(instance: object, name: str, trainer: type) -> bool:
    """True if the class of `instance`, or the instance itself, replaces the method `name` of `trainer`."""
    return name in vars(instance) or getattr(type(instance), name) is not getattr(trainer, name)


class TransformersInterface:
    """The part of transformers' trainer that is neither training nor saving, with the values of this run."""

    args: GRPOConfig
    agents: Any
    world: World
    model: Any
    train_dataset: Any
    eval_dataset: Any
    state: Any
    control: Any
    callback_handler: Any
    lr_scheduler: Any
    optimizers: tuple[Any, Any]
    output_dir: Path
    trackers: Any
    accelerator: Any
    is_in_train: bool = False

    compute_metrics = None
    model_init = None
    data_collator = list
    chat_template = None
    label_names: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_set_hook(self, name)
        refuse_idle_attribute(self, name, value)
        is_data = name in ("train_dataset", "eval_dataset") and value is not getattr(self, name, None)
        if is_data and value is not None and "_options_made_from" in vars(self):
            value = checked_late(self, name, value)
        super().__setattr__(name, value)
        if (
            name in ("optimizer", "lr_scheduler") and not self.is_in_train
        ):  # as in transformers, which makes one only where there is none
            first, second = self.optimizers
            self.optimizers = (value, second) if name == "optimizer" else (first, value)

    @property
    def is_fsdp_enabled(self) -> bool:
        return bool(self.args.fsdp)

    @property
    def is_deepspeed_enabled(self) -> bool:
        return bool(self.args.deepspeed)

    def is_world_process_zero(self) -> bool:
        return self.world.is_main

    def is_local_process_zero(self) -> bool:
        return int(self.args.local_process_index) == 0

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        return dict(lean.imported("transformers.trainer_pt_utils").metrics_format(metrics))

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print the metrics as transformers' scripts do, on the main process."""
        lean.imported("transformers.trainer_pt_utils").log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write `<split>_results.json` to `output_dir`, and with `combined` add to `all_results.json`."""
        if not self.world.is_main:
            return
        with as_disk_errors(f"{split}_results.json", self.output_dir, self.output_dir, REFUSALS):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._write_json(f"{split}_results.json", metrics)
            everything = self.output_dir / "all_results.json"
            if combined:
                earlier = json.loads(everything.read_text()) if everything.is_file() else {}
                self._write_json(everything.name, {**earlier, **metrics})

    def _write_json(self, name: str, metrics: Mapping[str, Any]) -> None:
        (self.output_dir / name).write_text(json.dumps(metrics, indent=4, sort_keys=True))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One epoch of the training set as TRL's batches: lists of rows, each row once for each of its completions."""
        if self.train_dataset is None:
            raise DataError("get_train_dataloader() needs train_dataset: a data set with a column 'prompt'.")
        return train_loader(self.train_dataset, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The evaluation set, one of a dict by its name, or the given one, as batches of rows."""
        dataset = self._held_out(eval_dataset)
        if dataset is None or isinstance(dataset, Mapping):
            raise DataError("get_eval_dataloader() needs one eval_dataset, or the name of one in a dict.")
        return eval_loader(dataset, self.args)

    def _held_out(self, dataset: Any) -> Any:
        """The evaluation set: the given one, one of a dict by its name, or for None the trainer's own."""
        if not isinstance(dataset, str):
            return self.eval_dataset if dataset is None else dataset
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if dataset not in sets:
            has = f"it has {', '.join(sets)}" if sets else "it is no dict of sets"
            raise MissingKeyError(f"eval_dataset has no set {dataset!r}; {has}.{did_you_mean(dataset, sets)}")
        return sets[dataset]

    def get_num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def end(self) -> None:
        """At the very end of a script: finish the trackers and leave the process group."""
        self.trackers.close()
        self.world.barrier()
        self.accelerator.end_training()

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    # -- evaluation and counts -------------------------------------------------------------------------------------------

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        raise NotImplementedError

    def _evaluated(self, eval_dataset: Any, prefix: str) -> dict[str, float]:
        """Metrics of one set, or of each set of a dict with its name behind the prefix."""
        expect_as_made(self)
        if eval_dataset is None:
            raise DataError("evaluate() needs eval_dataset: a data set with a column 'prompt'.")
        sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        metrics: dict[str, float] = {}
        with nullcontext() if self.is_in_train else closing(self.agents):  # in training they are closed at its end
            for name, dataset in sets.items():
                metrics |= self._evaluate_one(dataset, f"{prefix}_{name}" if name else prefix)
        metrics[f"{prefix}_num_tokens"] = float(self.state.num_input_tokens_seen)
        return metrics

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """A set of held-out prompts as batches of rows, as in `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> lean.PredictionOutput:
        """`evaluate` without a log entry: `.metrics` by `metric_key_prefix`; a language model has no `predictions` and no `label_ids`."""
        metrics = self._evaluated(checked_eval(test_dataset, self.args), metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, dict(metrics))
        return lean.PredictionOutput(predictions=None, label_ids=None, metrics=metrics)  # type: ignore[arg-type]

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of rows behind a loader. Raises TypeError for a stream."""
        return len(dataloader.dataset)  # type: ignore[arg-type]

    def get_total_train_batch_size(self, args: GRPOConfig) -> int:
        """Completions of an optimizer step, over all processes."""
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.world.size

    def get_learning_rates(self) -> list[float]:
        """Learning rate of each group of parameters. Raises DataError before `train()` has made the optimizer."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is None:
            raise DataError(
                "get_learning_rates() needs an optimizer, which train() makes; call it in a callback or afterwards."
            )
        return [group["lr"] for group in optimizer.param_groups]

    def hyperparameter_search(self, *args: Any, **named: Any) -> NoReturn:
        """Always refused, with what to use: TRL's trainer takes no `model_init` either, and raises here too."""
        raise NotOfferedError(
            "hyperparameter_search() is not offered; `covey tune CONFIG.yaml` searches options with Optuna (docs/tune.md)."
        )
