"""The history of every prompt: how often it was drawn, its rewards, and its state (solved, unsolved or flaky)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from covey.monitor.view.groups import GroupIndex
from covey.monitor.view.search import prompts_of

STATES = ("solved", "flaky", "unsolved")
"""By the newest group: every completion reaches the threshold, some do, none does."""
ORDERS: Mapping[str, tuple[str, bool]] = {
    "last seen": ("last_step", True),
    "most often seen": ("visits", True),
    "lowest reward": ("last", False),
    "highest reward": ("last", True),
    "biggest gain": ("gain", True),
    "biggest loss": ("gain", False),
    "most uneven": ("swing", True),
}
_MOST_VISITS = 60
_MOST_TEXTS = 20_000
_COLUMNS = (
    "uid",
    "state",
    "forgotten",
    "visits",
    "first_step",
    "last_step",
    "first",
    "last",
    "gain",
    "best",
    "swing",
    "group",
)


class PromptIndex:
    """Numbers of each prompt [m], worked out anew when the table of groups has changed."""

    def __init__(self, index: GroupIndex) -> None:
        self._index = index
        self._of: tuple[Any, float | None] = (None, None)
        self._found: dict[str, np.ndarray] = {}
        self._texts: dict[tuple[int, int, int], str] = {}

    def table(self, threshold: float | None) -> tuple[dict[str, np.ndarray], float, np.ndarray]:
        """Columns [m] by name, the threshold, and the table of groups they are of."""
        groups = self._index.table()
        limit = three_quarters(groups) if threshold is None else threshold
        of, known = self._of
        if of is not groups or known != limit:
            self._found = numbers_of(groups, limit)
            self._of = (groups, limit)
        return self._found, limit, groups

    def rows(self, *, state: str, sort: str, threshold: float | None, start: int, most: int) -> dict[str, Any]:
        """A part of the list of prompts, with their texts and last visits, and how many prompts are in each state."""
        found, limit, groups = self.table(threshold)
        order = _ordered(found, state, sort)
        part = order[start : start + most]
        texts = self._texts_of(groups, found["place"][part])
        return {
            "rows": [{**_row(found, at), "prompt": said, "history": _history(found, groups, at)}
                     for at, said in zip(part.tolist(), texts, strict=True)],
            "next": start + most if start + most < len(order) else None,
            "matching": len(order),
            "prompts": len(found["uid"]),
            "threshold": limit,
            "counts": {name: int((found["state"] == at).sum()) for at, name in enumerate(STATES)}
            | {"forgotten": int(found["forgotten"].sum())},
            "files_left": self._index.pending,
        }  # fmt: skip

    def _texts_of(self, groups: np.ndarray, places: np.ndarray) -> list[str]:
        """The beginning of the prompt of each group; a file is opened only for texts that were not shown yet."""
        if len(self._texts) > _MOST_TEXTS:
            self._texts = {}
        keys = [tuple(key) for key in groups[["uid", "step", "first_row"]][places].tolist()]
        new = [at for at, key in enumerate(keys) if key not in self._texts]
        read = prompts_of(self._index, groups, places[new].tolist(), names={"prompt": "prompt"})
        self._texts |= {keys[at]: said["prompt"] for at, said in zip(new, read, strict=True) if said["prompt"]}
        return [self._texts.get(key, "") for key in keys]

    def as_csv(self, *, state: str, sort: str, threshold: float | None) -> str:
        """Every prompt that passes, a line each; `last_step` and `group` say where its text and answers are."""
        found, _, _ = self.table(threshold)
        out = io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(_COLUMNS)
        for at in _ordered(found, state, sort).tolist():
            row = _row(found, at)
            lines.writerow(["" if row[name] is None else row[name] for name in _COLUMNS])
        return out.getvalue()


def three_quarters(groups: np.ndarray) -> float:
    """Three quarters of the way from the lowest reward of the run to the highest: 0.75 where rewards are 0 and 1."""
    known = groups[np.isfinite(groups["lowest"]) & np.isfinite(groups["highest"])]
    if not len(known):
        return 0.75
    low, high = float(known["lowest"].min()), float(known["highest"].max())
    return round(low + 0.75 * (high - low), 6)


def numbers_of(groups: np.ndarray, threshold: float) -> dict[str, np.ndarray]:
    """Record of each prompt [m] from its groups [n], which are in order of steps; groups without a score do not count."""
    kept = np.flatnonzero(np.isfinite(groups["reward"]))
    order = kept[np.argsort(groups["uid"][kept], kind="stable")]
    uid = groups["uid"][order]
    starts = np.flatnonzero(np.append(True, uid[1:] != uid[:-1])) if len(uid) else np.zeros(0, np.int64)
    visits = np.diff(np.append(starts, len(uid)))
    ends = starts + visits - 1
    reward = groups["reward"][order].astype(np.float64)
    first, last = order[starts], order[ends]
    each = (lambda of: of.reduceat(reward, starts)) if len(starts) else (lambda of: np.zeros(0))
    mean = np.add.reduceat(reward, starts) / visits if len(starts) else np.zeros(0)
    off = (reward - np.repeat(mean, visits)) ** 2
    swing = np.sqrt(np.add.reduceat(off, starts) / visits) if len(starts) else np.zeros(0)
    limit = threshold - 1e-6
    state = np.where(groups["lowest"][last] >= limit, 0, np.where(groups["highest"][last] >= limit, 1, 2))
    return {
        "uid": groups["uid"][last],
        "visits": visits,
        "first": groups["reward"][first].astype(np.float64),
        "last": groups["reward"][last].astype(np.float64),
        "gain": (groups["reward"][last] - groups["reward"][first]).astype(np.float64),
        "best": each(np.maximum),
        "swing": swing,
        "first_step": groups["step"][first],
        "last_step": groups["step"][last],
        "group": groups["group"][last],
        "place": last,
        "state": state,
        "forgotten": (each(np.maximum) >= limit) & (state == 2),
        "start": starts,
        "order": order,
    }


def _ordered(found: Mapping[str, np.ndarray], state: str, sort: str) -> np.ndarray:
    keep = np.ones(len(found["uid"]), bool)
    if state == "forgotten":
        keep = found["forgotten"]
    elif state in STATES:
        keep = found["state"] == STATES.index(state)
    places = np.flatnonzero(keep)
    name, is_descending = ORDERS[sort]
    keys = found[name][places].astype(np.float64)
    return places[np.argsort(-keys if is_descending else keys, kind="stable")]


def _row(found: Mapping[str, np.ndarray], at: int) -> dict[str, Any]:
    plain = {name: found[name][at].item() for name in _COLUMNS if name not in ("uid", "state", "swing")}
    return {
        **plain,
        "uid": str(found["uid"][at]),
        "state": STATES[int(found["state"][at])],
        "swing": float(found["swing"][at]),
    }


def _history(found: Mapping[str, np.ndarray], groups: np.ndarray, at: int) -> list[dict[str, Any]]:
    """The newest visits of a prompt, oldest first."""
    start, visits = int(found["start"][at]), int(found["visits"][at])
    places = found["order"][start + max(0, visits - _MOST_VISITS) : start + visits]
    return [
        {name: groups[name][place].item() for name in ("step", "group", "reward", "lowest", "highest")}
        for place in places
    ]
