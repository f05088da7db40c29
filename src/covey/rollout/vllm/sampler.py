"""Completions from a vLLM server, with the trainer's weights sent to it before each rollout and verified there."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.errors import ServerError
from covey.models import context_limit, unwrapped
from covey.models.modalities import banned_ids
from covey.process.interruption import on_main
from covey.process.sharding import Shards
from covey.process.world import World
from covey.rollout.prompts import PromptLike, as_prompts, occurrences
from covey.rollout.sampler import SamplingParams, update_metrics
from covey.rollout.sampling import fresh_seed, sequence_key
from covey.rollout.stopping import check_finite, checked_eos_ids
from covey.rollout.vllm.broadcast import BroadcastTransport
from covey.rollout.vllm.choice import transport_for
from covey.rollout.vllm.client import Address, Client, Deadlines, NoAnswerError, RefusedError, is_lost
from covey.rollout.vllm.experts import decoded, recorded_layers, with_experts
from covey.rollout.vllm.lifecycle import NEVER
from covey.rollout.vllm.media import complete, expect_media_taken
from covey.rollout.vllm.server import Server, refuse_other_model, refuse_raw_logprobs, warn_of_server
from covey.rollout.vllm.sync import Attest, Sync, Update, is_wrong
from covey.rollout.vllm.transports import Carrier, DirectoryTransport, dtype_of
from covey.rollout.vllm.weights import Source, safe_name
from covey.types import Completion, Group, Metric, Prompt, merge_metrics

logger = logging.getLogger(__name__)

MOST_REQUESTS = 256
"""Concurrent requests, one per prompt; the server batches them itself."""


class ServerSampler:
    """A `Sampler` over HTTP. `load` keeps the weights; they are sent when the next rollout begins.

    Log-probabilities are the server's own, after temperature and truncation. A seed repeats the draws as far as the last bits of
    logits allow it: they vary with the requests that are computed together. After a crash or hang the sampler waits for the server once, sends it the current weights, and requests the missing groups.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int] | None = None,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        timeout: float = 240.0,
        group_port: int = 51216,
        transport: Carrier = "auto",
        directory: str | Path = "vllm-weights",
        run: str = "run",
        attest: Attest = "stop",
        deadlines: Mapping[str, Any] | None = None,
        regex: str | None = None,
        world: World | None = None,
        shards: Shards | None = None,
        server: Server | None = None,
        example: Prompt | None = None,
        records_experts: bool = False,
        check_stop: Callable[[], None] = lambda: None,
        check_wait: Callable[[], None] | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """`server`: a connection to one that fits (`refuse_unfit`). None: wait up to `timeout` seconds for it and read its description.

        `shards`: those of a model that is split over processes, whose weights are gathered a block at a time to be sent.
        `example`: a prompt with images or sounds, attested with every update. `records_experts`: see `NativeSampler`. Raises ConfigError for a server of another model or
        without the endpoints, ServerError if no server answers.
        """
        self.tokenizer, self.regex, self.timeout = tokenizer, regex, timeout
        self.model, self.max_rows, self.world, self.shards = model, None, world or World(), shards
        self.eos_ids, self.banned = checked_eos_ids(eos_ids, unwrapped(model), tokenizer), banned_ids(model)
        self.check_stop = check_stop
        """Callback while the server generates; its exception aborts the requests."""
        self.check_wait, self.agree = check_wait or check_stop, agree or self.world.any
        """Callback of the main process while a lost server is waited for; its StopNow is raised on all. Logical or, once all have drawn."""
        if server is None:
            server = Server.connect(Client(Address.of(base_url, host, port), Deadlines.of(deadlines)), timeout)
            refuse_other_model(server, unwrapped(model).config, tokenizer)
            warn_of_server(server)
        self.server, self.client, facts = server, server.client, server.facts
        self.layers = recorded_layers(model, server) if records_experts else None
        self.dtype = "float32" if facts.is_float32 else None
        """Type that it computes in, where its log-probabilities are to equal a plain forward's."""
        limits = (context_limit(unwrapped(model)), facts.max_model_length)
        self.context = min((limit for limit in limits if limit is not None), default=None)
        folder = Path(directory) / f"{safe_name(run)}-{self.world.broadcast(secrets.token_hex(3))}"
        carrier = transport_for(self.server, model, transport, folder, group_port, world=self.world, shards=shards)
        if isinstance(carrier, (DirectoryTransport, BroadcastTransport)):
            carrier.sends_changed = attest != "off" and self.server.has_digests and facts.data_parallel == 1
        self.sync = Sync(self.server, carrier, run=folder.name, attest=attest, example=example)
        self.seen: list[dict[str, Metric]] = []
        self.pending: tuple[Any, int] | None = None
        self.update: Update | None = None
        """Weights that the next rollout sends if `pending` is None, or that were sent last."""
        self.is_sent = False
        self.load(model, version=0)

    def load(self, policy: torch.nn.Module, version: int) -> None:
        """Sample with these weights from the next call of `sample` on, whose completions carry `version`."""
        self.pending, self.version = (policy, version), version

    def prepare(self, policy: torch.nn.Module, version: int) -> Update:
        """These weights ready to be sent, which do not change with the policy. Of a split model all processes take part."""
        return self.sync.prepare(Source(policy, self.shards, writes=self.world.is_main), version)

    def load_prepared(self, update: Update) -> None:
        """Sample with the weights of `prepare` from the next call of `sample` on."""
        self.pending, self.update, self.version, self.is_sent = None, update, update.version, False

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish.

        Raises AttestationError if the server's weights are not those that were sent, ServerError if it does not come back.
        """
        return self._groups(self._encoded(prompts, n, params), n, params)

    def go_on(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """Like `sample`, within a rollout that has begun: by the weights that the server has. Not collective."""
        return self._groups(self._encoded(prompts, n, params), n, params, settles=False)

    def _encoded(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> list[Prompt]:
        refuse_raw_logprobs(self.server, params)
        encoded = as_prompts(prompts, self.tokenizer, self.context, n=n)
        expect_media_taken(self.client, encoded, self.banned)
        return encoded

    def take_metrics(self) -> dict[str, Metric]:
        """The updates of the server's weights since the last call, and the results of their attestation."""
        seen, self.seen = self.seen, []
        return merge_metrics(seen)

    def _groups(
        self, prompts: list[Prompt], n: int, params: SamplingParams, *, settles: bool = True
    ) -> Iterator[Group]:
        seed = fresh_seed(params)
        keys = [sequence_key(seed, p.uid, o, 0) % 2**31 for p, o in zip(prompts, occurrences(prompts), strict=True)]
        requests = {
            i: self._request(prompt, n, params, key) for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        }
        if settles:
            self._settle()
        lost = False
        try:
            yield from self._drawn(prompts, requests, n)
        except (NoAnswerError, RefusedError) as error:
            if not requests or not is_lost(error):
                raise
            if self.world.size > 1 and not settles:  # the other processes are at other turns
                raise ServerError("The server was lost amid the turns of several processes; resume the run.") from error
            logger.warning("%s", error)
            lost = True
        if self.agree(lost) if settles else lost:
            self._on_main(self._send_again)
            yield from self._drawn(prompts, requests, n)

    def _settle(self) -> None:
        """Send the weights of the last `load` from the main process; wait once for a lost server."""
        if self.pending is not None:
            self._on_main(self._prepared(*self.pending))
            self.pending, self.is_sent = None, True
        elif not self.is_sent:
            self._on_main(self._send)
            self.is_sent = True
        else:
            self._on_main(self._expect_current)

    def _expect_current(self) -> None:
        """Check that the server has this run's weights; one that was lost or started again is sent them."""
        try:
            self.sync.expect_current()
        except ServerError as error:
            if is_wrong(error):
                raise
            logger.warning("%s", error)
            self._send_again()

    def _prepared(self, policy: torch.nn.Module, version: int) -> Callable[[], None]:
        """Sending of these weights. Of a split model all processes prepare it, and gather weights now or, for a broadcast, when they are sent."""

        is_on_device = self.shards is None and getattr(self.sync.transport, "device", "cpu") != "cpu"
        summon = partial(self.world.broadcast, True) if self.streams else (lambda: None) if is_on_device else None

        def prepare() -> None:
            source = Source(policy, self.shards, writes=self.world.is_main, summon=summon)
            self.update = self.sync.prepare(source, version)

        def send() -> None:
            if self.shards is None:
                prepare()
            self._send()

        try:
            if self.shards is not None:
                prepare()
        except Exception as error:
            if not self.world.is_main:
                raise
            return partial(_raise, error)  # where all processes hear of it
        return send

    @property
    def streams(self) -> bool:
        """True if weights of a split model are gathered while they are sent, so that no process holds all of them."""
        return self.shards is not None and self.world.size > 1 and isinstance(self.sync.transport, BroadcastTransport)

    def _gather_along(self) -> None:
        """Gather weights whenever the main process does, until its work ends."""
        while self.world.broadcast(False):
            assert self.update is not None  # prepared before
            deque(self.update.source.distinct(dtype_of(self.server)), maxlen=0)

    def _send(self) -> None:
        assert self.update is not None  # prepared before
        self._push(self.update)

    def _push(self, update: Update) -> None:
        started = time.perf_counter()
        try:
            seen = self.sync.push(update)
        except ServerError as error:
            if is_wrong(error):
                raise
            logger.warning("The update failed: %s", error)
            self._wait()
            self.sync.is_broken = True  # it may have been started again, with the weights of its folder
            try:
                seen = self.sync.push(update)
            except NoAnswerError as again:
                raise ServerError(
                    f"{again} It answered /health before: start the server again, and resume the run."
                ) from again
        self.seen.append(update_metrics(update.seconds + time.perf_counter() - started, self.sync.sent_bytes))
        if seen is not None:
            self.seen.append(seen.metrics())

    def _send_again(self) -> None:
        """Send the weights of the last update, whole and verified, to a server that has lost them."""
        self._wait()
        self.sync.is_broken = True
        self._send()

    def _wait(self) -> None:
        self.client.wait_until_up(self.timeout, self.check_wait)
        self.server.expect_unchanged()

    def _on_main(self, work: Callable[[], None]) -> None:
        """Run `work` on the main process; every process then has the served label."""
        failed = ServerError("the update of the vLLM server failed on the main process; its log says why.")

        def work_and_dismiss() -> None:
            try:
                work()
            finally:
                self.world.broadcast(False)

        if self.streams and not self.world.is_main:
            self._gather_along()
        on_main(self.world, work_and_dismiss if self.streams else work, failed)
        if self.world.size > 1:
            self.sync.label, self.sync.model = self.world.broadcast((self.sync.label, self.sync.model))

    def _request(self, prompt: Prompt, n: int, params: SamplingParams, seed: int) -> dict[str, Any]:
        room = (
            params.max_tokens if self.context is None else min(params.max_tokens, self.context - len(prompt.token_ids))
        )
        body: dict[str, Any] = {
            "prompt": list(prompt.token_ids),
            "n": 1 if params.is_greedy else n,  # vLLM refuses equal ones
            "max_tokens": room,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p or 0.0,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": 0.0,  # else the server's own, of its generation_config.json
            "frequency_penalty": 0.0,
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self.eos_ids),
            "ignore_eos": True,
            "seed": seed if self.server.facts.takes_seeds else None,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,  # a stop string may be one
        }
        if self.banned:
            body["logit_bias"] = {str(token_id): NEVER for token_id in self.banned}
        return body if self.regex is None else {**body, "structured_outputs": {"regex": self.regex}}

    def _drawn(self, prompts: list[Prompt], requests: dict[int, dict[str, Any]], n: int) -> Iterator[Group]:
        """Groups in the order of the answers; answered requests are removed from `requests`. Then the server is verified."""
        if not requests:
            return
        answers: queue.Queue[tuple[int, Any]] = queue.Queue()

        label, over = str(self.sync.label), threading.Event()

        def ask(i: int, body: dict[str, Any]) -> None:
            try:
                named = {**body, "model": self.sync.model, "cache_salt": label}  # no keys and values of other weights
                answers.put(
                    (i, self.server.when_free(partial(complete, self.client, prompts[i], named, label), label, over))
                )
            except Exception as error:  # noqa: BLE001 - raised by the thread that waits
                answers.put((i, error))

        pool = ThreadPoolExecutor(min(MOST_REQUESTS, len(requests)), thread_name_prefix="covey-vllm")
        try:
            for i, body in requests.items():
                pool.submit(ask, i, body)
            for _ in range(len(requests)):
                i, answer = self._next(answers)
                if isinstance(answer, Exception):
                    raise answer
                made = self._completions(answer, requests[i], prompts[i])
                del requests[i]  # not before: an answer that was broken off is asked for again
                yield Group(prompt=prompts[i], completions=made * (n // len(made)))
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self.client.hang_up()  # abort the requests that still run
        if self.sync.label is not None:
            self.sync.expect_current()

    def _next(self, answers: queue.Queue[tuple[int, Any]]) -> tuple[int, Any]:
        """The next answer. While none comes, the server's health is polled, which also notices a frozen server."""
        quiet = 0.0
        while True:
            self.check_stop()
            try:
                return answers.get(timeout=0.1)
            except queue.Empty:
                quiet += 0.1
            if quiet >= self.client.deadlines.read:
                quiet = 0.0
                if self.server.is_paused():
                    raise NoAnswerError(f"The server at {self.client.address} was paused by someone else.")

    def _completions(self, body: Any, request: Mapping[str, Any], prompt: Prompt) -> tuple[Completion, ...]:
        n, room = request["n"], request["max_tokens"]
        try:
            choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
            made = tuple(self._completion(choice, prompt) for choice in choices)
            tables = [decoded(choice.get("routed_experts")) for choice in choices] if self.layers is not None else []
        except (TypeError, LookupError, ValueError) as error:
            raise ServerError(
                f"The server's answer holds no completions with token ids and log-probabilities ({type(error).__name__}: {error})."
            ) from error
        if len(made) != n:
            raise ServerError(f"The server answered {len(made)} completions where {n} were asked for.")
        if short := [answer.num_tokens for answer in made if answer.finish == "length" and answer.num_tokens < room]:
            raise ServerError(
                f"The server at {self.client.address} ends completions after {short[0]} of {room} tokens; start it with "
                "--generation-config vllm and without max_new_tokens in --override-generation-config."
            )
        return made if self.layers is None else with_experts(made, tables, prompt, self.layers)

    def _completion(self, choice: Mapping[str, Any], prompt: Prompt) -> Completion:
        ids = torch.tensor(list(choice["token_ids"]), dtype=torch.int64)
        logprobs = torch.tensor(list(choice["logprobs"]["token_logprobs"]), dtype=torch.float32)
        if len(ids) != len(logprobs) or not len(ids):
            raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities")
        if choice["finish_reason"] not in ("stop", "length"):
            raise NoAnswerError(f"The server broke prompt {prompt.uid} off ({choice['finish_reason']}).")
        check_finite(logprobs)
        return Completion(
            token_ids=ids,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish="stop" if choice["finish_reason"] == "stop" else "length",
            logprobs=logprobs,
            version=self.version,
        )


def _raise(error: Exception) -> None:
    raise error
