"""A model of the Llama or Qwen family as one GGUF file, which is read back and compared before it counts as written.

The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Names of tensors and keys come from the `gguf` package.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.data import vocabulary_size
from covey.errors import ConfigError, ModelError, needed

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""`model_type` of transformers: its name in gguf."""
OUTTYPES = ("f32", "f16", "bf16", "q8_0")
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_MOST_ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}
"""Largest error of a weight: of itself for f16 and bf16, of the largest in its block of 32 for q8_0."""
_LEAST_STEP = {"f32": 0.0, "f16": 2.0**-25, "bf16": 0.0, "q8_0": 127 * 2.0**-25}
"""Largest additional error, of numbers or scales so small that float16 rounds them to a multiple of 2**-24."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Facts of the file, as written and read back."""

    path: Path
    num_tensors: int
    size: int
    """Bytes."""
    largest_error: float
    """Largest error of a weight, relative to the largest weight of its tensor."""


def load_gguf() -> Any:
    """The `gguf` package. Raises ConfigError where it is not installed."""
    with needed("GGUF files need the gguf package", "gguf"):
        import gguf
    return gguf


def expect_exportable(config: Any, outtype: str) -> str:
    """The gguf name of the architecture. Raises ConfigError or ModelError where no faithful file can be made."""
    if outtype not in OUTTYPES:
        raise ConfigError(f"outtype {outtype!r} is not one of {', '.join(OUTTYPES)}.")
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"GGUF is written for {', '.join(ARCHITECTURES)}, not for {kind!r}; export --format merged and convert that with "
            "llama.cpp's own script."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"This model scales its rotary embedding ({rope['rope_type']}), which is not written to GGUF here; export --format merged "
            "and convert that with llama.cpp's own script."
        )
    if (activation := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"This model's MLP has the activation {activation!r}; llama.cpp computes silu for its family.")
    if getattr(config, "use_sliding_window", False):
        raise ModelError("This model uses sliding-window attention, which llama.cpp does not compute for its family.")
    return ARCHITECTURES[kind]


