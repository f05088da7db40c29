"""Small real parts for tests: a trained tokenizer, one-layer models, hand-made groups. `from kit import tiny_model`.

Everything is built on the CPU from a seed, without network, and cached for the session where it is safe to share.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from covey.kernels import compile as compiled
from covey.kernels import matmul_fp32 as live
from covey.learner import Learner, NoReference, Policy
from covey.learner.out_of_memory import BatchLimits
from covey.process.world import World
from covey.types import Completion, Finish, Group, Message, Prompt

Architecture = Literal["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""ChatML; `enable_thinking=True` opens a think block, so that tests can see template options arrive."""

_CORPUS = (
    "Tom has 3 apples and buys 4 more. How many apples does Tom have?",
    "The answer is 7. #### 7",
    "What is 12 + 30? 12 + 30 = 42 #### 42",
    "Anna had 20 pens and gave away 5. She has 20 - 5 = 15 pens left. #### 15",
)


@lru_cache
def _trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def tiny_tokenizer(
    *, chat: bool = True, eos: bool = True, pad: bool = True, padding_side: Literal["left", "right"] = "left"
) -> PreTrainedTokenizerFast:
    """A fresh byte-level BPE tokenizer of at most 320 tokens that encodes any text.

    EOS is `<|im_end|>`, pad is `<|endoftext|>`; `chat=False`, `eos=False`, `pad=False` leave the part out.
    """
    special: dict[str, Any] = {"eos_token": "<|im_end|>"} if eos else {}
    special |= {"pad_token": "<|endoftext|>"} if pad else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(_trained_tokenizer()), padding_side=padding_side, **special
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; a chat template of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<end>", "<user>", "<bot>"]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = (
        "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return tokenizer


def tiny_model(
    arch: Architecture = "qwen2",
    *,
    seed: int = 0,
    layers: int = 1,
    hidden: int = 32,
    vocab_size: int | None = None,
    max_position_embeddings: int = 256,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PreTrainedModel:
    """A fresh causal LM with random weights (the caller's to train or break), in eval mode.

    2 attention heads, 1 key-value head where the architecture has them; ids of pad and EOS are `tiny_tokenizer()`'s.
    Extra keywords go to the model's config.
    """
    tokenizer = _special_ids()
    vocab_size = tokenizer["vocab_size"] if vocab_size is None else vocab_size
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "pad_token_id": tokenizer["pad"],
        "eos_token_id": tokenizer["eos"],
        "bos_token_id": None,
    }
    if arch == "gpt2":
        shape |= {"n_embd": hidden, "n_layer": layers, "n_head": 2, "n_positions": max_position_embeddings}
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        shape |= {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": hidden // 2,
            "max_position_embeddings": max_position_embeddings,
            "tie_word_embeddings": True,
        }
    config_class, model_class = _ARCHITECTURES[arch]
    build = lambda: _seeded(lambda: model_class(config_class(**(shape | config))), seed).to(dtype).eval()
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return build()  # of fake tensors, or on another device
    return copy.deepcopy(_built(repr((arch, seed, dtype, sorted((shape | config).items()))), build))


def tiny_reward_model(*, seed: int = 0, hidden: int = 16, **config: Any) -> Qwen2ForSequenceClassification:
    """A fresh sequence classifier with one label and random weights, in eval mode; its tokenizer is `tiny_tokenizer()`."""
    tokenizer = _special_ids()
    shape: dict[str, Any] = {
        "vocab_size": tokenizer["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer["pad"],
        "num_labels": 1,
    }
    return _seeded(lambda: Qwen2ForSequenceClassification(Qwen2Config(**(shape | config))), seed).eval()


def learner_of(policy: Policy, optimizer: torch.optim.Optimizer, **given: Any) -> Learner:
    """A learner at a constant rate, of one process and without a reference unless `given` says otherwise."""
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    sizes = {item.name: given.pop(item.name) for item in fields(BatchLimits) if item.name in given}
    common = {"reference": NoReference(), "scheduler": scheduler, "world": World(), "limits": BatchLimits(**sizes)}
    return Learner(policy=policy, optimizer=optimizer, **{**common, **given})


def prompt(
    text: str | Sequence[Message] = "2 + 2 =", *, uid: str = "0:0", tokenizer: Any = None, **columns: Any
) -> Prompt:
    """A prompt made by hand; without a tokenizer its ids are those of the bytes of its text."""
    if isinstance(text, str):
        ids = tokenizer(text)["input_ids"] if tokenizer is not None else list(text.encode())
        return Prompt(uid=uid, text=text, token_ids=tuple(ids), columns=columns)
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    ids = tokenizer.apply_chat_template([dict(m) for m in text], add_generation_prompt=True, return_dict=False)
    return Prompt(uid=uid, messages=tuple(text), token_ids=tuple(ids), columns=columns)


def completion(
    text: str = "4", *, ids: Sequence[int] | None = None, finish: Finish = "stop", **fields: Any
) -> Completion:
    """A completion made by hand; its ids default to the bytes of its text."""
    token_ids = torch.tensor(list(text.encode(errors="surrogatepass")) if ids is None else list(ids), dtype=torch.int64)
    return Completion(token_ids=token_ids, text=text, finish=finish, **fields)


def group(
    texts: Sequence[str],
    *,
    question: str | Sequence[Message] = "2 + 2 =",
    uid: str = "0:0",
    rewards: Sequence[Sequence[float]] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Group:
    """A group made by hand: G completions of one prompt, and its rewards [G, R] where given."""
    return Group(
        prompt=prompt(question, uid=uid, **(columns or {})),
        completions=tuple(completion(text) for text in texts),
        rewards=None if rewards is None else torch.tensor(rewards, dtype=torch.float32),
    )


_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}


_BUILT: dict[str, PreTrainedModel] = {}


def _built(key: str, build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The model of this key, built once: a copy takes half the time."""
    if key not in _BUILT:
        _BUILT[key] = build()
    return _BUILT[key]


@lru_cache
def _special_ids() -> dict[str, int]:
    tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
    return {"vocab_size": len(tokenizer), "pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}


def _seeded(build: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


AVX2_ALONE = ("-mno-avx512f", "-mno-avx512bf16", "-mavx2", "-mfma")
"""Flags that compile kernels as on a processor without AVX-512."""


def live_kernels() -> live.Fp32Matmul:
    """Those of a processor without AVX-512, on this one."""
    return live.fp32_matmul() or live.Fp32Matmul(ctypes.CDLL(str(compiled.built(live.SOURCE, (), AVX2_ALONE))))


@contextmanager
def threads(count: int):
    """Inside, torch computes with this many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def forgotten(*cached):
    """What these functions (of `functools.cache`) know is found out again inside, and forgotten afterwards."""
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def rest_nightly(values: Iterable[Any], kept: int | Collection[Any]) -> list[Any]:
    """Cases of a parametrised test. In CI those in `kept`, or the first so many; the others are marked nightly."""
    return [
        value
        if (place < kept if isinstance(kept, int) else value in kept)
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for place, value in enumerate(values)
    ]


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Address of a server on this machine that answers by the handler, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def resident(line: str, process: int | str = "self") -> float:
    """MiB that a process has in memory (`line` VmRSS), or had at most (VmHWM). Linux only."""
    found = next(one for one in Path(f"/proc/{process}/status").read_text().splitlines() if one.startswith(line))
    return int(found.split()[1]) / 1024


class Doubled(TorchDispatchMode):
    """Makes float64 of every float32 that code asks for, as transformers' norms and softmax do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})
