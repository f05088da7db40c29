"""Checks before a run is resumed: its options then and now, and whether the difference allows it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config import options
from covey.errors import ConfigError
from covey.runs import manifest, provenance
from covey.runs.masking import mask

logger = logging.getLogger(__name__)

_DECISIVE: Mapping[str, str] = {
    **dict.fromkeys(
        ("seed", "data_seed", "shuffle_dataset", "curriculum", "group_languages"),
        "the place in the data would mean nothing",
    ),
    **dict.fromkeys(
        ("num_generations", "generation_batch_size", "steps_per_generation", "num_iterations"),
        "the rollout that is half used would not fit the schedule",
    ),
    "optim": "the state of the optimizer would mean nothing",
    "algorithm": "its coefficients and critic would be another algorithm's",
    "loss_type": "the run would be another experiment half-way",
}
"""Options that a run cannot change on its way, and why."""
_OF_THE_CALL = frozenset(
    {"output_dir", "resume_from_checkpoint", "disable_tqdm", "log_level", "run_name", "ddp_timeout"}
)


def expect_resumable(
    start: Path | None,
    args: Any,
    dataset: Any,
    model: Any = None,
    *,
    rewards: Sequence[Any] | None = None,
    tells: bool = True,
) -> None:
    """Raise ConfigError (exit code 2) when the run of the checkpoint `start` cannot be resumed with these options.

    `args` is the current GRPOConfig; `model` may not be loaded yet. Without a checkpoint or a `run.json` nothing is compared.
    With `tells`, harmless differences are logged, as `learning_rate 1e-06 -> 1e-05`.
    """
    if start is None:
        return
    changed = differences(
        start.parent,
        config=args.to_dict(),
        rows=len(dataset) if hasattr(dataset, "__len__") else None,
        model=provenance.model_facts(model),
        rewards=None if rewards is None else provenance.component(list(rewards)),
        dataset=provenance.dataset_facts(dataset),
    )
    if changed and tells:
        logger.warning("%s goes on with other options: %s.", start.parent, "; ".join(changed))


def differences(
    run_dir: Path,
    *,
    config: Mapping[str, Any],
    rows: int | None,
    model: Mapping[str, Any] | None,
    rewards: Any = None,
    dataset: Mapping[str, Any] | None = None,
) -> list[str]:
    """Harmless differences from the run in `run_dir`. Raises ConfigError for the first harmful one."""
    before = manifest.read(run_dir / manifest.NAME)
    if before is None or not isinstance(before.get("config"), Mapping):
        return []
    now = {"config": manifest.to_json(mask(dict(config))), "dataset": {"rows": rows}, "model": dict(model or {})}
    for name, why in _DECISIVE.items():
        if _differs(before["config"], now["config"], name):
            how = _rows_for(before["config"], now["config"]) if name == "generation_batch_size" else ""
            raise _refusal(run_dir, name, before["config"][name], now["config"][name], why, how)
    for part, name, what in (
        ("dataset", "rows", "the number of rows of the data set"),
        ("model", "class", "the model's class"),
        ("model", "parameters", "the number of the model's parameters"),
        ("model", "trained", "the number of parameters that are trained"),
    ):
        was = before[part] if isinstance(before.get(part), Mapping) else {}
        if was.get(name) is not None and now[part].get(name) is not None and was[name] != now[part][name]:
            raise _refusal(run_dir, what, was[name], now[part][name], "the checkpoint holds the state of the former")
    shown = sorted(options.HONOURED - _OF_THE_CALL - set(_DECISIVE))
    return [
        f"{name} {before['config'][name]} -> {now['config'][name]}"
        for name in shown
        if _differs(before["config"], now["config"], name)
    ] + _other_parts(before, manifest.to_json(mask({"rewards": rewards, "dataset": dataset, "model": model})))


def _other_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Rewards, the adapter and the system prompt where they are others than they were."""
    changes = []
    if now["rewards"] is not None and before.get("rewards") is not None and before["rewards"] != now["rewards"]:
        former, are = _names(before["rewards"]), _names(now["rewards"])
        changes.append(f"rewards {former} -> {are}" if former != are else f"the source or options of the rewards {are}")
    was, now_is = ((facts.get("model") or {}).get("adapter") or {} for facts in (before, now))
    changes += [f"{name} {was[name]} -> {now_is[name]}" for name in was if _differs(was, now_is, name)]
    was, now_is = (facts.get("dataset") or {} for facts in (before, now))
    if _differs(was, now_is, "system_prompt"):
        changes.append(f"system prompt {_short(was['system_prompt'])} -> {_short(now_is['system_prompt'])}")
    return changes


def _names(rewards: Any) -> str:
    names = [str(reward.get("name", reward)) if isinstance(reward, Mapping) else str(reward) for reward in rewards]
    return ", ".join(name.rpartition(":")[2] for name in names)


def _short(text: Any) -> str:
    return "none" if text is None else repr(text if len(text) <= 60 else f"{text[:57]}...")


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """An option that one of the two versions of Covey did not have says nothing."""
    return name in before and name in now and before[name] != now[name]


def _rows_for(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Completions of a device that make the former batch on as many processes as there are now; "" where none do."""
    completions, name = (
        before["generation_batch_size"] * now["per_device_train_batch_size"],
        "per_device_train_batch_size",
    )
    rows, rest = divmod(completions, now["generation_batch_size"])
    return "" if rest or rows == now[name] else f" ({name}={rows} on the processes that there are now)"


def _refusal(run_dir: Path, what: str, was: Any, now: Any, why: str, how: str = "") -> ConfigError:
    return ConfigError(
        f"The run in {run_dir} had {what}={was} and this one has {now}, so it cannot be gone on with: {why}. Give it as it was{how}, or "
        "start a new run from the checkpoint as its model."
    )
