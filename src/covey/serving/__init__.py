"""The native engine as an OpenAI-compatible endpoint. Needs the extra `serve`."""

from covey.serving.agents import AgentSampler
from covey.serving.endpoint import Endpoint
from covey.serving.engine import Call
from covey.serving.episodes import Episode, Recorded, episodes_of
from covey.serving.limits import Limits
from covey.serving.traces import Trace, lines_of, read_traces

__all__ = [
    "AgentSampler",
    "Call",
    "Endpoint",
    "Episode",
    "Limits",
    "Recorded",
    "Trace",
    "episodes_of",
    "lines_of",
    "read_traces",
]
