"""A state tree on disk, exactly: JSON for the shape and the small values, safetensors for the tensors. Never pickle.

A tree is made of dicts, lists, tuples, tensors, NumPy arrays, numbers, text, bytes, None, dates, decimals and the frozen
dataclasses of `covey.types`. A loaded tree equals the saved one bit for bit, NaN, -0.0 and the order of keys included;
a tensor or dataclass that occurs twice comes back as one object, any mapping as a dict, a parameter as a plain tensor.
Anything else is refused by name: a checkpoint that drops what it does not understand is worse than none. Only what a
scored group merely carries along (columns of its prompt, extras, details of events: images, say) is kept as its `repr`,
with a warning: no gradient depends on it, and a run should not end for it.
"""

import base64
import dataclasses
import datetime
import json
import math
import struct
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args
from zoneinfo import ZoneInfo

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from covey import types
from covey.errors import CheckpointError, CoveyError

SCHEMA = 1
_DATACLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(types.Prompt, types.Media, types.Completion, types.ToolCall, types.EpisodeNotes, types.Group),
        *(types.Event, types.StepReport, types.Alert),
        *get_args(types.Metric),
    )
}
_DATACLASSES["PromptImages"] = types.Media  # its name in checkpoints before sounds
_RENAMED = {"images": "media"}
"""Fields of dataclasses by their name in checkpoints before sounds."""
_STORED_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"),
    )
)
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_CARRIED_ALONG = {("Prompt", "columns"), ("Completion", "columns"), ("Group", "extras"), ("Event", "details")}


class StateError(CoveyError, TypeError):
    """A value that a checkpoint cannot hold exactly."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of a tree at one moment, to be written later."""

    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def snapshot(tree: Any) -> Snapshot:
    """The tree as it is now, sharing no memory with it. Raises StateError as `write` does."""
    return Snapshot(*encode(tree, copies=True))


def write(tree: Any, stem: Path) -> None:
    """Write `<stem>.json` and `<stem>.safetensors`, of a tree or of its snapshot.

    Raises StateError, naming the place, on a value that cannot be held.
    """
    held = tree if isinstance(tree, Snapshot) else Snapshot(*encode(tree))
    save_file(dict(held.tensors), f"{stem}.safetensors")
    text = json.dumps(held.document, allow_nan=False, separators=(",", ":"))
    Path(f"{stem}.json").write_text(text, encoding="ascii")


def read(stem: Path) -> Any:
    """The tree that `write` stored, tensors on the CPU. Raises CheckpointError when either file is missing or damaged."""
    try:
        document = json.loads(Path(f"{stem}.json").read_bytes())
        with safe_open(f"{stem}.safetensors", framework="pt", device="cpu") as file:
            # cloned: a lazily mapped page would end the process if the file were cut short later
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return decode(document, tensors)
    except (OSError, SafetensorError, struct.error, *_MALFORMED) as error:
        raise CheckpointError(
            f"{stem}.json and {stem.name}.safetensors do not hold a readable training state ({type(error).__name__}: "
            f"{error}); resume from another checkpoint."
        ) from error


