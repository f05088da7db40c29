"""A small stand-in for a vLLM server: its endpoints over stdlib HTTP, computing with a real model, failing where it is told to.

The real server is tested in `test_real_server.py`; here each phase fails in ways that a real one cannot be made to.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy
import torch
from safetensors.torch import load, load_file

from covey.kernels import find_routers
from covey.models.modalities import whole_inputs
from covey.process.link.covey_link import Link, meeting, store_at
from covey.types import Media, Prompt

PATHS = (
    *("/health", "/openapi.json", "/v1/models", "/server_info", "/v1/completions", "/tokenize", "/weight_info"),
    *("/is_paused", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/covey/media", "/covey/completions"),
)


class FakeServer:
    """`with FakeServer(model, tokenizer) as fake:` listens on `fake.port`. Change its fields to make it fail."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        replicas: int = 1,
        has_digest: bool = False,
        lora_rank: int = 0,
        host: str = "127.0.0.1",
    ):
        self.host = host
        self.replicas = [copy.deepcopy(model).eval() for _ in range(replicas)]
        self.tokenizer, self.lora_rank, self.has_digest = tokenizer, lora_rank, has_digest
        self.paths = list(PATHS)
        self.faults: dict[str, Any] = {}
        """By path: an HTTP status, "hang", "half" (of an answer), or a function called with the body instead."""
        self.holds: dict[str, threading.Event] = {}
        """By method of the worker: until when its next call takes."""
        self.moves_nothing = False
        self.reached: list[int] | None = None
        """Replicas that an update reaches; None: all."""
        self.is_varied = False
        """Completion i begins with the token of rank i, a single one with that of its seed; all are the greedy one otherwise."""
        self.key: str | None = None
        """API key of every path but /health."""
        self.noise = 0.0
        """Standard deviation of what is added to each log-probability."""
        self.rounding = 0.0
        """What is added to all of them, as another kernel rounds."""
        self.read: list[list[str]] = []
        """Names of the weights of each update that held a part of them."""
        self.sees_folders = True
        self.link: Any = None
        self.reads_cached: dict[str, Any] = {}
        self.caches_paths = False
        """Whether a path that was read before gives what it held then, as memory-mapped files do."""
        self.adapters: dict[str, list[Any]] = {}
        self.version, self.paused, self.calls = "default", False, []
        self.uploads: dict[str, bytes] = {}
        self.sees: Callable[[Media], Media] = lambda media: media
        """What it makes of the media of a prompt before its model reads them."""
        self.prompts: list[list[int]] = []
        """Token ids of the prompts that it has continued."""
        self.logprobs_mode, self.max_model_length = "processed_logprobs", 256
        self.device, self.dtype, self.quantization = "cpu", "float32", None
        self.cache_dtype, self.speculative, self.computes_in_pieces = "auto", None, False
        self.returns_experts = False
        self.folder = "/nowhere/policy"
        """Path of the model that it says it serves."""
        self._lock = threading.Lock()

    def __enter__(self) -> FakeServer:
        self._start(0)
        self.port = self.http.server_address[1]
        return self

    def __exit__(self, *_: Any) -> None:
        self.faults = {}
        self.paused = False
        self.stop()

    def stop(self) -> None:
        """Answer nothing any more."""
        self.http.shutdown()
        self.http.server_close()

    def restart(self, model: Any) -> None:
        """Come up at the same port with this model and the label of a new server."""
        self.stop()
        self.replicas = [copy.deepcopy(model).eval() for _ in self.replicas]
        self.version, self.paused, self.adapters, self.link = "default", False, {}, None
        self._start(self.port)

    # -- what it answers

    def answer(self, path: str, query: dict[str, list[str]], body: Any, headers: Any) -> Any:
        if path == "/openapi.json":
            return {"paths": {one: {} for one in self.paths}}
        if path == "/v1/models":
            length = self.max_model_length
            return {"data": [{"id": name, "max_model_len": length} for name in ("policy", *self.adapters)]}
        if path == "/server_info":
            return {"vllm_config": self._config()}
        if path == "/tokenize":
            return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/is_paused":
            return {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return {"status": "done"}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        if path == "/collective_rpc":
            return {"results": [self._by_worker(body)]}
        if path == "/v1/load_lora_adapter":
            return self._load_adapter(body)
        if path == "/covey/media":
            self.uploads[hashlib.sha256(body).hexdigest()] = body
            return {}
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return {}
        if path == "/covey/completions" and not body:
            return {"media": True}
        return self._complete(body, headers) if path.endswith("/completions") else {}

    def _by_worker(self, body: dict[str, Any]) -> Any:
        """As vLLM's executor of worker processes: calls in order, each taking the next answer, which one that is given up leaves behind."""
        with self.engine:
            self.orders.put(body)
            try:
                answer = self.answers.get(timeout=body.get("timeout"))
            except queue.Empty:
                raise TimeoutError(f"RPC call to {body['method']} timed out.") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _obey(self, orders: queue.Queue[Any], answers: queue.Queue[Any]) -> None:
        while True:
            body = orders.get()
            if (free := self.holds.pop(body["method"], None)) is not None:
                free.wait()
            try:
                answers.put(self._work(body["method"], body["kwargs"]))
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                answers.put(error)

    def _start(self, port: int) -> None:
        self.orders, self.answers, self.engine = queue.Queue[Any](), queue.Queue[Any](), threading.Lock()
        self.http = ThreadingHTTPServer((self.host, port), _handler(self))
        self.http.daemon_threads = True
        for work in (lambda: self.http.serve_forever(0.02), partial(self._obey, self.orders, self.answers)):
            threading.Thread(target=work, daemon=True).start()

    def _config(self) -> dict[str, Any]:
        return {
            "model_config": {
                "model": self.folder,
                "dtype": f"torch.{self.dtype}",
                "quantization": self.quantization,
                "logprobs_mode": self.logprobs_mode,
                "max_logprobs": 20,
            },
            "parallel_config": {
                "tensor_parallel_size": 1,
                "data_parallel_size": len(self.replicas),
                "worker_extension_cls": "covey_worker.CoveyWorker" if self.has_digest else "",
            },
            "device_config": {"device": self.device},
            "scheduler_config": {"enable_chunked_prefill": self.computes_in_pieces},
            "cache_config": {"cache_dtype": self.cache_dtype},
            "speculative_config": self.speculative,
            "aux_output_config": {"enable_return_routed_experts": self.returns_experts},
            "lora_config": {"max_lora_rank": self.lora_rank, "max_loras": 2} if self.lora_rank else None,
        }

    def _work(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method == "covey_digest":
            from covey.rollout.vllm.weights import digests_of, distinct_weights

            return digests_of(distinct_weights(self.replicas[0], torch.float32))
        if method == "covey_sees":
            return self.sees_folders
        if method in ("covey_join", "covey_try", "covey_receive"):
            return self._over_link(method, kwargs)
        if method == "covey_reload" and not self.moves_nothing:
            weights = {name: weight for file in kwargs["files"] for name, weight in load_file(file).items()}
            self.read.append(sorted(weights))
            for model in self.replicas:
                model.load_state_dict(self._named(weights), strict=False)
        if method in ("reload_weights", "covey_reload_folder") and not self.moves_nothing:
            path = kwargs.get("weights_path") or kwargs["folder"]
            if not (self.caches_paths and path in self.reads_cached):
                files = Path(path).glob("*.safetensors")
                read = {name: weight.clone() for file in files for name, weight in load_file(file).items()}
                self.reads_cached[path] = self._named(read)
            for rank, model in enumerate(self.replicas):
                if self.reached is None or rank in self.reached:
                    model.load_state_dict(self.reads_cached[path], strict=False)
        return None

    def _named(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights under the model's names, where those of a checkpoint are others."""
        from covey.rollout.vllm.weights import distinct_weights

        model = self.replicas[0]
        if weights.keys() <= model.state_dict().keys():
            return weights
        whole = {**dict(distinct_weights(model, torch.float32)), **weights}
        return type(model).from_pretrained(None, config=model.config, state_dict=whole).state_dict()

    def _over_link(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method == "covey_join":
            self.link = None
            size, limit = kwargs["size"], kwargs["limit"]
            store = meeting(store_at(kwargs["host"], kwargs["port"], size=size, seconds=limit), kwargs["number"])
            self.link = Link(kwargs["backend"], store, rank=1, size=size, seconds=limit)
            self.link_name = kwargs["name"]
            return None
        if kwargs["name"] != self.link_name:
            raise ConnectionError("another process has joined this server since")
        with self.link.failing():  # as the worker of `covey serve-vllm`
            received = {name: weight.clone() for name, weight in self.link.receive()}
        if method == "covey_try":
            return [weight.tolist() for name, weight in received.items() if name == "trial"]
        if self.moves_nothing:
            return None
        self.read.append(sorted(received))
        for rank, model in enumerate(self.replicas):
            if self.reached is None or rank in self.reached:
                model.load_state_dict(self._named(received), strict=False)
        return None

    def _load_adapter(self, body: dict[str, Any]) -> Any:
        from peft import PeftModel

        loaded = [copy.deepcopy(model) for model in self.replicas]
        reached = range(len(loaded)) if self.reached is None else self.reached
        self.adapters[body["lora_name"]] = [
            PeftModel.from_pretrained(model, body["lora_path"]).eval() if rank in reached else model
            for rank, model in enumerate(loaded)
        ]
        return {}

    def _complete(self, body: dict[str, Any], headers: Any) -> Any:
        while self.paused:
            time.sleep(0.01)
        rank = int(headers.get("X-data-parallel-rank") or 0)
        model = self.adapters.get(body["model"], self.replicas)[rank]
        with self._lock, torch.no_grad():
            if body.get("prompt_logprobs"):
                return {"choices": [{"prompt_logprobs": self._scores(model, body)}]}
            self.prompts.append(list(body["prompt"]))
            return {"choices": [self._greedy(model, body, index) for index in range(body["n"])]}

    def _logits(self, model: Any, body: dict[str, Any], more: list[int]) -> torch.Tensor:
        media = None
        if "media" in body:
            media = self.sees(Media(tensors=load(self.uploads[body["media"]]), count=body["media_count"]))
        prompt = Prompt(uid="", token_ids=tuple(body["prompt"]), media=media)
        return model(**whole_inputs(model, prompt, more)).logits[0].float()

    def _scores(self, model: Any, body: dict[str, Any]) -> list[Any]:
        ids = body["prompt"]
        logp = self._logits(model, body, []).log_softmax(-1)
        logp = logp + self.rounding + (self.noise * torch.randn_like(logp) if self.noise else 0)
        found: list[Any] = [None]
        for position in range(1, len(ids)):
            row = logp[position - 1]
            tokens = [ids[position], *row.topk(body["prompt_logprobs"]).indices.tolist()]
            found.append({str(token): {"logprob": float(row[token])} for token in tokens})
        return found

    def _greedy(self, model: Any, body: dict[str, Any], index: int) -> Any:
        drawn, logprobs = [], []
        while len(drawn) < body["max_tokens"]:
            logits = self._logits(model, body, drawn)[-1]
            for token, bias in body.get("logit_bias", {}).items():
                logits[int(token)] += bias
            logp = (logits / (body.get("temperature") or 1.0)).log_softmax(-1)
            place = index if body.get("n", 1) > 1 else int(body.get("seed") or 0) % 5
            rank = place if self.is_varied and not drawn else 0
            drawn.append(int(logp.topk(rank + 1).indices[-1]))
            logprobs.append(float(logp[drawn[-1]]))
            if drawn[-1] in body["stop_token_ids"]:
                break
        reason = "stop" if drawn[-1] in body["stop_token_ids"] else "length"
        made = {"index": index, "token_ids": drawn, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return {**made, "routed_experts": self._experts(model, body, drawn)} if self.returns_experts else made

    def _experts(self, model: Any, body: dict[str, Any], drawn: list[int]) -> str:
        """As vLLM 0.32: an .npy file in base64, of all tokens but the last and all layers, zeros in dense ones."""
        routers = find_routers(model, model)
        assert routers is not None
        with routers.watching():
            self._logits(model, body, drawn[:-1])
        chosen, config, content = routers.taken().numpy(), model.config, io.BytesIO()
        table = numpy.zeros((len(chosen), config.num_hidden_layers, chosen.shape[2]), numpy.uint8)
        table[:, [i for i in range(config.num_hidden_layers) if i not in config.mlp_only_layers]] = chosen
        numpy.save(content, table)
        return base64.b64encode(content.getvalue()).decode()


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else b"{}"
            if "json" in self.headers.get("Content-Type", "json"):
                body = json.loads(body)
            name = body.get("method", parts.path) if isinstance(body, dict) else parts.path
            fake.calls.append(name)
            if fake.key and parts.path != "/health" and self.headers.get("Authorization") != f"Bearer {fake.key}":
                return self._send(401, {"error": "Unauthorized"})
            fault = fake.faults.get(name)
            if callable(fault):
                fault = fault(body)
            if fault == "hang":  # neither acts nor answers, also when others do again
                while fake.faults.get(name) == "hang":
                    time.sleep(0.02)
                return None
            if isinstance(fault, int):
                return self._send(fault, {"error": {"message": "told to fail"}})
            known = parts.path in fake.paths
            if isinstance(body, dict) and "media" in body and body["media"] not in fake.uploads:
                return self._send(410, {"error": {"message": "no such upload"}})
            found = (
                fake.answer(parts.path, parse_qs(parts.query), body, self.headers) if known else {"detail": "Not Found"}
            )
            self._send(200 if known else 404, found, is_half=fault == "half")

        def _send(self, status: int, found: Any, is_half: bool = False) -> None:
            content = json.dumps(found).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content) + (10 if is_half else 0)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                self.close_connection = True

    return Handler


def nudged(model: Any, by: float = 0.02, seed: int = 1) -> None:
    """Move every weight a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * by * parameter.std().nan_to_num(1.0))
