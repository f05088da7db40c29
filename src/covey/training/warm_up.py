"""Supervised fine-tuning on Covey's loop: completions come from a data set instead of a sampler, each with reward 1."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.config import GRPOConfig
from covey.config.alerts import ALERT_RULES
from covey.config.options import IDLE_WITHOUT_SAMPLING
from covey.data.checks import row_at
from covey.data.examples import encode_example, load_examples
from covey.data.prompts import to_prompt
from covey.errors import ConfigError, DataError
from covey.models import context_limit
from covey.rollout import Sampler, SamplingParams
from covey.training.agents import AgentOptions, Agents
from covey.training.parts import Parts
from covey.training.trainer import GRPOTrainer
from covey.types import Completion, Group, Prompt

logger = logging.getLogger(__name__)

ALGORITHM = "covey.algorithms.examples:supervised"
DEFAULTS: Mapping[str, Any] = {"learning_rate": 2e-5, "num_train_epochs": 1.0, "rollout_log_steps": 0}
"""Defaults that differ from GRPOConfig's; the learning rate is TRL's for supervised fine-tuning."""
_WATCHED = (
    "gradient_spike", "large_updates", "non_finite", "throughput_drop", "tiny_updates", "update_spike",
    "detector_failed",
)  # fmt: skip
"""Alerts that apply to a run without rewards."""
Encode = Callable[[Prompt], Completion]


def sft_config(**options: Any) -> GRPOConfig:
    """A GRPOConfig for `SFTTrainer`: no groups, no sampling, a learning rate of 2e-5. Takes GRPOConfig's options."""
    if "max_length" in options:
        raise ConfigError("max_length is an argument of the trainer: SFTTrainer(..., max_length=1024).")
    idle = sorted(IDLE_WITHOUT_SAMPLING & options.keys())
    if idle:
        are = "have" if len(idle) > 1 else "has"
        raise ConfigError(f"{', '.join(idle)} {are} no effect in supervised fine-tuning; leave out what is idle.")
    chosen = {**DEFAULTS, **options}
    chosen["alert_actions"] = {
        **{rule: "off" for rule in ALERT_RULES if rule not in _WATCHED},
        **(options.get("alert_actions") or {}),
    }
    picks = options.get("early_stopping_patience") or options.get("load_best_model_at_end")
    if (picks or options.get("save_strategy") == "best") and "metric_for_best_model" not in options:
        chosen["metric_for_best_model"] = "loss"
    return GRPOConfig(algorithm=ALGORITHM, num_generations=1, **chosen)


class SFTTrainer(GRPOTrainer):
    """Supervised fine-tuning of a causal language model: the loss of completion tokens only, rows packed without padding.

    `train_dataset` has `prompt` and `completion` (text, or messages), or `messages` that end with the assistant's; or is a name
    or path. `sft_config` creates `args`. Checkpoints, resuming, evaluation, trackers and memory work as in GRPOTrainer; the metric
    `loss` is the mean negative log-likelihood of a completion token in nats. An example of more than `max_length` tokens, or
    longer than the model's context, raises a DataError; `on_long_prompt="drop"` leaves such examples out.
    """

    def __init__(
        self,
        model: str | Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        max_length: int | None = None,
    ) -> None:
        args = sft_config() if args is None else args
        if getattr(args, "algorithm", None) != ALGORITHM:
            raise ConfigError("SFTTrainer takes a configuration of covey.sft_config(...), as args.")
        super().__init__(
            model,
            reward_funcs=learnt,
            args=args,
            train_dataset=None if train_dataset is None else load_examples(train_dataset),
            eval_dataset=None if eval_dataset is None else load_examples(eval_dataset),
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        template = self.agents.template_options(args.chat_template_kwargs)
        encode = partial(_encoded, tokenizer=self.processing_class, eos_ids=self.eos_ids, template=template)
        self.agents = Examples(encode=encode)
        context = context_limit(self.model)
        limit = min((bound for bound in (max_length, context) if bound is not None), default=None)
        longest = [1, 1]
        for name in ("train_dataset", "eval_dataset"):
            dataset = getattr(self, name)
            if dataset is not None:
                measured = self._measured(dataset, name, encode, template, limit, longest)
                setattr(self, name, measured)
        room = longest[1] if context is None else min(longest[1], max(1, context - longest[0]))
        self.args.max_completion_length = room  # longest completion of the data; prompts get the rest of the context

    def _measured(
        self,
        dataset: Any,
        name: str,
        encode: Encode,
        template: Mapping[str, Any],
        limit: int | None,
        longest: list[int],
    ) -> Any:
        """The data set without too long examples, if they may be dropped; updates the lengths of prompt and completion in `longest`."""
        fitting = []
        for index in range(len(dataset)):
            where = f"row {index} of {name}"
            row, features = row_at(dataset, index), dataset.features
            prompt = to_prompt(row, str(index), where, self.processing_class, template, features=features)
            sizes = len(prompt.token_ids), encode(prompt).num_tokens
            if limit is not None and sum(sizes) > limit:
                if self.args.on_long_prompt != "drop":
                    raise DataError(
                        f"{where} has {sum(sizes)} tokens, and {limit} fit; shorten it, raise --max-length within the model's context, "
                        "or leave such rows out with --on-long-prompt drop."
                    )
                continue
            fitting.append(index)
            longest[:] = [max(old, new) for old, new in zip(longest, sizes, strict=True)]
        if not fitting:
            raise DataError(f"None of the {len(dataset)} rows of {name} fits into {limit} tokens.")
        if len(fitting) < len(dataset):
            logger.warning("%d of %d rows of %s are left out: more than %s tokens.", len(dataset) - len(fitting), len(dataset), name, limit)  # fmt: skip
            return dataset.select(fitting)
        return dataset

    def _advice(self) -> list[str]:
        return [remark for remark in super()._advice() if "num_generations" not in remark]

    def _build_parts(self, *args: Any) -> Parts:
        return replace(super()._build_parts(*args), has_rewards=False)

    def _parts_without_training(self) -> Parts:
        return replace(super()._parts_without_training(), has_rewards=False)

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        metrics = super()._evaluate_one(dataset, prefix)
        return {name: value for name, value in metrics.items() if "reward" not in name}


def learnt(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Reward 1 for every completion of the data."""
    return [1.0] * len(completions)


@dataclass(frozen=True, eq=False)
class Examples(Agents):
    """Completions from the column `completion`, in place of a sampler."""

    encode: Encode | None = None
    has_single_completions: bool = True

    def sampler(
        self,
        make: Callable[..., Sampler],
        options: AgentOptions,
        tokenizer: Any,
        eos_ids: Sequence[int],
        trainer: Any,
        num_ahead: int = 0,
    ) -> Sampler:
        assert self.encode is not None
        return Recorded(self.encode)


class Recorded:
    """A sampler that returns the completions of the data set."""

    def __init__(self, encode: Encode) -> None:
        self.encode, self.version = encode, 0
        self.check_stop: Callable[[], None] = lambda: None

    def load(self, policy: Any, version: int) -> None:
        """Set the version of completions; weights are not used."""
        self.version = version

    def sample(self, prompts: Sequence[Any], n: int, params: SamplingParams) -> Iterator[Group]:
        """A group of one completion for each prompt, in order."""
        for prompt in prompts:
            self.check_stop()
            yield Group(prompt=prompt, completions=(replace(self.encode(prompt), version=self.version),) * n)


def _encoded(prompt: Prompt, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any]) -> Completion:
    return encode_example(prompt, prompt.columns.get("completion"), tokenizer, eos_ids, template)
