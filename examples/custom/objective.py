"""An objective of one's own: the ratio weighs each token, but carries no gradient. It logs how often the weight was cut.

Use it: `GRPOTrainer(..., algorithm=mine)` · `--algorithm examples/custom/objective.py:mine` ·
`--algorithm "dapo, objective=examples/custom/objective.py:Truncated"`.
"""

from dataclasses import dataclass

from covey import algorithms as alg


@dataclass(frozen=True)
class Truncated:
    ceiling: float = 2.0

    def __call__(self, tokens):
        weight = tokens.ratio.clamp(max=self.ceiling).detach()
        return -weight * tokens.advantages * tokens.logp  # [N, T]

    def metrics(self, tokens):
        return {"truncated/share": tokens.ratio > self.ceiling}  # [N, T]; the library takes the mean over tokens


mine = alg.dapo().replace(objective=Truncated())
