"""Teachers of a run, in this process or served, and its supervised term."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from covey.algorithms import SFT, Algorithm, Distill
from covey.algorithms.distillation import POLICY
from covey.data import vocabulary_size
from covey.data.checks import row_at
from covey.data.examples import encode_example, load_examples
from covey.data.prompts import encode_chat, to_prompt
from covey.errors import ConfigError, ModelError
from covey.learner import Policy, ServedTeacher, Supervised, Teacher
from covey.learner.supervised import supervised_policy
from covey.learner.teacher import Hints
from covey.models import load_model, load_tokenizer, reads_images
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.types import Completion, Group, Prompt

logger = logging.getLogger(__name__)

PROBED = 64
"""Tokens, spread over the vocabulary, whose texts are compared."""
MOST_BYTES = 2**26
"""Size limit of an answer: some 100,000 tokens with their top 20 each."""


def served_teacher(
    part: Distill,
    policy: Policy,
    tokenizer: Any,
    hints: Hints | None,
    hinted: Callable[[Prompt, str], tuple[int, ...]],
    check_stop: Callable[[], None],
) -> ServedTeacher:
    """The teacher behind an address. Raises ConfigError where it cannot teach this policy, ServerError where it does not answer."""
    if policy.temperature != 1.0:
        raise ConfigError(
            f"distill's teacher {part.teacher} tells log-probabilities of temperature 1, and the policy samples at "
            f"{policy.temperature:g}; set temperature=1, or load the teacher here (a folder or a hub id)."
        )
    if reads_images(policy.model):
        raise ConfigError(
            "distill's teacher at an endpoint reads token ids, not images; load it here (a folder or a hub id)."
        )
    assert part.top_k is not None
    endpoint = Endpoint(
        url=part.teacher,
        model=str(part.served_model_name),
        key_env=part.key_env,
        request_seconds=part.request_seconds,
        called="teacher",
        most_bytes=MOST_BYTES,
    )
    teacher = ServedTeacher(endpoint, part.top_k, part.distance_to_likeliest, hints, hinted, check_stop)
    expect_same_tokens(teacher, tokenizer)
    return teacher


def expect_same_tokens(teacher: ServedTeacher, tokenizer: Any) -> None:
    """Raise ConfigError unless the server scores token ids, and tokens spread over the vocabulary have the policy's texts there."""
    ids = list(range(0, len(tokenizer), max(1, len(tokenizer) // PROBED)))
    teacher.asked([partial(teacher.likeliest, ids[:1], ids[1:])])
    [theirs] = teacher.asked([partial(teacher.texts, ids)])
    for one, text in zip(ids, theirs, strict=False):  # a server may add a token of its own
        own = tokenizer.decode([one])
        if "\N{REPLACEMENT CHARACTER}" not in own + text and own.strip() != text.strip():
            raise ConfigError(
                f"The teacher {teacher.endpoint.model} has another vocabulary: token {one} is {own!r} of the policy and {text!r} there, "
                "so their distributions cannot be compared; give a teacher with the policy's tokenizer, or one of the same family."
            )


def without_teaching(algorithm: Algorithm) -> Algorithm:
    """The algorithm without terms that need a second model or data, for estimates."""
    return replace(
        algorithm, regularizers=tuple(part for part in algorithm.regularizers if not isinstance(part, (Distill, SFT)))
    )


def build_teacher(
    algorithm: Algorithm,
    policy: Policy,
    tokenizer: Any,
    template: Mapping[str, Any],
    *,
    trust_remote_code: bool = False,
    check_stop: Callable[[], None] = lambda: None,
) -> Teacher | ServedTeacher | None:
    """The teacher of the algorithm's distillation; None without a distillation term.

    Raises ConfigError for two distillation terms or another vocabulary, ModelError for a teacher that cannot be loaded,
    ServerError for one that does not answer.
    """
    parts = [part for part in algorithm.regularizers if isinstance(part, Distill)]
    if not parts:
        return None
    if len(parts) > 1:
        raise ConfigError("The algorithm has several distill terms; one teacher can be learnt from at a time.")
    part = parts[0]
    hinted = partial(with_hint, template=part.template, tokenizer=tokenizer, options=template)
    hints = None if part.feedback is None else partial(hints_of, feedback=part.feedback, threshold=part.threshold)
    if isinstance(part.teacher, str) and part.teacher == POLICY:
        own = replace(policy, auxiliary_coefficient=0.0)
        return Teacher(own, part.distance, hints, hinted, part.entropy_sensitivity)
    if part.is_endpoint:
        return served_teacher(part, policy, tokenizer, hints, hinted, check_stop)
    kwargs = {"dtype": part.dtype} if isinstance(part.teacher, str) else {}
    model = load_model(part.teacher, kwargs, trust_remote_code=trust_remote_code)
    if model is policy.model:
        raise ConfigError(
            "distill's teacher is the very model that is trained; give another one, or 'policy' with feedback."
        )
    expect_same_vocabulary(model, tokenizer, policy, trust_remote_code=trust_remote_code)
    if not hasattr(model, "hf_device_map"):
        model = model.to(policy.device)
    model = model.eval().requires_grad_(False)
    if (
        model.dtype != torch.float32
        and policy.compute_dtype is None
        and next(policy.model.parameters()).dtype == torch.float32
    ):
        logger.warning(
            "The teacher computes in %s, as it is stored, and the policy in float32: divergences are some 3%% off; "
            "distill(..., dtype='float32') is exact and takes twice the memory.",
            str(model.dtype).removeprefix("torch."),
        )
    still = replace(policy, model=model, auxiliary_coefficient=0.0, offloads=False)
    return Teacher(still, part.distance, hints, hinted, part.entropy_sensitivity)


def expect_same_vocabulary(teacher: Any, tokenizer: Any, policy: Policy, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError unless each token of the policy has the same id in the teacher's vocabulary."""
    name = str(getattr(teacher.config, "_name_or_path", "") or type(teacher).__name__)
    fix = "give a teacher with the policy's tokenizer, or one of the same family"
    try:
        theirs = load_tokenizer(teacher, trust_remote_code=trust_remote_code).get_vocab()
    except ModelError:  # a model created in memory has no tokenizer
        sizes = [vocabulary_size(one) for one in (teacher, policy.model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"The teacher {name} knows {sizes[0]} tokens and the policy {sizes[1]}; {fix}.") from None
        return
    ours = tokenizer.get_vocab()
    for token, place in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != place:
            there = f"has the id {theirs[token]}" if token in theirs else "is unknown"
            raise ConfigError(
                f"The teacher {name} has another vocabulary: {token!r} is token {place} of the policy and {there} there, so their "
                f"distributions cannot be compared; {fix}."
            )


def hints_of(group: Group, feedback: str, threshold: float | None = None) -> list[str | None]:
    """The teacher's feedback on each completion: the group's best completion, a column of a reward, or one of the data set."""
    if feedback == "best":
        return _best_of(group, threshold)
    if feedback in group.extras:
        found: Sequence[Any] = group.extras[feedback]
    elif feedback in group.prompt.columns:
        found = [group.prompt.columns[feedback]] * group.size
    else:
        known = [*group.extras, *group.prompt.columns, "best"]
        raise ConfigError(f"distill's feedback={feedback!r} is no column here; there are {', '.join(known)}.")
    return [None if value is None or str(value) == "" else str(value) for value in found]


def _best_of(group: Group, threshold: float | None) -> list[str | None]:
    """Text of the completion with the highest reward, for completions with less; None for the others.

    With `threshold`, for those below it alone, and only where the best is not.
    """
    if group.totals is None or bool(group.totals.isnan().all()):
        return [None] * group.size
    totals = [float("-inf") if one != one else one for one in group.totals.tolist()]
    best = max(range(group.size), key=lambda g: totals[g])
    limit = totals[best] if threshold is None else threshold
    told = totals[best] >= limit
    return [group.completions[best].text if told and totals[g] < limit else None for g in range(group.size)]


def with_hint(prompt: Prompt, hint: str, template: str, tokenizer: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of the prompt with the hint appended to it, or to its last user message."""
    told = template.replace("{feedback}", hint)
    if prompt.messages is None:
        return tuple(tokenizer(text=f"{prompt.text or ''}{told}")["input_ids"])
    messages = [dict(message) for message in prompt.messages]
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if asked:
        messages[asked[-1]]["content"] = f"{messages[asked[-1]].get('content') or ''}{told}"
    else:
        messages.append({"role": "user", "content": told.strip()})
    own = prompt.columns.get("chat_template_kwargs") or {}
    return encode_chat(messages, f"prompt {prompt.uid} with its feedback", tokenizer, {**options, **own})


def build_supervised(
    algorithm: Algorithm, policy: Policy, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any], seed: int
) -> Supervised | None:
    """The examples of the algorithm's supervised term; None without such a term. Raises ConfigError for two of them."""
    parts = [part for part in algorithm.regularizers if isinstance(part, SFT)]
    if not parts:
        return None
    if len(parts) > 1:
        raise ConfigError(
            "The algorithm has several sft terms; mix their data sets into one ('0.5*a.jsonl + 0.5*b.jsonl')."
        )
    dataset = load_examples(parts[0].dataset)
    example = _encoder(dataset, tokenizer, eos_ids, template)
    example(0)  # raises errors of template and columns before the first rollout
    return Supervised(
        policy=supervised_policy(policy),
        example=example,
        count=len(dataset),
        weight=parts[0].weight,
        batch_size=parts[0].batch_size,
        seed=seed,
    )


def _encoder(
    dataset: Any, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any]
) -> Callable[[int], tuple[Prompt, Completion]]:
    def example(index: int) -> tuple[Prompt, Completion]:
        row = row_at(dataset, index)
        prompt = to_prompt(row, f"sft:{index}", f"row {index} of the examples", tokenizer, template)
        return prompt, encode_example(prompt, row["completion"], tokenizer, eos_ids, template)

    return example
