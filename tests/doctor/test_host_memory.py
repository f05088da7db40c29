"""The bytes that a run expects to offload are those that a plan counts for it."""

import pytest
import torch

from covey import GRPOConfig
from covey import algorithms as alg
from covey.doctor.dry_run import Target, measured, memory_of
from covey.learner import Policy
from covey.learner.memory_estimate import offloaded_bytes
from kit import rest_nightly, tiny_model

# of torch's conversion to a fake tensor
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]


@pytest.mark.parametrize(
    ("algorithm", "has_critic"),
    rest_nightly(
        [(alg.grpo(kl=alg.KL(coefficient=0.1)), False), (alg.ppo(critic_model="separate"), True), (alg.dapo(), False)],
        1,
    ),
)
def test_a_plan_and_a_run_count_the_same_bytes(algorithm, has_critic):
    args = GRPOConfig(
        "unused", use_cpu=True, report_to="none", algorithm=algorithm, max_completion_length=16, optim="adamw_torch"
    )
    model = tiny_model(layers=2)
    measurement = measured(args, model.config, peft_config=None, prompt_tokens=8, target=Target(on_cpu=True))
    plan = memory_of(measurement, args, model.config, 24, Target(on_cpu=True))
    planned = plan.weights + plan.reference + plan.critic + plan.gradients + plan.optimizer
    assert measurement.dtype == torch.float32
    options = {"copies": int(algorithm.needs.reference), "has_critic": has_critic}
    assert offloaded_bytes(Policy(model, pad_id=0), "adamw_torch", **options) == pytest.approx(planned, rel=0.02)
