"""bitsandbytes' optimizers on a model that is split over two processes: steps, and checkpoints that go on over another number."""

import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import sharded_cases as cases

from covey import GRPOConfig
from covey.learner.shard_optimizer import load_saved_state, on_shards, saved_state
from covey.process.shard_files import FOLDER, put_back, shards_refused, taken_out
from covey.process.sharding import Sharding, Shards, local, shard_like, whole
from covey.process.world import World
from covey.runs import serialization
from forked import Forked, free_port, rank_environment
from kit import tiny_model

bnb = pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES = {"aligned": (64, 256), "unaligned": (67, 96), "one_row": (1, 5000), "vector": (9000,), "small": (70, 3)}
"""Halves of the first begin with a block of 256, so do those of a tensor that one process holds; `small` has a 32-bit state."""
SAME_BLOCKS = ("aligned", "one_row", "small")
KINDS = {
    "adamw_8bit": (bnb.optim.AdamW, {"lr": 1e-2, "optim_bits": 8, "weight_decay": 0.1}),
    "lion_8bit": (bnb.optim.Lion, {"lr": 1e-3, "optim_bits": 8}),
    "rmsprop_bnb_8bit": (bnb.optim.RMSprop, {"lr": 1e-3, "optim_bits": 8}),
    "lion_32bit": (bnb.optim.Lion, {"lr": 1e-3, "optim_bits": 32}),
}
ROUNDED = {"adamw_8bit": 0.015, "lion_8bit": 0.04, "rmsprop_bnb_8bit": 0.008}
"""Most that other blocks may change the end, as a share of the way there: 1.5 times what was seen. Lion takes signs."""
RUN = {**cases.STEPS, "optim": "adamw_8bit", "max_steps": 3, "save_steps": 1}


MODEL = {"hidden": 72, "layers": 2}
"""Some of its halves begin with a block of 256, others do not, and others are too small for 8 bits."""


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters():
    return torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in weights().items()})


def steps(optimizer, given, numbers):
    for number in numbers:
        for name, gradient in weights(number).items():
            given[name].grad = shard_like(gradient * 10.0 ** -(number % 3), given[name])
        optimizer.step()


def values(given):
    return {name: whole(given[name].detach()).clone() for name in SHAPES}


def made(kind, given, is_split):
    make, options = KINDS[kind]
    return (on_shards(make) if is_split else make)(list(given.values()), **options)


def split_steps(kind, world, folder):
    """Weights after six steps, with a checkpoint of the fourth, and bytes of state for each element of a shard."""
    given = parameters()
    Shards(given, world, Sharding(blocks=()))
    optimizer = made(kind, given, is_split=True)
    steps(optimizer, given, range(1, 5))
    tree, shards = taken_out(saved_state(optimizer))
    now = values(given)
    if world.is_main:
        (folder / kind).mkdir(exist_ok=True)  # the other process may have begun its shards
        serialization.write({"optimizer": tree, "weights": now}, folder / kind / "state")
    assert shards_refused(shards, folder / kind / FOLDER) is None
    state = [one for name, one in optimizer.state[given["aligned"]].items() if not name.startswith("qmap")]
    held = sum(one.nbytes for one in state if torch.is_tensor(one)) / local(given["aligned"]).numel()
    steps(optimizer, given, range(5, 7))
    return values(given), held


def run(folder, processes, resume=None, **changed):
    model = {"model": lambda: tiny_model(**MODEL)}
    return cases.trained(folder, processes, resume=resume and str(resume), **{**RUN, **model, **changed})


def work(folder, part):
    """What each of two processes does; it leaves `<rank>.pt` in `folder`."""
    world = World.of(GRPOConfig(output_dir=str(folder / "none"), use_cpu=True, bf16=False, report_to="none"))
    if part == "first":
        found = {
            "steps": {kind: split_steps(kind, world, folder) for kind in KINDS},
            "unbroken": run(folder / "two", 2),
            "again": run(folder / "again", 2, folder / "two" / "checkpoint-2"),
        }
    else:
        found = {"last": run(folder / "last", 2, folder / "middle" / "checkpoint-2")}
    torch.save(found, folder / f"{part} {world.rank}.pt")
    torch.distributed.destroy_process_group()


def two_processes(folder, part):
    port = free_port()
    ranks = [Forked(__file__, folder, part, env=rank_environment(rank, port)) for rank in range(2)]
    assert [rank.wait(600) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    return [torch.load(folder / f"{part} {rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return two_processes(folder, "first"), folder


def change(one, other, before):
    """L2 distance of two ends of one training as a share of the way there."""
    return ((one - other).norm() / (other - before).norm()).item()


def expect_end(kind, found, expected):
    before = weights()
    for name in SHAPES:
        if name in SAME_BLOCKS or kind not in ROUNDED:
            assert torch.equal(found[name], expected[name]), name
        else:
            assert 0 < change(found[name], expected[name], before[name]) < ROUNDED[kind], name


@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_shards_are_those_of_whole_tensors_where_blocks_are_the_same(kind, pair):
    given = parameters()
    optimizer = made(kind, given, is_split=False)
    steps(optimizer, given, range(1, 7))
    for found, _ in (one["steps"][kind] for one in pair[0]):
        expect_end(kind, found, values(given))


def test_each_process_holds_two_bytes_of_state_for_each_element_of_its_shard(pair):
    assert [found["steps"]["adamw_8bit"][1] for found in pair[0]] == [2 + 2 * 4 / 256] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_from_the_state_of_two_to_the_bit_where_blocks_are_the_same(kind, pair):
    (first, _), folder = pair
    tree = put_back(serialization.read(folder / kind / "state"), folder / kind, World(), is_split=False)
    given = parameters()
    for name, value in tree["weights"].items():
        given[name].data.copy_(value)
    optimizer = made(kind, given, is_split=False)
    load_saved_state(optimizer, tree["optimizer"])
    steps(optimizer, given, range(5, 7))
    expect_end(kind, values(given), first["steps"][kind][0])


def losses(run):
    return [entry["loss"] for entry in run["history"] if "loss" in entry]


def start():
    return torch.cat([value.flatten().double() for _, value in sorted(tiny_model(**MODEL).state_dict().items())])


def expect_close(one, other):
    assert losses(one) == pytest.approx(losses(other), abs=2e-6)
    assert len(losses(one)) == RUN["max_steps"]
    assert change(one["weights"], other["weights"], start()) < 0.01


def test_a_run_of_two_processes_ends_close_to_that_of_one(pair, tmp_path):
    unbroken = pair[0][0]["unbroken"]
    assert unbroken["split"] > 0
    expect_close(unbroken, run(tmp_path, 1, save_strategy="no"))


def test_a_run_goes_on_to_the_bit_on_as_many_processes(pair):
    for found in pair[0]:
        assert torch.equal(found["again"]["weights"], found["unbroken"]["weights"])
        assert losses(found["again"]) == losses(found["unbroken"])


def test_a_run_goes_on_over_two_one_and_two_processes(pair):
    (first, _), folder = pair
    middle = run(folder / "middle", 1, folder / "two" / "checkpoint-1", max_steps=2)
    last, other = (found["last"] for found in two_processes(folder, "last"))
    assert (middle["split"], last["split"]) == (0, first["unbroken"]["split"])
    assert torch.equal(last["weights"], other["weights"])
    expect_close(last, first["unbroken"])


if __name__ == "__main__":
    signal.alarm(580)  # one that hangs ends
    torch.set_num_threads(1)
    work(Path(sys.argv[1]), sys.argv[2])
