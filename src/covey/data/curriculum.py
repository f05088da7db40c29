"""Curricula: orders by difficulty, from a column or from the policy's outcomes. Also mixtures of several sets, and replay."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from covey.data.checks import row_at
from covey.data.live.dataset import LiveDataset
from covey.data.live.order import LiveOrder
from covey.data.order import BlockOrder, Order, Outcome, Permutation, Row, pass_on, permutation
from covey.errors import DataError, did_you_mean

WEIGHT_COLUMN, NAME_COLUMN = "dataset_weight", "dataset"
"""A mixture says of each row which set it is from, and how much of all prompts that set shall be."""
_LEARN_RATE = 0.5
_FIRST = 1024
"""Rows of a draw that are put in order at first: more than most rollouts take."""
_UNSEEN, _MASTERED, _UNSOLVED = 0.5, 0.05, 0.1
"""Weights of rows: never drawn; drawn, without signal, solved; drawn, without signal, unsolved."""


def order_of(
    dataset: Any, *, curriculum: str, seed: int, shuffle: bool, block_size: int, keeps_shares: bool = True
) -> Order:
    """The order that `curriculum` names, one for each set of a mixture. Raises DataError where it cannot be built.

    Without `keeps_shares` a mixture's rows come like those of any set, each once an epoch.
    """
    if isinstance(dataset, LiveDataset):
        base, share = parted(curriculum)
        if base != "none":
            raise DataError(
                f"curriculum={curriculum!r}: a live source takes none or replay:0.25 (a share of earlier rows)."
            )
        return LiveOrder(dataset, seed=seed, replay=share)
    if not hasattr(dataset, "__len__"):
        if curriculum != "none":
            raise DataError(f"curriculum={curriculum!r} needs a data set with a length; leave streaming out.")
        return BlockOrder(dataset, seed=seed, shuffle=shuffle, block_size=block_size)
    if not len(dataset):
        raise DataError("The data set is empty; there is nothing to draw from.")
    columns = getattr(dataset, "column_names", None) or []
    if keeps_shares and WEIGHT_COLUMN in columns and NAME_COLUMN in columns:
        return Mixture(dataset, curriculum=curriculum, seed=seed, shuffle=shuffle)
    return _finite(dataset, curriculum, seed, shuffle)


def _finite(dataset: Any, curriculum: str, seed: int, shuffle: bool) -> Order:
    is_column = curriculum in (getattr(dataset, "column_names", None) or ())
    base, share = (curriculum, None) if is_column else parted(curriculum)
    if share is not None:
        return Replay(dataset, _finite(dataset, base, seed, shuffle), share)
    if curriculum == "none":
        return Permutation(dataset, seed=seed, shuffle=shuffle)
    if curriculum == "frontier":
        return Frontier(dataset, seed=seed)
    return ByColumn(dataset, curriculum, seed=seed)


class ByColumn(Permutation):
    """Every epoch from low to high values of a column of numbers (`-column`: from high to low), ties in an order of the seed."""

    def __init__(self, dataset: Any, column: str, *, seed: int) -> None:
        name = column.removeprefix("-")
        have = list(dataset.column_names)
        if name not in have:
            raise DataError(
                f"curriculum={column!r} is neither none, nor frontier, nor a column of the data set, which has "
                f"{', '.join(have)}.{did_you_mean(name, have)}"
            )
        values = dataset[name][:]
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise DataError(
                    f"curriculum={column!r} needs numbers, and row {index} (counting from 0) has {value!r} there."
                )
        self._values = torch.tensor(values, dtype=torch.float64) * (-1 if column.startswith("-") else 1)
        super().__init__(dataset, seed=seed, shuffle=True)

    def _permuted(self, epoch: int) -> torch.Tensor:
        mixed = permutation(self.num_rows, self.seed, epoch)
        return mixed[torch.argsort(self._values[mixed], stable=True)]


class Frontier:
    """Rows that the policy sometimes solves come most often: they alone have a gradient (zero-variance groups have none).

    After each rollout a row's weight is the decayed share of its groups whose rewards differed, `w <- (w + signal) / 2`; rows
    never drawn count 0.5, and rows without signal keep 0.05 (solved) or 0.1 (unsolved), so that both are seen again as the
    policy moves. A rollout is drawn without replacement in proportion to the weights (Gumbel-top-k, Kool et al. 2019,
    <https://arxiv.org/abs/1903.06059>). As many draws as rows no longer have every row once.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.num_rows: int = len(dataset)
        self._drawn = torch.zeros(self.num_rows, dtype=torch.int32)
        self._signal = torch.full((self.num_rows,), torch.nan)
        self._score = torch.zeros(self.num_rows)
        self._rounds, self._position = 0, 0
        self._is_old = True
        self._rows = torch.arange(0)

    def next(self) -> tuple[str, Row]:
        """The uid `draws:row` of the next draw, and the row."""
        if self._is_old or self._position == self.num_rows:
            self._rounds, self._position, self._is_old = self._rounds + 1, 0, False
            self._rows = self._ranked(_FIRST)
        if self._position == len(self._rows):
            self._rows = self._ranked(self.num_rows)
        row = int(self._rows[self._position])
        self._position += 1
        self._drawn[row] += 1
        return f"{int(self._drawn[row]) - 1}:{row}", row_at(self.dataset, row)

    def learn(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record the outcomes of rows; the next draw depends on them."""
        for row, outcome in outcomes.items():
            if not outcome.is_judged:
                continue
            new = float(outcome.has_signal)
            before = float(self._signal[row])
            self._signal[row] = new if before != before else before + _LEARN_RATE * (new - before)
            self._score[row] = outcome.score
            self._is_old = True

    def weights(self) -> torch.Tensor:
        """[rows] in proportion to which rows are drawn."""
        floor = torch.where(self._score > 0.5, _MASTERED, _UNSOLVED)
        return torch.where(self._signal.isnan(), _UNSEEN, torch.maximum(self._signal, floor))

    def state_dict(self) -> dict[str, Any]:
        """The position, and of every row that was drawn: its draws, signal and score."""
        rows = self._drawn.nonzero()[:, 0]
        columns = {name: getattr(self, name)[rows].tolist() for name in ("_drawn", "_signal", "_score")}
        position = {"rounds": self._rounds, "position": self._position, "is_old": self._is_old}
        signal = [None if value != value else value for value in columns["_signal"]]  # JSON has no NaN
        seen = {"rows": rows.tolist(), "drawn": columns["_drawn"], "signal": signal, "score": columns["_score"]}
        return {**position, **seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = torch.tensor(state["rows"], dtype=torch.long)
        signal = [torch.nan if value is None else value for value in state["signal"]]
        for name, values, empty in (
            ("_drawn", state["drawn"], 0),
            ("_signal", signal, torch.nan),
            ("_score", state["score"], 0),
        ):
            tensor = getattr(self, name).fill_(empty)
            tensor[rows] = torch.tensor(values, dtype=tensor.dtype)
        self._rounds, self._position, self._is_old = state["rounds"], state["position"], state["is_old"]
        self._rows = torch.arange(0) if self._is_old else self._ranked(max(_FIRST, self._position))

    def _ranked(self, most: int) -> torch.Tensor:
        """The first `most` rows or more of all, in the order of a draw without replacement by weight."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self._rounds) % 2**63)
        uniform = torch.rand(self.num_rows, generator=generator, dtype=torch.float64)
        keys = self.weights().double().log_().sub_(uniform.clamp_min_(1e-300).log_().neg_().log_())
        rows = torch.arange(self.num_rows)
        if most < self.num_rows:  # a sort of a million rows takes half the time of a draw
            rows = (keys >= keys.topk(most, sorted=False).values.min()).nonzero()[:, 0]
        return rows[torch.argsort(keys[rows], descending=True, stable=True)]


class Mixture:
    """Several sets in one, each drawn so that its share of all prompts is its weight: always the set that lags most comes next.

    Each set has its own order and epochs.
    """

    def __init__(self, dataset: Any, *, curriculum: str, seed: int, shuffle: bool) -> None:
        names, weights = dataset[NAME_COLUMN][:], dataset[WEIGHT_COLUMN][:]
        self.num_rows: int = len(names)
        places: dict[str, list[int]] = {}
        shares: dict[str, float] = {}
        for row, (name, weight) in enumerate(zip(names, weights, strict=True)):
            places.setdefault(str(name), []).append(row)
            if shares.setdefault(str(name), weight) != weight:
                raise DataError(
                    f"{WEIGHT_COLUMN} of {name!r} is {shares[str(name)]} and, in row {row}, {weight}; a set has one weight."
                )
        if any(not isinstance(weight, int | float) or not 0 < weight < float("inf") for weight in shares.values()):
            raise DataError(f"{WEIGHT_COLUMN} must be numbers above 0; the sets have {shares}.")
        total = sum(shares.values())
        self._shares = {name: weight / total for name, weight in shares.items()}
        self._places = places
        self._orders = {
            name: _finite(_Part(dataset, rows), curriculum, seed + number, shuffle)
            for number, (name, rows) in enumerate(places.items())
        }
        self._drawn = dict.fromkeys(places, 0)

    def next(self) -> tuple[str, Row]:
        """The uid `epoch:row` of the next draw, `row` in the whole and `epoch` of its set, and the row."""
        total = sum(self._drawn.values()) + 1
        name = max(self._shares, key=lambda name: self._shares[name] * total - self._drawn[name])
        self._drawn[name] += 1
        uid, row = self._orders[name].next()
        epoch, _, local = uid.partition(":")
        return f"{epoch}:{self._places[name][int(local)]}", row

    def learn(self, outcomes: Mapping[int, Outcome]) -> None:
        """Pass on the outcomes of rows to the order of their set, where it adapts to them."""
        parts: dict[str, dict[int, Outcome]] = {}
        for row, outcome in outcomes.items():
            name, local = self._part_of(row)
            parts.setdefault(name, {})[local] = outcome
        for name, part in parts.items():
            pass_on(self._orders[name], "learn", part)

    def _part_of(self, row: int) -> tuple[str, int]:
        """The set of a row, and its place there."""
        candidates = ((name, bisect_left(rows, row), rows) for name, rows in self._places.items())
        return next((name, place) for name, place, rows in candidates if rows[place : place + 1] == [row])

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": dict(self._drawn),
            "orders": {name: order.state_dict() for name, order in self._orders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["orders"]) != set(self._orders):
            raise DataError("The checkpoint's mixture has other sets; resume with the same, or start a new run.")
        self._drawn = {name: int(count) for name, count in state["drawn"].items()}
        for name, order in self._orders.items():
            order.load_state_dict(state["orders"][name])


class _Part:
    """Some rows of a data set, as one of their own."""

    def __init__(self, dataset: Any, rows: Sequence[int]) -> None:
        self._dataset, self._places = dataset, rows
        self.column_names = dataset.column_names

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            column = self._dataset[key][:]  # a value at a time takes hundreds of times as long
            return [column[place] for place in self._places]
        return self._dataset[self._places[key]]


_SHARE = 0.25
_RARELY = 0.5
"""Mean reward, 1 for full marks, below which a prompt counts as solved rarely."""
_PATIENCE = 3
"""Replays in a row without signal after which a prompt leaves: a rare success is often missed once."""
_GAP, _GAP_SHARE = 256, 10
"""Draws that lie between two of the same row: so many, or a tenth of the rows if that is fewer; practice is best spaced."""
_NAMED = re.compile(r"(?:(?P<base>.+)\+)?replay(?::(?P<share>[^+]*))?")


def parted(curriculum: str) -> tuple[str, float | None]:
    """The curriculum without its replay, and the share of replays: `difficulty+replay:0.3` is `("difficulty", 0.3)`.

    None: no replay. Raises DataError for a share that is none.
    """
    match = _NAMED.fullmatch(curriculum)
    if match is None:
        return curriculum, None
    try:
        share = _SHARE if match["share"] is None else float(match["share"])
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise DataError(
            f"curriculum={curriculum!r}: the share of prompts that are replays lies between 0 and 1, as in replay:0.25."
        )
    return match["base"] or "none", share


class Replay:
    """Another order, in which up to `share` of the draws are rows that were solved rarely, the one not seen for longest first.

    A row enters when its group had both right and wrong answers and scored below one half; it leaves when it scores that or
    more, or had no signal in three replays. A row is not replayed before its last draw was judged and 256 draws, or a tenth of
    the rows, have passed. Where too few rows wait, the base order fills in, whose epochs still have
    every row.
    """

    def __init__(self, dataset: Any, base: Order, share: float) -> None:
        self.dataset, self.base, self.share = dataset, base, share
        self._gap = min(_GAP, (base.num_rows or 0) // _GAP_SHARE)
        self._waiting: dict[int, tuple[int, int]] = {}
        """Rows that were solved rarely, with their replays without signal since, and when they were judged; longest ago first."""
        self._drawn, self._replayed = 0, 0
        self._unjudged: dict[int, int] = {}
        """Rows of the pool that were replayed since the last outcomes, and their replays without signal."""

    @property
    def num_rows(self) -> int | None:
        return self.base.num_rows

    def next(self) -> tuple[str, Row]:
        """The uid and the row of the next draw; a replay's uid is `r0:row`, counting replays."""
        self._drawn += 1
        row, (dull, since) = next(iter(self._waiting.items()), (-1, (0, self._drawn)))  # the last of these is never due
        if self._drawn - since > self._gap and self._replayed + 1 <= self.share * self._drawn:
            del self._waiting[row]
            self._unjudged[row] = dull
            self._replayed += 1
            return f"r{self._replayed - 1}:{row}", row_at(self.dataset, row)
        return self.base.next()

    def learn(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record the outcomes of rows, and pass them on to an order that adapts to them."""
        for row, outcome in outcomes.items():
            dull = self._unjudged.pop(row, self._waiting.pop(row, (None, 0))[0])
            if not outcome.is_judged and dull is not None:
                self._waiting[row] = (dull, self._drawn)
            if not outcome.is_judged or outcome.score >= _RARELY:
                continue
            if outcome.has_signal:
                self._waiting[row] = (0, self._drawn)
            elif dull is not None and dull + 1 < _PATIENCE:
                self._waiting[row] = (dull + 1, self._drawn)
        pass_on(self.base, "learn", outcomes)

    def state_dict(self) -> dict[str, Any]:
        waiting = [[row, dull, since] for row, (dull, since) in self._waiting.items()]
        unjudged = [[row, dull] for row, dull in self._unjudged.items()]
        counts = {"drawn": self._drawn, "replayed": self._replayed}
        return {"base": self.base.state_dict(), **counts, "waiting": waiting, "unjudged": unjudged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self._drawn, self._replayed = int(state["drawn"]), int(state["replayed"])
        self._waiting = {int(row): (int(dull), int(since)) for row, dull, since in state["waiting"]}
        self._unjudged = {int(row): int(dull) for row, dull in state["unjudged"]}
