"""`covey.sandbox`, by the name that it had first."""

from covey.sandbox import Isolation, Result, Sandbox, isolation, run

__all__ = ["Isolation", "Result", "Sandbox", "isolation", "run"]
