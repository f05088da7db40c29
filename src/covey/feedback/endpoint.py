"""An endpoint that learns from scores of its answers while it serves."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import socket
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.adapters import has_adapter
from covey.data.rendering import content_text
from covey.errors import ConfigError, StorageError
from covey.feedback.process import Learning
from covey.feedback.settings import Settings
from covey.feedback.store import FeedbackError, Store
from covey.feedback.versions import Versions
from covey.feedback.worker import Made, Order, fixed_prompts
from covey.models import unwrapped
from covey.rollout import NativeSampler
from covey.runs.lock import FolderLock
from covey.serving import Call, Endpoint
from covey.serving.asking import APIRequest
from covey.serving.errors import APIError, bad
from covey.serving.fields import Fields
from covey.serving.loading import with_merged_adapter
from covey.types import Prompt

logger = logging.getLogger(__name__)

LONGEST_COMMENT = 4000
"""Characters of a comment at most."""
_ATTEMPTS = 3
"""Failures of the learning process in a row after which learning ends."""
_SHOWN = 20
_USER = re.compile(r"[A-Za-z0-9._-]{1,64}")


class LearningEndpoint:
    """An OpenAI-compatible endpoint whose model learns from `POST /v1/feedback`. `with LearningEndpoint(...) as one: one.endpoint.url`.

    Every answer is kept until its score comes. A process of its own trains an adapter on scored answers and compares it with the
    served version on the fixed set; `gate` decides, this object promotes. `versions` are on the disk: a server that is killed
    goes on with the one that it served.
    """

    def __init__(self, sampler: NativeSampler, settings: Settings, *, name: str = "policy", **options: Any) -> None:
        """`sampler`: of the model in `settings`; `options` as `Endpoint` takes them. Starts the process that learns.

        Raises ConfigError, RunFolderError or CoveyError before anything is served.
        """
        if has_adapter(sampler.model):
            raise ConfigError(
                f"{name} is a model with an adapter; add it into its base first (covey merge), and serve that."
            )
        self.settings, self.name, self.base = settings, name, unwrapped(sampler.model)
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(settings.folder)
        self._lock.take()
        self.versions = Versions(settings.folder, fingerprint(self.base))
        self.store = Store(settings.folder, settings.max_age_seconds)
        self._fixed = {mark for prompt in fixed_prompts(settings, sampler.tokenizer) for mark in marks(prompt)}
        self._serving, self._closing, self._scored = threading.Lock(), threading.Event(), threading.Event()
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self._learning = Learning(settings)
        self.endpoint = Endpoint(
            {name: sampler},
            on_call=self._keep,
            routes={
                ("POST", "/v1/feedback"): self._feedback,
                ("POST", "/v1/rollback"): self._roll_back,
                ("GET", "/v1/learning"): lambda body: self.status(),
            },
            model_for=self._model_for,
            **options,
        )
        for model in self.versions.models:
            if version := self.versions.served(model):
                self._add(model, version)

    # -- a server ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> LearningEndpoint:
        self.endpoint.open()
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Serve and learn until SIGTERM or Ctrl-C."""
        self._start()
        try:
            self.endpoint.run(listener, on_start)
        finally:
            self.close()

    def close(self) -> None:
        """Stop learning, finish what runs, stop listening."""
        self._closing.set()
        self._scored.set()
        self._learning.close()
        if self._thread is not None:
            self._thread.join()
        self.endpoint.close()
        self.store.close()
        self._lock.release()

    def status(self) -> dict[str, Any]:
        """Response of `GET /v1/learning`."""
        return {
            "served": {
                model: self.versions.served(model) for model in {self.name: 0} | dict.fromkeys(self.versions.models)
            },
            "waiting": self.store.waiting(),
            "needed": self.settings.scores_per_candidate,
            "scores": self.store.counts(),
            "problem": self._problem,
            "candidates": self._log()[-_SHOWN:],
        }

    # -- answers and scores -----------------------------------------------------------------------------------------

    def _keep(self, call: Call) -> None:
        """Keep the answers of a prompt, on the engine's thread."""
        first = int(call.group.prompt.uid) * call.group.size  # prompts of a request have the uids "0", "1", ...
        for place, completion in enumerate(call.group.completions):
            model, refused = self._learner(call), self._refusal(call)
            self.store.add(call.id, first + place, model, call.group.prompt, completion, refused)

    def _refusal(self, call: Call) -> str | None:
        """Reason why answers of this call are not trained on."""
        params, model, models = call.params, self._learner(call), self.versions.models
        if self.settings.users and model == self.name:
            return "it was not asked by a user of their own model"
        if model != self.name and model not in models and len(models) >= self.settings.max_users:
            return "as many users have an adapter as may have one"
        if call.group.prompt.media is not None:
            return "its prompt has images, sounds or videos, which are not kept"
        if params.temperature <= 0:
            return "it was drawn greedily"
        if params.truncates or params.repetition_penalty != 1.0:
            return "it was drawn from a truncated or penalised distribution"
        if marks(call.group.prompt) & self._fixed:
            return "its prompt is in the fixed set"
        return None

    def _learner(self, call: Call) -> str:
        """Model that learns from this call: the shared one, or the user's own."""
        if not self.settings.users or call.user is None:
            return self.name
        user_model = self._of_user(call.user)
        return user_model if call.model in (self.name, user_model) else self.name

    def _of_user(self, user: str) -> str:
        return f"{self.name}@{user}"

    def _model_for(self, api_request: APIRequest) -> str:
        """The user's own model once it has learnt something. Raises APIError for a `user` that cannot be part of a name."""
        if not self.settings.users or api_request.user is None:
            return api_request.model
        if not _USER.fullmatch(api_request.user):
            raise bad("user must be 1 to 64 letters, digits, dots, hyphens or underscores here.", "user")
        user_model = self._of_user(api_request.user)
        return (
            user_model if api_request.model == self.name and user_model in self.endpoint.samplers else api_request.model
        )

    def _feedback(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        id, score, index = fields.text("id"), fields.number("score", None), fields.whole("index", 0, 0)
        comment = fields.text("comment")
        fields.rest()
        if not id:
            raise bad("id is missing; give that of an answer.", "id")
        if score is None or not -1 <= score <= 1:
            raise bad(f"score is {score}; give a number from -1 to 1.", "score")
        if comment is not None and len(comment) > LONGEST_COMMENT:
            raise bad(f"comment has {len(comment)} characters; at most {LONGEST_COMMENT} are kept.", "comment")
        try:
            taken = self.store.score(id, index, float(score), cleaned(comment) if comment else None)
        except FeedbackError as error:
            self.store.count(error.outcome)
            raise APIError(error.status, str(error), code=f"feedback_{error.outcome}") from error
        self.store.count("taken" if taken.refused is None else "not_trained")
        self._scored.set()
        trains = {"trained_on": taken.refused is None, "reason": taken.refused}
        return {"id": id, "index": index, "score": score, "weights_version": taken.version, **trains}

    def _roll_back(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        model = fields.text("model") or self.name
        fields.rest()
        if model not in self.endpoint.samplers:
            raise APIError(404, f"There is no model {model!r} here.", param="model", code="model_not_found")
        with self._serving:
            former = self.versions.served(model)
            try:
                version = self.versions.roll_back(model)
            except LookupError as error:
                raise APIError(409, str(error), code="nothing_to_roll_back") from error
            self._serve(model, version)
        logger.warning("%s was rolled back from version %d to %d.", model, former, version)
        self._write({"model": model, "outcome": "rolled_back", "version": version, "from": former})
        return {"model": model, "weights_version": version, "withdrawn": former}

    # -- learning ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._learn, name="covey-learning", daemon=True)
        self._thread.start()

    def _learn(self) -> None:
        """Train candidates as scores arrive, until the endpoint closes or learning fails several times in a row."""
        failures = 0
        while not self._closing.is_set():
            try:
                model = self.store.due(self.settings.scores_per_candidate)
                if model is None:
                    self._scored.wait(60.0)
                    self._scored.clear()
                    self.store.forget_old()
                else:
                    self._candidate(model)
                failures = 0
            except Exception as error:  # noqa: BLE001 - of any kind: reported, and shown as the problem
                failures += 1
                if not self._closing.is_set() and self._is_over(error, failures):
                    return

    def _is_over(self, error: Exception, failures: int) -> bool:
        """Start the process anew after a failure. True if that was the last attempt."""
        logger.error("No candidate was made: %s. (%s)", error, error.__cause__)
        self._learning.close()
        if failures < _ATTEMPTS:
            try:
                self._learning = Learning(self.settings)
                return False
            except Exception as again:  # noqa: BLE001 - of any kind, as in `_learn`
                error = again
        self._problem = str(error)
        logger.error("Learning ends after %d failures in a row; the endpoint goes on serving.", failures)
        return True

    def _candidate(self, model: str) -> None:
        """Train and judge one candidate; promote it or drop it."""
        served, best = self.versions.served(model), self.versions.best(model)
        conversations = self.store.oldest(model, self.settings.scores_per_candidate)
        rivals = (served,) if best == served else (served, best)
        output = self.settings.folder / "candidates" / "next"
        order = Order(
            conversations=tuple(conversations),
            start=self.versions.adapter(model, served),
            against=tuple(self.versions.adapter(model, rival) for rival in rivals),
            output=output,
        )
        made = self._learning.make(order)
        verdicts = {str(rival): verdict.summary() for rival, verdict in zip(rivals, made.verdicts, strict=True)}
        entry = {"model": model, "conversations": len(conversations), "verdicts": verdicts}
        entry |= {"metrics": made.metrics, "seconds": round(made.seconds, 3)}
        with self._serving:
            if self.versions.served(model) != served:  # rolled back: the verdict compares with another version
                self._write({**entry, "outcome": "overtaken"})
                return
            if not all(verdict.passes for verdict in made.verdicts):
                self.store.used(conversations, 0)
                self._tell({**entry, "outcome": "dropped"}, made)
                return
            version = self.versions.promote(model, served, output, made.verdicts[0].summary())
            try:
                self.store.used(conversations, version)  # at once: after a kill they would be trained on again
            finally:
                self._serve(model, version)
        self._tell({**entry, "outcome": "promoted", "version": version}, made)

    def _serve(self, model: str, version: int) -> None:
        """Answer with this version from the next batch of requests on."""
        if model in self.endpoint.samplers:
            self.endpoint.load(self._weights(model, version), version, model)
        else:
            self._add(model, version)

    def _add(self, model: str, version: int) -> None:
        """Serve a version of a model that nothing runs yet: before the endpoint is open, or a user's first."""
        base_sampler = self.endpoint.samplers[self.name]
        sampler = base_sampler if model == self.name else copy.copy(base_sampler)
        sampler.load(self._weights(model, version), version)
        if model != self.name:
            self.endpoint.add(model, sampler)

    def _weights(self, model: str, version: int) -> Any:
        folder = self.versions.adapter(model, version)
        return self.base if folder is None else with_merged_adapter(self.base, folder)

    # -- reports ----------------------------------------------------------------------------------------------------

    def _tell(self, entry: Mapping[str, Any], made: Made) -> None:
        self._write(entry)
        name = (
            f"{entry['model']} version {entry['version']}" if "version" in entry else f"a candidate of {entry['model']}"
        )
        sentence = "; ".join(verdict.sentence for verdict in made.verdicts)
        logger.warning("%s was %s after %d scores: %s.", name, entry["outcome"], entry["conversations"], sentence)

    @property
    def _log_path(self) -> Path:
        return self.settings.folder / "log.jsonl"

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            with self._log_path.open("a") as file:
                file.write(json.dumps({"time": time.time(), **entry}) + "\n")
        except OSError as error:
            raise StorageError(f"{self._log_path} cannot be written ({error.strerror}).") from error

    def _log(self) -> list[dict[str, Any]]:
        if not self._log_path.exists():
            return []
        return [json.loads(line) for line in self._log_path.read_text().splitlines() if line.endswith("}")]


def fingerprint(model: Any) -> str:
    """Hash of a model's parameters: their names, shapes, and up to 64 numbers of each."""
    digest = hashlib.sha256()
    for name, value in model.named_parameters():
        flat = value.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
        digest.update(f"{name} {tuple(value.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


_DROPPED = frozenset({"Cc", "Cs", "Co", "Cn"})


def cleaned(text: str) -> str:
    """The text in Unicode's form NFC without control characters, lone surrogates and unassigned characters; line ends as `\\n`."""
    lines = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) not in _DROPPED).strip()


def marks(prompt: Prompt) -> set[str]:
    """Hashes that identify a prompt: of its token ids, and of its text or last user message without spaces at the ends, in any case."""
    hashes = {_hash(list(prompt.token_ids))}
    user_texts = [
        content_text(message.get("content")) for message in prompt.messages or () if message.get("role") == "user"
    ]
    text = user_texts[-1] if user_texts else prompt.text
    if text is not None and text.strip():
        hashes.add(_hash(" ".join(unicodedata.normalize("NFKC", text).casefold().split())))
    return hashes


def _hash(value: str | Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
