"""Interface of TRL's trainer besides `train` and `evaluate`: attributes, metrics files, loaders, the hub."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from covey.adapters import has_adapter
from covey.algorithms import Algorithm
from covey.algorithms.control import current
from covey.algorithms.regularizers import EntropyBonus
from covey.config.options import DECLARED, GROUPS
from covey.errors import ArgumentTypeError, ConfigError, NotOfferedError, did_you_mean
from covey.evaluation.model_card import Card
from covey.learner import FrozenCopy, frozen_copy
from covey.process import lean
from covey.process.lean import accelerator_of
from covey.rewards import Scorer
from covey.rewards.builtin.reward_model import ModelReward
from covey.runs.disk import as_disk_errors, write_whole
from covey.runs.hub import CARD, Hub, raise_refused
from covey.runs.storage import REFUSALS
from covey.runs.weights import note_saved
from covey.training.agents import Agents
from covey.training.hooks import TransformersInterface
from covey.training.loop import Steps, to_the_end
from covey.training.parts import Parts
from covey.training.recording import weights_to_write, write_model
from covey.training.saving import write_trainer_state

_SHOWN_OPTIONS = frozenset(
    name for group, names in GROUPS.items() if group not in ("output", "hub", "alerts") for name in names
) - {"algorithm", "model_init_kwargs"}
"""Options shown in a model card: those that affect the model, without any that may hold an address or a token."""
_OF_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length"}

_FORMER_ARGUMENTS = {
    "tokenizer": " Use processing_class.",
    "ref_model": " The reference is a copy of the model: set beta above 0 in GRPOConfig.",
}


class _Option:
    """Attribute with the value of the option of the same name, as TRL's trainer has. Those of sampling may be set before training."""

    def __init__(self, option: str) -> None:
        self.option = option

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.args, self.option)

    def __set__(self, trainer: Any, value: Any) -> None:
        if self.option not in _OF_SAMPLING or trainer._parts is not None:
            also = ", or on the trainer before its first train() or evaluate()" if self.option in _OF_SAMPLING else ""
            raise ConfigError(f"{self.option} is an option; set it in GRPOConfig, before the trainer is made{also}.")
        DECLARED[self.option].check(self.option, value)
        trainer.args = copy.copy(trainer.args)  # which another trainer may share
        setattr(trainer.args, self.option, value)


