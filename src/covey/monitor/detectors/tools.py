"""Tool collapse: a model that gave up its tools, calls them in loops, or gets only errors."""

from dataclasses import dataclass
from statistics import fmean

from covey.monitor.history import History
from covey.types import Alert


@dataclass(frozen=True)
class ToolCollapse:
    """`tool_collapse`: over `window` steps no tool is called, the same call is made over and over, or nearly every call fails.

    Never called: in `patient` steps from the start of the run, or in `window` steps after it had been called. A completion loops when
    it makes one call with the same arguments three times or more.
    """

    loops: float = 0.3
    failures: float = 0.9
    window: int = 5
    patient: int = 20

    def __call__(self, seen: History) -> Alert | None:
        calls = seen["tools/call_frequency"]
        last = calls.last(self.window)
        if len(last) < self.window:
            return None
        failed, looping = fmean(seen["tools/failure_frequency"].last(self.window) or [0.0]), seen["tools/looping"]
        repeated = fmean(looping.last(self.window) or [0.0])
        evidence = {"calls_per_completion": fmean(last), "failed": failed, "looping": repeated}
        if max(last) == 0.0:
            was_called = sum(calls.start(self.window)) > 0
            if not was_called and calls.count < self.patient:
                return None
            sentence = "tools are no longer called" if was_called else f"no tool was called in {calls.count} steps"
            advice: tuple[str, ...] = (
                "show in the prompt when a tool helps, or teach a few calls first (covey sft); GRPO cannot find what is never drawn",
                "raise the temperature, or num_generations, so that some completions call a tool",
                "see whether answers without a tool earn as much",
            )
            return seen.alert("tool_collapse", "warning", sentence, advice, **evidence)
        if repeated >= self.loops:
            sentence = f"{repeated:.0%} of completions make the same call three times or more"
            advice = (
                "look at such a conversation in covey view: a tool may answer with nothing new",
                "bound the calls: max_tool_calling_iterations, or let the reward charge for calls",
            )
            return seen.alert("tool_collapse", "warning", sentence, advice, **evidence)
        if failed >= self.failures:
            sentence = f"{failed:.0%} of the calls of tools fail"
            advice = (
                "read the errors in covey view: arguments of another form, or a tool that is down",
                "say in the tool's docstring what its arguments look like",
            )
            return seen.alert("tool_collapse", "warning", sentence, advice, **evidence)
        return None
