"""Checks before a run is resumed: its options then and now, and whether the difference allows it."""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.algorithms import from_options
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
_OF_THE_MODEL: Mapping[str, str] = {
    "class": "the model's class",
    "parameters": "the number of the model's parameters",
    "trained": "the number of parameters that are trained",
    "adapter_factors": "the factors of the adapter (by lora_alpha)",
    "rope_factors": "the set of rotary factors (longrope)",
}
_HOLDS = "the checkpoint holds the state of the former"
_OF_CODE = frozenset({"fields", "file", "line", "source", "sha256"})
"""Entries of a component that say where its code is, and its fields."""
_OF_THE_CALL = frozenset(
    {"output_dir", "resume_from_checkpoint", "disable_tqdm", "log_level", "run_name", "ddp_timeout", "hub_token"}
)


def expect_resumable(
    start: Path | None,
    args: Any,
    dataset: Any,
    model: Any = None,
    *,
    scorer: Any = None,
    algorithm: Any = None,
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
        rewards=None if scorer is None else provenance.component([spec.call for spec in scorer.rewards]),
        reward_weights=None if scorer is None else provenance.component(scorer.weight_options),
        dataset=provenance.dataset_facts(dataset),
        algorithm=None if algorithm is None else provenance.component(algorithm),
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
    algorithm: Any = None,
    reward_weights: Any = None,
) -> list[str]:
    """Harmless differences from the run in `run_dir`. Raises ConfigError for the first harmful one."""
    before = manifest.read(run_dir / manifest.NAME)
    if before is None or not isinstance(before.get("config"), Mapping):
        return []
    now = {"config": manifest.to_json(mask(dict(config))), "dataset": {"rows": rows}, "model": dict(model or {})}
    _refuse_decisive(run_dir, before["config"], now["config"])
    was, rows = (
        before["dataset"].get("rows") if isinstance(before.get("dataset"), Mapping) else None,
        now["dataset"]["rows"],
    )
    if was is not None and rows is not None and was != rows:
        raise _refusal(run_dir, "the number of rows of the data set", was, rows, _HOLDS)
    expect_same_model(run_dir, before.get("model"), now["model"])
    inputs = {"rewards": rewards, "reward_weights": reward_weights, "dataset": dataset, "model": model}
    now |= manifest.to_json(mask({**inputs, "algorithm": algorithm}))
    others = [] if algorithm is None else _changed_parts(before, now)
    if others and not _is_named(before, now):
        raise _refusal(run_dir, *others[0], _DECISIVE["algorithm"])
    shown = [
        (name, before["config"][name], now["config"][name])
        for name in sorted(options.HONOURED - _OF_THE_CALL - set(_DECISIVE))
        if _differs(before["config"], now["config"], name)
    ]
    named = [f"{name} {was} -> {now_is}" for name, was, now_is in [*shown, *others]]
    return named + _other_parts(before, now, named)


def expect_same_model(place: Path, before: Any, now: Mapping[str, Any]) -> None:
    """Raise ConfigError where `provenance.model_facts` of a checkpoint and of the model tell two kinds of model.

    Facts of an earlier version name no set of rotary factors: every run took the short one.
    """
    facts = {"rope_factors": "short", **(before if isinstance(before, Mapping) else {})}
    for name, what in _OF_THE_MODEL.items():
        if facts.get(name) is not None and now.get(name) is not None and facts[name] != now[name]:
            raise _refusal(place, what, facts[name], now[name], _HOLDS)


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a run cannot change on its way, as JSON: a checkpoint holds them, since it may be copied without its `run.json`."""
    return dict(manifest.to_json({name: config[name] for name in _DECISIVE if name in config}))


def expect_same_decisive(checkpoint: Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the `decisive` options of a checkpoint are those of the run."""
    _refuse_decisive(checkpoint, before, manifest.to_json(dict(config)))


