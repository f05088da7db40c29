"""Every test: seeded, one thread of arithmetic, no network but loopback, `tests/` importable (`from kit import ...`)."""

import gc
import logging
import os
import random
import re
import signal
import socket
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; tests of several threads set their number
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests start processes beside them
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# runs are of no repository: a run notes what differs from its commit, 0.1 s of a tiny run in a fresh clone
os.environ["GIT_DIR"] = os.devnull
sys.path.insert(0, str(Path(__file__).parent))

import numpy
import pytest

gc.disable()  # until all tests are collected: nothing of what imports and collection make is garbage
COUNT_FROZEN = gc.get_freeze_count
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # compiled by the collection, read by each process that a test starts

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the process that hands out tests runs none, and needs no torch
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks when it is imported, and other libraries import it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make slow` reads only the files in which the mark is written: a test that has it from elsewhere would never run."""
    for mark in ("slow", "nightly"):
        marked = {item.path for item in items if item.get_closest_marker(mark)}
        silent = [str(path) for path in marked if not re.search(rf"mark\.{mark}|rest_{mark}\(", path.read_text())]
        assert not silent, f"pytest.mark.{mark} is not written in {silent}"


def pytest_collection_finish():
    """Garbage collections leave out what the imports made: a run collects once before it starts, which took 0.3 s each time.
    Counting what is frozen, as a run does, takes another 0.1 s."""
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] in ("torch", "dill"):
            logger.propagate = True  # pytest puts its handlers on each that does not, six times a test
    gc.enable()
    gc.collect()
    gc.freeze()
    frozen = COUNT_FROZEN()
    gc.get_freeze_count = lambda: frozen


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap():
    """What tests before this file imported and keep is left out as well."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def thawed_heap(monkeypatch):
    """The heap as a script has it."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed also notes the call's stack for devices that are not there


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch):
    """What the command line sets for its process is taken back, also what a fixture of a whole module set by calling it."""
    for name, logger in logging.root.manager.loggerDict.items():
        if not name.startswith(("covey", "bitsandbytes")) or not isinstance(logger, logging.Logger):
            continue
        logger.handlers.clear()
        if logger.level != logging.NOTSET:  # setting it empties the cache of every logger there is
            logger.setLevel(logging.NOTSET)
        logger.propagate = True
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A connection to anything but this machine is a bug in the test or in Covey."""
    connect = socket.socket.connect

    def guarded(self, address):
        is_local = self.family == socket.AF_UNIX or str(address[0]) in {"127.0.0.1", "::1", "localhost"}
        if not is_local:
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
