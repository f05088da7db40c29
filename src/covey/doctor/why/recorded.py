"""A step as the run folder holds it: the batch from `rollouts/`, weights and optimizer from the checkpoint before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.config import GRPOConfig
from covey.config.options import HONOURED
from covey.environments.branches import share_advantages
from covey.errors import CheckpointError, ConfigError, RunFolderError
from covey.learner import Learner
from covey.models import load_model
from covey.monitor.view.token_text import pieces
from covey.process.world import World
from covey.rewards.combining import weight_of
from covey.runs import checkpoint, checksums, manifest, rollouts
from covey.runs.metrics import read as read_metrics
from covey.training.build_algorithm import build_algorithm
from covey.training.build_learner import RunInputs, build_learner, samples_here
from covey.training.credit import with_advantages
from covey.training.loading import load_for_training
from covey.types import Completion, Group, Prompt

_OF_THE_CALL = frozenset({"output_dir", "report_to", "resume_from_checkpoint", "model_init_kwargs", "run_name"})
_MOST_EARLIER = 1024
"""Completions of the step and of steps before it that slices are judged by."""
_SAME = 1e-4
"""Judged again, advantages may differ from the recorded ones by this much, relative to the largest."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded inputs of step `step`."""

    step: int
    groups: tuple[Group, ...]
    reward_names: tuple[str, ...]
    weights: Tensor
    """[R] of the rewards."""
    algorithm: Algorithm
    learner: Learner
    state: Mapping[str, Any]
    """The checkpoint's tree."""
    can_judge: bool
    """Advantages come out as recorded when the rewards are judged again."""
    metrics: Mapping[str, float]
    """Of this step, as the run wrote them."""
    earlier: Mapping[str, Sequence[float]]
    """Of the steps before."""
    teacher: TeacherSignal | None = None
    """Signal of a teacher, of a run that learns from one."""
    earlier_groups: tuple[Group, ...] = ()
    """Recorded groups of the steps before, newest first; `_MOST_EARLIER` completions at most with those of this step."""


def load(run_dir: Path, step: int) -> Recorded:
    """Read a step. Raises RunFolderError, CheckpointError or ConfigError where the folder lacks what a replay needs."""
    described = manifest.read(run_dir / manifest.NAME)
    if described is None:
        raise RunFolderError(f"{run_dir} holds no run.json of a run; give the folder of a run, such as runs/train-1.")
    if step < 1:
        raise ConfigError(f"--step {step}: the first step of a run is 1.")
    folder = run_dir / f"checkpoint-{step - 1}"
    path = rollouts.path_of(run_dir / "rollouts", step)
    if not folder.is_dir() or not path.is_file():
        last = max((row["step"] for row in _logged_rows(run_dir)), default=0)
        if step > last:
            raise ConfigError(f"--step {step}: {run_dir} has taken {last} steps so far.")
        have = sorted(
            set(rollouts.steps(run_dir / "rollouts"))
            & {checkpoint.step_of(c) + 1 for c in checkpoint.checkpoints(run_dir)}
        )
        hint = f"It has both for step {', '.join(map(str, have[-5:]))}. " if have else ""
        lack = [str(missing.relative_to(run_dir)) for missing in (folder, path) if not missing.exists()]
        raise RunFolderError(
            f"{run_dir} lacks {' and '.join(lack)}, which step {step} is made again from. {hint}A run resumed from an earlier "
            "checkpoint with --save-steps 1 --rollout-log-steps 1 --save-total-limit 0 takes the same steps and keeps both."
        )
    if wrong := checksums.problems(folder):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}.")
    args = _options(described, run_dir)
    tree = checkpoint.load_state(folder)
    algorithm = build_algorithm(args)
    _refuse_unrecorded(args, algorithm)
    algorithm = algorithm.resolve(tree["state"]["controllers"])
    rows = rollouts.read(path)
    names = tuple(name.removeprefix("reward/") for name in rows[0] if name.startswith("reward/"))
    options = described.get("reward_weights") or ()
    logged = _logged_rows(run_dir)
    taken = next((row for row in logged if row["step"] == step), {})
    of_rewards = [
        _weight(option, f"rewards/{name}/weight", taken, step)
        for option, name in zip(options, names[: len(options)], strict=True)
    ]
    weights = torch.tensor([*of_rewards, *[1.0] * (len(names) - len(of_rewards))])  # those of environments are behind
    groups = groups_of(rows, names)
    rated, can_judge = _rejudge(groups, algorithm, weights)
    before = [row for row in logged if row["step"] < step]
    learner = _learner(args, algorithm, _policy(folder, described))
    _restore_teacher(learner, algorithm, tree, folder)
    return Recorded(
        step=step,
        groups=tuple(rated if can_judge else groups),
        reward_names=names,
        weights=weights,
        algorithm=algorithm,
        learner=learner,
        teacher=signal_of(rows, folder / "tokenizer.json"),
        state=tree,
        can_judge=can_judge,
        metrics=taken,
        earlier={"grad_norm": [row["grad_norm"] for row in before if isinstance(row.get("grad_norm"), float)]},
        earlier_groups=tuple(_earlier(run_dir / "rollouts", step, names, _MOST_EARLIER - len(rows))),
    )


