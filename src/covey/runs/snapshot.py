"""Snapshots of tensors in host memory, unaffected by later in-place updates of the originals, and a thread that writes them."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor


@torch.no_grad()
def weights_now(model: torch.nn.Module) -> dict[str, Any]:
    """The model's `state_dict` as it is now; tensors tied to each other stay tied.

    Frozen parameters are not copied: nothing changes them, and a base model under an adapter is most of the memory.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = model.state_dict()
    return dict(zip(state, _copy(state, keep=frozen), strict=True))


def _copy(state: Mapping[str, Any], keep: set[str]) -> list[Any]:
    done: dict[tuple[Any, ...], Tensor] = {}
    copies: list[Any] = []
    for name, value in state.items():
        if name in keep or not isinstance(value, Tensor) or value.is_meta:
            copies.append(value)
            continue
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or place not in done:
            done[place] = host_copy(value)
        copies.append(done[place])
    return copies


def host_copy(value: Tensor) -> Tensor:
    """The tensor in the host's memory, never sharing any with the original."""
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def bytes_to_copy(model: torch.nn.Module, tree: Any) -> int:
    """Bytes of a snapshot of the trained weights and of the tensors in `tree`; tensors inside other objects do not count."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return weights + _bytes_in(tree)


def _bytes_in(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(_bytes_in, tree.values()))
    return sum(_bytes_in(item) for item in tree if type(item) is not int) if isinstance(tree, list | tuple) else 0


T = TypeVar("T")


class Background(Generic[T]):
    """Runs one piece of work at a time on a thread of its own.

    The thread lives only as long as its work, and Python waits for it at exit, so nothing is cut off but by a kill.
    """

    def __init__(self) -> None:
        self._pending: Future[T] | None = None

    @property
    def is_busy(self) -> bool:
        """True while the work is running."""
        return self._pending is not None and not self._pending.done()

    def start(self, work: Callable[[], T], name: str) -> None:
        """Begin. The result of earlier work must have been taken with `finish`."""
        assert self._pending is None, "the work before was not taken"
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending = threads.submit(work)
        threads.shutdown(wait=False)  # no second piece comes: the thread ends with this one

    def finish(self) -> T | None:
        """Wait for the work and return its result, or re-raise its exception, once. None when there is no work."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()
