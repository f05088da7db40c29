"""Alerts of real runs: what goes wrong is told in the run folder and on the screen, with evidence and a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "faults"))  # its tiny runs
from small_runs import lines, trainer

LONG = {"max_steps": 12, "save_strategy": "no", "max_completion_length": 4}


def constant(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def told(folder: Path) -> list[dict[str, Any]]:
    return lines(folder, "alerts.jsonl") if (folder / "alerts.jsonl").exists() else []


def test_rewards_that_never_differ_are_told_as_dead_groups_with_evidence_and_a_remedy(tmp_path, capsys):
    trainer(tmp_path / "run", reward_funcs=constant, disable_tqdm=False, **LONG).train()
    dead = [alert for alert in told(tmp_path / "run") if alert["rule"] == "dead_groups"]
    assert len(dead) == 1, "told once, not at every step"
    assert dead[0]["step"] == 10
    assert dead[0]["severity"] == "warning"
    assert dead[0]["evidence"] == {"tied": 1.0, "all_pass": 0.0, "all_fail": 1.0}
    assert "teach nothing" in dead[0]["said"]
    assert any("test the reward" in advice for advice in dead[0]["try_this"])
    assert set(dead[0]) == {"step", "rule", "severity", "said", "evidence", "try_this"}
    shown = capsys.readouterr().err
    assert "warning at step 10, dead_groups: 100% of groups have tied rewards" in shown
    assert "try: the prompts are too hard" in shown
