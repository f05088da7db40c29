"""The real server as a fixture of every file here."""

from real_server import running

__all__ = ["running"]
