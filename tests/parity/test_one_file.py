"""`examples/grpo_in_one_file.py` and Covey: the same loss, gradients and steps on the same completions."""

from __future__ import annotations

import ast
import copy
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from covey import algorithms as alg
from faults.small_runs import reward_len, trainer
from kit import tiny_model, tiny_tokenizer

FILE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"
STEPS = 3
"""Two updates on the first rollout, one on the second: the ratio of the second update is not 1."""


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = type(sys)("grpo_in_one_file")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    return SimpleNamespace(**runpy.run_path(str(FILE), run_name=module.__name__))


class Steps(TrainerCallback):
    """Gradients after clipping, and weights after the update, of each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradients: list[Tensor] = []
        self.weights: list[Tensor] = []

    def on_pre_optimizer_step(self, *given: Any, **more: Any) -> None:
        self.gradients.append(flat(parameter.grad for parameter in self.model.parameters()))

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self.weights.append(flat(parameter.detach() for parameter in self.model.parameters()))


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1).clone() for tensor in tensors])


def test_loss_gradients_and_three_steps_are_coveys(tmp_path: Path, one_file: SimpleNamespace) -> None:
    rollouts: list[tuple[list[str], list[list[int]], list[float]]] = []

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        values = reward_len(prompts, completions)
        rollouts.append((prompts, completion_ids, values))
        return values

    start, tokenizer = tiny_model("qwen2"), tiny_tokenizer()
    run = trainer(
        tmp_path, model=copy.deepcopy(start), reward_funcs=reward, algorithm=alg.grpo(), max_steps=STEPS, num_iterations=2,
        logging_steps=1, save_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    covey = Steps(run.model)
    run.add_callback(covey)
    run.train()

    settings = one_file.Settings(updates=2, learning_rate=1e-2)
    model, reference = copy.deepcopy(start), copy.deepcopy(start).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    here, losses = Steps(model), list[float]()
    optimizer.register_step_pre_hook(here.on_pre_optimizer_step)
    optimizer.register_step_post_hook(here.on_step_end)
    for prompts, completions, values in rollouts:
        questions = list(dict.fromkeys(prompts))
        groups = [[ids for prompt, ids in zip(prompts, completions, strict=True) if prompt == q] for q in questions]
        rewards = torch.tensor(
            [[value for prompt, value in zip(prompts, values, strict=True) if prompt == q] for q in questions]
        )
        assert rewards.shape == (2, 4)
        encoded = [tokenizer(question)["input_ids"] for question in questions]
        batch = one_file.Batch.of(encoded, groups, one_file.group_advantages(rewards), tokenizer.pad_token_id)
        losses += one_file.train_on(model, reference, optimizer, batch, settings)

    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    torch.testing.assert_close(torch.tensor(losses[:STEPS]), torch.tensor(logged), atol=1e-5, rtol=1e-4)
    for step in range(STEPS):
        assert covey.gradients[step].abs().max() > 1e-3
        torch.testing.assert_close(here.gradients[step], covey.gradients[step], atol=1e-5, rtol=1e-3)
    moved = (covey.weights[-1] - flat(start.parameters())).abs().max()
    assert moved > 1e-2
    for step in range(STEPS):  # Adam divides by a gradient's size, which is rounding where the gradient is 0
        gap = (here.weights[step] - covey.weights[step]).abs()
        assert gap.mean() < 1e-3 * moved


def test_advantages_are_those_of_a_hand_calculation(one_file: SimpleNamespace) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    expected = 0.5 / (3**-0.5 + 1e-4)  # sd of a sample of 1, 0, 0, 1: sqrt(1 / 3)
    torch.testing.assert_close(
        one_file.group_advantages(rewards), torch.tensor([[expected, -expected, -expected, expected], [0.0] * 4])
    )


def test_the_file_is_short_and_imports_torch_and_transformers_only() -> None:
    text = FILE.read_text()
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")])
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(text.splitlines()) <= 300
    assert {name for name in names if name not in sys.stdlib_module_names} == {"torch", "transformers"}
