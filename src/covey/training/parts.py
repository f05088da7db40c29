"""Parts of a run: one object per stage, created by `build.py` and used by `loop.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from covey.algorithms import Algorithm
from covey.data import PromptStream
from covey.ensembles import EnsembleSampler
from covey.learner import Learner
from covey.merging import WeightAverage
from covey.process.interruption import Interruption
from covey.process.world import World
from covey.rewards import Scorer
from covey.rollout import Sampler, SamplingParams
from covey.training.session import Session


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects that the loop calls, and the sizes of a rollout."""

    prompts: PromptStream
    sampler: Sampler
    scorer: Scorer
    learner: Learner
    algorithm: Algorithm
    session: Session
    world: World
    interruption: Interruption
    """Stop signal of sampler and learner, so that a stop need not wait for the end of a step."""
    sampling: SamplingParams
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
    ensemble: EnsembleSampler | None = None
    """Sampler of training groups with completions of ensemble members. None: the policy alone."""
    average: WeightAverage | None = None
    """Averaged weights for evaluation and the end of the run. None: the policy's own."""
    has_rewards: bool = True
    """False in supervised fine-tuning, where reward metrics are meaningless."""
    max_staleness: int = 0
    """Most optimizer updates between the order of a rollout and its first use; asynchronous rollouts only."""
    pipeline_depth: int = 1
    """Most rollouts ordered ahead."""

    def close(self) -> None:
        """Release resources that are needed only during the run."""
        close = getattr(self.sampler, "close", None)  # of samplers that run workers, or an endpoint
        if close is not None:
            close()
        self.learner.policy.release()
        self.session.monitor.close()
        self.session.display.close()

    def sampling_for(self, rollout: int) -> SamplingParams:
        """The sampling options of the `rollout`-th generation batch: reproducible on any machine, with a new seed for each batch."""
        return replace(self.sampling, seed=(self.seed * 1_000_003 + rollout) % 2**31)
