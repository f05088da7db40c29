"""An algorithm of one's own: two functions put into GRPO, tested before the run, then trained with.

    python examples/own_algorithm.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`. custom/ has one file for each kind of part.
Expect: the reward rises, and metrics.jsonl has the metric of the part, `sure/share`.
"""

from dataclasses import dataclass

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.testing import check_advantage, check_regularizer

MODEL = "demo"


def from_median(scores):
    """Advantage [P, G]: the distance from the group's median; a completion without a score gets 0."""
    return (scores.total - scores.total.nanmedian(1, keepdim=True).values).nan_to_num(0.0)


@dataclass(frozen=True)
class WakeUp:
    """Regularizer [N, T], already weighted: an entropy bonus where the model was sure."""

    weight: float = 0.005
    below: float = 0.5

    def __call__(self, tokens):
        return -self.weight * tokens.entropy * (tokens.entropy.detach() < self.below)

    def metrics(self, tokens):
        return {"sure/share": tokens.entropy < self.below}


check_advantage(from_median)  # shapes, padding, groups of one, equal rewards: AssertionError says what is wrong
check_regularizer(WakeUp())
mine = alg.grpo(kl=None).replace(advantage=from_median, regularizers=(WakeUp(),))

smoke = is_smoke(__doc__)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs="math",
    algorithm=mine,
    args=GRPOConfig(
        output_dir="runs/own-algorithm",
        max_steps=12 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems(),
)
trainer.train()
