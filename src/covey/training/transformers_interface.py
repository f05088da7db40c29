"""Methods and attributes of transformers' `Trainer` that scripts around a run use: metrics files, loaders, prediction, counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from covey.config import GRPOConfig
from covey.errors import DataError, MissingKeyError, NotOfferedError, did_you_mean
from covey.process import lean
from covey.process.world import World
from covey.runs.kept import told_of_the_disk
from covey.runs.storage import REFUSALS
from covey.training.build import checked_eval
from covey.training.loaders import eval_loader, train_loader


class TransformersInterface:
    """The part of transformers' trainer that is neither training nor saving, with the values of this run."""

    args: GRPOConfig
    world: World
    model: Any
    train_dataset: Any
    eval_dataset: Any
    state: Any
    control: Any
    callback_handler: Any
    lr_scheduler: Any
    output_dir: Path
    trackers: Any
    accelerator: Any
    is_in_train: bool = False

    compute_metrics = None
    model_init = None
    data_collator = list
    chat_template = None
    label_names: tuple[str, ...] = ()

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
        with told_of_the_disk(f"{split}_results.json", self.output_dir, self.output_dir, REFUSALS):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._write_json(f"{split}_results.json", metrics)
            everything = self.output_dir / "all_results.json"
            if combined:
                known = json.loads(everything.read_text()) if everything.is_file() else {}
                self._write_json(everything.name, {**known, **metrics})

    def _write_json(self, name: str, metrics: Mapping[str, Any]) -> None:
        (self.output_dir / name).write_text(json.dumps(metrics, indent=4, sort_keys=True))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One epoch of the training set as TRL's batches: lists of rows, each row once for each of its completions."""
        if self.train_dataset is None:
            raise DataError("get_train_dataloader() needs train_dataset: a data set with a column 'prompt'.")
        return train_loader(self.train_dataset, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The evaluation set, one of a dict by its name, or the given one, as batches of rows."""
        given = self._held_out(eval_dataset)
        if given is None or isinstance(given, Mapping):
            raise DataError("get_eval_dataloader() needs one eval_dataset, or the name of one in a dict.")
        return eval_loader(given, self.args)

    def _held_out(self, given: Any) -> Any:
        """The evaluation set: the given one, one of a dict by its name, or for None the trainer's own."""
        if not isinstance(given, str):
            return self.eval_dataset if given is None else given
        known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if given not in known:
            has = f"it has {', '.join(known)}" if known else "it is no dict of sets"
            raise MissingKeyError(f"eval_dataset has no set {given!r}; {has}.{did_you_mean(given, known)}")
        return known[given]

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

    def _evaluated(self, given: Any, prefix: str) -> dict[str, float]:
        """Metrics of one set, or of each set of a dict with its name behind the prefix."""
        if given is None:
            raise DataError("evaluate() needs eval_dataset: a data set with a column 'prompt'.")
        sets = given if isinstance(given, Mapping) else {"": given}
        metrics: dict[str, float] = {}
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

    def hyperparameter_search(self, *given: Any, **named: Any) -> NoReturn:
        """Always refused, with what to use: TRL's trainer takes no `model_init` either, and raises here too."""
        raise NotOfferedError(
            "hyperparameter_search() is not offered; `covey tune CONFIG.yaml` searches options with Optuna (docs/tune.md)."
        )
