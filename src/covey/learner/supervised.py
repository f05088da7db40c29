"""The supervised term of a step: its examples and their loss. Stateless: examples are drawn by the step number."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from covey.learner.packing import Row, filler, unscored_row
from covey.learner.policy import Policy
from covey.learner.token_batches import spread
from covey.types import Completion, Mean, Metric, Prompt, Sum


@dataclass(eq=False)
class Supervised:
    """Supervised examples trained on in addition to the rollout. An epoch is a permutation seeded by `seed` and its number."""

    policy: Policy
    """The policy at temperature 1."""
    example: Callable[[int], tuple[Prompt, Completion]]
    count: int
    weight: float
    batch_size: int
    seed: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def rows(self, step: int) -> list[Row]:
        """The examples of this step, counted from 1, as rows without advantage."""
        places = range((step - 1) * self.batch_size, step * self.batch_size)
        examples = [self.example(self._order(place // self.count)[place % self.count]) for place in places]
        return [unscored_row(prompt, completion, i, i) for i, (prompt, completion) in enumerate(examples)]

    def loss(self, batch: Sequence[Row], num_tokens: int) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's share of the weighted mean over the step's `num_tokens`, and its metrics."""
        measured = self.policy.measure(batch)
        logp = measured.logp
        counts = spread([row.counts for row in batch], logp.shape, logp.device, False)
        nll = torch.where(counts, -logp, torch.zeros_like(logp))
        loss = self.weight * nll.sum() / max(1, num_tokens)
        return loss, {"loss": Sum(loss.item()), "sft/loss": Mean.of(nll.detach(), counts)}

    def accumulate(
        self,
        rows: Sequence[Row],
        batches: Callable[[Sequence[Row]], Iterable[Sequence[Row]]],
        before_each: Callable[[], None],
        backward: Callable[[Tensor], None],
    ) -> list[dict[str, Metric]]:
        """Backward of a step's examples, in this process's `batches` of their `rows`. Returns their metrics."""
        num_tokens = sum(int(row.counts.sum()) for row in rows)
        parts = []
        for batch in batches(rows):
            before_each()
            loss, metrics = self.loss(batch or [filler()], num_tokens)
            backward(loss if batch else 0.0 * loss)
            parts += [metrics] if batch else []
        return parts

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            shuffled = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
            self._orders = {epoch: shuffled.tolist(), **dict(list(self._orders.items())[:1])}
        return self._orders[epoch]


def supervised_policy(policy: Policy) -> Policy:
    """The policy with log-probabilities at temperature 1 and rows packed without padding."""
    return replace(policy, temperature=1.0, auxiliary_coefficient=0.0, packs_always=True).tried()
