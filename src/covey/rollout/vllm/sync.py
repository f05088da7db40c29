"""Weight sync to a vLLM server, in phases with deadlines, verified before the server generates anything.

Fail-stop: an update cannot be rolled back, so after a broken one the server stays paused until full weights are sent and verified.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from covey.data import vocabulary_size
from covey.errors import AttestationError, ServerError
from covey.rollout.vllm.attestation import (
    PROBE_TOKENS,
    TOP,
    Answer,
    Attestation,
    AttestationResult,
    check_replicas,
    probe_ids,
)
from covey.rollout.vllm.media import expect_near, score
from covey.rollout.vllm.server import Server
from covey.rollout.vllm.transports import Shipment, Transport, dtype_of
from covey.rollout.vllm.weights import Source, differing_blocks, texts_of
from covey.types import Prompt

logger = logging.getLogger(__name__)

Attest = Literal["stop", "warn", "off"]


@dataclass(frozen=True, eq=False)
class Probe:
    """The trainer's answer to the probe: log-probabilities [L - 1, V] as it computes them, and in the server's dtype."""

    ids: tuple[int, ...]
    logp: Tensor
    rounded: Tensor
    is_float32: bool
    media: Tensor | None = None
    """[L - 1] of the tokens of `Sync.example`, in the server's dtype."""


@dataclass(frozen=True, eq=False)
class Update:
    """Weights that are ready to be sent, and what a server that has them answers."""

    source: Source
    version: int
    label: str
    shipment: Shipment
    probe: Probe | None
    """None: nothing is attested."""
    seconds: float
    """Time of the preparation."""


class RestartedError(AttestationError):
    """A server that was started again, so that it serves the weights of its folder."""


def is_wrong(error: ServerError) -> bool:
    """True if the server has other weights than were sent, and was not started again meanwhile."""
    return isinstance(error, AttestationError) and not isinstance(error, RestartedError)


