"""Checks of a distillation teacher at an endpoint, before the first rollout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from covey.algorithms import Distill
from covey.errors import ConfigError
from covey.learner import Policy, ServedTeacher
from covey.learner.teacher import Hints
from covey.models import reads_images
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.types import Prompt

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
