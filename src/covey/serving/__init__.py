"""The native engine as an OpenAI-compatible endpoint. Needs the extra `serve`."""

from __future__ import annotations

from covey.serving.endpoint import Endpoint
from covey.serving.engine import Call
from covey.serving.episodes import Episode, Recorded, episodes_of
from covey.serving.limits import Limits

__all__ = ["Call", "Endpoint", "Episode", "Limits", "Recorded", "episodes_of"]