def write_gguf(path: Path, model: Any, tokenizer: Any, *, name: str, outtype: str) -> Written:
    """Write `path` from a model with its weights in memory, read it back, and compare every tensor.

    `outtype`: f32, f16, bf16, or q8_0 (8 bits and a scale for 32 weights); vectors are f32 always. Raises ModelError for an
    architecture or a tokenizer that would not be the same in llama.cpp, and where what is read back differs by more than rounding.
    """
    gguf = load_gguf()
    config = model.config.get_text_config()
    kind = expect_exportable(config, outtype)
    arch = gguf.MODEL_ARCH[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_header(gguf, writer, config, name, outtype, vocabulary_size(model))
    _add_vocabulary(writer, tokenizer, vocabulary_size(model))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for parameter, weight in _weights(model):
        stem, _, ending = parameter.rpartition(".")
        theirs = names.get_name(stem)
        if theirs is None:
            raise ModelError(
                f"{parameter} has no place in a GGUF file of this family; the model has parts that llama.cpp does not."
            )
        data, raw = _encode(gguf, weight, outtype)
        writer.add_tensor(f"{theirs}.{ending}", data, raw_dtype=raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return _verify(gguf, path, model, names, outtype)


def _add_header(gguf: Any, writer: Any, config: Any, name: str, outtype: str, size: int) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    writer.add_rope_freq_base(float(theta))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(size)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[outtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and float32 weights as llama.cpp wants them; a tied output layer is left out, as it reads the embedding."""
    config = model.config.get_text_config()
    state: Mapping[str, Tensor] = model.state_dict()
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = weight.detach().float().cpu()
        if config.model_type == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            is_query = ".q_proj." in name
            weight = _interleave(weight, config.num_attention_heads if is_query else config.num_key_value_heads)
        yield name, weight


def _interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head as llama.cpp's Llama rotates them: pairs (2i, 2i + 1), where transformers rotates (i, i + d/2)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _encode(gguf: Any, weight: Tensor, outtype: str) -> tuple[np.ndarray[Any, Any], Any]:
    """The bytes of a tensor and their type; None where numpy knows the type."""
    is_small = weight.ndim < 2 or (outtype == "q8_0" and weight.shape[-1] % 32)
    values = np.ascontiguousarray(weight.numpy())
    if is_small or outtype == "f32":
        return values, None
    if outtype == "f16":
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise ModelError("A weight is too large for f16; use --outtype bf16 or f32.")
        return values.astype(np.float16), None
    kind = gguf.GGMLQuantizationType[outtype.upper()]
    return gguf.quantize(values, kind), kind


def _verify(gguf: Any, path: Path, model: nn.Module, names: Any, outtype: str) -> Written:
    """Every tensor of the file against the model's. Raises ModelError where one differs by more than its type rounds."""
    reader = gguf.GGUFReader(path)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    largest, count = 0.0, 0
    for parameter, weight in _weights(model):
        stem, _, ending = parameter.rpartition(".")
        tensor = by_name.get(f"{names.get_name(stem)}.{ending}")
        if tensor is None:
            raise ModelError(f"{path} was written but lacks {parameter}.")
        kind = tensor.tensor_type.name.lower()
        back = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        back = back.reshape(weight.shape)
        scale = weight.reshape(-1, 32).abs().amax(-1, keepdim=True) if kind == "q8_0" else weight.abs().reshape(-1, 1)
        apart = (back - weight).abs()
        allowed = scale * _MOST_ROUNDING[kind] + _LEAST_STEP[kind]
        if not bool((apart.reshape(scale.shape[0], -1) <= allowed * 1.001).all()):
            raise ModelError(f"{path} was written but {parameter} reads back unlike it was; not kept.")
        largest = max(largest, float(apart.max() / weight.abs().max().clamp_min(1e-30)))
        count += 1
    if count != len(by_name):
        raise ModelError(f"{path} was written but holds {len(by_name)} tensors instead of {count}; not kept.")
    return Written(path=path, num_tensors=count, size=path.stat().st_size, largest_error=largest)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_PATTERN = {_GPT2: "gpt-2", _LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
"""llama.cpp's name of each way to cut text into words, by its pattern in `tokenizer.json`."""
_DIGITS_FIRST = "smollm"
"""Each digit alone, then GPT-2's pattern."""


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Add the tokenizer of a model with `size` embeddings. Raises ModelError for one that GGUF would not reproduce."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    model = described.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ModelError(
            f"{type(tokenizer).__name__} is no byte-level BPE tokenizer, the only kind that is written to GGUF; convert this model "
            "with llama.cpp's own script."
        )
    words = {index: text for text, index in model["vocab"].items()}
    special = set()
    for added in described.get("added_tokens") or ():
        words[added["id"]] = added["content"]
        special.add((added["id"], added["special"]))
    if max(words) >= size:
        raise ModelError(
            f"The tokenizer has token {max(words)} and the model {size} embeddings; they do not belong together."
        )
    # llama.cpp's `llama_token_type`: 1 normal, 3 control, 4 defined by the user, 5 unused
    kinds = {index: 3 if is_special else 4 for index, is_special in special}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    bos = tokenizer.bos_token_id
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(
        _pre(described.get("pre_tokenizer"), described.get("normalizer"), bool(model.get("ignore_merges")))
    )
    writer.add_token_list([words.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([kinds.get(i, 1) if i in words else 5 for i in range(size)])
    writer.add_token_merges(merges)
    for add, value in (
        (writer.add_bos_token_id, bos),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_chat_template, tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None),
    ):
        if value is not None:
            add(value)
    writer.add_add_bos_token(bos is not None and tokenizer("a").input_ids[0] == bos)


def _pre(described: Any, normalizer: Any, ignores_merges: bool) -> str:
    """llama.cpp's name for the pre-tokenizer. Raises ModelError where it has none that cuts text alike."""
    steps = (described or {}).get("pretokenizers") or [described or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        pre_tokenizer: str | None = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        pre_tokenizer = _DIGITS_FIRST
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pre_tokenizer = _BY_PATTERN.get((steps[0].get("pattern") or {}).get("Regex", ""))
    else:
        pre_tokenizer = None
    normal = {"type": "NFC"} if pre_tokenizer == "qwen2" else None
    spaced = any(step.get("add_prefix_space") for step in steps)
    if (
        pre_tokenizer is None
        or spaced
        or normalizer not in (None, normal)
        or ignores_merges != (pre_tokenizer == "llama-bpe")
    ):
        raise ModelError(
            "llama.cpp would cut text into other words than this tokenizer does, so the model would read other tokens; convert it with "
            "llama.cpp's own script, which knows more tokenizers."
        )
    return pre_tokenizer
