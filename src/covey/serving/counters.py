"""Metrics of an endpoint in Prometheus' text format."""

import threading
from collections import Counter
from collections.abc import Mapping

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_HELP = {
    "covey_requests_total": "Requests by path and status.",
    "covey_cancelled_total": "Requests whose client went away.",
    "covey_prompt_tokens_total": "Tokens of prompts that were answered.",
    "covey_completion_tokens_total": "Tokens that were written.",
}


class Counters:
    """Counts and times of requests; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds, self._num_timed = 0.0, 0

    def add(self, name: str, value: float = 1, **labels: object) -> None:
        with self._lock:
            self._counts[name, tuple((key, str(held)) for key, held in labels.items())] += value  # type: ignore[assignment]

    def took(self, seconds: float) -> None:
        """An answered group took this long, waiting included."""
        with self._lock:
            self._seconds += seconds
            self._num_timed += 1
            self._buckets[next((bound for bound in _SECONDS if seconds <= bound), float("inf"))] += 1

    @property
    def mean_seconds(self) -> float:
        """Mean time of a group so far; 1 before the first."""
        with self._lock:
            return self._seconds / self._num_timed if self._num_timed else 1.0

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """The page; `gauges` are names with their help and present value."""
        lines: list[str] = []
        with self._lock:
            for name, help_text in _HELP.items():
                lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
                samples = [(labels, value) for (held, labels), value in self._counts.items() if held == name]
                lines += [f"{name}{_labels(labels)} {value:.15g}" for labels, value in samples or [((), 0)]]
            name = "covey_request_seconds"
            lines += [f"# HELP {name} Seconds of a prompt's answers, waiting included.", f"# TYPE {name} histogram"]
            total = 0
            for bound in (*_SECONDS, float("inf")):
                total += self._buckets[bound]
                lines.append(f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {total}')
            lines += [f"{name}_sum {self._seconds:.15g}", f"{name}_count {self._num_timed}"]
        for name, (help_text, value) in gauges.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", f"{name} {value:.15g}"]
        return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    """`path` and `status` come from the server itself, never from a client, so nothing is escaped."""
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels) + "}" if labels else ""
