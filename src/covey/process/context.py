"""Context parallelism: processes that compute each row together, every one a part of its tokens.

Between layers a process of a group of C holds every C-th token. Attention needs all tokens of a head, so an all-to-all turns
"all heads of my tokens" into "all tokens of my heads" before it, and back after it (DeepSpeed-Ulysses, Jacobs et al. 2023).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.process.world import World

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The processes that compute the rows of this process together."""

    world: World
    """World of the learner; its `context` is the size of the group."""

    @property
    def size(self) -> int:
        return self.world.context

    @property
    def rank(self) -> int:
        """Place of this process in its group."""
        return self.world.rank % self.size

    @property
    def tokens(self) -> slice:
        """Those of a whole row that this process computes."""
        return slice(self.rank, None, self.size)

    def passes(self) -> AbstractContextManager[None]:
        """Context of passes, in which a process that has ended is named by RankError."""
        return self.world.passes()

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group of `x`, of which each process has a part.

        Every process then computes the same loss from it, so its gradient is already that of the whole.
        """
        total: Tensor = _Sum.apply(x, self)
        return total

    def of_first(self, work: Callable[[], T]) -> T:
        """Result of `work()`, which the first process of the group does for all; what it raises, all raise. Collective."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box = [work(), None]
            except Exception as error:  # noqa: BLE001 - raised once every process has heard of it
                box = [None, error]
        with self.world.passes():
            dist.broadcast_object_list(box, src=self.world.rank - self.rank, group=self._group)
        if box[1] is not None:
            raise box[1]
        result: T = box[0]
        return result

    def by_head(self, x: Tensor) -> Tensor:
        """[1, H, t, D] all heads of this process's tokens -> [1, H / C, t C, D] all tokens of its heads. Differentiable."""
        whole: Tensor = _Exchange.apply(x, self.to_heads, self.to_tokens)
        return whole

    def by_token(self, x: Tensor) -> Tensor:
        """The inverse of `by_head`."""
        part: Tensor = _Exchange.apply(x, self.to_tokens, self.to_heads)
        return part

    def to_heads(self, x: Tensor) -> Tensor:
        """`by_head` without a gradient."""
        _, heads, tokens, width = x.shape
        got = self._exchanged(x.reshape(self.size, heads // self.size, tokens, width))  # [C, H / C, t, D], by sender
        return got.permute(1, 2, 0, 3).reshape(1, heads // self.size, -1, width)

    def to_tokens(self, x: Tensor) -> Tensor:
        """`by_token` without a gradient."""
        _, heads, tokens, width = x.shape
        parts = x.reshape(heads, tokens // self.size, self.size, width).permute(2, 0, 1, 3)
        return self._exchanged(parts).reshape(1, heads * self.size, -1, width)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """[C, ...] parts by receiver -> parts by sender."""
        sent = parts.contiguous()
        got = torch.empty_like(sent)
        with self.world.passes():
            dist.all_to_all_single(got, sent, group=self._group)
        return got

    @property
    def _group(self) -> Any:
        return _group(self.world.device.type, self.world.size, self.size)

    def summed(self, x: Tensor) -> Tensor:
        """`sum` without a gradient."""
        total = x.clone()
        with self.world.passes():
            dist.all_reduce(total, group=self._group)
        return total


@cache
def _group(device: str, processes: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (processes // size, size), mesh_dim_names=("rows", "context"))
    return mesh.get_group("context")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextGroup) -> Tensor:
        return group.summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Exchange(torch.autograd.Function):
    """An exchange `there`; its gradient comes `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None
