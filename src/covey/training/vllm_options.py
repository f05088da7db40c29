"""The `vllm_*` options as arguments of a sampler, for `build.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.config import GRPOConfig
from covey.process.world import World


def vllm_backend(args: GRPOConfig) -> str:
    """Sampler backend of `vllm_mode`."""
    return "vllm-server" if args.vllm_mode == "server" else "vllm"


def vllm_options(args: GRPOConfig, world: World, server: Any = None) -> dict[str, Any]:
    """Options of vLLM, in this process or as a server."""
    shared: dict[str, Any] = {"regex": args.vllm_structured_outputs_regex}
    if args.vllm_mode == "server":
        return shared | {
            "base_url": args.vllm_server_base_url,
            "host": args.vllm_server_host,
            "port": args.vllm_server_port,
            "timeout": args.vllm_server_timeout,
            "group_port": args.vllm_group_port,
            "transport": args.vllm_transport,
            "directory": args.vllm_directory or f"{args.output_dir}/vllm-weights",
            "run": args.run_name or Path(str(args.output_dir)).name,
            "attest": args.vllm_attestation,
            "deadlines": args.vllm_deadlines if isinstance(args.vllm_deadlines, dict) else None,
            "world": world,
            "server": server,
        }
    return shared | {
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_length": args.vllm_max_model_length,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "model_impl": args.vllm_model_impl,
        "sleeps": args.vllm_enable_sleep_mode,
    }
