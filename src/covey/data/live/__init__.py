"""Prompts from sources that grow while a run trains: files, folders, queues, iterables, and the user's own in ten lines."""

from covey.data.live.dataset import LiveDataset as LiveDataset
from covey.data.live.dataset import follow as follow
from covey.data.live.sources import Source as Source

__all__ = ["LiveDataset", "Source", "follow"]