def encode(tree: Any, *, copies: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A JSON document and the tensors it refers to by name: those of the tree where they can be, or always `copies`."""
    encoder = _Encoder(copies=copies)
    root = encoder.encode(tree, "state")
    return {"schema": SCHEMA, "objects": encoder.objects, "tree": root}, encoder.tensors


def decode(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The tree behind `encode`'s answer. Raises ValueError, LookupError, TypeError ... on a document that is not one."""
    if document["schema"] != SCHEMA:
        raise ValueError(f"state schema {document['schema']!r}; this version of Covey reads schema {SCHEMA}")
    decoder = _Decoder(tensors)
    for item in document["objects"]:
        decoder.objects.append(decoder.build_object(item))
    return decoder.decode(document["tree"])


class _Encoder:
    """Walks a tree once. Plain JSON values stand for themselves; the rest is `{"$kind": ...}`."""

    def __init__(self, *, copies: bool = False) -> None:
        self.copies = copies
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Any] = []
        self._storages: set[int] = set()
        self._warned: set[str] = set()
        self._seen: dict[int, tuple[Any, Any]] = {}  # id -> (the object, kept alive so that ids stay unique; its code)

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int):
            return value
        if isinstance(value, Tensor) or type(value) in _DATACLASSES.values():
            return self._once(value, where)
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if type(value) in (list, tuple):
            is_plain = set(map(type, value)) <= {int}  # a random state has 625 integers
            items = list(value) if is_plain else [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, where)
        for kind, (cls, to_json, _) in _SCALARS.items():
            if type(value) is cls:
                code = to_json(value)
                return code if kind in ("float", "str") and not isinstance(code, list) else {f"${kind}": code}
        raise _refusal(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        """Text keys stay a JSON object; any other key (an optimizer counts its parameters) makes a list of pairs."""
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
        return {
            "$dict": [
                [self.encode(key, f"a key of {where}"), self.encode(item, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }

    def _once(self, value: Any, where: str) -> Any:
        """The code of an object; when it was met before, the same code, so that it is stored once."""
        if id(value) not in self._seen:
            code = self._tensor(value, where) if isinstance(value, Tensor) else self._object(value, where)
            self._seen[id(value)] = (value, code)
        return self._seen[id(value)][1]

    def _object(self, value: Any, where: str) -> Any:
        name = type(value).__name__
        content = {}
        for item in dataclasses.fields(value):
            held, place = getattr(value, item.name), f"{where}.{item.name}"
            if (name, item.name) in _CARRIED_ALONG:
                held = {key: self._storable(entry, f"{name}.{item.name}[{key!r}]") for key, entry in held.items()}
            content[item.name] = self.encode(held, place)
        self.objects.append([name, content])
        return {"$object": len(self.objects) - 1}

    def _storable(self, value: Any, where: str) -> Any:
        """The value, or its `repr` where a checkpoint cannot hold it; a list keeps its length."""
        try:
            _Encoder().encode(value, where)
        except StateError as error:
            if type(value).__module__.startswith("PIL."):
                return f"image of {value.width} x {value.height}"  # the prompt keeps what the model read of it
            if isinstance(value, list | tuple):
                return [self._storable(item, where) for item in value]
            self._warn_once(where, str(error))
            return repr(value)[:1000]
        return value

    def _warn_once(self, where: str, sentence: str) -> None:
        if where not in self._warned:
            warnings.warn(f"{sentence} It is kept as text in this checkpoint; training is not affected.", stacklevel=2)
        self._warned.add(where)

    def _tensor(self, value: Tensor, where: str) -> Any:
        is_sharded = type(value).__name__ == "DTensor"
        if value.layout is not torch.strided or value.dtype not in _STORED_DTYPES or value.is_meta or is_sharded:
            raise StateError(
                f"{where} is a {type(value).__name__} of {value.dtype}, {value.layout} on {value.device}, which a "
                "checkpoint cannot hold; store a whole, dense tensor."
            )
        return {"$tensor": self._store(value.detach(), where)}

    def _store(self, value: Tensor, where: str) -> str:
        """Keep a tensor under its place in the tree, for other tools that read the file. Returns the name used."""
        name = place = where.encode("ascii", "backslashreplace").decode()
        while name in self.tensors:
            name = f"{place}#{len(self.tensors)}"
        stored = value.resolve_conj().resolve_neg().cpu().contiguous()
        is_view = stored.untyped_storage().nbytes() != stored.numel() * stored.element_size()
        is_live = self.copies and stored.data_ptr() == value.data_ptr()
        shares = is_live or is_view or stored.data_ptr() in self._storages
        self.tensors[name] = stored.clone() if shares else stored  # safetensors refuses tensors that share memory
        self._storages.add(stored.data_ptr())
        return name

    def _numpy(self, value: np.ndarray | np.generic, where: str) -> Any:
        if isinstance(value, np.str_):
            return self.encode(str(value), where)
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.dtype.name in ("complex128", "longdouble", "clongdouble"):
            raise _refusal(value, where)
        kind = "$array" if isinstance(value, np.ndarray) else "$number"
        native = array.astype(array.dtype.newbyteorder("="))
        return {kind: self._store(torch.from_numpy(native.copy()), where)}


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.objects: list[Any] = []

    def build_object(self, item: Any) -> Any:
        name, content = item
        return _DATACLASSES[name](**{_RENAMED.get(key, key): self.decode(value) for key, value in content.items()})

    def decode(self, code: Any) -> Any:
        if isinstance(code, list):
            return [self.decode(item) for item in code]
        if not isinstance(code, dict):
            return code
        kind = next(iter(code), "")
        if not kind.startswith("$"):
            return {key: self.decode(item) for key, item in code.items()}
        return self._special(kind[1:], code[kind])

    def _special(self, kind: str, code: Any) -> Any:
        match kind:
            case "tuple":
                return tuple(self.decode(item) for item in code)
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in code}
            case "object":
                return self.objects[int(code)]
            case "tensor":
                return self.tensors[code]
            case "array":
                return self.tensors[code].numpy()
            case "number":
                return self.tensors[code].numpy()[()]
        if kind not in _SCALARS:
            raise ValueError(f"unknown kind of value {kind!r}")
        return _SCALARS[kind][2](code)


def _float_code(value: float) -> float | list[str]:
    return value if math.isfinite(value) else [struct.pack(">d", value).hex()]


def _text_code(value: str) -> str | list[str]:
    return value if _is_text(value) else [base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]


def _is_text(value: str) -> bool:
    """False with lone surrogates: two in a row would come back from JSON as one character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _zone_code(value: datetime.tzinfo | None) -> Any:
    if value is None:
        return None
    if type(value) is datetime.timezone:
        return value.utcoffset(None).total_seconds()
    if isinstance(value, ZoneInfo) and value.key:
        return value.key
    raise StateError(f"a date with the time zone {value!r} cannot be stored; give it a named zone or a fixed offset.")


def _zone(code: Any) -> datetime.tzinfo | None:
    if code is None:
        return None
    return ZoneInfo(code) if isinstance(code, str) else datetime.timezone(datetime.timedelta(seconds=code))


def _zoned(kind: Any) -> tuple[type, Callable[[Any], Any], Callable[[Any], Any]]:
    """A kind of date with a time zone, as text, zone and fold."""
    return (
        kind,
        lambda x: [x.replace(tzinfo=None).isoformat(), _zone_code(x.tzinfo), x.fold],
        lambda code: (lambda text, zone, fold: kind.fromisoformat(text).replace(tzinfo=_zone(zone), fold=fold))(*code),
    )


# kind -> (exact type, value -> JSON, JSON -> value). Finite floats and ordinary text stand for themselves.
_SCALARS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, _float_code, lambda code: struct.unpack(">d", bytes.fromhex(code[0]))[0]),
    "str": (str, _text_code, lambda code: base64.b64decode(code[0]).decode("utf-8", "surrogatepass")),
    "bytes": (bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
    "decimal": (Decimal, str, Decimal),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": _zoned(datetime.datetime),
    "time": _zoned(datetime.time),
    "timedelta": (
        datetime.timedelta,
        lambda x: [x.days, x.seconds, x.microseconds],
        lambda code: datetime.timedelta(*code),
    ),
}


def _refusal(value: Any, where: str) -> StateError:
    return StateError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold exactly; "
        "use numbers, text, lists, dicts, dates or tensors, or remove the column from the data set."
    )
