"""`covey train --from-run runs/x`: the same run again, from its recorded options, with changes from the command line."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.cli import output, trust
from covey.cli.flags import Flag, read_yaml, typed
from covey.cli.verb import Args
from covey.config import options
from covey.config.options import RECIPE
from covey.errors import RunFolderError
from covey.experiments.series import NEVER

_PATHS = (
    "model", "dataset", "eval_dataset", "reward", "algorithm", "alert_detectors", "tools",
    "environment_factory", "rollout_func", "agent", "ensemble",
)  # fmt: skip


def recorder(overrides: Mapping[str, Any], cli_args: Mapping[str, Any]) -> Any:
    """A callback that writes RECIPE into the run's folder when training starts."""
    from transformers import TrainerCallback

    from covey.cli.plan import as_yaml
    from covey.runs.masking import mask
    from covey.runs.storage import refusal, write_atomically

    text = as_yaml(
        mask(dict(overrides)), {name: value for name, value in mask(dict(cli_args)).items() if name not in NEVER}
    )

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                recipe = Path(args.output_dir) / RECIPE
                try:
                    write_atomically(recipe, f"{text}\n".encode())
                except OSError as error:
                    output.say(
                        f"warning: {refusal(error, RECIPE, recipe.parent) or error} Training goes on without it."
                    )

    return Recorder()


def repeated(args: Args, flags: list[Flag], types: Mapping[str, Any], verb: str = "--from-run") -> dict[str, Any]:
    """The options of the run that `from_run` names, overridden by those of the command line; `verb`: what a refusal names.

    Raises RunFolderError where the folder holds no run, ConfigError where its code has changed and the user has not
    agreed to it. A run that a script started stores its options only; `covey train` asks for the missing ones.
    """
    from covey.runs import manifest
    from covey.runs.masking import MASK

    folder = Path(args["from_run"]).expanduser()
    run_json = manifest.read(folder / manifest.NAME)
    if run_json is None:
        raise RunFolderError(f"{folder} holds no run.json of a run; give the folder of a run, such as runs/train-1.")
    if (folder / RECIPE).is_file():
        recorded = {name: value for name, value in read_yaml(folder / RECIPE, flags).items() if name not in NEVER}
    else:
        recorded = _from_script(run_json)
    lost = {name for name, value in recorded.items() if MASK in str(value)}
    recorded = {name: value for name, value in recorded.items() if name not in lost}
    if missing := lost - set(args):
        output.say(
            f"warning: {', '.join(sorted(missing))} was a secret and is not in {folder}; give it again if the run needs it."
        )
    home = Path(run_json.get("working_folder") or ".")
    recorded = {name: _resolve_path(value, home) if name in _PATHS else value for name, value in recorded.items()}
    trust.confirm(folder, recorded, run_json, args, verb)
    chosen = {name: value for name, value in args.items() if name not in ("from_run", "trust_source")}
    changed = {name: value for name, value in chosen.items() if name not in NEVER and recorded.get(name) != value}
    shown = ", ".join(f"{name} {recorded.get(name)} -> {value}" for name, value in changed.items())
    output.say(f"repeats {folder}" + (f" with {shown}" if shown else ""))
    return {**typed(recorded, types), **chosen}


def refuse_other_run(chosen: Args, config: Any, dataset: Any) -> None:
    """Raise RunFolderError when the options do not make the recorded algorithm; warn of other versions, source and rows.

    `chosen` are the other flags of the command: an algorithm, or options of one, may differ on purpose.
    """
    from covey.runs import manifest, provenance
    from covey.training.build_algorithm import build_algorithm

    folder = Path(chosen["from_run"]).expanduser()
    run_json = manifest.read(folder / manifest.NAME) or {}
    for difference in _differences(run_json, dataset):
        output.say(f"warning: {difference}, so numbers may differ.")
    if set(chosen) & {"algorithm", *options.ALGORITHM_OPTIONS}:
        return
    recorded, now = run_json.get("algorithm"), manifest.to_json(provenance.component(build_algorithm(config)))
    if recorded is not None and _shape(recorded) != _shape(now):
        raise RunFolderError(
            f"{folder} used an algorithm that its options do not make (a script built it); give it as --algorithm file.py:name."
        )


def _differences(run_json: Mapping[str, Any], dataset: Any) -> Iterator[str]:
    from covey.runs import provenance

    now = provenance.package_versions()
    before: Mapping[str, str] = run_json.get("versions") or {}
    for name in sorted(set(before) & set(now)):
        if before[name] != now[name]:
            yield f"{name} was {before[name]} and is {now[name]}"
    for name, source in (run_json.get("sources") or {}).items():
        path = Path(name)
        if not path.is_file():
            yield f"{name} is gone (run.json holds its text)"
        elif provenance.file_digest(path) != source["sha256"]:
            yield f"{name} has changed since"
    rows, facts = (run_json.get("dataset") or {}).get("rows"), provenance.dataset_facts(dataset) or {}
    if rows is not None and facts.get("rows") != rows:
        yield f"the data set had {rows} rows and has {facts.get('rows')}"


def _shape(described: Any) -> Any:
    """Structure of an algorithm without source files, lines and texts, which `sources` compares."""
    if isinstance(described, Mapping):
        return {k: _shape(v) for k, v in described.items() if k not in ("file", "line", "source", "sha256")}
    return [_shape(item) for item in described] if isinstance(described, list) else described


def _from_script(run_json: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run that a script started: the configuration, the model's name, and rewards that can be imported."""
    config = run_json.get("config") or {}
    settings = {name: value for name, value in config.items() if name in options.HONOURED and name not in NEVER}
    settings = {name: value for name, value in settings.items() if not str(value).startswith("Algorithm(")}
    name = (run_json.get("model") or {}).get("name")
    rewards = [_importable(reward) for reward in run_json.get("rewards") or []]
    more = {"model": name, "reward": rewards if rewards and all(rewards) else None}
    return {**settings, **{key: value for key, value in more.items() if value}}


def _importable(described: Any) -> str | None:
    """`file.py:name` or `package.module:name` of a plain function; None for one that carries values or has no name."""
    if not isinstance(described, Mapping) or set(described) & {"fields", "holds", "partial", "repr"}:
        return None
    module, _, name = str(described.get("name", "")).partition(":")
    if not name.isidentifier():
        return None
    return f"{described['file']}:{name}" if described.get("file") else f"{module}:{name}"


def _resolve_path(value: Any, home: Path) -> Any:
    """A path from the folder that the run was started in, where it is not here too."""
    if isinstance(value, list):
        return [_resolve_path(item, home) for item in value]
    if not isinstance(value, str):
        return value
    bare, comma, options = value.partition(",")
    if "=" in options:  # a member of an ensemble
        return f"{_resolve_path(bare, home)}{comma}{options}"
    path, colon, rest = value.partition(":")
    if not path or Path(path).expanduser().exists() or not (home / path).exists():
        return value
    return str(home / path) + colon + rest
