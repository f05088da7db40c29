"""Traces of agents as OpenTelemetry spans with GenAI attributes, one episode a line, in OTLP's JSON; read back, they are calls.

Each line is an OTLP `TracesData` message: a span `invoke_agent NAME` with a span `chat MODEL` for each call. Token ids, log-probabilities
and the weights' version are added to the GenAI attributes under `covey.*`. Sources: OpenTelemetry protocol 1.x, file exporter;
semantic conventions for generative AI spans.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from covey.errors import DataError
from covey.files.places import expect_path
from covey.rollout import SamplingParams
from covey.serving.engine import Call
from covey.types import Completion, Group, Message, Prompt

_INTERNAL, _CLIENT = 1, 3
_ERROR = 2


@dataclass(frozen=True)
class Trace:
    """An episode as it was recorded."""

    session: str
    agent: str
    uid: str
    calls: tuple[Call, ...]
    created: float
    """Seconds since 1970."""
    seconds: float
    lost: str = ""
    score: float | None = None


def expect_recorded(turns: Sequence[Mapping[str, Any]], calls: Sequence[Call]) -> list[Call]:
    """The recorded calls that a trace names by `prompt_token_ids` and `completion_token_ids`, as OpenEnv's TrainingTrace has them.

    Raises DataError for a turn that no call has: its text was rendered to tokens again, which are not the ones that were drawn.
    """
    ids_of = lambda call, done: [list(call.group.prompt.token_ids), done.token_ids.tolist()]
    answers = [(call, ids_of(call, done)) for call in calls for done in call.group.completions]
    recorded: list[Call] = []
    for i, turn in enumerate(turns):
        token_ids = [list(turn.get(name) or ()) for name in ("prompt_token_ids", "completion_token_ids")]
        match = next((call for call, ids in answers if ids == token_ids), None)
        if match is None:
            raise DataError(
                f"turn {i} of the trace has tokens that this endpoint neither read nor wrote; its text was rendered again. Hand on "
                "the token ids that the answers carry (return_token_ids), or leave the trace out"
            )
        if match not in recorded:
            recorded.append(match)
    return recorded


def lines_of(traces: Iterable[Trace]) -> Iterator[str]:
    """A line for each trace, without its end."""
    for trace in traces:
        yield json.dumps(_spans(trace), ensure_ascii=False, separators=(",", ":"))


def read_traces(path: Path | str) -> list[Call]:
    """The calls of a file of traces, for `episodes_of`. Raises DataError for a line that is none, or tokens that were changed."""
    calls = []
    for number, line in enumerate(expect_path("path", path).read_bytes().splitlines(), 1):
        try:
            spans = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
            pairs = [(span, {held["key"]: _plain(held["value"]) for held in span["attributes"]}) for span in spans]
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}, line {number}, is no trace of an agent ({error}).") from error
        calls += [_call(span, has, f"{path}, line {number}") for span, has in pairs if "covey.digest" in has]
    return calls


# -- writing --------------------------------------------------------------------------------------------------------


def _spans(trace: Trace) -> dict[str, Any]:
    trace_id = _hex(trace.session, 16)
    root = _hex(f"{trace.session} root", 8)
    about = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": trace.agent,
        "gen_ai.conversation.id": trace.session,
        "covey.prompt_uid": trace.uid,
        **({} if trace.score is None else {"covey.score": trace.score}),
        **({"error.type": trace.lost} if trace.lost else {}),
    }
    whole = _span(trace_id, root, "", f"invoke_agent {trace.agent}", _INTERNAL, trace.created, trace.seconds, about)
    if trace.lost:
        whole["status"] = {"code": _ERROR, "message": trace.lost}
    spans = [whole]
    for call in trace.calls:
        for i, done in enumerate(call.group.completions):
            span_id = _hex(f"{call.id} {i}", 8)
            name = f"chat {call.model}"
            has = _attributes_of(call, done)
            spans.append(_span(trace_id, span_id, root, name, _CLIENT, call.created, call.seconds, has))
    scope = {"scope": {"name": "covey"}, "spans": spans}
    resource = {"attributes": _pairs({"service.name": "covey"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _span(
    trace_id: str, span_id: str, parent: str, name: str, kind: int, start: float, seconds: float, has: Mapping[str, Any]
) -> dict[str, Any]:
    first = round(start * 1e9)
    return {
        "traceId": trace_id,
        "spanId": span_id,
        **({"parentSpanId": parent} if parent else {}),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(first),
        "endTimeUnixNano": str(first + round(seconds * 1e9)),
        "attributes": _pairs(has),
    }


def _attributes_of(call: Call, done: Completion) -> dict[str, Any]:
    prompt, drawn = call.group.prompt, done.logprobs
    output = [{"role": "assistant", "parts": [{"type": "text", "content": done.text}], "finish_reason": done.finish}]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "covey",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [done.finish],
        "gen_ai.request.temperature": call.params.temperature,
        "gen_ai.usage.input_tokens": len(prompt.token_ids),
        "gen_ai.usage.output_tokens": done.num_tokens,
        "gen_ai.conversation.id": call.session or "",
        **({} if call.user is None else {"enduser.id": call.user}),
        "gen_ai.input.messages": json.dumps(
            [_message_parts(message) for message in prompt.messages or ()], ensure_ascii=False
        ),
        "gen_ai.output.messages": json.dumps(output, ensure_ascii=False),
        "covey.messages": json.dumps(list(prompt.messages or ()), ensure_ascii=False, default=str),
        "covey.weights_version": done.version,
        "covey.seed": call.seed,
        "covey.prompt_token_ids": list(prompt.token_ids),
        "covey.completion_token_ids": done.token_ids.tolist(),
        "covey.logprobs": [] if drawn is None else [float(logprob) for logprob in drawn],
        **({} if prompt.media is None else {"covey.media": prompt.media.count}),
        "covey.digest": _digest(prompt.token_ids, done.token_ids.tolist()),
    }


def _message_parts(message: Message) -> dict[str, Any]:
    """A message in the parts of the GenAI conventions."""
    if message.get("role") == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        return {"role": "tool", "parts": [answer]}
    content = message.get("content") or ()
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[dict[str, Any]] = [
        {"type": "text", "content": part["text"]} if part["type"] == "text" else dict(part) for part in texts
    ]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")})  # fmt: skip
    return {"role": message.get("role"), "parts": parts}


def _pairs(has: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in has.items()]


def _value(value: Any) -> dict[str, Any]:
    """OTLP's AnyValue."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else json.dumps(value)}  # JSON has no NaN
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def _hex(words: str, size: int) -> str:
    return hashlib.blake2b(words.encode(), digest_size=size).hexdigest()


