"""The HTTP application: OpenAI's routes over an engine, streamed or whole, and routes for metrics and health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.errors import CoveyError, Unsupported
from covey.rollout import NativeSampler
from covey.rollout.calls import NotReportedError
from covey.serving.access import Guard
from covey.serving.asking import LONG_BYTES, APIRequest, Reader, context_of
from covey.serving.bodies import SessionPaths, body_of
from covey.serving.engine import Ended, Engine, Ticket, Token
from covey.serving.errors import APIError
from covey.serving.limits import Limits
from covey.serving.replies import Choice, answer, new_id, usage

_PATHS = frozenset(
    {"/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info", "/metrics"}
)
"""Names of paths in the metrics; a client cannot add others."""


Routes = Mapping[tuple[str, str], Callable[[Any], dict[str, Any]]]
"""Further pages by method and path, such as ("POST", "/v1/feedback"): from the JSON body (None for GET) to the JSON answer. They
run on a thread of their own and may raise APIError."""
Admit = Callable[[APIRequest, str | None], APIRequest]
"""(request, its session) -> the request as it is to be answered. Raises APIError to refuse it."""


class Service:
    """The routes, for these samplers by model name, and the engine that runs them."""

    def __init__(
        self,
        samplers: dict[str, NativeSampler],
        engine: Engine,
        limits: Limits,
        further: Routes | None = None,
        model_for: Callable[[APIRequest], str] | None = None,
        admit: Admit | None = None,
        processor: Any = None,
    ) -> None:
        """`model_for`: the model that answers a request; the one that it names when left out."""
        self.model_for = model_for or (lambda request: request.model)
        self.samplers, self.engine, self.limits, self.admit = samplers, engine, limits, admit
        self.further = dict(further or {})
        self.reader = Reader(samplers, limits, processor)
        self.created = int(time.time())
        self._long = anyio.CapacityLimiter(1)

    def app(self, api_key: str | None) -> ASGIApp:
        """The ASGI application. Without a key it answers under this machine's own names only."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            *(Route(path, self._page(work), methods=[method]) for (method, path), work in self.further.items()),
        ]
        handlers: Any = {
            APIError: self._refuse,
            CoveyError: self._refuse,
            HTTPException: self._refuse,
            ClientDisconnect: self._gone,
        }
        return Guard(SessionPaths(Starlette(routes=routes, exception_handlers=handlers)), api_key)

    # -- pages ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return self._json(request, {"object": "list", "data": [self._about(name) for name in list(self.samplers)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.samplers:
            raise APIError(404, f"There is no model {name!r} here.", param="model", code="model_not_found")
        return self._json(request, self._about(name))

    def _about(self, name: str) -> dict[str, Any]:
        sampler, first = self.samplers[name], next(iter(self.samplers))
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "covey",
            "parent": None if name == first else first,
            "max_model_len": context_of(sampler),
            "weights_version": sampler.version,
        }

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.engine.counters.text(self.engine.info()), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    # -- the tokenizer, as vLLM shows it ----------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        return await self._read_by(request, self.reader.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._read_by(request, self.reader.detokenize)

    async def _read_by(self, request: Request, read: Callable[[Any], dict[str, Any]]) -> Response:
        body = await self._body(request)
        return self._json(request, await anyio.to_thread.run_sync(read, body, limiter=self._lane(request)))

    def _lane(self, request: Request) -> anyio.CapacityLimiter | None:
        """Long requests are tokenized one after another, so that they leave threads to the short ones."""
        return self._long if request.state.num_bytes > LONG_BYTES else None

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = next(iter(self.samplers.values())).tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
        return self._json(request, {name: getattr(tokenizer, name, None) for name in names})

    # -- answers ----------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self.reader.chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, self.reader.completion)

    async def _answer(self, request: Request, read: Callable[[Any], APIRequest]) -> Response:
        body = await self._body(request)
        api_request = await anyio.to_thread.run_sync(read, body, limiter=self._lane(request))
        api_request = replace(api_request, model=self.model_for(api_request))
        session = request.headers.get("x-session-id")
        if self.admit is None:
            return await self._call(request, _Call(self, api_request, session))
        named = session or request.headers.get("authorization", "").removeprefix("Bearer ")
        answer = await self._call(request, _Call(self, self.admit(api_request, named), named))
        if session is None:  # OpenEnv's client has an event loop a call, and cannot use the connection of one before
            answer.headers["Connection"] = "close"
        return answer

    async def _call(self, request: Request, call: _Call) -> Response:
        self.engine.submit(call.tickets)
        if call.api_request.is_streamed:
            self._count(request, 200)
            return _Streamed(call)
        try:
            whole = await _unless_gone(request, call.whole())
        finally:
            call.cancel()
        return Response(status_code=499) if whole is None else self._json(request, whole)

    async def _body(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").split(";")[0].strip()
        if kind != "application/json":  # a web page cannot send this kind elsewhere without asking first
            raise APIError(415, "The body must be JSON: send Content-Type: application/json.")
        try:
            text = await asyncio.wait_for(self._read(request), self.limits.body_seconds)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise APIError(408, f"The body did not arrive within {self.limits.body_seconds:g} seconds.") from error
        return body_of(text)

    async def _read(self, request: Request) -> bytes:
        most, parts, size = self.limits.max_body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise APIError(413, f"The body is larger than {most} bytes.", code="body_too_large")
            parts.append(part)
        request.state.num_bytes = size
        return b"".join(parts)

    def _page(self, work: Callable[[Any], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        """A further page, which computes its answer on a thread."""

        async def page(request: Request) -> Response:
            body = None if request.method == "GET" else await self._body(request)
            return self._json(request, await anyio.to_thread.run_sync(work, body))

        return page

    # -- errors and counts ------------------------------------------------------------------------------------------

    def _json(self, request: Request, body: Any) -> Response:
        self._count(request, 200)
        return JSONResponse(body)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        api_error = as_api_error(error)
        self._count(request, api_error.status)
        return JSONResponse(api_error.body, api_error.status, headers=api_error.headers)

    async def _gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    def _count(self, request: Request, status: int) -> None:
        paths = _PATHS | {path for _, path in self.further}
        path = request.url.path if request.url.path in paths else "other"
        self.engine.counters.add("covey_requests_total", path=path, status=status)


class _Call:
    """One request in the engine: a ticket for each prompt."""

    def __init__(self, service: Service, api_request: APIRequest, session: str | None) -> None:
        self.service, self.api_request = service, api_request
        self.id, self.created = new_id(api_request.is_chat), int(time.time())
        self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
        self.tokenizer = service.samplers[api_request.model].tokenizer
        of = lambda prompt_request: Ticket(
            api_request.model, prompt_request, self._wake, self.id, session, api_request.user
        )
        self.tickets = [of(prompt_request) for prompt_request in api_request.prompt_requests]

    def _wake(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.changed.set)

    def cancel(self) -> None:
        for ticket in self.tickets:
            if not ticket.is_over:
                self.service.engine.cancel(ticket)

    @property
    def _version(self) -> int:
        groups = [ticket.group for ticket in self.tickets if ticket.group is not None]
        written = [completion.version for group in groups for completion in group.completions]
        return written[0] if written else self.service.samplers[self.api_request.model].version

    def _choices(self) -> list[list[Choice]]:
        n = self.api_request.n
        return [
            [Choice(self.api_request, ticket, sample, p * n + sample, self.tokenizer) for sample in range(n)]
            for p, ticket in enumerate(self.tickets)
        ]

    async def _until(self, holds: Callable[[Ticket], object]) -> None:
        """Wait until it holds for every ticket."""
        while not all(map(holds, self.tickets)):
            await self.changed.wait()
            self.changed.clear()
        self._raise()

    def _raise(self) -> None:
        for ticket in self.tickets:
            if ticket.error is not None:
                raise as_api_error(ticket.error) from ticket.error

    async def whole(self) -> dict[str, Any]:
        """The answer, once it is written."""
        await self._until(lambda ticket: ticket.is_over)
        choices = []
        for ticket, row in zip(self.tickets, self._choices(), strict=True):
            written = ticket.group.completions if ticket.group else ()
            choices += [choice.whole(written[choice.sample] if written else None) for choice in row]
        body = answer(self.api_request, self.id, self.created, choices, self._version)
        if self.api_request.returns_ids and self.api_request.is_chat:
            body["prompt_token_ids"] = list(self.api_request.prompt_requests[0].prompt.token_ids)
        return {**body, "usage": usage(self.api_request, self.tickets)}

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            async for piece in self._pieces():
                yield _event(piece)
        except APIError as error:
            yield _event(error.body)
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[dict[str, Any]]:
        choices = self._choices()
        chunk = lambda parts: answer(self.api_request, self.id, self.created, parts, self._version)
        is_first = True
        if self.api_request.echoes:  # the log-probabilities of the prompts come before the first token
            await self._until(lambda ticket: ticket.is_over or ticket.events or not ticket.prompt_request.scores_prompt)
        for choice in (choice for row in choices for choice in row):
            if (piece := choice.begin()) is not None:
                body = chunk([piece])
                if self.api_request.returns_ids and self.api_request.is_chat and is_first:
                    body["prompt_token_ids"] = list(self.api_request.prompt_requests[0].prompt.token_ids)
                is_first = False
                yield body
        while True:
            is_over = all(ticket.is_over for ticket in self.tickets)
            for ticket, row in zip(self.tickets, choices, strict=True):
                while ticket.events:
                    event: Token | Ended = ticket.events.popleft()
                    if (piece := row[event.sample].hear(event)) is not None:
                        yield chunk([piece])
            self._raise()
            if is_over:
                break
            await self.changed.wait()
            self.changed.clear()
        for row in choices:
            for choice in row:
                if choice.finish is None:  # nothing was to be written
                    yield chunk([choice.hear(Ended(choice.sample, False))])
        if self.api_request.includes_usage:
            yield {**chunk([]), "usage": usage(self.api_request, self.tickets)}


class _Streamed(StreamingResponse):
    """A streamed answer. A client that disconnects cancels its request."""

    def __init__(self, call: _Call) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(call.stream(), media_type="text/event-stream", headers=headers)
        self.call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.cancel()


async def _unless_gone(request: Request, work: Any) -> Any:
    """Result of `work`; None where the client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    answering, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        answering.cancel()
        watching.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def as_api_error(error: Exception) -> APIError:
    """Error of the engine, for a client: Covey's own sentences, and of anything else only that it happened."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, CoveyError):
        return APIError(400 if isinstance(error, NotReportedError | Unsupported) else 500, str(error))
    return APIError(500, f"The server failed ({type(error).__name__}); its log says where.")
