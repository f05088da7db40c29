"""`covey data check`, `clean` and `pivots`: faults of a data set, a copy without them, and turns of trajectories as prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, Args, Verb, Verbs
from covey.errors import ConfigError

if TYPE_CHECKING:
    from covey.doctor.data_check.inspection import Inspection
    from covey.doctor.data_check.summary import Summary

_FLAGS = (
    Flag(name="prompt_column", help="Column that holds the prompt.", default="prompt", group="data"),
    Flag(name="answer_column", help="Column of the gold answer; left out: answer or solution, if there.", group="data"),
    Flag(name="answers", help="Form of an answer: number, math (math-verify parses it) or text; auto: a number where 9 in 10 are.", default="auto", group="data"),
    Flag(name="max_rows", help="Check only the first N rows.", type=int, least=1, group="data"),
    Flag(name="against", help="Evaluation sets whose questions must not be among the rows; may be several.", type="list[str]", group="comparison"),
    Flag(name="against_column", help="Column of their prompts; left out: as --prompt-column.", group="comparison"),
    Flag(name="overlap", help="Share of a prompt's words, in runs that an evaluation question has too, from which it is one.", type=float, default=0.5, group="comparison"),
    Flag(name="gram", help="Words of such a run.", type=int, default=8, group="comparison"),
    Flag(name="near", help="Share of common runs of three words from which prompts are near duplicates; 0: exact ones only; left out: 0.6 or 0.8.", type=float, group="comparison"),
    Flag(name="tokenizer", help="Model or folder whose tokenizer and chat template count tokens.", group="length"),
    Flag(name="max_prompt_length", help="Most tokens of a prompt.", type=int, group="length"),
    Flag(name="ignore", help="Kinds of fault to ignore, such as near_duplicate or form.", type="list[str]", group="comparison"),
    JSON,
    CONFIG,
)  # fmt: skip
_OUTPUT = Flag(
    name="output", short="o", help="File for the clean rows (.jsonl); its report is written next to it.", group="output"
)
_EXAMPLES = Flag(name="examples", help="Examples shown of each fault.", type=int, default=3, group="output")
_HTML = Flag(name="html", help="Also write the findings, with more examples, to this page (.html).", group="output")
_PLACES = {"dataset": "data set", "against": "data set", "tokenizer": "model folder"}
_ON_PAGE = 20
_WIDTH = 76


def run_check(options: dict[str, Any]) -> int:
    """Check, print a table or JSON. Exit code 0 when nothing must be fixed, else 1."""
    page = None if options["html"] is None else _page(options["html"])
    from covey.doctor.data_check.summary import summary

    shown = max(options["examples"], 0)
    report = summary(_inspect(options), shown if page is None else max(shown, _ON_PAGE))
    if page is not None:
        from covey.doctor.data_check.html_report import as_html
        from covey.runs.storage import write_text

        write_text(page, as_html(report))
    if options["json"]:
        output.result_json(report.as_dict())
    else:
        _show(report, shown)
    return 0 if report.is_ok else 1


def run_clean(options: dict[str, Any]) -> int:
    """Look, write the clean rows and the report, say what was done."""
    from covey.doctor.data_check.clean_copy import check_output, clean
    from covey.doctor.data_check.findings import KINDS

    target = Path(options["output"]).expanduser()
    check_output(target)
    inspection = _inspect(options)
    done = clean(inspection, target)
    if options["json"]:
        output.result_json({**vars(done), "output": str(done.output), "report": str(done.report)})
        return 0
    output.result(f"{done.output}: {done.kept:,} of {done.num_rows:,} rows, {done.changed:,} of them mended")
    for name in (name for name in KINDS if name in done.dropped):
        output.result(f"  {done.dropped[name]:>8,}  left out: {KINDS[name].title}")
    output.result(f"{done.report}: a line for every row that was left out or mended, with the reason")
    return 0


def run_pivots(args: Args) -> int:
    """Write a row for each turn of the experts, say how many."""
    from covey.doctor.data_check import Rows
    from covey.doctor.data_check.clean_copy import refuse_taken
    from covey.doctor.data_check.pivots import Chosen, write_pivots

    target = Path(args["output"]).expanduser()
    if target.suffix != ".jsonl" or not target.parent.is_dir():
        raise ConfigError(f"--output {target}: give a file that ends in .jsonl, in a folder that is there.")
    refuse_taken(target)
    chosen = Chosen(args["messages_column"], args["tool_calls_only"], args["success_column"])
    counts = write_pivots(Rows(args["dataset"], args["max_rows"]), chosen, target)
    facts = {name: counts[name] for name in ("trajectories", "failed", "pivots")}
    failed = f", {counts['failed']:,} left out as failed" if chosen.success_column else ""
    sentence = f"{target}: {counts['pivots']:,} pivots of {counts['trajectories']:,} trajectories{failed}"
    output.answer(args, {"output": str(target), **facts}, sentence)
    return 0


def _page(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix.lower() not in (".html", ".htm") or not path.parent.is_dir():
        raise ConfigError(f"--html {name}: give a file that ends in .html, in a folder that is there.")
    return path


def _inspect(options: dict[str, Any]) -> Inspection:
    from covey.doctor.data_check import Rows, Settings, inspect

    settings = Settings(
        prompt_column=options["prompt_column"],
        answer_column=options["answer_column"],
        answers=options["answers"],
        near=options["near"],
        against=tuple(options["against"] or ()),
        against_column=options["against_column"],
        gram=options["gram"],
        overlap=options["overlap"],
        tokenizer=_tokenizer(options),
        max_prompt_length=options["max_prompt_length"],
        ignore=tuple(options["ignore"] or ()),
    )
    return inspect(Rows(options["dataset"], options["max_rows"]), settings)


def _tokenizer(options: dict[str, Any]) -> Any:
    if (options["tokenizer"] is None) != (options["max_prompt_length"] is None):
        raise ConfigError(
            "--tokenizer and --max-prompt-length need each other: how long is a prompt, and how long may it be?"
        )
    if options["tokenizer"] is None:
        return None
    from covey.cli.checkpoints import model_folder
    from covey.models import load_tokenizer

    return load_tokenizer(None, model_folder(options["tokenizer"]))


def _show(report: Summary, num_examples: int) -> None:
    length = report.lengths["characters"]
    quantiles = (
        f"; prompts of {length['median']:,.0f} characters (5% {length['p05']:,.0f}, 95% {length['p95']:,.0f}, longest {length['most']:,.0f})"
        if length
        else ""
    )
    output.result(f"{report.source}: {_in_rows(report.num_rows)}{quantiles}")
    for title, is_grave in (("to mend", True), ("to look at", False)):
        entries = [entry for entry in report.entries if entry.kind.must_be_mended == is_grave]
        if entries:
            output.result(f"\n{title:<36}{'kind':<16}{'rows':>8}  {'share':>6}")
        for entry in entries:
            share = 100 * entry.count / report.num_rows
            output.result(f"  {entry.kind.title:<34}{entry.kind.name:<16}{entry.count:>8,}  {share:>5.2f}%")
            for example in entry.examples[:num_examples]:
                output.result(f"      row {example.row} {example.why}\n          {_short(example.begins)}")
            output.result(f"      fix: {entry.kind.fix}")
    output.result("" if report.entries else "\nNothing found.")
    for note in report.notes:
        output.result(f"note: {note}")
    if not report.is_ok:
        output.result(
            f"covey data clean would leave out {_in_rows(report.to_drop)} and mend {report.to_change:,}; it writes a new file."
        )  # fmt: skip


def _in_rows(rows: int) -> str:
    return f"{rows:,} row" + "s" * (rows != 1)


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


_check = Verb(
    name="data check",
    usage="DATASET [options]",
    sentence="Finds the faults of a data set, row by row; exit code 1 when something must be fixed.",
    flags=lambda: (*_FLAGS, _EXAMPLES, _HTML),
    run=run_check,
    positional=("dataset",),
    needs={"dataset": "a data set: covey data check train.jsonl."},
    places=_PLACES,
    examples=(
        "covey data check train.jsonl --prompt-column question --against test.jsonl",
        "covey data check train.jsonl --tokenizer runs/x --max-prompt-length 512 --json",
    ),
)
_clean = Verb(
    name="data clean",
    usage="DATASET -o FILE [options]",
    sentence="Writes a data set without its faults, and a report of every row that was changed or dropped; overwrites nothing.",
    flags=lambda: (*_FLAGS, _OUTPUT),
    run=run_clean,
    positional=("dataset",),
    needs={
        "output": "--output: the file for the clean rows, such as --output clean.jsonl.",
        "dataset": "a data set: covey data clean train.jsonl.",
    },
    places=_PLACES,
    examples=("covey data clean train.jsonl --prompt-column question --against test.jsonl --output clean.jsonl",),
)
_pivots = Verb(
    name="data pivots",
    usage="TRAJECTORIES -o FILE [options]",
    sentence="Writes each turn of expert trajectories as a prompt whose answer is the expert's turn; overwrites nothing.",
    flags=lambda: (
        Flag(name="messages_column", help="Column of the messages; left out: messages, conversations, conversation or trajectory.", group="data"),
        Flag(name="tool_calls_only", help="Only turns that call a tool.", type=bool, default=False, group="data"),
        Flag(name="success_column", help="Column that is true, or a reward of 1 at least, in trajectories to take turns of.", group="data"),
        Flag(name="max_rows", help="Read only the first N rows.", type=int, least=1, group="data"),
        Flag(name="output", short="o", help="File for the pivots (.jsonl).", group="output"),
        JSON,
    ),
    run=run_pivots,
    positional=("dataset",),
    needs=dict.fromkeys(("dataset", "output"), "trajectories and a file: covey data pivots expert.jsonl -o pivots.jsonl."),
    places={"dataset": "data set"},
    examples=("covey data pivots expert.jsonl --tool-calls-only -o pivots.jsonl",),
)  # fmt: skip
verb = Verbs(name="data", usage="DATASET ...", verbs={"check": _check, "clean": _clean, "pivots": _pivots})
