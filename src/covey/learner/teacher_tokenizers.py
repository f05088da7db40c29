"""The tokenizer of a teacher: the policy's, or another one, whose text is aligned with the policy's."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.algorithms import TeacherRole
from covey.config.combinations import expect_together
from covey.data import vocabulary_size
from covey.data.hints import with_hint
from covey.data.prompts import encode_chat, template_of_prompt
from covey.data.rendering import control_texts, plain_ids
from covey.errors import ConfigError, ModelError
from covey.learner.policy import Policy
from covey.learner.served_teacher import ServedTeacher
from covey.learner.text_alignment import BROKEN, TextAlignment
from covey.models import load_tokenizer
from covey.types import Prompt

logger = logging.getLogger(__name__)

PROBED = 64
"""Tokens, spread over the vocabulary, whose texts are compared."""


@dataclass(frozen=True, eq=False)
class Tokenizers:
    """The policy's tokenizer, and how a teacher of another one reads prompts and completions."""

    policy: Any
    eos_ids: Sequence[int]
    template: Mapping[str, Any]
    """Options of the policy's chat template."""
    role: TeacherRole
    compares_distributions: bool
    """True if the algorithm learns from the teacher's whole distribution, which takes the policy's tokens."""
    trust_remote_code: bool = False
    reads_media: bool = False

    def alignment(self, teacher: Any, name: str) -> TextAlignment | None:
        """The alignment with a teacher's tokenizer; None if each token of the policy has the same id there.

        Raises ConfigError where another tokenizer cannot teach this algorithm, or reads none of the policy's texts.
        """
        difference = first_difference(teacher.get_vocab(), self.policy.get_vocab())
        if difference is None:
            return None
        if self.compares_distributions:
            raise ConfigError(
                f"The teacher {name} has another vocabulary: {difference}, so their distributions cannot be compared; give a teacher with "
                "the policy's tokenizer, or learn from log-probabilities of its text alone (mopd, iw_opd, rlsd, sdar, sdpo)."
            )
        words: dict[str, object] = {"name": name, "difference": difference}
        expect_together("teacher", "other tokenizer", self.reads_media and "media", **words)
        several = isinstance(self.role.teacher, (Mapping, list, tuple)) and self.role.by is None
        if several:
            raise ConfigError(
                f"The teacher {name} has another tokenizer ({difference}), and is averaged with others, which share no tokens with it; "
                "choose the teacher of each prompt with by='COLUMN', or give this one alone."
            )
        alignment = TextAlignment(self.policy, teacher, partial(self._prompt_ids, teacher), tuple(self.eos_ids))
        share = readable(self.policy, teacher)
        if not share:
            raise ConfigError(
                f"The teacher {name} reads none of the policy's tokens as the text that they are, so it can teach nothing; give a "
                "teacher whose tokenizer reads this language."
            )
        logger.warning(
            "The teacher %s has another tokenizer (%s). It reads the text, and teaches by pieces at whose ends both tokenizers part; "
            "it reads %.0f%% of the policy's tokens, and teacher/aligned is the share of tokens that takes part.",
            name, difference, 100 * share,
        )  # fmt: skip
        return alignment

    def _prompt_ids(self, teacher: Any, prompt: Prompt, hint: str | None) -> tuple[int, ...]:
        """The prompt in the teacher's tokens and chat template, with feedback where there is some."""
        options = {name: value for name, value in self.template.items() if name != "chat_template"}
        if hint is not None:
            return with_hint(prompt, hint, self.role.template, teacher, options)
        if prompt.messages is not None:
            where = f"prompt {prompt.uid}"
            return encode_chat(prompt.messages, where, teacher, {**options, **template_of_prompt(prompt, where)})
        text = self.policy.decode(list(prompt.token_ids)) if prompt.text is None else prompt.text
        return tuple(teacher(text=text)["input_ids"])


def readable(policy: Any, teacher: Any) -> float:
    """Share of tokens spread over the policy's vocabulary whose text the teacher's tokenizer encodes and gives back; bytes count not."""
    controls = set(control_texts(policy))
    texts = [policy.decode([token]) for token in range(0, len(policy), max(1, len(policy) // PROBED))]
    texts = [text for text in texts if text and BROKEN not in text and text not in controls]
    back = [teacher.decode(plain_ids(teacher, text), clean_up_tokenization_spaces=False) for text in texts]
    same = sum(bool(a.strip() == b.strip()) for a, b in zip(texts, back, strict=True))
    return same / max(1, len(texts))


def first_difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str | None:
    """The policy's first token that the teacher's vocabulary has at another place or not at all, in words; None if there is none."""
    for token, place in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != place:
            there = f"has the id {theirs[token]}" if token in theirs else "is unknown"
            return f"{token!r} is token {place} of the policy and {there} there"
    return None


def alignment_of_model(teacher: Any, policy: Policy, tokenizers: Tokenizers) -> TextAlignment | None:
    """The alignment with a loaded teacher; None if it reads the policy's tokens. Raises ConfigError as `Tokenizers.alignment`."""
    name = str(getattr(teacher.config, "_name_or_path", "") or type(teacher).__name__)
    try:
        theirs = load_tokenizer(
            teacher, tokenizers.role.teacher_tokenizer_name_or_path, trust_remote_code=tokenizers.trust_remote_code
        )
    except ModelError:
        if tokenizers.role.teacher_tokenizer_name_or_path is not None:
            raise  # a model created in memory has no tokenizer; a folder that was named must hold one
        sizes = [vocabulary_size(model) for model in (teacher, policy.model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"The teacher {name} knows {sizes[0]} tokens and the policy {sizes[1]}; give a teacher with the policy's tokenizer, or "
                "say which one it has, with teacher_tokenizer_name_or_path='FOLDER'."
            ) from None
        return None
    return tokenizers.alignment(theirs, name)


def alignment_of_server(model: str, tokenizers: Tokenizers) -> tuple[TextAlignment | None, Any]:
    """The alignment with a served teacher whose tokenizer is named, and its tokenizer; else None and the policy's."""
    name = tokenizers.role.teacher_tokenizer_name_or_path
    if name is None:
        return None, tokenizers.policy
    theirs = load_tokenizer(None, name, trust_remote_code=tokenizers.trust_remote_code)
    return tokenizers.alignment(theirs, model), theirs


def expect_same_tokens(teacher: ServedTeacher, tokenizer: Any) -> None:
    """Raise ConfigError unless the server scores token ids, and tokens spread over the vocabulary have the tokenizer's texts there."""
    ids = list(range(0, len(tokenizer), max(1, len(tokenizer) // PROBED)))
    fix = "say which tokenizer it has, with teacher_tokenizer_name_or_path='FOLDER or hub id'"
    try:
        teacher.run_all([partial(teacher.likeliest, ids[:1], ids[1:])])
    except ConfigError as error:
        raise ConfigError(f"{error} If it refuses these tokens as unknown, {fix}.") from error
    [theirs] = teacher.run_all([partial(teacher.texts, ids)])
    for token, text in zip(ids, theirs, strict=False):  # a server may add a token of its own
        expected = tokenizer.decode([token])
        if BROKEN not in expected + text and expected.strip() != text.strip():
            raise ConfigError(
                f"The teacher {teacher.endpoint.model} has another vocabulary: token {token} is {expected!r} of the policy and {text!r} there; "
                f"give one with the policy's tokenizer, or {fix}."
            )