class TRLInterface(TransformersInterface):
    """TRL 1.16's public interface besides training: attributes and methods, with the values of this run."""

    steps: Callable[..., Steps[lean.TrainOutput]]

    def __new__(cls, *_: Any, **named: Any) -> Any:
        """Refuse arguments that `__init__` does not have, with the name to use. Raises ArgumentTypeError."""
        taken = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        unknown = {}
        for name in () if takes_any else [name for name in named if name not in taken]:
            hint = f" It is an option: GRPOConfig({name}=...)." if name in DECLARED else did_you_mean(name, taken)
            unknown[name] = f"{name} is no argument of {cls.__name__}.{_FORMER_ARGUMENTS.get(name, hint)}"
        if unknown:
            raise ArgumentTypeError(" ".join(unknown.values()))
        return super().__new__(cls)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> lean.TrainOutput:
        """Train to `max_steps` (or the epochs' end), a stop signal, or a callback's request.

        `resume_from_checkpoint`: True for the newest verified checkpoint in `output_dir`, or a path. Returns
        transformers' TrainOutput. A reward that fails too often, or bad numbers, raise an error after a checkpoint.
        After a stop signal the checkpoint is saved and KeyboardInterrupt (Ctrl-C) or SystemExit(75) is raised.
        `ignore_keys_for_eval` is there for TRL's signature, without effect on a language model; so is `trial`, which must be None.
        """
        if trial is not None:
            raise NotOfferedError(
                "train(trial=...) is not offered; `covey tune CONFIG.yaml` searches options (docs/tune.md)."
            )
        if self.is_in_train:
            raise ConfigError("train() is running on this trainer already; call it again when it has returned.")
        return to_the_end(self.steps(resume_from_checkpoint))

    hub: Hub
    scorer: Scorer
    agents: Agents
    algorithm: Algorithm
    processing_class: Any
    eos_ids: tuple[int, ...]
    _parts: Parts | None = None

    _tag_names: tuple[str, ...] | list[str] = ()
    """Tags of the model card; a subclass may set them, as in TRL."""

    num_generations = _Option("num_generations")
    max_completion_length = _Option("max_completion_length")
    max_tool_calling_iterations = _Option("max_tool_calling_iterations")
    temperature = _Option("temperature")
    top_p = _Option("top_p")
    top_k = _Option("top_k")
    min_p = _Option("min_p")
    repetition_penalty = _Option("repetition_penalty")
    num_iterations = _Option("num_iterations")
    epsilon_low = _Option("epsilon")
    shuffle_dataset = _Option("shuffle_dataset")
    mask_truncated_completions = _Option("mask_truncated_completions")
    top_entropy_quantile = _Option("top_entropy_quantile")
    log_completions = _Option("log_completions")
    num_completions_to_print = _Option("num_completions_to_print")
    use_vllm = _Option("use_vllm")
    loss_type = _Option("loss_type")
    scale_rewards = _Option("scale_rewards")
    importance_sampling_level = _Option("importance_sampling_level")
    use_adaptive_entropy = _Option("use_adaptive_entropy")
    generation_kwargs = _Option("generation_kwargs")
    log_multimodal = _Option("log_multimodal")
    log_unique_prompts = _Option("log_unique_prompts")
    multi_objective_aggregation = _Option("multi_objective_aggregation")
    off_policy_mask_threshold = _Option("off_policy_mask_threshold")
    pad_to_multiple_of = _Option("pad_to_multiple_of")
    use_transformers_continuous_batching = _Option("use_transformers_continuous_batching")
    vllm_gpu_memory_utilization = _Option("vllm_gpu_memory_utilization")
    vllm_importance_sampling_clip_max = _Option("vllm_importance_sampling_clip_max")
    vllm_importance_sampling_clip_min = _Option("vllm_importance_sampling_clip_min")
    vllm_importance_sampling_correction = _Option("vllm_importance_sampling_correction")
    vllm_importance_sampling_mode = _Option("vllm_importance_sampling_mode")
    vllm_mode = _Option("vllm_mode")
    vllm_tensor_parallel_size = _Option("vllm_tensor_parallel_size")

    # -- attributes -----------------------------------------------------------------------------------------------------

    @cached_property
    def accelerator(self) -> Any:
        """accelerate's `Accelerator` of this run's process group."""
        return accelerator_of(self.args)

    @cached_property
    def _metrics(self) -> dict[str, MutableMapping[str, list[float]]]:
        """TRL's lists of values by mode (`train`, `eval`) and name; the mean of each is added to the next log of its mode."""
        return {"train": defaultdict(list), "eval": defaultdict(list)}

    def _taken_metrics(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Means of the lists in `_metrics` for the mode of these logs; the lists are cleared."""
        is_eval = any(name.startswith("eval_") for name in logs)
        lists = self._metrics["eval" if is_eval else "train"]
        taken = {f"eval_{name}" if is_eval else name: fmean(values) for name, values in lists.items() if values}
        lists.clear()
        return taken

    @property
    def model_wrapped(self) -> Any:
        return self.model

    @property
    def ref_model(self) -> Any:
        """The reference model; None without a KL term, with PEFT, which shares the base, and before a sharded model is trained."""
        reference = self._parts.learner.reference if self._parts is not None else None
        return reference.policy.model if isinstance(reference, FrozenCopy) else self._frozen

    @cached_property
    def _frozen(self) -> Any:
        """The reference's copy of the model, made when it is first needed and kept, as in TRL, over every `train()`."""
        is_split = self.args.sharding is not None and self.world.size > 1
        if is_split or has_adapter(self.model) or not self.algorithm.needs.reference:
            return None
        return frozen_copy(self.model)

    @property
    def beta(self) -> float:
        """Current KL coefficient."""
        kl = self._resolved.kl
        return 0.0 if kl is None else current(kl.coefficient)

    @property
    def entropy_coef(self) -> float:
        """Current entropy coefficient; an adaptive one also while it is not applied."""
        state = self._parts.session.latest.controllers if self._parts is not None else {}
        values = self.algorithm.initial_controllers() | dict(state)
        for index, part in enumerate(self.algorithm.regularizers):
            if isinstance(part, EntropyBonus):
                return abs(values.get(f"regularizers.{index}.coefficient", current(part.coefficient)))
        return 0.0

    @property
    def epsilon_high(self) -> float:
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def num_generations_eval(self) -> int:
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        return self.agents.template_options(self.args.chat_template_kwargs)

    @property
    def reward_funcs(self) -> list[Any]:
        """Rewards: functions, and reward models as modules."""
        calls = [spec.call for spec in self.scorer.rewards]
        return [call.model if isinstance(call, ModelReward) else call for call in calls]

    @property
    def reward_func_names(self) -> list[str]:
        return self.scorer.names

    @property
    def reward_weights(self) -> Tensor:
        """Reward weights [R] at the current step."""
        return self.scorer.weights

    @property
    def reward_processing_classes(self) -> list[Any]:
        """Tokenizer of each reward model, None for a function."""
        calls = [spec.call for spec in self.scorer.rewards]
        return [call.tokenizer if isinstance(call, ModelReward) else None for call in calls]

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a completion."""
        return list(self.eos_ids)

    @property
    def environments(self) -> Any:
        return self.agents.environments

    @property
    def rollout_func(self) -> Any:
        return self.agents.rollout_func

    @property
    def hub_model_id(self) -> str | None:
        """Full name of the repository on the hub, once there is one."""
        return self.hub.repo_id

    @property
    def _resolved(self) -> Algorithm:
        """The algorithm with the current values of its adaptive coefficients."""
        return self.algorithm.resolve(self._parts.session.latest.controllers if self._parts is not None else {})

    # -- rewards ---------------------------------------------------------------------------------------------------------

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Scores [N, R] of this process's completions by each reward, NaN if not scored.

        A subclass may override it: training calls the override for every generation batch. `inputs` holds each completion's row.
        Unlike in TRL, where it also gathers over processes, every process returns its own completions only.
        """
        return self.scorer.calculated(inputs, prompts, completions, completion_ids_list).to(self.world.device)

    # -- saving and uploading --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (an adapter, for PEFT) and its tokenizer as transformers would, to `output_dir`.

        With `push_to_hub` they are uploaded too; a failed upload is a warning.
        """
        folder = Path(output_dir or self.output_dir).expanduser()
        names = self._saved(folder)
        if self.args.push_to_hub and not _internal_call and self.world.is_main:
            self.hub.upload(folder, names, "Model save", card=self._card().text())
            self.hub.finish()

    def _saved(self, folder: Path) -> list[str]:
        """Write model and tokenizer to `folder` on the main process. Returns the names of the files and folders. Collective."""
        weights = weights_to_write(self.model, self.world)
        if not self.world.is_main:
            return []
        with as_disk_errors("The trained model", folder, self.output_dir, REFUSALS):
            write = partial(write_model, model=self.model, tokenizer=self.processing_class, weights=weights)
            names = write_whole(folder, write)
            note_saved(self.output_dir, folder, self.state.global_step)
            return names

    def save_state(self) -> None:
        """Write `trainer_state.json` to `output_dir`."""
        if self.world.is_main:
            with as_disk_errors("trainer_state.json", self.output_dir, self.output_dir, REFUSALS):
                self.output_dir.mkdir(parents=True, exist_ok=True)
                write_trainer_state(self.output_dir / "trainer_state.json", self.state)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
    ) -> None:
        """Write `README.md` to `output_dir`: data, algorithm, options, evaluations with their intervals, the run's id."""
        if not self.world.is_main:
            return
        card = self._card(model_name, dataset_name, tags, language, license)
        with as_disk_errors("The model card", self.output_dir, self.output_dir, REFUSALS):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            (self.output_dir / CARD).write_text(card.text(), encoding="utf-8")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save model, tokenizer and model card to `output_dir` and upload them to the hub.

        Returns huggingface_hub's CommitInfo, a Future of it with `blocking=False`, None on other processes. `card`: arguments of
        `create_model_card`. Raises UploadError if the upload fails; the files are in `output_dir` then.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        names = self._saved(self.output_dir)
        self.create_model_card(**card)
        if not self.world.is_main:
            return None
        files = [*names, *([] if CARD in names else [CARD])]
        overrides: dict[str, Any] = {"token": token, "revision": revision, "private": private}
        upload: Future[Any] = self.hub.upload(self.output_dir, files, str(commit_message), **overrides)
        if not blocking:
            return upload
        error = upload.exception()
        self.hub.drop(upload)
        if error is not None:
            raise_refused(error, self.hub.name, self.output_dir)
        return upload.result()

    def _checkpoint_saved(self, path: Path, step: int) -> None:
        """Upload a complete checkpoint, if `hub_strategy` says so."""
        by_epoch = str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) == "epoch"
        when = f"epoch {int(self.state.epoch or 0)}" if by_epoch else f"step {step}"
        self.hub.checkpoint_saved(path, f"Training in progress, {when}", lambda: self._card(step=step).text())

    def _card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
        step: int | None = None,
    ) -> Card:
        base = str(getattr(self.model.config, "_name_or_path", "") or "")
        named = (self.args.hub_model_id or self.output_dir.resolve().name).rpartition("/")[2]
        extra_tags = [tags] if isinstance(tags, str) else list(tags or ())
        return Card(
            model_name=model_name or named,
            base_model=base if base and not Path(base).exists() else None,
            repo_id=self.hub.repo_id or self.args.hub_model_id,
            dataset_name=dataset_name,
            algorithm=self.algorithm.name,
            options={name: value for name, value in self.args._changed().items() if name in _SHOWN_OPTIONS},
            rewards=dict(zip(self.scorer.names, self.scorer.weights.tolist(), strict=True)),
            step=self.state.global_step if step is None else step,
            run_dir=self.output_dir,
            is_adapter=has_adapter(self.model),
            tags=[*extra_tags, *self._tag_names, *(getattr(self.model, "model_tags", None) or ())],
            language=language,
            license=license,
        )
