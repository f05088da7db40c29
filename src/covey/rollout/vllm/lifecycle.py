"""Sleep mode of a vLLM engine as a state machine, where level 2 drops the weights, the bias that bans a token, and the limits of temperatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from covey.errors import ConfigError, ServerError
from covey.rollout.sampler import SamplingParams

State = Literal["awake", "asleep(1)", "asleep(2)", "weights are back", "synced"]

NEVER = -100.0
"""Logit bias of a token that no completion may hold; OpenAI's interface takes no lower one."""
COLDEST, HOTTEST = 0.01, 2.0
"""Lowest temperature above 0 at which vLLM draws, to which it raises lower ones, and the highest that it takes."""


@dataclass(eq=False)
class Sleep:
    """`awake -> asleep(1|2) -> weights are back -> synced -> awake`; from level 1 the old weights may also be restored.

    `engine` has vLLM's `sleep(level)` and `wake_up(tags)`. Each step raises ServerError in a state from which it is not allowed.
    """

    engine: Any
    state: State = "awake"

    @property
    def is_empty(self) -> bool:
        """True if the engine holds no weights, or not all of them."""
        return self.state in ("asleep(2)", "weights are back")

    def sleep(self, level: int) -> None:
        """Free device memory: level 1 keeps the weights in host memory, level 2 drops them. No effect if asleep."""
        if self.state.startswith("asleep"):
            return
        self._expect("awake", "synced")
        if level not in (1, 2):
            raise ValueError(f"sleep level {level} is not 1 or 2.")
        self.engine.sleep(level)
        self.state = "asleep(1)" if level == 1 else "asleep(2)"

    def sync(self, send: Callable[[], None]) -> None:
        """Allocate the weights, fill them by `send`, then allocate the KV cache. Can be repeated after an error."""
        if self.state.startswith("asleep"):
            self.engine.wake_up(["weights"])
            self.state = "weights are back"
        was_awake = self.state == "awake"
        send()
        if not was_awake:
            self.state = "synced"
            self._wake_cache()

    def wake(self) -> None:
        """Wake with the old weights, after level 1 only. No effect if awake."""
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


def refuse_temperature(params: SamplingParams) -> None:
    """Raise ConfigError for a temperature that vLLM raises, so that its log-probabilities would be those of another one, or refuses."""
    if 0 < params.temperature < COLDEST:
        raise ConfigError(
            f"temperature is {params.temperature}, and vLLM draws at no less than {COLDEST}; give that, or 0 for greedy decoding."
        )
    if params.temperature > HOTTEST:
        raise ConfigError(
            f"temperature is {params.temperature}, and vLLM draws at no more than {HOTTEST:g}; give that or less, or leave use_vllm out."
        )