@dataclass(eq=False)
class Sync:
    """Weight updates of one server by one run, in order: `push` sends an update, `expect_current` verifies the last."""

    server: Server
    transport: Transport
    run: str
    """Name of the run, the first half of every label `RUN:STEP`."""
    attest: Attest = "stop"
    attestation: Attestation = field(default_factory=Attestation)
    label: str | None = None
    """Label that the server must show; None before the first update."""
    model: str = ""
    """Model name that requests ask for."""
    is_broken: bool = False
    """True if the last update failed, so that nothing may be generated before a successful one."""
    pushed: int = 0
    newest: int = -1
    """Highest version that was prepared, which may still wait to be sent."""
    sent_bytes: int = 0
    """Bytes of the last update."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Sums of the digest of what was sent last, by block; empty where nothing compares them."""
    ids: tuple[int, ...] = ()
    """Token ids of the probe."""
    example: Prompt | None = None
    """A prompt with images or sounds, which is attested too; None for a run of text."""

    def prepare(self, source: Source, version: int) -> Update:
        """Weights ready to be sent. Of a split model all processes take part, with one forward pass for the probe."""
        started, label = time.perf_counter(), self._next_label(version)
        probe = self._probe(source) if self.attest != "off" else None
        shipment = self.transport.prepare(source, label)  # last: it may fail on the process that writes
        return Update(source, version, label, shipment, probe, time.perf_counter() - started)

    def _probe(self, source: Source) -> Probe:
        policy, dtype = source.policy, dtype_of(self.server)
        most = self.server.facts.max_model_length or PROBE_TOKENS + 1  # with the token that a request must ask for
        ids = probe_ids(vocabulary_size(policy), min(PROBE_TOKENS, most - 1))
        text = Prompt(uid="probe", token_ids=ids)
        logp = source.logprobs(text)
        rounded = logp if dtype == torch.float32 else source.logprobs(text, dtype)
        return Probe(ids, logp, rounded, source.is_float32, self._example_logprobs(source, dtype))

    def _example_logprobs(self, source: Source, dtype: torch.dtype) -> Tensor | None:
        if self.example is None:
            return None
        logp = source.logprobs(self.example, None if dtype == torch.float32 else dtype)
        return logp.gather(1, torch.tensor(self.example.token_ids[1:])[:, None]).squeeze(1)

    def push(self, update: Update) -> AttestationResult | None:
        """Send these weights to the server and attest them. Returns None if nothing was attested.

        Raises ServerError if a phase fails or takes too long (the server is left paused), AttestationError where the server
        answers with other weights afterwards.
        """
        if self.label is not None and not self.is_broken:
            self.expect_current()
        transport = self.transport
        label = self._next_label(update.version) if self.is_broken else update.label
        was_broken, self.is_broken = self.is_broken, True
        if was_broken:
            self.attestation.forget()
            transport.forget()
        try:
            if transport.pauses:
                self.server.pause()
            elif self.server.is_paused():
                self.server.resume()
            exact = self._sent(update, label)
            self.server.set_version(label)
            if exact is False:
                raise AttestationError("The digest of the server's weights is not that of the weights that were sent.")
            if transport.pauses:
                self.server.resume()
            self.label, self.model = label, transport.model_for(label)
            seen = self._attested(update.probe, exact)
            transport.finish(update.shipment, is_exact=exact is True)
        except ServerError:
            self._stay_paused()
            raise
        self.is_broken = False
        return seen

    def _sent(self, update: Update, label: str) -> bool | None:
        """Send what has changed, or everything where the digests then disagree. Returns `_is_exact`."""
        self.sent_bytes = 0
        exact: bool | None = None
        for _ in range(2):
            num_bytes = self.transport.send(update.source, label, update.shipment)
            self.sent_bytes += num_bytes
            if self.transport.pauses:
                self.server.forget_prefixes()
            self.sums = update.shipment.sums if update.probe is not None else {}
            exact = self._is_exact()
            if exact or num_bytes >= update.shipment.num_bytes:
                break
            logger.warning(
                "The server lacks weights that were sent before; all are sent to it now and in later updates."
            )
            self.transport.forget(for_good=True)
        return exact

    def expect_current(self) -> None:
        """Raise AttestationError unless the server has the label of the last update and answers the probe as it did then.

        Raises RestartedError for a server that was started again; the next `push` sends it everything.
        """
        label = self.server.version()
        if label != self.label:
            self.is_broken = True
            address = self.server.client.address
            if label == "default":
                raise RestartedError(f"The server at {address} was started again, without the weights of this run.")
            raise AttestationError(
                f"The server at {address} says that it serves {label!r}, where this run sent {self.label!r}: it is at an older "
                "version or another process writes to it; give every run a server of its own."
            )
        if self.attest == "off" or self.attestation.last is None:
            return
        first = self.answer()
        if self.attestation.last.equals(first):
            return
        proof = self._is_exact if self.server.facts.data_parallel == 1 else lambda: None
        self._report(lambda: self.attestation.check_untouched(first, self.answer(), proof))

    def answer(self, replica: int | None = None) -> Answer:
        """The server's answer to the probe, never from its prefix cache."""
        top = TOP if self.server.facts.max_logprobs < 0 else min(TOP, self.server.facts.max_logprobs)
        salt = secrets.token_hex(8)
        return Answer.of(self.server.score(self.ids, top, model=self.model, replica=replica, salt=salt))

    def _next_label(self, version: int) -> str:
        """`RUN:STEP`; a version that is sent again gets a new label, and with it a new folder."""
        self.pushed += 1
        label = f"{self.run}:{version}"
        is_new, self.newest = version > self.newest, max(version, self.newest)
        return label if is_new else f"{label}.{self.pushed}"

    def _is_exact(self) -> bool | None:
        """True if every block's digest is that of the weights that were sent, in the server's type; None if that cannot be compared."""
        sums = self.sums if self.server.has_digests else {}
        digests = self.server.digests() if sums else None
        if not sums or not digests:
            return None
        try:
            wrong = differing_blocks(texts_of(sums), digests[0])
        except ValueError as error:
            logger.warning(
                "The server's digests are of other blocks than the model's (%s); they are not compared.", error
            )
            return None
        if wrong:
            logger.error("Blocks whose digest differs: %s.", ", ".join(wrong[:5]))
        return not wrong

    def _attested(self, probe: Probe | None, exact: bool | None) -> AttestationResult | None:
        if probe is None:
            return None
        self.ids = probe.ids
        before = self.attestation.last
        after = self.answer()
        if self.attestation.is_repeatable is None:
            self.attestation.learn_repeatability(after, self.answer())
        self.attestation.is_exact_trainer = probe.is_float32
        self.attestation.is_float32 = probe.is_float32 and self.server.facts.is_float32
        replicas = self.server.facts.data_parallel
        others = [self.answer(rank) for rank in range(replicas)] if replicas > 1 else []
        seen: list[AttestationResult] = []

        def look() -> None:
            check_replicas(others, before, is_repeatable=self.attestation.is_repeatable)
            seen.append(self.attestation.check_update(after, probe.logp, probe.rounded, exact))
            if self.example is not None and probe.media is not None:
                theirs = score(self.server.client, self.example, self.model, str(self.label))
                expect_near(theirs, probe.media, is_sharp=self.attestation.is_float32)

        self._report(look)
        return seen[0] if seen else None

    def _report(self, look: Any) -> None:
        """Call `look`; its AttestationError is raised or, with attest='warn', logged as a warning."""
        try:
            look()
        except AttestationError as error:
            if self.attest == "stop":
                self.is_broken = True
                raise
            logger.warning("%s (vllm_attestation='warn' goes on)", error)

    def _stay_paused(self) -> None:
        """Leave the server paused if it is reachable. Adapters are loaded under new names, so they need no pause."""
        if not self.transport.pauses:
            return
        try:
            if not self.server.is_paused():
                self.server.pause()
        except ServerError as error:
            logger.warning("The server could not be left paused: %s", error)
