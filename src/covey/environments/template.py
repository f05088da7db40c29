"""Chat templates in episodes: the form of a tool call, and the tokens between a model's turn and its next.

Both are inferred from the template once, by rendering conversations with known words. So tokens that the model wrote are never
rendered again: only the answer's tokens are, and they follow the model's own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.data import chat_ids
from covey.data.media import Kind, media_prompt, parts_of
from covey.data.thoughts import thought_marks
from covey.environments.call_forms import (
    ID,
    KEYS,
    NAME,
    VALUES,
    WrittenCall,
    as_mapping,
    json_form,
    name_and_json_form,
    readable,
    reads_back,
    recipient_form,
    tagged_form,
)
from covey.environments.keyed_calls import keyed_form
from covey.environments.messages import parsed_response, read_channels, thoughts_in, thoughts_of, without_specials
from covey.errors import ModelError, message_of
from covey.rollout.environments import Answer
from covey.types import Media, Message


def channel_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """Messages in channels, gpt-oss' harmony."""
    is_harmony = all(word in body for word in ("<|channel|>", "<|message|>", f"functions.{NAME}"))
    return read_channels if is_harmony else None


FORMS = (channel_form, recipient_form, json_form, keyed_form, name_and_json_form, tagged_form)
_ASK = {"role": "user", "content": "qxquestion"}
_ID_STYLES = (ID, "functions.{name}:{place}")
"""Identities of calls: what most templates take, and Kimi's, which hold the tool's name."""
_WAYS = tuple((style, as_text) for as_text in (False, True) for style in _ID_STYLES)
"""Some templates add the arguments to a text, so that they must be one."""