def _digest(prompt: Sequence[int], written: Sequence[int]) -> str:
    return _hex(json.dumps([list(prompt), list(written)]), 16)


# -- reading --------------------------------------------------------------------------------------------------------


def _plain(value: Mapping[str, Any]) -> Any:
    ((kind, held),) = value.items()
    if kind == "arrayValue":
        return [_plain(item) for item in held.get("values", [])]
    return int(held) if kind == "intValue" else float(held) if kind == "doubleValue" else held


def _call(span: Mapping[str, Any], has: Mapping[str, Any], place: str) -> Call:
    try:
        prompt, written, drawn = has["covey.prompt_token_ids"], has["covey.completion_token_ids"], has["covey.logprobs"]
        name = has["gen_ai.response.id"]
        messages = tuple(json.loads(has["covey.messages"]))
        text = json.loads(has["gen_ai.output.messages"])[0]["parts"][0]["content"]
        start, stop = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{place}: a call lacks what it was recorded with ({error}).") from error
    if has["covey.digest"] != _digest(prompt, written) or len(drawn) != len(written):
        raise DataError(
            f"{place}: call {name} has other tokens than were recorded; text that was rendered again is not what the model read "
            "and wrote. Take the trace as the run wrote it."
        )
    if has.get("covey.media"):
        raise DataError(f"{place}: call {name} has images, sounds or videos, which traces do not hold; leave it out.")
    completion = Completion(
        token_ids=torch.tensor(written, dtype=torch.int64),
        text=text,
        finish=has["gen_ai.response.finish_reasons"][0],
        logprobs=torch.tensor(drawn),
        version=has["covey.weights_version"],
    )
    shown = Prompt(uid="0", token_ids=tuple(prompt), messages=messages or None)
    return Call(
        id=name,
        model=has["gen_ai.request.model"],
        group=Group(prompt=shown, completions=(completion,)),
        params=SamplingParams(temperature=has["gen_ai.request.temperature"]),
        seed=has["covey.seed"],
        session=has["gen_ai.conversation.id"] or None,
        user=has.get("enduser.id"),
        created=start / 1e9,
        seconds=(stop - start) / 1e9,
    )
