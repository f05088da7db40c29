"""Triton's interpreter as the CPU backend that vLLM's second model runner asks for: with this folder on the path of a Python that has vLLM
and triton, the runner computes on a CPU. vLLM means triton-cpu, whose backend has this name.
"""

import importlib.util
import os

if importlib.util.find_spec("triton") is not None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "TORCH_COMPILE_DISABLE": "1"}
    from triton import backends

    class Driver:
        """A device that is there; nothing is compiled for it."""

        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)