class Template:
    """The chat template of a tokenizer, as episodes use it. `options` are keyword arguments of `apply_chat_template`.

    Raises ModelError where the template has no tool calls, or where an answer changes what came before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        options: Mapping[str, Any],
        *,
        has_bridges: bool = True,
        processor: Any = None,
    ) -> None:
        """`has_bridges=False`: only calls are read, so an answer may change what came before it. `processor`: of a model that reads media."""
        self.processor = processor
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.options = {name: value for name, value in options.items() if name != "tools"}
        self.tools = options.get("tools") or None
        if getattr(tokenizer, "chat_template", None) is None and not options.get("chat_template"):
            raise ModelError(
                "tools need a chat template, which the tokenizer does not have; use an instruct model's, or set "
                "tokenizer.chat_template."
            )
        self.takes_text_arguments, self._id_style = False, ID
        self._wrapper = ""  # text that opens the calls, without special tokens
        self._before_body = ""
        self._failures: list[str] = []  # the template's own exceptions at a turn with a call
        self._in_parts: frozenset[str] = frozenset()
        """Roles whose content the template reads in parts alone, as those of images may."""
        self._in_parts = self._roles_in_parts([_ASK], "qxquestion")
        self.marks = None if self._has_response_template else thought_marks(tokenizer)
        self._form = self._learn_form()
        if has_bridges:
            answer = {"role": "tool", "name": NAME, "content": "qxresult", "tool_call_id": self.call_id(NAME)}
            history = [_ASK, self._assistant([NAME], {}, [self.call_id(NAME)]), answer]
            self._in_parts |= self._roles_in_parts(history, "qxresult")
            self.reply([answer])
            if "qxresult" not in self._render(history, tokenize=False):
                raise ModelError(
                    "the tokenizer's chat template leaves out what a tool answers, so the model would not read it; set another "
                    "tokenizer.chat_template."
                )

    # -- what the model wrote ---------------------------------------------------------------------------------------

    def turn_in(self, token_ids: Sequence[int], prefix: Sequence[int]) -> tuple[str, list[WrittenCall], dict[str, Any]]:
        """Text of a model's turn without its tool calls, the calls, and the fields of its message with thoughts, where these are told apart.

        `token_ids` stand behind the tokens `prefix`, and end with the end-of-turn token, if any.
        """
        head, text, calls, thoughts = self.parts_in(token_ids, prefix)
        return (without_specials(head, self.tokenizer, strips=False) + text).strip(), calls, thoughts

    def parts_in(
        self, token_ids: Sequence[int], prefix: Sequence[int]
    ) -> tuple[str, str, list[WrittenCall], dict[str, Any]]:
        """`turn_in` with the thoughts between `marks` before the text, in which no call is looked for."""
        ids = list(token_ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        if self._has_response_template:
            message = parsed_response(self.tokenizer, ids, prefix, self.tools)
            if message is None:
                return "", self.tokenizer.decode(ids, skip_special_tokens=True), [], {}
            return "", message["content"], _calls_of(message), thoughts_of(message)
        whole = self.tokenizer.decode(ids, skip_special_tokens=False)
        head, rest = self._thought_first(whole, prefix)
        text, calls = self._form(rest)
        if head and _num_whole(self._form(whole)) > _num_whole(self._form(head)) + _num_whole((text, calls)):
            head, (text, calls) = "", self._form(whole)  # the word that closes thoughts stood in a call's arguments
        thoughts = thoughts_in(whole) if self._form is read_channels else {}
        shown = without_specials(text, self.tokenizer)
        return head, shown.removesuffix(self._wrapper).strip() if calls else shown, calls, thoughts

    def _thought_first(self, text: str, prefix: Sequence[int]) -> tuple[str, str]:
        """A turn's thoughts with their marks, and what follows. Thoughts without an end are no thoughts: a call may end them."""
        if self._form is read_channels or self.marks is None:
            return "", text
        is_open = self.marks.are_open(self.tokenizer, prefix)
        end = text.find(self.marks.closes) + len(self.marks.closes)
        if end < len(self.marks.closes) or not (is_open or text.lstrip().startswith(self.marks.opens)):
            return "", text
        rest = text[end:].lstrip()
        return text[: len(text) - len(rest)], rest

    @property
    def _has_response_template(self) -> bool:
        return bool(getattr(self.tokenizer, "response_template", None))

    # -- what the tools answered ------------------------------------------------------------------------------------

    def shows(self, kind: Kind) -> bool:
        """True if the template writes the placeholder of such an item in an answer."""
        place, answer = kind.place(self.processor), {"role": "tool", "name": NAME, "content": [{"type": kind.name}]}
        history = [_ASK, self._assistant([NAME], {}), {**answer, "tool_call_id": self.call_id(NAME)}]
        try:
            return place is None or place in self._render(history, tokenize=False)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False

    def reply(self, answers: Sequence[Message]) -> Answer:
        """Token ids from the end of the model's turn to the start of its next, with `answers` (tool or user messages), and their media.

        Raises ModelError where the template writes what came before the model's turn otherwise once it is answered, DataError for
        media that the processor refuses.
        """
        tools = [answer for answer in answers if answer["role"] == "tool"]
        names = [str(answer.get("name") or NAME) for answer in tools]
        ids = [str(answer["tool_call_id"]) for answer in tools if answer.get("tool_call_id")]
        ids = ids if len(ids) == len(names) else []
        turn = self._assistant(names, {}, ids) if names else {"role": "assistant", "content": "qx"}
        before = self._render([_ASK], tokenize=True)
        alone = self._render([_ASK, turn], tokenize=True)
        whole, media = self._whole([_ASK, turn, *answers])
        rest = lambda start: Answer(whole[start:], None if media is None else media.last(len(whole) - start))
        if whole[: len(before)] != before:
            raise ModelError(
                "the tokenizer's chat template is not prefix-stable: an answer changes the tokens that came before the "
                "model's turn, so it would be trained on text that it did not read; set another tokenizer.chat_template."
            )
        end = next((i for i in range(len(before), len(whole)) if whole[i] in self.eos_ids), None)
        if end is not None:
            return rest(end + 1)
        if whole[: len(alone)] != alone:
            raise ModelError(
                "the tokenizer's chat template has no token that ends the model's turn, and an answer changes that turn; set "
                "another tokenizer.chat_template, or eos_token_id to the token that ends a turn."
            )
        return rest(len(alone))

    def _whole(self, messages: Sequence[Message]) -> tuple[list[int], Media | None]:
        """The conversation with the model's turn next, the items of its media read by the processor."""
        if not any(part.get("type") != "text" for part in parts_of(messages)):
            return list(self._render(messages, tokenize=True, add_generation_prompt=True)), None
        how = self.options | ({"tools": self.tools} if self.tools else {})
        read = media_prompt({"prompt": messages}, "", "an answer of a tool", self.processor, how, {})
        return list(read.token_ids), read.media

    def answer(self, answers: Sequence[Message], calls: Sequence[WrittenCall], num_before: int) -> Answer:
        """`reply` with the answers of these calls, with the identities that the model wrote where the template takes them.

        `num_before`: calls of the conversation before these.
        """
        new = [self.call_id(call.name, num_before + i) for i, call in enumerate(calls)]
        ids = [call.id or made for call, made in zip(calls, new, strict=True)]
        with_ids = lambda ids: [{**entry, "tool_call_id": id} for entry, id in zip(answers, ids, strict=True)]
        try:
            return self.reply(with_ids(ids))
        except Exception:
            if ids == new:
                raise
            return self.reply(with_ids(new))  # templates may refuse an identity, such as one of too few letters

    def _roles_in_parts(self, messages: Sequence[Message], word: str) -> frozenset[str]:
        """The role of the last message, where the template leaves out its `word` as text but not in a part; else none."""
        role, before = str(messages[-1]["role"]), self._in_parts
        has_word = []
        for roles in (before, before | {role}):
            self._in_parts = roles
            try:
                has_word.append(word in self._render(messages, tokenize=False))
            except Exception:  # noqa: BLE001 - a template is a program and may raise anything
                has_word.append(False)
        self._in_parts = before
        return frozenset({role}) if has_word == [False, True] else frozenset()

    def _render(self, messages: Sequence[Message], *, tokenize: bool, **options: Any) -> Any:
        how = {**self.options, **options}
        messages = [
            {**message, "content": [{"type": "text", "text": content}]}
            if message["role"] in self._in_parts and isinstance(content := message.get("content"), str)
            else message
            for message in messages
        ]
        if self.tools:
            how["tools"] = self.tools
        if tokenize:
            return chat_ids(self.tokenizer, messages, **how)
        return str(self.tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **how))

    def call_id(self, name: str, place: int = 0) -> str:
        """An identity of a call in the form that the template takes, for a call without one."""
        return "call00001" if self._id_style == ID else self._id_style.format(name=name, place=place)

    def _assistant(self, names: Sequence[str], arguments: Mapping[str, Any], ids: Sequence[str] = ()) -> Message:
        """The model's turn with a call of each of these tools."""
        content: Any = json.dumps(arguments) if self.takes_text_arguments else dict(arguments)
        ids = ids or [self._id_style.format(name=name, place=place) for place, name in enumerate(names)]
        calls = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": content}}
            for name, call_id in zip(names, ids, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    # -- the form of a call -----------------------------------------------------------------------------------------

    def _learn_form(self) -> Callable[[str], tuple[str, list[WrittenCall]]]:
        """The parser for calls as this template writes them."""
        body, form = None, None
        for self._id_style, self.takes_text_arguments in _WAYS:
            if form is None and (written := self._body()) is not None:
                body = body or written
                learnt = [make(written) for make in self._forms()]
                form = next((parser for parser in learnt if parser is not None and reads_back(parser, written)), None)
            if form is not None:
                self._wrapper = without_specials(form(written or "")[0], self.tokenizer)
                return form
        if body is not None:
            raise ModelError(
                "the tokenizer's "
                + (
                    "response_template does not read the tool calls that its chat template writes"
                    if self._has_response_template
                    else "chat template writes tool calls in a form that is not understood"
                )
                + f", such as {body.strip()[:200]!r}; set tokenizer.response_template, by which transformers' parse_response reads "
                "them, or another tokenizer.chat_template."
            )
        if len(self._failures) == len(_WAYS):
            raise ModelError(
                f"the tokenizer's chat template fails at a turn with a tool call ({self._failures[0]}); set tokenizer.chat_template "
                "to one that transformers can render."
            )
        raise ModelError(
            "the tokenizer's chat template does not write tool calls, so the model cannot make any; use an instruct model "
            "that was trained with tools, or set tokenizer.chat_template."
        )

    def _forms(self) -> Sequence[Callable[[str], Callable[[str], tuple[str, list[WrittenCall]]] | None]]:
        """Makers of parsers: the tokenizer's own response template alone, where it has one."""
        if not self._has_response_template:
            return FORMS
        parsed = lambda text: parsed_response(self.tokenizer, text, self._before_body, self.tools)
        return (lambda body: lambda text: ("", _calls_of(parsed(text) or {})),)

    def _body(self) -> str | None:
        """An assistant's turn with one call of two arguments, as the template writes it; None where it leaves them out."""
        arguments = dict(zip(KEYS, VALUES, strict=True))
        try:
            start = self._render([_ASK], tokenize=False, add_generation_prompt=True)
            whole = self._render([_ASK, self._assistant([NAME], arguments)], tokenize=False)
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            self._failures.append(f"{type(error).__name__}: {message_of(error, 200)}")
            return None
        shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
        tag = whole.rfind("<", 0, shared)
        begin = tag if tag >= 0 and ">" not in whole[tag:shared] else shared  # two tags may begin alike
        self._before_body, body = whole[:begin], whole[begin:]
        return self._without_end(body) if all(word in body for word in (NAME, *KEYS, *VALUES)) else None

    def _without_end(self, body: str) -> str:
        ends = [self.tokenizer.decode([token]) for token in self.eos_ids]
        cuts = [body.rfind(end) for end in ends if end and end in body]
        return body[: max(cuts)] if cuts else body


def _num_whole(parsed: tuple[str, list[WrittenCall]]) -> int:
    """Calls that could be read."""
    return sum(call.problem is None for call in parsed[1])


def _calls_of(message: Mapping[str, Any]) -> list[WrittenCall]:
    """The calls of a message that the tokenizer's response template parsed."""
    written = lambda call: WrittenCall(str(call.get("name", "")), readable(as_mapping(call.get("arguments", {}))))
    return [written(call["function"]) for call in message.get("tool_calls") or [] if "function" in call]