def _refuse_unrecorded(args: GRPOConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for a run that learns from what rollouts do not record."""
    if args.router_replay:
        raise ConfigError(
            f"router_replay={args.router_replay!r} learns with the sampler's experts, which rollouts do not record; covey why cannot make "
            "its steps again."
        )
    if (
        algorithm.critic is not None
        or algorithm.needs.distribution
        or algorithm.needs.squared_score
        or (algorithm.kl and algorithm.kl.where == "reward")
    ):
        raise ConfigError(
            f"{algorithm.name} learns from a critic, whole distributions, squared gradients or a KL in the reward, which rollouts do not record; covey why "
            "cannot make its steps again."
        )


def _restore_teacher(learner: Learner, algorithm: Algorithm, tree: Mapping[str, Any], folder: Path) -> None:
    """Weights of a teacher that is the policy of earlier steps. Raises ConfigError where no checkpoint holds them."""
    role = algorithm.role
    if role is None or learner.teacher is None or role.rule is None:
        return
    state = tree.get("teacher") or {}
    if not state and checkpoint.step_of(folder) > 0:
        raise ConfigError(
            f"{algorithm.name} has a teacher that is the policy of the start, whose weights {folder} does not hold; covey why cannot "
            "make its steps again."
        )
    learner.teacher.load_state_dict(state)


def _logged_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that belong to a step."""
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if isinstance(row.get("step"), int)]


def _earlier(folder: Path, step: int, names: Sequence[str], room: int) -> Iterator[Group]:
    """Groups of the files before a step, newest first, of `room` completions at most; an older file of another form ends them."""
    earlier = [before for before in rollouts.steps(folder) if before < step]
    for rows in rollouts.read_each(folder, earlier[::-1]):
        if room < len(rows) or not {"prompt_ids", "advantage", *(f"reward/{name}" for name in names)} <= rows[0].keys():
            return
        room -= len(rows)
        yield from groups_of(rows, names)


def groups_of(rows: Sequence[Mapping[str, Any]], reward_names: Sequence[str]) -> list[Group]:
    """The groups of a file of rollouts. Raises RunFolderError for one without the prompts' tokens or the advantages."""
    if any(name not in rows[0] for name in ("prompt_ids", "advantage")):
        raise RunFolderError(
            "These rollouts hold no tokens of prompts or no advantages: an earlier version of Covey wrote them."
        )
    return [_group(group, reward_names) for group in rollouts.by_group(rows)]


