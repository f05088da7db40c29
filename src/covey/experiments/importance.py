"""Importance of searched options: the share of the difference between good and other trials that each explains."""

import warnings
from typing import Any

FEWEST = 8
"""Completed trials below which nothing is said."""
PLENTY = 30
"""Completed trials from which the shares are more than a hint."""
_BEST = 1 / 3
"""Share of the trials that counts as good. Optuna's tenth is one trial of a short search, whose values are chance."""


def importances(study: Any) -> dict[str, float]:
    """Shares that sum to 1 by option, the largest first; empty with one option or fewer than `FEWEST` completed trials.

    PED-ANOVA (Watanabe et al. 2023) as in Optuna: how far the distribution of each option in the best third of the trials is from
    that in all trials. Pruned and failed trials are left out.
    """
    import optuna

    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    searched = {name for trial in done for name in trial.params}
    if len(done) < FEWEST or len(searched) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST)
        importance = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in importance.items()}


def in_words(shares: dict[str, float], trials: int) -> list[str]:
    """Lines for the table of a search."""
    if not shares:
        return []
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    hint = "" if trials >= PLENTY else f"; a hint, from {trials} completed trials"
    return [f"importance: {listed}{hint}"]
