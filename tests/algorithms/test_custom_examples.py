"""One's own part of an algorithm: the six examples are short, sound, found by name, and their numbers are logged."""

import ast
import math
from pathlib import Path

import pytest
import torch

from covey import algorithms as alg
from covey import testing
from covey.algorithms.samples import made_scores, made_tokens
from covey.names import load
from covey.types import Totals

FOLDER = Path(__file__).parents[2] / "examples" / "custom"
PARTS = {
    "advantage": ("from_median", testing.check_advantage),
    "objective": ("Truncated", testing.check_objective),
    "kl": ("huber_kl", testing.check_kl),
    "regularizer": ("wake_up", testing.check_regularizer),
    "reference": ("follow_when_far", testing.check_reference),
    "critic": ("huber_error", testing.check_critic),
}


def part_of(slot):
    found = load(f"{FOLDER / slot}.py:{PARTS[slot][0]}", slot)
    return found() if isinstance(found, type) else found


def lines_of_code(file):
    """Lines of a file without its docstrings, comments and blank lines."""
    text = file.read_text()
    lines = {
        number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        lines -= set(range(node.lineno, node.end_lineno + 1)) if is_text else set()
    return len(lines)


@pytest.mark.parametrize("slot", PARTS)
def test_an_example_has_less_than_15_lines_of_code(slot):
    assert lines_of_code(FOLDER / f"{slot}.py") < 15


@pytest.mark.parametrize("slot", PARTS)
def test_an_example_keeps_the_invariants(slot):
    PARTS[slot][1](part_of(slot))


@pytest.mark.parametrize("slot", PARTS)
def test_an_example_is_an_algorithm_by_import_path(slot):
    mine, tokens = alg.from_name(f"{FOLDER / slot}.py:mine"), made_tokens()
    advantages, _ = mine.judge(made_scores())
    assert advantages.isfinite().all()
    totals = Totals.of(tokens.mask, tokens.group, 16)
    mine = mine.resolve(mine.initial_controllers())
    loss = mine.loss(tokens, totals)
    assert loss.isfinite()
    assert all(math.isfinite(metric.value) for metric in mine.metrics(tokens, totals).values())


@pytest.mark.parametrize("slot", PARTS)
def test_an_example_changes_one_part_of_a_preset_by_name(slot):
    base = "ppo" if slot == "critic" else "grpo"
    changed, plain = alg.from_name(f"{base}, {slot}={FOLDER / slot}.py:{PARTS[slot][0]}"), alg.from_name(base)
    different = {
        name
        for name in ("advantage", "objective", "aggregate", "kl", "regularizers", "weights", "reference", "critic")
        if getattr(changed, name) != getattr(plain, name)
    }
    assert different == {"regularizers" if slot == "regularizer" else slot}


def test_metrics_of_ones_own_part_are_means_over_tokens_that_count():
    mine, tokens = alg.from_name(f"{FOLDER / 'objective'}.py:mine"), made_tokens(drift=1.0)
    seen = mine.metrics(tokens, Totals.of(tokens.mask, tokens.group, 16))["truncated/share"].value
    assert seen == pytest.approx((tokens.ratio > 2.0)[tokens.mask].double().mean().item())
    assert 0.0 < seen < 1.0


def test_an_adaptive_coefficient_of_ones_own_moves_with_the_reports():
    mine = alg.from_name(f"{FOLDER / 'kl'}.py:mine")
    assert mine.initial_controllers() == {"kl.coefficient": 0.04}
    assert mine.resolve({"kl.coefficient": 0.5}).kl.coefficient == 0.5


def test_the_critic_of_ones_own_weighs_by_its_coefficient():
    mine, tokens = alg.from_name(f"{FOLDER / 'critic'}.py:mine"), made_tokens()
    totals = Totals.of(tokens.mask, tokens.group, 16)
    errors = torch.nn.functional.huber_loss(tokens.values, tokens.returns, reduction="none")
    assert torch.isclose(mine.critic.loss(tokens, totals), 0.5 * errors[tokens.mask].mean())
