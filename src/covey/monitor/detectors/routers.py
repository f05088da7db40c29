"""Router drift: the experts of a model are used less and less evenly, or the learner's routers choose others than the sampler's."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from covey.monitor.history import History
from covey.types import Alert


@dataclass(frozen=True)
class RouterDrift:
    """`router_drift`: the entropy of some layer's load falls to `fall` of what it was at the start, or `changed` of the choices differ.

    The entropy is that of the layer with the lowest, over log E. Differences are measured with `router_replay='R3'`, which records
    the sampler's choices.
    """

    fall: float = 0.7
    changed: float = 0.3
    window: int = 5

    def __call__(self, seen: History) -> Alert | None:
        entropy = seen["experts/entropy"]
        last = entropy.last(self.window)
        if len(last) < self.window:
            return None
        start = fmean(entropy.start(self.window))
        changed = fmean(seen["experts/changed"].last(self.window) or [0.0])
        load = fmean(seen["experts/max_load"].last(self.window))
        evidence = {"entropy": fmean(last), "entropy_at_start": start, "max_load": load, "changed": changed}
        if fmean(last) <= self.fall * start:
            sentence = f"in some layer {load:.0%} of the tokens go to one expert; the entropy of its load fell from {start:.2f} to {fmean(last):.2f}"
            advice = (
                "give the load-balancing loss a weight (router_aux_loss_coef=0.001 or more)",
                "lower learning_rate, or leave the router out of the adapter",
            )
            return seen.alert("router_drift", "warning", sentence, advice, **evidence)
        if changed >= self.changed:
            sentence = f"{changed:.0%} of the learner's choices of experts are not the sampler's"
            advice = (
                "use completions for fewer steps (steps_per_generation, num_iterations), or with less staleness",
                "lower learning_rate; sample in the learner's precision (rollout_dtype)",
            )
            return seen.alert("router_drift", "warning", sentence, advice, **evidence)
        return None
