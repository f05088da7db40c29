"""A tool, an environment with it, and models that call it."""

from environments.acting import trained_on

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Sum:
    """An environment with the tool `add`, which scores its own episode."""

    def reset(self, **row):
        self.calls = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.calls.append((a, b))
        return a + b

    def get_reward(self) -> float:
        return float(len(self.calls))


def shown(tools: str = "add ") -> str:
    """The prompt as the template writes it."""
    return f"<|im_start|>system\nTools: {tools}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def bridge(result: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def calling(result: str = "7", call: str = CALL, tools: str = "add ", **made):
    """A model that calls a tool and, when it has read `result`, says it."""
    before = shown(tools)
    return trained_on(((before, call), (before + call + bridge(result), f"{result}<|im_end|>")), **made)
