"""The history of every prompt: how often it was drawn, its rewards, and its state (solved, unsolved or flaky)."""

import io
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as write

from covey.monitor.view.groups import GroupIndex, ordered
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
_MOST_VISITS = 24
_MOST_TEXTS = 20_000
_COLUMNS = (
    "uid", "state", "forgotten", "visits", "first_step", "last_step", "first", "last", "gain", "best", "swing",
    "group",
)  # fmt: skip
_VISIT = ["step", "group", "reward", "lowest", "highest"]


class PromptIndex:
    """Numbers of each prompt [m], worked out anew when the table of groups has changed. Safe to use from several threads."""

    def __init__(self, index: GroupIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._groups: np.ndarray | None = None
        self._rows: dict[str, np.ndarray] = {}
        self._usual = 0.0
        self._orders: dict[str, np.ndarray] = {}
        self._texts: dict[tuple[Any, ...], str] = {}

    def refresh(self) -> None:
        """Work the numbers out ahead of the next request, if somebody has asked for them before."""
        if self._groups is not None:
            self.table(None)

    def table(
        self, threshold: float | None, sort: str | None = None
    ) -> tuple[dict[str, np.ndarray], float, np.ndarray]:
        """Columns [m] by name, with `sorted`, the places in that order; the threshold; the table of groups they are of."""
        groups = self._index.table()
        with self._lock:
            if self._groups is not groups:
                self._rows, self._usual, self._orders = numbers_of(groups), three_quarters(groups), {}
                self._groups = groups
            records, limit = self._rows, self._usual if threshold is None else threshold
            if sort is not None and sort not in self._orders:
                name, descending = ORDERS[sort]
                self._orders[sort] = ordered(records[name], descending)
            order = {} if sort is None else {"sorted": self._orders[sort]}
        return records | states_of(records, limit) | order, limit, groups

    def rows(self, *, state: str, sort: str, threshold: float | None, start: int, most: int) -> dict[str, Any]:
        """A part of the list of prompts, with their texts and last visits, and how many prompts are in each state."""
        records, limit, groups = self.table(threshold, sort)
        order = _select(records, state)
        part = order[start : start + most]
        texts = self._texts_of(groups, records["place"][part])
        return {
            "rows": [{**row, "prompt": text, "history": _history(records, groups, at)}
                     for at, text, row in zip(part.tolist(), texts, _records(records, part).to_pylist(), strict=True)],
            "next": start + most if start + most < len(order) else None,
            "matching": len(order),
            "prompts": len(records["uid"]),
            "threshold": limit,
            "counts": {name: int((records["state"] == at).sum()) for at, name in enumerate(STATES)}
            | {"forgotten": int(records["forgotten"].sum())},
            "files_left": self._index.pending,
        }  # fmt: skip

    def _texts_of(self, groups: np.ndarray, places: np.ndarray) -> list[str]:
        """The beginning of the prompt of each group; a file is opened only for texts that were not shown yet."""
        if len(self._texts) > _MOST_TEXTS:
            self._texts = {}
        cached = self._texts
        keys = [(*key, self._index.mark_of(key[1])) for key in groups[["uid", "step", "first_row"]][places].tolist()]
        new = [at for at, key in enumerate(keys) if key not in cached]
        read = prompts_of(self._index, groups, places[new].tolist(), names={"prompt": "prompt"})
        cached |= {
            keys[at]: beginning["prompt"] for at, beginning in zip(new, read, strict=True) if beginning["prompt"]
        }
        return [cached.get(key, "") for key in keys]

    def as_csv(self, *, state: str, sort: str, threshold: float | None) -> str:
        """Every prompt that passes, a line each; `last_step` and `group` say where its text and answers are."""
        records, _, _ = self.table(threshold, sort)
        out = io.BytesIO()
        plain = write.WriteOptions(include_header=False, quoting_style="none")  # numbers and words
        write.write_csv(_records(records, _select(records, state)), out, plain)
        return ",".join(_COLUMNS) + "\n" + out.getvalue().decode()


def three_quarters(groups: np.ndarray) -> float:
    """Three quarters of the way from the lowest reward of the run to the highest: 0.75 where rewards are 0 and 1."""
    scored = groups[np.isfinite(groups["lowest"]) & np.isfinite(groups["highest"])]
    if not len(scored):
        return 0.75
    low, high = float(scored["lowest"].min()), float(scored["highest"].max())
    return round(low + 0.75 * (high - low), 6)


def numbers_of(groups: np.ndarray) -> dict[str, np.ndarray]:
    """Record of each prompt [m] from its groups [n], which are in order of steps; groups without a score do not count."""
    scored = np.flatnonzero(np.isfinite(groups["reward"]))
    order = scored[np.argsort(groups["uid"][scored], kind="stable")]
    uid = groups["uid"][order]
    starts = np.flatnonzero(np.append(True, uid[1:] != uid[:-1])) if len(uid) else np.zeros(0, np.int64)
    visits = np.diff(np.append(starts, len(uid)))
    ends = starts + visits - 1
    reward = groups["reward"][order].astype(np.float64)
    each = (lambda of, values: of.reduceat(values, starts)) if len(starts) else (lambda of, values: np.zeros(0))
    mean = each(np.add, reward) / visits
    off = (reward - np.repeat(mean, visits)) ** 2
    last = groups[order[ends]]
    return {
        "uid": last["uid"],
        "visits": visits,
        "first": reward[starts],
        "last": reward[ends],
        "gain": reward[ends] - reward[starts],
        "best": each(np.maximum, reward),
        "swing": np.sqrt(each(np.add, off) / visits),
        "first_step": groups["step"][order[starts]],
        "last_step": last["step"],
        "group": last["group"],
        "lowest": last["lowest"],
        "highest": last["highest"],
        "place": order[ends],
        "start": starts,
        "order": order,
    }


def states_of(records: Mapping[str, np.ndarray], threshold: float) -> dict[str, np.ndarray]:
    """`state` [m], places in `STATES` by the newest group, and `forgotten` [m]: unsolved now, the mean of an earlier group was not."""
    limit = threshold - 1e-6 * abs(threshold)  # `lowest_passing` of covey.types, which PyTorch comes with
    state = np.where(records["lowest"] >= limit, 0, np.where(records["highest"] >= limit, 1, 2))
    return {"state": state, "forgotten": (records["best"] >= limit) & (state == 2)}


def _select(records: Mapping[str, np.ndarray], state: str) -> np.ndarray:
    """Places in `sorted` order of the prompts in a state, or of all."""
    order = records["sorted"]
    if state == "forgotten":
        forgotten: np.ndarray = order[records["forgotten"][order]]
        return forgotten
    return order[records["state"][order] == STATES.index(state)] if state in STATES else order


def _records(records: Mapping[str, np.ndarray], places: np.ndarray) -> pa.Table:
    """These prompts as a table of `_COLUMNS`; the hash as text, as it has more digits than JavaScript's numbers."""
    columns = {name: records[name][places] for name in _COLUMNS}
    return pa.table(columns | {"uid": columns["uid"].astype(str), "state": np.array(STATES)[columns["state"]]})


def _history(records: Mapping[str, np.ndarray], groups: np.ndarray, at: int) -> list[dict[str, Any]]:
    """The newest visits of a prompt, oldest first."""
    start, visits = int(records["start"][at]), int(records["visits"][at])
    places = records["order"][start + max(0, visits - _MOST_VISITS) : start + visits]
    return [dict(zip(_VISIT, visit, strict=True)) for visit in groups[_VISIT][places].tolist()]