def _group(rows: Sequence[Mapping[str, Any]], reward_names: Sequence[str]) -> Group:
    first = rows[0]
    number = lambda value: math.nan if value is None else value
    tensor = lambda values: None if values is None else torch.tensor(values, dtype=torch.float32)
    messages = tuple(json.loads(first["messages"])) if first.get("messages") else None
    prompt = Prompt(uid=first["prompt_uid"], token_ids=tuple(first["prompt_ids"]), text=first["prompt"], messages=messages, columns=json.loads(first["columns"]))  # fmt: skip
    completions = tuple(
        Completion(
            token_ids=torch.tensor(row["token_ids"], dtype=torch.int64),
            text=row["completion"],
            finish=row["finish"],
            logprobs=tensor(row.get("logprobs")),
            old_logp=tensor(row.get("old_logp")),
            ref_logp=tensor(row.get("ref_logp")),
            mask=None if row.get("mask") is None else torch.tensor(row["mask"]),
            observations=None if row.get("observations") is None else torch.tensor(row["observations"]),
            version=row["version"],
            source=row["source"],
        )
        for row in rows
    )
    return Group(
        prompt=prompt,
        completions=completions,
        rewards=torch.tensor(
            [
                [number(row["reward"] if row["reward"] is None else row[f"reward/{name}"]) for name in reward_names]
                for row in rows
            ],
            dtype=torch.float32,
        ),  # a completion without a sum left its group
        advantages=_advantages(rows),
        totals=torch.tensor([number(row["reward"]) for row in rows], dtype=torch.float32),
        extras={
            name.removeprefix("extra/"): [row[name] for row in rows] for name in first if name.startswith("extra/")
        },
    )


