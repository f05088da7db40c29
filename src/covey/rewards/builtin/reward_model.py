"""Reward models: a sequence classifier with one label, called as any other reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.data.rendering import plain_ids, spells_control
from covey.errors import ModelError, TooLongError
from covey.files.hub import hub_options
from covey.process.device import dtype_to_read_in
from covey.rewards.builtin.inference_model import Frozen, conversation_ids, is_float, load_model, read_tokenizer
from covey.rewards.builtin.text import clean
from covey.rewards.decorators import reward


@reward(timeout=math.inf)
@dataclass(frozen=True, eq=False)
class ModelReward(Frozen):
    """The score of a model's single logit for prompt and completion together.

    A conversation is conversation_ids by the reward model's own chat template, plain texts are joined; both are encoded without
    further special tokens and padded on the right, as TRL 1.16 does. Runs on the model's own device, in evaluation mode.
    `batch_size` texts at a time, fewer once memory ran out.
    """

    template: Mapping[str, Any] = field(default_factory=dict)
    may_round: bool = False
    """True if it was loaded without a word on its type: a GPU that has bfloat16 then computes in that, but for the last product."""

    @staticmethod
    def of(
        model: Any,
        tokenizer: Any = None,
        *,
        device: Any = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ModelReward:
        """A reward from a folder, a hub id or a module; the tokenizer defaults to the one in the model's folder.

        Raises ModelError when it cannot be loaded or has no head with a single label.
        """
        loaded = _load(str(model), dict(model_init_kwargs or {})) if isinstance(model, str | Path) else model
        where = str(getattr(loaded.config, "_name_or_path", "") or "")
        name = where.rstrip("/").split("/")[-1] or type(loaded).__name__
        labels = getattr(loaded.config, "num_labels", 1)
        if labels != 1:
            raise ModelError(f"The reward model {name!r} has {labels} labels; a reward model has one (num_labels=1).")
        if tokenizer is None:
            absent = "the model was not loaded from a folder or id"
            option, place = "it in reward_processing_classes", hub_options(model_init_kwargs)
            tokenizer = read_tokenizer(where, absent, f"reward model {name!r}", option, **place)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        text_config = loaded.config.get_text_config() if hasattr(loaded.config, "get_text_config") else loaded.config
        text_config.pad_token_id = tokenizer.pad_token_id  # the score is read at the last token that is no padding
        loaded = loaded.eval().requires_grad_(False)
        has_type = {"dtype", "torch_dtype", "quantization_config"} & set(model_init_kwargs or ())
        is_free = loaded is not model and not has_type
        reward = ModelReward(loaded, tokenizer, name, template=dict(chat_template_kwargs or {}), may_round=is_free)
        return reward if device is None else reward.to(device)

    def to(self, device: Any) -> ModelReward:
        """The same reward with its model on `device`; one that was placed or spread over devices stays where it is."""
        super().to(device)
        if self.may_round and next(self.model.parameters()).dtype == torch.float32:
            _round(self.model, dtype_to_read_in(self.device))
        return self

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Tensor:
        """[N] float32."""
        ids = [self.encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        longest = max((len(row) for row in ids), default=0)
        if longest > self.limit:
            raise TooLongError(
                f"prompt and completion have {longest} tokens, the reward model {self.name!r} reads {self.limit}"
            )
        scores = self.run(ids, lambda output, ids, mask: output.logits[:, 0])
        return torch.stack(scores) if scores else torch.zeros(0)

    def encode(self, prompt: Any, completion: Any) -> list[int]:
        """The ids of prompt and completion together."""
        if not isinstance(prompt, str):
            return conversation_ids(self.tokenizer, self.name, [*prompt, *completion], **self.template)
        whole = lambda text: list(self.tokenizer(text=clean(text), add_special_tokens=False)["input_ids"])
        if spells_control(self.tokenizer, completion):  # a completion writes none of them
            return [*whole(prompt), *plain_ids(self.tokenizer, clean(completion))]
        return whole(prompt + completion)


def reward_model(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int = 16,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ModelReward:
    """A reward model with a device, a type of numbers and a batch size of its own, from a folder or a hub id.

    Example: `--reward "reward_model(model='org/name', device='cuda:1', dtype='bfloat16', batch_size=64)"`.
    """
    if batch_size < 1:
        raise ModelError(f"reward_model: batch_size={batch_size} lets no text through; use at least 1.")
    if dtype is not None and not is_float(dtype):
        raise ModelError(f"reward_model: dtype={dtype!r} is no type of numbers; use float32, bfloat16 or float16.")
    options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    reward = ModelReward.of(model, device=device, model_init_kwargs=options, chat_template_kwargs=chat_template_kwargs)
    return replace(reward, batch_size=batch_size, is_placed=device is not None)


def _round(model: Any, dtype: torch.dtype) -> None:
    """Weights in `dtype`; the layer that gives the score stays in float32: scores of 8 bits would tie within groups."""
    if dtype == torch.float32:
        return
    model.to(dtype)
    for name in ("score", "classifier"):
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear):
            head.float()
            head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))


def _load(source: str, options: dict[str, Any]) -> Any:
    auto = "AutoModelForSequenceClassification"
    model, missing = load_model(auto, source, "reward model", num_labels=1, **options)
    if missing:
        raise ModelError(
            f"{source!r} is no reward model: it has no weights for {missing[0]}; give a sequence classifier with one label."
        )
    return model
