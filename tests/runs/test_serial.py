"""A state tree comes back from disk exactly, or is refused by name."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import json
import math
import random
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import CheckpointError
from covey.process import rng
from covey.runs import serialization
from covey.types import Completion, Event, Group, Max, Mean, Prompt, StepReport
from example_counts import examples


def through_disk(tree: Any, folder: Path) -> Any:
    serialization.write(tree, folder / "state")
    return serialization.read(folder / "state")


def bits(value: Any) -> Any:
    """A form in which == means the same bits and the same types."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return ("tensor", value.dtype, tuple(value.shape), raw)
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, dict):
        return ("dict", [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    if isinstance(value, Prompt | Completion | Group | Event | StepReport | Mean | Max):
        return (type(value), bits({name: getattr(value, name) for name in value.__dataclass_fields__}))
    return (type(value), value)


ODD_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@examples(30)
@given(tree=trees)
def test_any_tree_of_plain_values_comes_back_bit_for_bit(tree: Any, tmp_path: Path) -> None:
    assert bits(through_disk(tree, tmp_path)) == bits(tree)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.nan,
        ODD_NAN,
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        0.1 + 0.2,
        2**70,
        True,
        1,
        "\ud83d\ude00",
        "\x00\u2028\U0001f600",
        {"$tensor": "not one", "$": 1},
        {1: "a", "1": "b", (2, 3): "c", None: "d", 1.5: "e", False: "f"},
        {},
        (),
        [],
        ((),),
    ],
    ids=repr,
)
def test_awkward_values_come_back_bit_for_bit(value: Any, tmp_path: Path) -> None:
    assert bits(through_disk(value, tmp_path)) == bits(value)


def test_dates_keep_their_zone_and_fold(tmp_path: Path) -> None:
    moments = [
        datetime.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime.datetime(2026, 1, 1, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
        datetime.datetime(1, 1, 1, microsecond=1, tzinfo=datetime.timezone.utc),
        datetime.time(4, 5, 6, 7),
    ]
    back = through_disk(moments, tmp_path)
    assert back == moments
    assert [moment.utcoffset() for moment in back] == [moment.utcoffset() for moment in moments]
    assert back[0].fold == 1


@pytest.mark.parametrize("dtype", sorted(serialization._STORED_DTYPES, key=str), ids=str)
def test_tensors_of_every_type_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 8), dtype=torch.uint8)
    tensor = raw.view(dtype)
    tree = {
        "whole": tensor,
        "view": tensor[1:, ::2],
        "scalar": tensor[0, 0],
        "empty": tensor[:0],
        "transposed": tensor.T,
    }
    back = through_disk(tree, tmp_path)
    assert bits(back) == bits(tree)


def test_numpy_arrays_and_numbers_come_back_with_their_type(tmp_path: Path) -> None:
    tree = {
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "number": np.float32(0.1),
        "double": np.float64("nan"),
        "yes": np.bool_(True),
        "empty": np.zeros((0, 3)),
    }
    back = through_disk(tree, tmp_path)
    assert bits(back) == bits(tree)
    back["array"][0, 0] = 9  # ordinary, writable memory


