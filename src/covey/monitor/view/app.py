"""The server: a page, its scripts, and JSON for them. Reads run folders; writes nothing."""

import contextlib
import json
import mimetypes
from collections.abc import AsyncIterator, Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from covey.errors import CoveyError
from covey.files.bounded import finite
from covey.monitor.view import browsing
from covey.monitor.view.about_run import changed_options
from covey.monitor.view.access import Guard, flag, number, one_of, text, whole
from covey.monitor.view.curves import AXES, as_csv, curve_of, mean_of
from covey.monitor.view.distributions import correlations_of, lengths_of, policy_of
from covey.monitor.view.groups import SORTS
from covey.monitor.view.prompts import ORDERS, STATES
from covey.monitor.view.reading import Library, RunView, differences
from covey.monitor.view.series import SeriesIndex
from covey.runs import previews

_SECONDS = "seconds/"
_MEMORY = "memory/"
_STEP = "seconds/step"


def phases_of(series: SeriesIndex, points: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """By bucket of steps: mean seconds of each phase (`other`: the rest of the step), tokens a second, and the
    peak of each memory. At most `points` buckets; lists [k] under `steps`, `seconds`, `memory`, `speed`."""
    names = [name for name in series.names() if name.startswith(_SECONDS) and name != _STEP]
    steps, whole = _between(*series.column(_STEP), low, high)
    empty: dict[str, Any] = {"steps": [], "seconds": {}, "memory": {}, "speed": []}
    if not len(steps):
        return empty
    width = max(1, -(-int(steps[-1] - steps[0] + 1) // points))
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    counts = np.diff(np.append(starts, len(steps)))
    mean = lambda values: np.add.reduceat(values, starts) / counts
    seconds = {name.removeprefix(_SECONDS): mean(_at(series, name, steps)) for name in names}
    rest = mean(whole) - sum(seconds.values(), np.zeros(len(starts)))
    memory = {name.removeprefix(_MEMORY): np.fmax.reduceat(_at(series, name, steps), starts)
              for name in series.names() if name.startswith(_MEMORY)}  # fmt: skip
    speed = mean(_at(series, "num_tokens", steps)) / np.maximum(mean(whole), 1e-9)
    return {
        "steps": steps[starts].tolist(),
        "seconds": {name: part.tolist() for name, part in (seconds | {"other": np.maximum(rest, 0.0)}).items()},
        "memory": {name: part.tolist() for name, part in memory.items()},
        "speed": speed.tolist(),
    }


def _between(
    steps: np.ndarray, values: np.ndarray, low: float | None, high: float | None
) -> tuple[np.ndarray, np.ndarray]:
    keep = np.isfinite(values)
    if low is not None:
        keep &= steps >= low
    if high is not None:
        keep &= steps <= high
    return steps[keep], values[keep]


def _at(series: SeriesIndex, name: str, steps: np.ndarray) -> np.ndarray:
    """A metric at these steps [n]; 0 where it is not known."""
    theirs, values = series.column(name)
    if not len(theirs):
        return np.zeros(len(steps))
    places = np.minimum(np.searchsorted(theirs, steps), len(theirs) - 1)
    return np.where((theirs[places] == steps) & np.isfinite(values[places]), values[places], 0.0)


_PAGE = Path(__file__).parent / "page"
_MOST_POINTS = 5000
_MOST_CURVES = 64
_MOST_RUNS = 256
_MOST_ROWS = 200


def make_app(library: Library, token: str | None = None, *, watch: bool = True) -> ASGIApp:
    """The ASGI application. With `watch` it indexes in the background while it runs."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if watch:
            library.start()
        yield
        library.stop()

    ask = {name: _json(call, library) for name, call in _CALLS.items()}
    routes: list[Any] = [Route(f"/api/{name}", endpoint) for name, endpoint in ask.items()]
    mimetypes.add_type("text/javascript", ".js")  # a machine's own table may say text/plain, which no browser runs
    routes.append(Mount("/", StaticFiles(directory=_PAGE, html=True, follow_symlink=True)))  # uv can install links
    return Guard(Starlette(routes=routes, lifespan=lifespan), token)


def runs(library: Library, request: Request) -> Any:
    """The table of runs."""
    return {"runs": [run.overview() for run in library.find()], "sorts": list(SORTS)}


def series(library: Library, request: Request) -> Any:
    """Curves of `run` (repeated) times `metric` (repeated), between `from` and `to`, in about `points` points each."""
    names, metrics = _values_of(request, "run", _MOST_RUNS), _values_of(request, "metric", _MOST_CURVES)
    points = whole(request, "points", 600, low=10, high=_MOST_POINTS)
    window = whole(request, "smooth", 1, low=1, high=10**9)
    low, high = number(request, "from"), number(request, "to")
    axis = one_of(request, "x", AXES, AXES[0])
    pairs = [(library.get(name), metric) for metric in metrics for name in names[:_MOST_CURVES]]
    sets = _seeds([library.get(name) for name in names]) if flag(request, "seeds") else []
    joined = {run.name for runs in sets for run in runs}
    curves = chain(
        (mean_of(runs, metric, points, window, low, high, axis) for metric in metrics for runs in sets),
        (
            curve_of(run, metric, points, window, low, high, axis)
            for run, metric in pairs[:_MOST_CURVES]
            if run.name not in joined
        ),
    )
    shown = list(islice(curves, _MOST_CURVES))
    num_runs = len(set(request.query_params.getlist("run"))) - sum(len(runs) - 1 for runs in sets)
    return {"curves": shown, "left_out": num_runs * len(metrics) - len(shown)}


def _values_of(request: Request, name: str, most: int) -> list[str]:
    """The values of a parameter that may be repeated: each once, and no more than are shown."""
    return list(dict.fromkeys(request.query_params.getlist(name)))[:most]


def _seeds(runs: list[RunView]) -> list[list[RunView]]:
    """Those of the runs that differ in their seed alone, two or more together."""
    families: dict[str, list[RunView]] = {}
    for run in runs:
        if run.family is not None:
            families.setdefault(run.family, []).append(run)
    return [family for family in families.values() if len(family) > 1]


def values(library: Library, request: Request) -> Any:
    """Every value of `metric` (repeated) of each `run` (repeated), as CSV."""
    names, metrics = _values_of(request, "run", _MOST_RUNS), _values_of(request, "metric", _MOST_CURVES)
    if len(names) * len(metrics) > _MOST_RUNS or len(set(request.query_params.getlist("run"))) > _MOST_RUNS:
        raise HTTPException(400, f"This asks for more than {_MOST_RUNS} columns; choose fewer runs.")
    pairs = [(library.get(name), metric) for metric in metrics for name in names]
    text = as_csv({f"{run.name}: {metric}": run.column(metric) for run, metric in pairs})
    return _csv(text, "covey.csv")


def alerts(library: Library, request: Request) -> Any:
    """Alerts of each `run`, by step, so that the last ones are the newest of all runs."""
    names = _values_of(request, "run", _MOST_RUNS)
    rows = [{"run": name, **row} for name in names for row in library.get(name).alerts.rows()]
    return {"alerts": sorted(rows, key=lambda row: row["step"])}


def rollouts(library: Library, request: Request) -> Any:
    """A part of the list of groups: filtered, sorted, searched."""
    filters = {
        "from_step": number(request, "from"),
        "to_step": number(request, "to"),
        "min_reward": number(request, "min_reward"),
        "max_reward": number(request, "max_reward"),
        "truncated": flag(request, "truncated"),
        "signal": flag(request, "signal"),
        "uid": whole(request, "uid", None, low=0, high=2**64 - 1),
    }
    return browsing.rows(
        library.get(text(request, "run")).groups,
        filters,
        sort=one_of(request, "sort", list(SORTS), "newest"),
        text=text(request, "search", ""),
        start=whole(request, "start", 0, low=0, high=2**53),
        most=whole(request, "most", 50, low=1, high=_MOST_ROWS),
    )


def rollout(library: Library, request: Request) -> Any:
    """One group with all its completions and their per-token columns."""
    run = library.get(text(request, "run"))
    step = whole(request, "step", None, low=0, high=2**53)
    group = whole(request, "group", 0, low=0, high=2**31 - 1)
    return browsing.group_of(run.path, run.groups, step or 0, group)


def media(library: Library, request: Request) -> Any:
    """An image, a sound or a video of a recorded prompt, by its name in `rollouts/`; never anything but PNG, JPEG, WAV or GIF."""
    content, kind = previews.read(library.get(text(request, "run")).path / "rollouts", text(request, "name"))
    return Response(content, media_type=kind)


def spread(library: Library, request: Request) -> Any:
    """Distribution of rewards over the steps."""
    return browsing.spread_of(library.get(text(request, "run")).groups, whole(request, "points", 200, low=2, high=2000))


def prompts(library: Library, request: Request) -> Any:
    """A part of the list of prompts with their history; all of them as CSV with `csv=1`."""
    about: dict[str, Any] = {
        "state": one_of(request, "state", ("all", *STATES, "forgotten"), "all"),
        "sort": one_of(request, "sort", list(ORDERS), "last seen"),
        "threshold": number(request, "threshold"),
    }
    history = library.get(text(request, "run")).prompts
    if flag(request, "csv"):
        return _csv(history.as_csv(**about), "prompts.csv")
    start, most = whole(request, "start", 0, low=0, high=2**53), whole(request, "most", 50, low=1, high=_MOST_ROWS)
    return history.rows(**about, start=start, most=most) | {"orders": list(ORDERS)}


def lengths(library: Library, request: Request) -> Any:
    """Distribution of completion lengths over the steps."""
    samples, about = _samples(library, request)
    return lengths_of(samples) | about


def correlations(library: Library, request: Request) -> Any:
    """Correlation of rewards, and the distribution of one of them (`score`) over the steps."""
    samples, about = _samples(library, request)
    return correlations_of(samples, text(request, "score", "") or None) | about


def policy(library: Library, request: Request) -> Any:
    """Entropy and ratio by token position, and their histograms."""
    samples, about = _samples(library, request, has_tokens=True)
    return policy_of(samples) | about


def _samples(library: Library, request: Request, *, has_tokens: bool = False) -> tuple[Any, Any]:
    run = library.get(text(request, "run"))
    most = whole(request, "most", 24, low=2, high=60)
    return run.samples.read(most, number(request, "from"), number(request, "to"), has_tokens=has_tokens)


def _csv(content: str, name: str) -> Response:
    return Response(content, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{name}"'})


def phases(library: Library, request: Request) -> Any:
    """Time and memory by phase of the steps between `from` and `to`."""
    run = library.get(text(request, "run"))
    points = whole(request, "points", 200, low=2, high=2000)
    return phases_of(run.series, points, number(request, "from"), number(request, "to"))


def facts(library: Library, request: Request) -> Any:
    """`run.json`, the options that differ from their defaults, the last events."""
    run = library.get(text(request, "run"))
    run_json = run.manifest()
    return {
        "manifest": run_json,
        "changed": changed_options(run_json),
        "events": run.events.rows()[-200:],
        "troubles": run.troubles(),
    }


def diff(library: Library, request: Request) -> Any:
    """Differences between the manifests of the named runs."""
    names = _values_of(request, "run", _MOST_RUNS)
    return {"runs": names, "rows": differences([library.get(name) for name in names])}


_CALLS: dict[str, Callable[[Library, Request], Any]] = {
    call.__name__: call
    for call in (
        runs, series, values, alerts, rollouts, rollout, media, spread, phases, facts, diff, prompts, lengths,
        correlations, policy,
    )
}  # fmt: skip


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode()


def _json(call: Callable[[Library, Request], Any], library: Library) -> Callable[[Request], Response]:
    """An endpoint; not a coroutine, so Starlette runs it on a thread."""

    def endpoint(request: Request) -> Response:
        library.touch()  # its indexing yields
        try:
            result = call(library, request)
            return result if isinstance(result, Response) else _Json(result)
        except CoveyError as error:
            return _Json({"error": str(error)}, 404)
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 -- a damaged folder does not hide the others
            return _Json({"error": f"This cannot be shown: {type(error).__name__}: {str(error)[:300]}."}, 422)

    return endpoint
