"""`covey chat`: talk to a model, an adapter or a checkpoint in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from covey.cli import output
from covey.cli.checkpoints import model_folder
from covey.cli.flags import Flag, typed
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, CoveyError, did_you_mean
from covey.process.terminal import safe

_HELP = """/reset            forget the conversation
/system TEXT      set the system message (and forget the conversation); without TEXT: leave it out
/sample a=b ...   change sampling: temperature (0: greedy), top_p, top_k, max_tokens; alone: show it
/quit             leave (so do Ctrl-D and Ctrl-C)"""


_ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of the answers."""

    temperature: float = 0.7
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ConfigError(
                f"{self} cannot be sampled with: temperature and top_k are at least 0, top_p is above 0 and at most 1, "
                "max_tokens is at least 1."
            )

    def changed(self, words: list[str]) -> Sampling:
        """A copy changed by `name=value` words. Raises ConfigError for an unknown name or a wrong value."""
        kinds = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int}
        values = dict(word.split("=", 1) for word in words if "=" in word)
        for word in words:
            name = word.partition("=")[0]
            if name not in kinds or name not in values:
                raise ConfigError(
                    f"/sample {word}: write name=value.{did_you_mean(name, kinds)} It knows {', '.join(kinds)}."
                )
        return replace(self, **typed(values, kinds))

    def for_generate(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_tokens, "do_sample": False}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"max_new_tokens": self.max_tokens, "do_sample": True, **chosen}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())


