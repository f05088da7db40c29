"""A vLLM server as a sampler needs it: its description, its state, and the calls that change it, each with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any

from covey.errors import ConfigError, ServerError
from covey.files.bounded import read_json
from covey.process.addresses import listens_everywhere
from covey.rollout.sampler import SamplingParams
from covey.rollout.vllm.client import Client, NoAnswerError, RefusedError
from covey.rollout.vllm.lifecycle import refuse_temperature

logger = logging.getLogger(__name__)

REQUIRED = (
    *("/v1/completions", "/v1/models", "/server_info", "/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
    *("/update_weight_version", "/weight_info"),
)
QUANTIZES_ITSELF = frozenset(
    {"fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "experts_int8", "online"}
)  # fmt: skip
"""Methods of `--quantization` by which vLLM 0.32 quantizes weights in floating point as they are loaded, and no checkpoint is quantized."""
SALTED = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Stores of keys and values whose names have the salt of a request in them, so that none of other weights is read."""
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Answers of a server or a proxy that takes no more requests now, as vLLM's with `--max-num-queued-reqs`."""
DIGEST, RELOAD, RELOAD_FOLDER = "covey_digest", "covey_reload", "covey_reload_folder"
JOIN, TRY, RECEIVE, SEES = "covey_join", "covey_try", "covey_receive", "covey_sees"
"""Methods of the worker extension in servers started by `covey serve-vllm`."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Description of a server, from `/server_info` and `/v1/models`."""

    model: str
    """Model name for requests."""
    folder: str
    """Path of the model on the server's machine."""
    dtype: str
    device: str
    max_model_length: int | None
    tensor_parallel: int
    data_parallel: int
    logprobs_mode: str
    max_logprobs: int
    max_lora_rank: int
    """0: adapters are not enabled."""
    max_loras: int
    has_digest: bool
    quantization: str | None = None
    """vLLM's name of the method by which its weights are quantized; None: they are not."""
    cache_dtype: str = "auto"
    """Type of its KV cache, such as fp8; `auto`: `dtype`."""
    drafts_by: str | None = None
    """Method by which it drafts tokens that its model then accepts or rejects (speculative decoding); None: it does not."""
    connector: str | None = None
    """Store of keys and values that it reads before it computes them; None: its own prefix cache alone."""
    takes_seeds: bool = True
    """False on a CPU that computes prompts in pieces: vLLM 0.32 would end at one with a seed."""
    returns_experts: bool = False
    """True if answers have the experts of each token."""

    @property
    def is_float32(self) -> bool:
        """True if weights, cache and computation are in float32, so that log-probabilities are to equal a plain forward's."""
        return self.dtype == "float32" and self.quantization is None and self.cache_dtype in ("auto", "float32")