def _refuse_decisive(place: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    is_object = any(_is_object(config.get("algorithm")) for config in (before, now))
    for name, why in _DECISIVE.items():
        if _differs(before, now, name) and not (name == "algorithm" and is_object):
            how = _rows_for(before, now) if name == "generation_batch_size" else ""
            raise _refusal(place, name, before[name], now[name], why, how)


def _other_parts(before: Mapping[str, Any], now: Mapping[str, Any], named: Sequence[str]) -> list[str]:
    """Rewards and their weights, the adapter and the system prompt where they are others than they were, and not `named` yet."""
    changes = []
    if now["rewards"] is not None and before.get("rewards") is not None and before["rewards"] != now["rewards"]:
        former, are = _names(before["rewards"]), _names(now["rewards"])
        changes.append(f"rewards {former} -> {are}" if former != are else f"the source or options of the rewards {are}")
    weights = [facts.get("reward_weights") for facts in (before, now)]
    is_option = any(name.startswith("reward_weights ") for name in named)
    if all(weights) and weights[0] != weights[1] and not is_option:
        changes.append(f"the weights of the rewards {weights[0]} -> {weights[1]}")
    if now["algorithm"] is not None and _digests(before.get("algorithm")) != _digests(now["algorithm"]):
        changes.append("the source of the algorithm's parts")
    was, now_is = ((facts.get("model") or {}).get("adapter") or {} for facts in (before, now))
    changes += [f"{name} {was[name]} -> {now_is[name]}" for name in was if _differs(was, now_is, name)]
    was, now_is = (facts.get("dataset") or {} for facts in (before, now))
    if _differs(was, now_is, "system_prompt"):
        changes.append(f"system prompt {_short(was['system_prompt'])} -> {_short(now_is['system_prompt'])}")
    return changes


def _is_object(algorithm: Any) -> bool:
    """True for an option `algorithm` that is neither a name nor an import path, but an object, of which a config has the `repr`."""
    return isinstance(algorithm, str) and algorithm.startswith(("Algorithm(", "<"))


def _is_named(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if both algorithms are of the same name, or of options, so that their parts differ by the code behind these alone."""
    name = before["config"].get("algorithm")
    if name is None:
        return all(map(_is_composed, (before, now)))
    return not _is_object(name) and name == now["config"].get("algorithm")


def _changed_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Parts and numbers of the algorithm that differ: name, former value and new one. Options of the loss that differ, and so are named,
    explain all others.
    """
    options = inspect.signature(from_options).parameters
    is_explained = any(_differs(before["config"], now["config"], name) for name in options)
    if is_explained and all(map(_is_composed, (before, now))):
        return []
    was, now_is = (_parts(facts.get("algorithm"), "the algorithm") for facts in (before, now))
    return [(name, was[name], now_is[name]) for name in was if name in now_is and was[name] != now_is[name]]


def _is_composed(facts: Mapping[str, Any]) -> bool:
    """True if the options of the loss made the algorithm, by its name."""
    fields, config = (facts.get("algorithm") or {}).get("fields") or {}, facts["config"]
    name = re.split("[/+]", str(fields.get("name")))[0]
    return config.get("algorithm") is None and name == config.get("loss_type")


def _parts(described: Any, where: str) -> dict[str, Any]:
    """Classes and numbers of a component by their place, without its name, its source and `target_kl`, which is an option."""
    if not isinstance(described, Mapping | list):
        return {where: described}
    inside: Mapping[Any, Any] = (
        dict(enumerate(described))
        if isinstance(described, list)
        else {
            name: value
            for name, value in {**described, **(described.get("fields") or {})}.items()
            if name not in ("name", "target_kl", *_OF_CODE)
        }
    )
    label = len(described) if isinstance(described, list) else str(described.get("name")).rpartition(":")[2]
    parts = [_parts(value, f"{where}.{name}") for name, value in inside.items()]
    return {where: label, **{place: value for part in parts for place, value in part.items()}}


def _digests(described: Any) -> set[str]:
    """Checksums of the user's own code in a component."""
    values = described.values() if isinstance(described, Mapping) else described if isinstance(described, list) else ()
    digest = {described["sha256"]} if isinstance(described, Mapping) and described.get("sha256") else set()
    return digest.union(*map(_digests, values))


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
