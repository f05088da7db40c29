"""`covey export`: records and models of a run in formats that other tools read."""

import json
from collections.abc import Sequence
from pathlib import Path

from covey.cli import output
from covey.cli.columns import rows_file
from covey.cli.export_model import model_verb
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, DataError, did_you_mean

_FLAGS = (
    Flag(name="output", short="o", help="Where the pairs go: a new .jsonl or .parquet file.", group="output"),
    Flag(name="min_margin", help="Least difference of the two rewards; equal ones never make a pair.", type=float, default=0.0, group="pairs"),
    Flag(name="reward", help="Compare by this reward of the run; left out: by the total.", group="pairs"),
    Flag(name="steps", help="Only these steps, as FIRST:LAST; one end may be left out.", group="pairs"),
    Flag(name="max_per_prompt", help="Most pairs of one prompt, those of the widest margin.", type=int, least=1, group="pairs"),
    Flag(name="finished_only", help="Leave out completions that were cut at the length limit.", type=bool, default=False, group="pairs"),
    JSON,
)  # fmt: skip


def run_pairs(options: Args) -> int:
    """Write the pairs of a run. Exit code 0 with at least one."""
    run, path = Path(options["run"]), rows_file(options["output"])
    if path.exists():
        raise ConfigError(f"{path} is there already; give another --output.")
    first, last = steps_of(options["steps"])
    from covey.runs.pairs import PairOptions, preference_pairs
    from covey.runs.storage import storage_errors, whole_file

    criteria = {name: options[name] for name in ("min_margin", "reward", "max_per_prompt", "finished_only")}
    pairs = preference_pairs(run, PairOptions(first_step=first, last_step=last, **criteria))
    if not pairs.rows:
        raise DataError(
            f"None of the {pairs.num_groups} groups in {run} has completions far enough apart; lower --min-margin, or choose other --steps."
        )
    with whole_file(path) as unfinished, storage_errors(path):
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist([dict(row) for row in pairs.rows]), unfinished)
        else:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pairs.rows)
            unfinished.write_text(lines, encoding="utf-8")
    counts = {
        "pairs": len(pairs.rows),
        "groups": pairs.num_groups,
        "level": pairs.num_level,
        "repeated": pairs.num_repeated,
    }
    sentence = f"{path}: {len(pairs.rows)} pairs of {pairs.num_groups} groups; {pairs.num_level} not far enough apart, {pairs.num_repeated} repeated"
    output.answer(options, {"output": str(path), **counts}, sentence)
    return 0


def steps_of(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    first, is_range, last = text.partition(":")
    try:
        return (int(first or 0), int(last) if last else None) if is_range else (int(first), int(first))
    except ValueError as error:
        raise ConfigError(f"--steps {text} is no FIRST:LAST, such as 100:200, 100: or :200.") from error


_pairs = Verb(
    name="export pairs",
    usage="RUN -o FILE [options]",
    sentence="Writes preference pairs, the best against the worst of each group, with TRL's columns prompt, chosen and rejected.",
    flags=lambda: _FLAGS,
    run=run_pairs,
    positional=("run",),
    needs={"run": "a run: covey export pairs runs/first -o pairs.jsonl."},
    examples=(
        "covey export pairs runs/first -o pairs.jsonl",
        "covey export pairs runs/first -o pairs.parquet --min-margin 0.5 --steps 100: --max-per-prompt 2",
    ),
)
_VERBS = {"pairs": _pairs}


def verb(arguments: Sequence[str]) -> int:
    """`covey export pairs ...`, or a model where `--format` says so. Returns the exit code."""
    name = arguments[0] if arguments else "--help"
    if name in _VERBS:
        return _VERBS[name](arguments[1:])
    if any(word.partition("=")[0] == "--format" for word in arguments):
        return model_verb(arguments)
    if name in ("--help", "-h", "--help-all"):
        shown = (model_verb, *_VERBS.values())
        lines = [f"  covey {command.name} {command.usage}\n      {command.sentence}" for command in shown]
        model_verb([name] if arguments else ["--help"])
        output.result("\n".join(["", *lines, "", "covey export pairs --help shows the options of pairs."]))
        return 0 if arguments else 2
    raise ConfigError(
        f"covey export has no {name!r}.{did_you_mean(name, _VERBS)} It has {', '.join(_VERBS)}; a model needs --format merged, "
        "adapter or gguf."
    )
