"""Parts of a run: one object per stage, created by `build.py` and used by `loop.py`."""

from collections.abc import Callable
from dataclasses import dataclass

from covey.algorithms import Algorithm
from covey.data import PromptStream
from covey.learner import Learner
from covey.merging import WeightAverage
from covey.process.interruption import Interruption
from covey.process.world import World
from covey.rewards import Scorer
from covey.rollout import Sampler, close_sampler
from covey.rollout.ahead import PromptSupply
from covey.training.drawing import Draws, RolloutSampling
from covey.training.session import Session
from covey.types import Stages


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects that the loop calls, and the sizes of a rollout."""

    prompts: PromptStream
    supply: PromptSupply
    """Prompts of each rollout: the next of `prompts`, or those of a rollout that was ordered ahead."""
    sampler: Sampler
    """The policy's sampler."""
    draws: Draws
    """Scored groups for training."""
    stages: Stages
    """Features that transform the groups of a step."""
    scorer: Scorer
    learner: Learner
    algorithm: Algorithm
    session: Session
    world: World
    interruption: Interruption
    """Stop signal of sampler and learner, so that a stop need not wait for the end of a step."""
    sampling_for: RolloutSampling
    """Sampling parameters of a rollout, by its number."""
    prompts_per_rollout: int
    num_generations: int
    """G, completions per prompt."""
    dynamic_sampling: int
    """Most further draws of prompts to replace groups without signal."""
    batches_per_rollout: int
    """Batches per rollout, each for one optimizer step."""
    num_iterations: int
    """Optimizer steps per batch."""
    total_steps: int
    seed: int
    check_sampler: Callable[[], None] = lambda: None
    """Raises ModelError if the sampler draws from another policy; called once, with the first weights."""
    evaluation_sampler: Sampler | None = None
    """Reads the model's weights whenever an evaluation begins. None: `sampler` serves."""
    average: WeightAverage | None = None
    """Averaged weights for evaluation and the end of the run. None: the policy's own."""
    has_rewards: bool = True
    """False in supervised fine-tuning, where reward metrics are meaningless."""

    def close(self) -> None:
        """Release resources that are needed only during the run."""
        for sampler in (self.draws.sampler, self.evaluation_sampler):  # with the members of an ensemble
            close_sampler(sampler)
        self.learner.policy.release()
        self.session.monitor.close()
        self.session.display.close()