def _advantages(rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """[G], or [G, T] where they differ by token; 0 where there is none."""
    if all(row.get("advantages") is None for row in rows):
        return torch.tensor([row["advantage"] or 0.0 for row in rows], dtype=torch.float32)
    by_token = [torch.tensor(row["advantages"] or [], dtype=torch.float32).nan_to_num(0.0) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(by_token, batch_first=True)


def judged_again(groups: Sequence[Group], algorithm: Algorithm, weights: Tensor) -> list[Group]:
    """The groups with new advantages; branches of an episode have the episode's."""
    return [share_advantages(group) for group in with_advantages(groups, algorithm, weights)]


def _rejudge(groups: list[Group], algorithm: Algorithm, weights: Tensor) -> tuple[list[Group], bool]:
    """The groups judged again, and whether that gives the recorded advantages."""
    again = judged_again(groups, algorithm, weights)
    apart, largest = 0.0, 1e-6
    for new, old in zip(again, groups, strict=True):
        if new.advantages is None or old.advantages is None or new.advantages.ndim != old.advantages.ndim:
            return groups, False
        judged = new.advantages if old.advantages.ndim == 1 else new.advantages[:, : old.advantages.shape[1]]
        apart = max(apart, float((judged - old.advantages).abs().max()))
        largest = max(largest, float(old.advantages.abs().max()))
    return again, apart <= _SAME * largest


def _weight(option: Any, metric: str, taken: Mapping[str, Any], step: int) -> float:
    """The weight of a reward at a step; of a function, which run.json describes alone, as the step logged it."""
    if not isinstance(option, Mapping):
        return weight_of(option)(step - 1)
    if not isinstance(logged := taken.get(metric), int | float):
        raise RunFolderError(
            f"the weight of a reward is a function, and the run did not log {metric} at step {step}; covey why needs it."
        )
    return float(logged)


def _options(described: Mapping[str, Any], run_dir: Path) -> GRPOConfig:
    config = {k: v for k, v in (described.get("config") or {}).items() if k in HONOURED and k not in _OF_THE_CALL}
    if str(config.get("algorithm")).startswith("Algorithm("):
        raise ConfigError(
            f"{run_dir} was trained by an algorithm that a script built; covey why needs one that options name."
        )
    return GRPOConfig(output_dir=str(run_dir), report_to="none", **config)


def _policy(folder: Path, described: Mapping[str, Any]) -> Any:
    """The model of a checkpoint: its folder, or its adapter on the base that it names."""
    if not (folder / "adapter_config.json").is_file():
        return str(folder)
    dtype = (described.get("model") or {}).get("dtype")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"{folder} holds an adapter on a quantized base, whose steps covey why cannot make again.")
    return load_model(folder, {"dtype": dtype}, is_trainable=True)


def _learner(args: GRPOConfig, algorithm: Algorithm, policy: Any) -> Learner:
    world = World.of(args)
    loaded = load_for_training(policy, args, world.device)
    scorer: Any = None  # rewards are recorded, none is called
    inputs = RunInputs(
        args=args,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        algorithm=algorithm.replace(kl=None),  # the reference's log-probabilities are recorded
        scorer=scorer,
        train_dataset=None,
        world=world,
    )
    return build_learner(
        inputs, args.max_steps if args.max_steps > 0 else 1, (None, None), True, samples_here=samples_here(inputs)
    )


COLUMN = "token/teacher_gap"
MOST = 3
"""Tokens shown in each direction."""


@dataclass(frozen=True)
class Pull:
    """A token of a completion, with the teacher's log-probability minus the policy's there."""

    group: int
    completion: int
    token: str
    gap: float
    advantage: float


@dataclass(frozen=True)
class TeacherSignal:
    """Signal of a step: mean gap in nats a token, completions with one, and the tokens of its largest pulls.

    Of a teacher of another tokenizer the tokens in aligned spans alone count.
    """

    gap: float
    informed: int
    completions: int
    agreement: float | None
    """From -1 to 1, as the metric `teacher/agreement`; None where all rewards are equal."""
    up: tuple[Pull, ...]
    down: tuple[Pull, ...]

    def lines(self) -> list[str]:
        """The signal in words."""
        agreement = (
            "no rewards differ" if self.agreement is None else f"agreement with the reward {self.agreement:+.2f}"
        )
        of = f"{self.informed} of {self.completions} completions"
        out = [f"teacher: a signal on {of}, {self.gap:+.3g} nats a token (log q - log p), {agreement}"]
        for word, pulls in (("up", self.up), ("down", self.down)):
            out += [
                f"  pulls {word} {pull.gap:+.2f} at {pull.token!r}, completion {pull.completion} of group {pull.group}, advantage {pull.advantage:+.2f}"
                for pull in pulls
            ]
        return out


def signal_of(rows: Sequence[Mapping[str, Any]], tokenizer: Path) -> TeacherSignal | None:
    """The signal that a step's rollouts recorded; None without a teacher. `tokenizer`: its file, for the texts of tokens."""
    measured = [row for row in rows if row.get(COLUMN)]
    if not measured:
        return None
    raw = [np.array(row[COLUMN], float) for row in measured]
    counts = [int((_written(row) & ~np.isnan(gap)).sum()) for row, gap in zip(measured, raw, strict=True)]
    gaps = [np.where(_written(row), np.nan_to_num(gap), 0.0) for row, gap in zip(measured, raw, strict=True)]
    means = np.array([gap.sum() / max(1, int(_written(row).sum())) for gap, row in zip(gaps, measured, strict=True)])
    pull = means * np.array([row["advantage"] or 0.0 for row in measured])
    informed = [bool(gap.any()) for gap in gaps]
    tokens = sum(count for count, has_signal in zip(counts, informed, strict=True) if has_signal)
    places = sorted(
        ((float(value), r, t) for r, gap in enumerate(gaps) for t, value in enumerate(gap) if value), reverse=True
    )
    shown = lambda some: tuple(_pull(measured[r], t, value, tokenizer) for value, r, t in some)
    return TeacherSignal(
        gap=float(sum(gap.sum() for gap in gaps)) / max(1, tokens),
        informed=sum(informed),
        completions=len(rows),
        agreement=float(pull.sum() / np.abs(pull).sum()) if np.abs(pull).sum() > 0 else None,
        up=shown([place for place in places[:MOST] if place[0] > 0]),
        down=shown([place for place in reversed(places[-MOST:]) if place[0] < 0]),
    )


def _written(row: Mapping[str, Any]) -> np.ndarray:
    mask = row.get("mask")
    return np.ones(len(row["token_ids"]), bool) if mask is None else np.array(mask, bool)


def _pull(row: Mapping[str, Any], place: int, gap: float, tokenizer: Path) -> Pull:
    try:
        token = pieces(tokenizer, row["token_ids"])[place]
    except RunFolderError:  # a tokenizer of another form: the token's number stands for it
        token = str(row["token_ids"][place])
    return Pull(int(row["group"]), int(row["completion_index"]), token, gap, float(row["advantage"] or 0.0))
