"""The teacher of an algorithm as a role: who teaches, what it reads, and how it follows the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from covey.algorithms.reference import Every, keep
from covey.declared import Count, Finite, Positive, Range, checked_dataclass
from covey.errors import ConfigError, did_you_mean
from covey.types import ReferenceRule

POLICY = "policy"
"""The teacher that is the policy itself, with feedback in its prompt."""
KINDS = ("live", "base", "ema")


@checked_dataclass(frozen=True)
class TeacherRole:
    """A teacher: a frozen second model, several of them, or the policy itself at some time, with more to read.

    `teacher` is a folder, a hub id, a loaded model, the address of an endpoint (`"http://host:8000/v1"`), or `"policy"` with
    `feedback`. Several: a list, whose signals are averaged; a mapping from teacher to share; or, with `by`, a mapping from
    the values of that column to teachers (MOPD, 2026, <https://arxiv.org/abs/2601.02780>). The teacher carries no gradient. One
    of another tokenizer reads the text, and teaches by log-probabilities of the pieces that both tokenizers share.
    """

    teacher: Any = POLICY
    feedback: str | None = None
    """Feedback in the teacher's prompt: a column of the data set, a column that a reward adds with `log_extra`, or `best`, the
    group's best completion for those that earned less, `successful`, the first other completion of the group whose reward
    reaches `threshold`, or `tool_result`, the last answer of a tool in the completion's episode. A teacher that is the policy
    teaches nothing where there is none; another model reads the plain prompt there."""
    template: str = "\n\n{feedback}"
    """Format of the feedback behind the prompt, or behind the last message of the user."""
    threshold: Finite | None = None
    """With feedback from the `best`: show it to completions of a lower reward than this alone, where the best has it. With
    `successful`: the least reward of a success, 1 where it is None."""
    teacher_model_kind: str | ReferenceRule = "live"
    """Of the policy as its own teacher: `live`, the weights of now; `base`, those of the start; `ema`, an exponential average;
    or a rule of the reference, such as `alg.FrozenAt(200)`. Words and the next two names are TRL's."""
    teacher_update_rate: Annotated[float, Range(above=0, at_most=1)] = 0.05
    """Share of the policy in each update of an `ema` teacher."""
    teacher_sync_steps: Count = 1
    """Optimizer steps between the updates of an `ema` teacher."""
    by: str | None = None
    """Column whose value names the teacher of a prompt, where `teacher` maps values to teachers."""
    teacher_tokenizer_name_or_path: str | None = None
    """Folder or hub id of the teacher's own tokenizer, where it is not the policy's and does not come with the teacher: of an
    endpoint, or of a model that is loaded. TRL's name."""
    dtype: str = "auto"
    """Type that the teacher's weights are loaded in; auto: as stored."""
    served_model_name: str | Mapping[str, str] | None = None
    """The model that an endpoint serves; of several by the value of the column `by`, or by address."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's key."""
    request_seconds: Positive = 60.0
    """Longest time of one request to an endpoint."""
    when_lost: Literal["stop", "skip"] = "stop"
    """Answer to an endpoint that is away: stop with a checkpoint, or skip its signal on those completions."""

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_rule()
        self._check_feedback()
        is_averaged = isinstance(self.teacher, (Mapping, list, tuple)) and self.by is None
        if self.when_lost == "skip" and is_averaged:
            raise ConfigError(
                "when_lost='skip' drops the signal of a teacher that is away, and the mean of the others would be another one; choose "
                "teachers with by='COLUMN', or stop."
            )
        if self.when_lost == "skip" and not self.is_endpoint:
            raise ConfigError("when_lost='skip' acts for a teacher at an endpoint.")
        for source, _, value in self.shares():
            if is_address(source) and not self.model_at(source, value):
                raise ConfigError(
                    f"The teacher {source} is an endpoint: say which model it serves, with served_model_name='NAME', or of several "
                    "with a mapping from address, or value of the column, to name."
                )
        if self.served_model_name and not self.is_endpoint:
            raise ConfigError(
                "served_model_name belongs to an endpoint, whose address begins with http://, and the teacher is none."
            )

        is_alone = not (self.is_policy or isinstance(self.teacher, (Mapping, list, tuple)))
        if self.teacher_tokenizer_name_or_path is not None and not is_alone:
            raise ConfigError(
                "teacher_tokenizer_name_or_path is the tokenizer of a teacher that is another model, and alone; leave it out."
            )

    def _check_sources(self) -> None:
        if not isinstance(self.teacher, (Mapping, list, tuple)):
            if self.by is not None:
                raise ConfigError(
                    f"by={self.by!r} names a column whose values choose the teacher; give teacher={{value: teacher, ...}}."
                )
            return
        if not self.teacher:
            raise ConfigError("teacher is an empty list; name at least one, or leave it out.")
        sources = list(self.teacher.values()) if self.by is not None and isinstance(self.teacher, Mapping) else []
        if self.by is not None and not sources:
            raise ConfigError(f"by={self.by!r} needs teacher={{value of the column: teacher, ...}}, and it is a list.")
        if any(map(is_policy, (*sources, *self.teacher))):
            raise ConfigError("The policy teaches itself alone; several teachers are models of their own.")
        if self.by is None and isinstance(self.teacher, Mapping):
            _check_shares(self.teacher)

    def _check_rule(self) -> None:
        kind = self.teacher_model_kind
        if isinstance(kind, str) and kind not in KINDS:
            hint = (
                did_you_mean(kind, KINDS) or f" It is one of {', '.join(KINDS)}, or a rule such as alg.FrozenAt(200)."
            )
            raise ConfigError(f"teacher_model_kind={kind!r} is not known.{hint}")
        if not isinstance(kind, str) and (isinstance(kind, type) or not callable(kind)):
            raise ConfigError(f"teacher_model_kind={kind!r} is neither a word nor a rule such as alg.FrozenAt(200).")
        if kind != "live" and not self.is_policy:
            raise ConfigError("teacher_model_kind is about teacher='policy'; another model stays as it is.")

    def _check_feedback(self) -> None:
        if self.is_policy and self.feedback is None:
            raise ConfigError(
                "The teacher is the policy itself, which has nothing to teach without feedback; name a column, or 'best'."
            )
        if self.threshold is not None and self.feedback not in ("best", "successful"):
            raise ConfigError(
                "threshold parts right completions from failed ones for feedback='best' or 'successful'; leave it out."
            )
        if "{feedback}" not in self.template:
            raise ConfigError("The teacher's template has no {feedback}; write where the feedback goes.")

    @property
    def is_policy(self) -> bool:
        return is_policy(self.teacher)

    @property
    def is_endpoint(self) -> bool:
        """True if a teacher is at an endpoint."""
        return any(is_address(source) for source, _, _ in self.shares())

    def model_at(self, address: str, value: str | None) -> str | None:
        """The model that the endpoint at an address serves, for the value of the column `by`."""
        if not isinstance(self.served_model_name, Mapping):
            return self.served_model_name
        return self.served_model_name.get(address if value is None else value)

    @property
    def rule(self) -> ReferenceRule | None:
        """Rule by which the teacher's weights follow the policy's; None: they are the policy's of now, or another model's."""
        kind = self.teacher_model_kind
        if not isinstance(kind, str):
            return kind
        if kind == "ema":
            return Every(self.teacher_sync_steps, self.teacher_update_rate)
        return keep if kind == "base" else None

    def shares(self) -> list[tuple[Any, float, str | None]]:
        """Each teacher with its share, and the value of the column `by` that it teaches (None: every prompt)."""
        if self.by is not None:
            return [(source, 1.0, str(value)) for value, source in self.teacher.items()]
        if isinstance(self.teacher, Mapping):
            total = float(sum(self.teacher.values()))
            return [(source, share / total, None) for source, share in self.teacher.items()]
        sources = self.teacher if isinstance(self.teacher, (list, tuple)) else [self.teacher]
        return [(source, 1.0 / len(sources), None) for source in sources]

    def role(self) -> TeacherRole:
        """The role alone, without a divergence."""
        return TeacherRole(**{item.name: getattr(self, item.name) for item in fields(TeacherRole)})


def is_policy(source: Any) -> bool:
    return isinstance(source, str) and source == POLICY


def is_address(source: Any) -> bool:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def _check_shares(shares: Mapping[Any, Any]) -> None:
    for source, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not share > 0:
            raise ConfigError(
                f"The teacher {source!r} has the share {share!r}, no number above 0; to choose a teacher by a column, add by='COLUMN'."
            )


def role_of(parts: Sequence[Any]) -> TeacherRole | None:
    """The one role that parts learn from; None without any. Raises ConfigError for two different ones."""
    roles = [part.role() for part in parts if isinstance(part, TeacherRole)]
    if any(_differ(roles[0], role) for role in roles[1:]):
        raise ConfigError(
            "The algorithm has several teachers; give them as one: teacher=['a', 'b'] averages them, and by='COLUMN' chooses by prompt."
        )
    return roles[0] if roles else None


def _differ(a: TeacherRole, b: TeacherRole) -> bool:
    same: Callable[[Any, Any], bool] = lambda x, y: x is y or (isinstance(x, str | float | int) and x == y)
    return not all(same(getattr(a, item.name), getattr(b, item.name)) for item in fields(TeacherRole))