def test_the_state_of_an_optimizer_and_its_schedule_comes_back(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, seeds: range) -> None:
        for seed in seeds:
            model(torch.full((1, 3), float(seed))).sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    straight = make()
    steps(*straight, range(4))
    model, optimizer, schedule = make()
    steps(model, optimizer, schedule, range(2))
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    back = through_disk(tree, tmp_path)
    model, optimizer, schedule = make()
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    schedule.load_state_dict(back["schedule"])
    steps(model, optimizer, schedule, range(2, 4))
    for mine, theirs in zip(model.parameters(), straight[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert schedule.get_last_lr() == straight[2].get_last_lr()


def a_group() -> Group:
    prompt = Prompt(
        uid="0:1",
        token_ids=(1, 2, 3),
        messages=({"role": "user", "content": "hi"},),
        columns={"answer": "4", "when": datetime.date(2026, 1, 2), "nested": [{"a": None}], "score": math.nan},
    )
    completion = Completion(
        token_ids=torch.tensor([4, 5]),
        text="x\x1b[0m",
        finish="stop",
        logprobs=torch.tensor([-0.1, math.nan]),
        mask=torch.tensor([True, False]),
        version=3,
    )
    return Group(
        prompt=prompt,
        completions=(completion, completion),
        rewards=torch.tensor([[1.0], [math.nan]]),
        advantages=torch.tensor([0.5, -0.5]),
        events=(Event(kind="reward", said="It failed.", details={"traceback": "..."}),),
        extras={"length": [1, 2]},
    )


def test_groups_come_back_whole_and_shared_parts_stay_shared(tmp_path: Path) -> None:
    group = a_group()
    tree = {"pending": ((group,), (group, group.take([1]))), "metrics": {"kl": Mean(1.0, 3.0), "top": Max(math.nan)}}
    back = through_disk(tree, tmp_path)
    assert bits(back) == bits(tree)
    first, second = back["pending"][0][0], back["pending"][1][0]
    assert first is second
    assert back["pending"][1][1].prompt is first.prompt
    assert first.completions[0] is first.completions[1]


def test_what_a_group_only_carries_along_never_stops_a_checkpoint(tmp_path: Path) -> None:
    group = Group(
        prompt=Prompt(uid="0", token_ids=(), columns={"image": Path("a.png"), "answer": "4"}),
        completions=(),
        events=(Event(kind="reward", said="x", details={"error": ValueError("bad")}),),
        extras={"parsed": [{1, 2}, 3.5]},
    )
    with pytest.warns(UserWarning, match=r"(columns|extras|details)\[.*training is not affected") as seen:
        back = through_disk([group, group], tmp_path)
    assert len(seen) == 3
    assert back[0].prompt.columns == {"image": "PosixPath('a.png')", "answer": "4"}
    assert back[0].extras == {"parsed": ["{1, 2}", 3.5]}
    assert back[0].events[0].details == {"error": "ValueError('bad')"}


def test_a_repeated_tensor_is_stored_once(tmp_path: Path) -> None:
    tensor = torch.zeros(25_000)
    serialization.write([tensor] * 10, tmp_path / "state")
    assert (tmp_path / "state.safetensors").stat().st_size < 101_000


class Mood(str, enum.Enum):
    GOOD = "good"


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        {1, 2},
        Mood.GOOD,
        Point(1, 2),
        1j,
        np.array(["a"]),
        np.datetime64("2026"),
        Path("x"),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_held_exactly_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(serialization.StateError, match=r"state\.data\.rows\[1\]"):
        serialization.encode({"data": {"rows": [0, value]}})


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex128)],
    ids=["sparse", "meta", "complex128"],
)
def test_tensors_that_cannot_be_held_are_refused_by_their_place(tensor: torch.Tensor) -> None:
    with pytest.raises(serialization.StateError, match=r"state\.weight"):
        serialization.encode({"weight": tensor})


@examples(30)
@given(
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    cut=st.booleans(),
    name=st.sampled_from(["json", "safetensors"]),
)
def test_damaged_files_raise_a_checkpoint_error_or_read(
    where: float, bit: int, cut: bool, name: str, tmp_path: Path
) -> None:
    serialization.write({"group": a_group(), "x": [1.5, math.nan, b"z", Decimal("1.2")]}, tmp_path / "state")
    file = tmp_path / f"state.{name}"
    data = bytearray(file.read_bytes())
    place = int(where * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << bit
    file.write_bytes(data)
    with contextlib.suppress(CheckpointError):  # finding every flipped bit is the manifest's work; here the kind counts
        serialization.read(tmp_path / "state")


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"schema": 99, "objects": [], "tree": 1},
        {"schema": 1, "objects": [["Popen", {"args": "touch x"}]], "tree": {"$object": 0}},
        {"schema": 1, "objects": [], "tree": {"$object": 0}},
        {"schema": 1, "objects": [], "tree": {"$pickle": "gASVAA=="}},
        {"schema": 1, "objects": [], "tree": {"$float": ["00"]}},
        {"schema": 1, "objects": [], "tree": {"$decimal": "x"}},
        {"schema": 1, "objects": [], "tree": {"$datetime": ["2026-01-01", "../../etc/passwd", 0]}},
    ],
    ids=repr,
)
def test_a_document_of_another_kind_raises_a_checkpoint_error(document: Any, tmp_path: Path) -> None:
    serialization.write(0, tmp_path / "state")
    (tmp_path / "state.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="resume from another checkpoint"):
        serialization.read(tmp_path / "state")


def test_nesting_without_end_raises_a_checkpoint_error(tmp_path: Path) -> None:
    serialization.write(0, tmp_path / "state")
    (tmp_path / "state.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError):
        serialization.read(tmp_path / "state")


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(2).tolist()]


def test_every_generator_goes_on_where_it_stood(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draws()  # leaves a cached second gaussian in Python's and NumPy's generators
    state = through_disk(rng.snapshot(), tmp_path)
    expected = draws()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    rng.restore(state)
    assert draws() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")
def test_a_checkpoint_from_a_machine_with_gpus_is_restored_with_a_warning() -> None:
    state = {**rng.snapshot(), "cuda": [torch.get_rng_state()] * 2}
    expected = draws()
    with pytest.warns(UserWarning, match=r"random state of 2 GPU\(s\) and this machine has 0"):
        rng.restore(state)
    assert draws() == expected
