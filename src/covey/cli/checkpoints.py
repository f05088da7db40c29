"""`covey checkpoints`: those of a run, listed, verified, pruned and repaired. And where the weights are that a user names."""

import datetime
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import CheckpointError, ConfigError, did_you_mean
from covey.runs.weights import FINAL as FINAL
from covey.runs.weights import model_folder as model_folder


def run(args: Args) -> int:
    """Do what the first word says. Returns 0, or the exit code of damaged checkpoints where some are damaged."""
    what, folder = args.get("what"), args.get("run")
    if what not in _DO:
        near = "" if what is None else did_you_mean(what, _DO)
        raise ConfigError(
            f"covey checkpoints does one of {', '.join(_DO)}.{near} Such as: covey checkpoints list runs/train-1."
        )
    if not folder:
        raise ConfigError(f"covey checkpoints {what} needs the folder of a run: covey checkpoints {what} runs/train-1.")
    if (args.get("keep") is not None or args.get("dry_run")) and what != "prune":
        raise ConfigError("--keep and --dry-run belong to covey checkpoints prune.")
    return _DO[what](Path(folder).expanduser(), args)


def _list(folder: Path, args: Args) -> int:
    from covey.runs import upkeep

    checkpoints = upkeep.held(folder)
    if args.get("json"):
        output.result_json({"run": str(folder), "checkpoints": [_as_json(checkpoint) for checkpoint in checkpoints]})
        return 0
    if not checkpoints:
        output.result(f"{folder} holds no checkpoint.")
    for checkpoint in checkpoints:
        saved = (
            "-" if checkpoint.saved is None else f"{datetime.datetime.fromtimestamp(checkpoint.saved):%Y-%m-%d %H:%M}"
        )
        best = "best evaluation" if checkpoint.is_best else ""
        output.result(
            f"{checkpoint.path.name:<20}{saved:<18}{checkpoint.size / 1e6:>10.1f} MB  {checkpoint.kind:<14}{best}".rstrip()
        )
    return 0


def _as_json(checkpoint: Any) -> dict[str, Any]:
    return {"path": str(checkpoint.path), "step": checkpoint.step, "saved": checkpoint.saved, "bytes": checkpoint.size, "kind": checkpoint.kind, "best": checkpoint.is_best}  # fmt: skip


def _verify(folder: Path, args: Args) -> int:
    from covey.runs import checkpoint, checksums, upkeep

    upkeep.expect_folder(folder)
    paths = [folder] if checksums.is_ours(folder) else checkpoint.checkpoints(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no checkpoint to verify.")
    wrong = {path: checksums.problems(path) if checksums.is_ours(path) else None for path in paths}
    is_bad = any(wrong.values())
    if args.get("json"):
        output.result_json({"ok": not is_bad, "checkpoints": {str(path): problems for path, problems in wrong.items()}})
    else:
        for path, problems in wrong.items():
            state = (
                "not Covey's, not looked at"
                if problems is None
                else "; ".join(problems) or "every byte is as it was written"
            )
            output.row("FAIL" if problems else "OK  ", path.name, state)
        if is_bad:
            output.say("covey checkpoints repair mends what can be mended and sets the rest aside.")
    return CheckpointError.exit_code if is_bad else 0


def _prune(folder: Path, args: Args) -> int:
    from covey.runs import upkeep

    keep = args.get("keep")
    if keep is None or keep < 1:
        raise ConfigError("covey checkpoints prune needs --keep N, how many are to stay, from 1 on.")
    is_dry = bool(args.get("dry_run"))
    gone = upkeep.prune(folder, keep, is_dry=is_dry)
    stay = [checkpoint.path for checkpoint in upkeep.held(folder) if checkpoint.path not in gone]
    if args.get("json"):
        output.result_json({"deleted": [] if is_dry else [str(path) for path in gone], "excess": [str(path) for path in gone], "kept": [str(path) for path in stay]})  # fmt: skip
        return 0
    verb = "would be deleted" if is_dry else "deleted"
    output.result(f"{verb}: {_names(gone)}; kept: {_names(stay)}")
    return 0


def _repair(folder: Path, args: Args) -> int:
    from covey.runs import upkeep

    done = upkeep.repair(folder)
    resumes = None if done.resumes_from is None else str(done.resumes_from)
    if args.get("json"):
        output.result_json({"copied": done.copied, "renamed": done.renamed, "damaged": done.damaged, "resumes_from": resumes})  # fmt: skip
    else:
        for line in (*(f"mended {path}" for path in done.copied), *done.renamed):
            output.result(line)
        for problem in done.damaged:
            output.row("WARN" if resumes else "FAIL", "damaged", problem)
        if not (done.copied or done.renamed or done.damaged):
            output.result("nothing to repair: every checkpoint is as it was written")
        output.result(f"a run resumes from {resumes}" if resumes else "no whole checkpoint to resume from")
    return 0 if resumes else CheckpointError.exit_code


def _names(paths: Any) -> str:
    return ", ".join(path.name for path in paths) or "none"


_DO = {"list": _list, "verify": _verify, "prune": _prune, "repair": _repair}

verb = Verb(
    name="checkpoints",
    usage="list | verify | prune | repair RUN [options]",
    sentence="The checkpoints of a run: list them, verify every byte, delete old ones, repair damaged ones.",
    examples=(
        "covey checkpoints list runs/train-1",
        "covey checkpoints prune runs/train-1 --keep 2 --dry-run",
        "covey checkpoints repair runs/train-1",
    ),
    positional=("what", "run"),
    run=run,
    flags=lambda: (
        Flag(name="keep", help="With prune: how many checkpoints stay; the best and the newest whole one always do.", type=int, group="prune"),
        Flag(name="dry_run", help="With prune: name what would be deleted, and delete nothing.", type=bool, group="prune"),
        JSON,
    ),
)  # fmt: skip