@dataclass(eq=False)
class Server:
    """A connected server. Its methods raise ServerError if a call fails or does not answer in time."""

    client: Client
    facts: ServerInfo
    has_refused: bool = False
    """True once it was too busy for a request, which is said once."""

    @staticmethod
    def connect(client: Client, seconds: float, check_stop: Any = lambda: None) -> Server:
        """Wait for the server and read its description. Raises ConfigError if it lacks endpoints for updates, ServerError if absent."""
        client.wait_until_up(seconds, check_stop)
        if reason := _why_unfit(client):
            raise ConfigError(reason)
        facts = _read_info(client)
        if facts.connector not in (None, *SALTED):
            raise ConfigError(
                f"The server at {client.address} reads keys and values from {facts.connector}, also those that other weights computed; start it "
                "without --kv-transfer-config."
            )
        return Server(client, facts)

    def expect_unchanged(self) -> None:
        """Raise ServerError for a server that was started again with other options than this run began with, or without endpoints for updates."""
        if reason := _why_unfit(self.client):
            raise ServerError(reason)
        now = vars(_read_info(self.client))
        changed = [
            f"{name} {now[name]} instead of {value}" for name, value in vars(self.facts).items() if now[name] != value
        ]
        if changed:
            raise ServerError(
                f"The server at {self.client.address} was started again with {', '.join(changed)}; start it as before, or resume "
                "the run, which then goes by what it has."
            )

    @property
    def has_digests(self) -> bool:
        """True if the digests of its only worker can be compared with those of whole weights."""
        return self.facts.has_digest and self.facts.tensor_parallel == 1 and self.facts.quantization is None

    @property
    def is_packed(self) -> bool:
        """True for a quantized checkpoint, into which weights in floating point cannot be loaded."""
        return self.facts.quantization not in (None, *QUANTIZES_ITSELF)

    def version(self) -> str:
        """Label of the current weights, set by the last update; `default` before the first."""
        reply = self.client.get("/weight_info")
        return str(reply.get("weight_version")) if isinstance(reply, Mapping) else str(reply)

    def is_paused(self) -> bool:
        reply = self.client.get("/is_paused")
        return bool(reply.get("is_paused")) if isinstance(reply, Mapping) else False

    def pause(self) -> None:
        """Drain running requests, start no new ones, and return once the server reports that it is paused."""
        seconds = self.client.deadlines.pause
        self._change("/pause", {"mode": "wait"}, seconds=seconds)
        until = time.monotonic() + seconds
        while not self.is_paused():
            if time.monotonic() > until:
                raise ServerError(
                    f"The server at {self.client.address} does not say that it is paused within {seconds:g} seconds."
                )
            time.sleep(0.05)

    def resume(self) -> None:
        self._change("/resume", seconds=self.client.deadlines.resume)
        if self.is_paused():
            raise ServerError(f"The server at {self.client.address} stays paused after /resume.")

    def _change(self, path: str, query: Mapping[str, Any] | None = None, *, seconds: float) -> None:
        """A POST, sent once. Without an answer, the caller reads its effect from the server's state."""
        try:
            self.client.post(path, query=query, seconds=seconds)
        except NoAnswerError as error:
            logger.warning("%s Its state is read instead.", error)

    def call_workers(self, method: str, *, seconds: float, **arguments: Any) -> list[Any]:
        """Results of `method` by worker. vLLM has no timeout: it would take a late answer for that of the next call."""
        reply = self.client.post("/collective_rpc", {"method": method, "kwargs": arguments}, seconds=seconds)
        return list(reply.get("results", [])) if isinstance(reply, Mapping) else []

    def reload(self, folder: str, num_bytes: int) -> None:
        """Load weights from a folder at this path on the server's machine."""
        seconds = self.client.deadlines.update_of(num_bytes)
        if self.facts.has_digest:
            self.call_workers(RELOAD_FOLDER, seconds=seconds, folder=folder)
        else:
            self.call_workers("reload_weights", seconds=seconds, weights_path=folder, is_checkpoint_format=True)

    def reload_files(self, files: Sequence[str], num_bytes: int) -> None:
        """Load the weights of these safetensors files, by paths on the server's machine; the other weights stay. Needs the extension."""
        self.call_workers(RELOAD, seconds=self.client.deadlines.update_of(num_bytes), files=list(files))

    def forget_prefixes(self) -> None:
        """Clear the prefix cache, which the previous weights computed."""
        reply = self.client.post(
            "/reset_prefix_cache", query={"reset_external": True}, seconds=self.client.deadlines.finish
        )
        if not (isinstance(reply, Mapping) and reply.get("success")):
            raise ServerError(
                f"The server at {self.client.address} did not reset its prefix cache: requests still hold blocks of it."
            )

    def set_version(self, label: str) -> None:
        self.client.post("/update_weight_version", {"new_version": label}, seconds=self.client.deadlines.finish)

    def digests(self) -> list[Mapping[str, str]] | None:
        """Digests of each block's weights, by worker; None without the worker extension."""
        if not self.facts.has_digest:
            return None
        return self.call_workers(DIGEST, seconds=self.client.deadlines.update)

    def load_adapter(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": folder}
        self.client.post("/v1/load_lora_adapter", body, seconds=self.client.deadlines.update)

    def unload_adapter(self, name: str) -> None:
        self.client.post("/v1/unload_lora_adapter", {"lora_name": name}, seconds=self.client.deadlines.finish)

    def when_free(self, ask: Callable[[], Any], label: str, over: Event) -> Any:
        """The answer of `ask`, which is called again, until `over`, while a server with the weights `label` is too busy for a request."""
        until = time.monotonic() + self.client.deadlines.generation
        while True:
            try:
                return ask()
            except RefusedError as error:
                if error.status not in BUSY or time.monotonic() > until:
                    raise
                if not self.has_refused:
                    logger.warning("%s It is asked again until it takes the request.", error)
                self.has_refused = True
                if self.version() != label:
                    raise NoAnswerError(
                        f"The server at {self.client.address} was started again amid a rollout."
                    ) from error
                if over.wait(1.0):
                    raise

    def models(self) -> list[str]:
        reply = self.client.get("/v1/models")
        return [str(entry.get("id")) for entry in reply.get("data", [])] if isinstance(reply, Mapping) else []

    def score(self, ids: Sequence[int], top: int, *, model: str, replica: int | None, salt: str) -> Any:
        """`prompt_logprobs` of these tokens: for each but the first, the `top` likeliest tokens and the token itself."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        seconds = self.client.deadlines.probe
        reply = self.client.post("/v1/completions", {**body, "cache_salt": salt}, seconds=seconds, headers=headers)
        try:
            return reply["choices"][0]["prompt_logprobs"]
        except (TypeError, LookupError) as error:
            raise NoAnswerError(f"The server at {self.client.address} gives no prompt_logprobs.") from error


def _why_unfit(client: Client) -> str | None:
    """Sentence about the endpoints for updates that a server lacks; None if it has them."""
    client.probe()
    missing = [path for path in REQUIRED if not client.has(path)]
    sentence = (
        f"The server at {client.address} lacks {', '.join(missing)}, which updating its weights needs; start it with covey serve-vllm MODEL, or "
        "with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs (vLLM 0.32 has them all)."
    )
    return sentence if missing else None


def _read_info(client: Client) -> ServerInfo:
    info = client.get("/server_info", {"config_format": "json"}, client.deadlines.init)
    models = client.get("/v1/models")
    try:
        config, listed = info["vllm_config"], models["data"][0]
        model, parallel, lora = config["model_config"], config["parallel_config"], config.get("lora_config") or {}
        return ServerInfo(
            model=str(listed["id"]),
            folder=str(model["model"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            device=str((config.get("device_config") or {}).get("device")),
            max_model_length=listed.get("max_model_len"),
            tensor_parallel=int(parallel["tensor_parallel_size"]) * int(parallel.get("pipeline_parallel_size", 1)),
            data_parallel=int(parallel["data_parallel_size"]),
            logprobs_mode=str(model.get("logprobs_mode")),
            max_logprobs=int(model.get("max_logprobs", 20)),
            max_lora_rank=int(lora.get("max_lora_rank") or 0) if client.has("/v1/load_lora_adapter") else 0,
            max_loras=int(lora.get("max_loras") or 0),
            quantization=model.get("quantization"),
            cache_dtype=str((config.get("cache_config") or {}).get("cache_dtype", "auto")),
            drafts_by=(config.get("speculative_config") or {}).get("method"),
            connector=(config.get("kv_transfer_config") or {}).get("kv_connector"),
            takes_seeds=(config.get("device_config") or {}).get("device") != "cpu"
            or not (config.get("scheduler_config") or {}).get("enable_chunked_prefill", True),
            returns_experts=bool((config.get("aux_output_config") or {}).get("enable_return_routed_experts")),
            has_digest="covey" in str(parallel.get("worker_extension_cls") or "") and client.has("/collective_rpc"),
        )
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise ServerError(
            f"{client.address}/server_info does not describe a vLLM server ({type(error).__name__}: {error})."
        ) from error


def refuse_other_model(server: Server, config: Any, tokenizer: Any, stop: Sequence[str] = ()) -> None:
    """Raise ConfigError where the server has another vocabulary than the model of this configuration or, as far as its folder can be
    read here, another shape. `stop`: texts that it looks for in what it writes, with its own tokenizer.
    """
    text = " ".join(("Covey 12 + 30 = 42, résumé", *stop))
    where, facts = server.client.address, server.facts
    if server.client.has("/tokenize"):
        request = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        theirs = server.client.post("/tokenize", request).get("tokens")
        ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if theirs != ours:
            raise ConfigError(
                f"The server at {where} has another vocabulary: it serves {facts.folder}, whose tokenizer reads {text!r} as "
                f"{theirs} where this run's reads {ours}; start it with the model of the run."
            )
    stored = Path(facts.folder) / "config.json"
    read = read_json(stored, ConfigError) if stored.is_file() else {}
    mine, theirs = (_flat(each) if isinstance(each, dict) else {} for each in (config.to_dict(), read))
    shape = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    for name in (
        *shape,
        "rms_norm_eps",
        "rope_theta",
    ):  # older files have some at the top that newer ones have in `text_config`
        if name in mine and theirs.get(name, mine[name]) != mine[name]:
            raise ConfigError(
                f"The server at {where} serves another model: {facts.folder} has {name} {theirs[name]}, this run's model "
                f"{mine[name]}; start it with the model of the run."
            )
    refuse_smaller_vocabulary(server, config)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The text's part of a configuration, with the entries of `rope_parameters` at its top level, where older files have them."""
    text = config.get("text_config") or config
    return {
        **(text.get("rope_parameters") or {}),
        **text,
        **{key: config[key] for key in config if key == "model_type"},
    }


def refuse_smaller_vocabulary(server: Server, config: Any) -> None:
    """Raise ConfigError where the server does not know the last token of this configuration, whose embeddings may have been resized."""
    if server.is_paused():  # left asleep or paused by a broken update of an earlier run; the first update wakes it
        return
    try:
        vocabulary = config.get_text_config().vocab_size
        server.score([vocabulary - 1, 0], 1, model=server.facts.model, replica=None, salt="vocabulary")
    except RefusedError as error:
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        raise ConfigError(
            f"The server at {server.client.address} does not know token {vocabulary - 1} of this run's vocabulary, which it must have been "
            f"started with: {error}"
        ) from error


def refuse_raw_logprobs(server: Server, params: SamplingParams) -> None:
    """Raise ConfigError if the server's log-probabilities are not those of the sampled distribution: raw ones, of a raised temperature, or
    of drafted tokens on a CPU, where vLLM 0.32 answers HTTP 400.
    """
    refuse_temperature(params)
    if server.facts.drafts_by is not None and server.facts.device == "cpu" and not params.is_greedy:
        raise ConfigError(
            f"The server at {server.client.address} drafts tokens ({server.facts.drafts_by}), and vLLM on a CPU then gives no "
            "log-probabilities of what is drawn; start it without --speculative-config."
        )
    is_plain = params.temperature in (0.0, 1.0) and not params.truncates and params.repetition_penalty == 1.0
    if server.facts.logprobs_mode not in ("processed_logprobs", *["raw_logprobs"] * is_plain):
        raise ConfigError(
            f"The server at {server.client.address} gives {server.facts.logprobs_mode}, which at this temperature or truncation are "
            "not those of the tokens' own distribution; start it with --logprobs-mode processed_logprobs."
        )


def refuse_packed(server: Server) -> None:
    """Raise ConfigError for a server of a quantized checkpoint, into which weights in floating point cannot be loaded."""
    if server.is_packed:
        raise ConfigError(
            f"The server at {server.client.address} serves {server.facts.folder}, whose weights are quantized ({server.facts.quantization}), and the run's weights "
            "cannot be loaded into it; start it with the model of the run, or train a LoRA adapter that it takes alone (--lora-rank)."
        )


def warn_of_server(server: Server) -> None:
    """Warn of a server that the network reaches, and of one whose weights are rounded to other numbers than the learner's."""
    warn_if_exposed(server)
    if server.facts.quantization is not None:
        logger.warning(
            "The vLLM server at %s computes with weights quantized by %s, not with the learner's: completions are drawn from probabilities that "
            "are off by about vllm/probe_difference nats, and digests are not compared. Start it without --quantization, unless you mean this.",
            server.client.address,
            server.facts.quantization,
        )
    elif server.facts.cache_dtype not in ("auto", server.facts.dtype):
        logger.warning(
            "The vLLM server at %s keeps keys and values in %s: completions are drawn from other probabilities than the learner's, by about "
            "vllm/probe_difference nats. Start it without --kv-cache-dtype, unless you mean this.",
            server.client.address,
            server.facts.cache_dtype,
        )


def warn_if_exposed(server: Server) -> None:
    """Warn once if a local server in development mode listens on the network, where anyone may run code in it."""
    address = server.client.address
    if address.is_local and listens_everywhere(address.port):
        logger.warning(
            "The vLLM server at %s is in development mode and listens on all interfaces: anyone on the network can replace its "
            "weights and run code in it; start it with --host 127.0.0.1.",
            address,
        )
