"""`covey init DIR`: a project that works, to be changed: data, a reward, a configuration, tests."""

import json
import shlex
from pathlib import Path
from string import Template

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError

_TEMPLATES = Path(__file__).with_name("project")
"""The files of a project but for its data, by their names and `.txt`."""
_TRAIN, _TEST = 512, 64
_DEMO = {"learning_rate": "6.0e-4", "batch": 128, "length": 32, "minutes": "minutes on a CPU"}
_OTHERS = {"learning_rate": "1.0e-6", "batch": 32, "length": 256, "minutes": "on a GPU"}


def run(args: Args) -> None:
    """Write the project, whole or not at all. Raises ConfigError where something is there already."""
    folder = Path(args["folder"]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty; choose a new folder for the project.")
    model = args.get("model") or "demo"
    if model != "demo" and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())  # run.yaml is read from the project's folder
    files = _files(folder.resolve().name, model)
    _write(folder, files)
    if args.get("json"):
        output.result_json({"folder": str(folder), "files": sorted(files)})
        return
    output.result(f"{folder}: {', '.join(sorted(files))}")
    output.say(f"next: cd {shlex.quote(str(folder))} && pytest && covey train run.yaml --output-dir runs/first")


def _files(name: str, model: str) -> dict[str, str]:
    """Contents by path. The data are arithmetic word problems, made from a seed; no calculation is in both files."""
    from covey.demo.task import rows

    values = {"name": name, "model": json.dumps(model), **(_DEMO if model == "demo" else _OTHERS)}
    lines = lambda split, count: "".join(f"{json.dumps(row)}\n" for row in rows(split, count))
    filled = lambda file: Template(file.read_text(encoding="utf-8")).safe_substitute(values)
    return {
        "data/train.jsonl": lines("train", _TRAIN),
        "data/test.jsonl": lines("test", _TEST),
        ".gitignore": "runs/\n__pycache__/\n",
        **{file.stem: filled(file) for file in _TEMPLATES.glob("*.txt")},
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    from covey.runs.storage import storage_errors, whole_folder

    with storage_errors(folder), whole_folder(folder.resolve()) as unfinished:
        for name, text in files.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / name).write_text(text, encoding="utf-8")


verb = Verb(
    name="init",
    usage="FOLDER [options]",
    sentence="A project to start from: data, a reward, a configuration, and tests that pass. Everything in it is yours to change.",
    examples=("covey init my-project", "covey init my-project --model Qwen/Qwen2.5-0.5B-Instruct"),
    positional=("folder",),
    needs={"folder": "a folder for the project: covey init my-project."},
    places={"model": "model folder"},
    run=run,
    flags=lambda: (
        Flag(name="folder", help="Folder to make; it must be new or empty.", group="what"),
        Flag(name="model", help="Model that run.yaml trains: a folder, a hub id, or demo for the one that ships with Covey.", default="demo", group="what"),
        JSON,
    ),
)  # fmt: skip
