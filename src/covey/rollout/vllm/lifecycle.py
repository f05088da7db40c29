"""Sleep of a vLLM engine as one state machine: level 2 drops the weights, so that only a sync leads back to awake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from covey.errors import ServerError

State = Literal["awake", "asleep(1)", "asleep(2)", "weights are back", "synced"]


@dataclass(eq=False)
class Sleep:
    """`awake -> asleep(1|2) -> weights are back -> synced -> awake`; from level 1 the weights may also wake as they were.

    `engine` has vLLM's `sleep(level)` and `wake_up(tags)`. Each step raises ServerError from a state that it does not follow.
    """

    engine: Any
    state: State = "awake"

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 keeps the weights in the host's memory, level 2 drops them. Asleep already: nothing."""
        if self.state.startswith("asleep"):
            return
        self._expect("awake", "synced")
        if level not in (1, 2):
            raise ValueError(f"sleep level {level} is not 1 or 2.")
        self.engine.sleep(level)
        self.state = "asleep(1)" if level == 1 else "asleep(2)"

    def sync(self, send: Callable[[], None]) -> None:
        """Make room for weights, let `send` bring them, then wake the cache. Left half done, it can be begun again."""
        if self.state.startswith("asleep"):
            self.engine.wake_up(["weights"])
            self.state = "weights are back"
        was_awake = self.state == "awake"
        send()
        if not was_awake:
            self.state = "synced"
            self._wake_cache()

    def wake(self) -> None:
        """Wake as it fell asleep, which only level 1 allows. Awake already: nothing."""
        if self.state == "awake":
            return
        self._expect("asleep(1)", "synced")
        if self.state == "asleep(1)":
            self.engine.wake_up(["weights"])
        self._wake_cache()

    def _wake_cache(self) -> None:
        self.engine.wake_up(["kv_cache"])
        self.state = "awake"

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            raise ServerError(
                f"The vLLM engine is {self.state}: level-2 sleep dropped its weights, so they must be sent before it goes on."
            )