@dataclass
class Chat:
    """A conversation with a model."""

    model: Any
    tokenizer: Any
    eos_ids: list[int]
    sampling: Sampling
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def reset(self) -> None:
        self.messages = []

    def ask(self, text: str, streamer: Any = None) -> str:
        """The answer, added to the conversation; a tokenizer without chat template continues the text as it stands."""
        import torch

        from covey.models import unwrapped
        from covey.rollout.hf import plainly_generating

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encoded(messages, text).to(self.model.device)
        with torch.inference_mode(), plainly_generating(unwrapped(self.model)):
            drawn = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=self.eos_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=streamer,
                **self.sampling.for_generate(),
            )
        answer = str(self.tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _encoded(self, messages: list[dict[str, str]], text: str) -> Any:
        """[1, L] token ids of what the model reads."""
        import torch

        if self.has_template:
            from covey.data import chat_ids

            system = [{"role": "system", "content": self.system}] if self.system else []
            ids = chat_ids(self.tokenizer, [*system, *messages], add_generation_prompt=True)
        else:
            ids = self.tokenizer(f"{self.system}\n{text}" if self.system else text)["input_ids"]
        from covey.models import context_limit

        limit = context_limit(self.model)
        if limit is not None and len(ids) >= limit:
            raise ConfigError(
                f"The conversation has {len(ids)} tokens and the model reads {limit}: /reset starts a new one."
            )
        return torch.tensor([ids], dtype=torch.long)


def streamer_to_stdout(tokenizer: Any) -> Any:
    """Writes an answer word by word, without anything that steers the terminal."""
    from transformers import TextStreamer

    class Words(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            sys.stdout.write(safe(text) + ("\n" if stream_end else ""))
            sys.stdout.flush()

    return Words(tokenizer, skip_prompt=True, skip_special_tokens=True)


def start(args: Args) -> Chat:
    """Load what `covey chat MODEL` names."""
    folder = model_folder(args["model"])
    import torch

    from covey import data
    from covey.models import load_model, load_tokenizer
    from covey.process.lean import set_seed

    trust = bool(args["trust_remote_code"])
    model = load_model(folder, {"dtype": args["dtype"]}, trust_remote_code=trust).eval()
    tokenizer = load_tokenizer(model, folder, trust_remote_code=trust)
    tokenizer = data.prepare_tokenizer(tokenizer, model)
    if torch.accelerator.is_available() and not args["use_cpu"]:
        model = model.to(torch.accelerator.current_accelerator())
    set_seed(args["seed"])
    sampling = Sampling(**{name: args[name] for name in ("temperature", "top_p", "top_k", "max_tokens")})
    return Chat(model, tokenizer, list(data.eos_ids(model, tokenizer)), sampling, args["system_prompt"])


def advice_of(model: Any) -> str:
    """A sentence with the sampling settings of the model's generation config, which have no effect; empty without any."""
    config = getattr(model, "generation_config", None)
    settings = {} if config is None else config.to_diff_dict()
    advised = [f"{name}={value}" for name, value in settings.items() if name in _ADVISED]
    return f" Its generation_config.json, which is not applied, names {' '.join(advised)}." if advised else ""


def lines() -> Iterator[str]:
    """Lines that the user types, until the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = input().strip()
        except EOFError:
            return
        if line:
            yield line


def command(chat: Chat, line: str) -> bool:
    """Do what a line with a slash says. Returns whether to go on."""
    word, _, rest = line.partition(" ")
    if word in ("/quit", "/exit"):
        return False
    if word == "/reset":
        chat.reset()
    elif word == "/system":
        chat.system = rest.strip() or None
        chat.reset()
    elif word == "/sample":
        chat.sampling = chat.sampling.changed(rest.split())
        output.say(str(chat.sampling))
    elif word == "/help":
        output.say(_HELP)
    else:
        commands = ("/reset", "/system", "/sample", "/quit", "/help")
        output.say(f"{word} is not known.{did_you_mean(word, commands)} It is one of {', '.join(commands)}.")
    return True


def run(args: Args) -> None:
    chat = start(args)
    if args.get("prompt") is not None:
        answer = chat.ask(args["prompt"], None if args.get("json") else streamer_to_stdout(chat.tokenizer))
        if args.get("json"):
            output.result_json({"prompt": args["prompt"], "answer": answer})
        return
    if args.get("json"):
        raise ConfigError("--json answers one --prompt; give it too.")
    if not chat.has_template:
        output.say(
            "This tokenizer has no chat template: each line is continued as it stands, without the lines before it."
        )
    output.say(
        f"{args['model']}: /help shows the commands. Answers are drawn with {chat.sampling}.{advice_of(chat.model)}"
    )
    converse(chat)


def converse(chat: Chat) -> None:
    """Answer line by line until the user leaves. A wrong command or a full context is reported and the chat continues."""
    for line in lines():
        try:
            if not line.startswith("/"):
                chat.ask(line, streamer_to_stdout(chat.tokenizer))
            elif not command(chat, line):
                return
        except CoveyError as error:
            output.say(str(error))


verb = Verb(
    name="chat",
    usage="MODEL [options]",
    sentence="Talk to a model, an adapter, a checkpoint, or the final model of a run.\n\n" + _HELP,
    examples=("covey chat runs/first", 'covey chat demo --prompt "What is 2 + 3?" --temperature 0'),
    positional=("model",),
    needs={"model": "a model: a folder, a run, a hub id, or demo."},
    places={"model": "model folder"},
    flags=lambda: (
        Flag(name="model", help="A folder, a run, a hub id, or demo.", group="what"),
        Flag(name="system_prompt", help="System message.", group="what"),
        Flag(name="prompt", help="Answer this one message and stop.", group="what"),
        Flag(name="temperature", help="Sampling temperature; 0: greedy.", type=float, default=0.7, group="sampling"),
        Flag(name="top_p", help="Sample from the fewest tokens that reach this sum.", type=float, default=1.0, group="sampling"),
        Flag(name="top_k", help="Sample from the k likeliest tokens; 0: all.", type=int, default=0, group="sampling"),
        Flag(name="max_tokens", help="Most tokens of an answer.", type=int, default=512, group="sampling"),
        Flag(name="seed", help="Seed of the sampling.", type=int, default=42, group="sampling"),
        Flag(name="dtype", help="Type that the weights are loaded in.", default="float32", group="model", is_common=False),
        Flag(name="trust_remote_code", help="Run Python code that comes with the model.", type=bool, group="model", is_common=False),
        Flag(name="use_cpu", help="Use the CPU even where there is an accelerator.", type=bool, group="model", is_common=False),
        JSON,
    ),
    run=run,
)  # fmt: skip
