"""What a run is made of: one object a stage, put together by `build.py` and used by `loop.py`."""

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
    """Everything the loop calls, and the few numbers that it counts by."""

    prompts: PromptStream
    sampler: Sampler
    scorer: Scorer
    learner: Learner
    algorithm: Algorithm
    session: Session
    world: World
    interruption: Interruption
    """Heard by the sampler and the learner, so that a stop signal need not wait for the end of a step."""
    sampling: SamplingParams
    prompts_per_rollout: int
    num_generations: int
    """G, completions a prompt."""
    dynamic_sampling: int
    """Times that further prompts are drawn in place of groups without signal."""
    batches_per_rollout: int
    """Optimizer steps that share one rollout, each on its own part of it."""
    num_iterations: int
    """How often each part is used."""
    total_steps: int
    seed: int
    ensemble: EnsembleSampler | None = None
    """Draws the groups of training, with members' completions in them. None: the policy draws them alone."""
    average: WeightAverage | None = None
    """Averaged weights, which evaluations see and the run ends with. None: the policy's own."""
    has_rewards: bool = True
    """False where every completion is right by definition, so that metrics of rewards would say nothing."""
    max_staleness: int = 0
    """Updates that the weights may make between the ordering of a rollout and its first use; asynchronous rollouts only."""
    pipeline_depth: int = 1
    """Rollouts that may be ordered ahead."""

    def close(self) -> None:
        """Give back what a run holds only while it goes on."""
        close = getattr(self.sampler, "close", None)  # of samplers that run workers, or an endpoint
        if close is not None:
            close()
        self.learner.policy.release()
        self.session.monitor.close()
        self.session.display.close()

    def sampling_for(self, rollout: int) -> SamplingParams:
        """The sampling options of the `rollout`-th generation batch: the same draws on any machine, new ones each time."""
        return replace(self.sampling, seed=(self.seed * 1_000_003 + rollout) % 2**31)
