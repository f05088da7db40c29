"""`covey reward test`, `train` and `audit`: a reward tried on probes before a run, a reward model, scores called again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from covey.cli import output, reward_audit, reward_steps, reward_train
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, Verb, Verbs
from covey.errors import ConfigError, DataError, RewardError

if TYPE_CHECKING:
    from covey.doctor.reward_audit.examination import Examination, Tried
    from covey.doctor.reward_audit.verdicts import Verdict
    from covey.evaluation.calibration import Calibration

_FLAGS = (
    Flag(name="reward", help="Built-in name, import path or reward model; may be repeated.", type="list[str]", group="reward"),
    Flag(name="dataset", help="Prompts with gold answers: a file, a folder or a hub id; left out: sums of two numbers.", group="data"),
    Flag(name="prompt_column", help="Column that holds the prompt.", default="prompt", group="data"),
    Flag(name="columns", help="Rename columns: new=old, so that a reward finds them.", type="list[str]", group="data"),
    Flag(name="gold_column", help="Column of the right answer; left out: answer, solution, reference, ...", group="data"),
    Flag(name="completion_column", help="Column of completions to score, in addition to generated ones.", group="data"),
    Flag(name="rows", help="How many rows are tried, from all over the data set.", type=int, default=16, least=1, group="data"),
    Flag(name="timeout", help="Seconds that one call may take.", type=float, default=60.0, group="reward"),
    Flag(name="strict", help="Warnings fail too.", type=bool, default=False, group="output"),
    JSON,
    CONFIG,
)  # fmt: skip


def run(options: dict[str, Any]) -> int:
    """Try every reward and say what is wrong. Exit code 0 without a FAIL, 3 with one."""
    if not options["timeout"] > 0:
        raise ConfigError(f"--timeout {options['timeout']} leaves no time; give seconds above 0.")
    from covey.rewards.builtin.registry import resolve
    from covey.rewards.contract import check_signature

    specs = [resolve(reward) for reward in options["reward"]]
    data = _data(options)
    columns = list(data[0])
    gold = _gold_column(options["gold_column"], columns)
    for spec in specs:
        check_signature(spec, columns)
    logging.getLogger("covey.rewards.scorer").setLevel(logging.ERROR)  # completions without a score are counted below
    examined = [_examine(spec, data, gold, options) for spec in specs]
    is_ok = all(_is_ok(verdicts, options) for _, verdicts, _ in examined)
    if options["json"]:
        output.result_json({"ok": is_ok, "gold_column": gold, "rewards": [_as_json(*parts) for parts in examined]})
    else:
        for spec, (examination, verdicts, steps) in zip(specs, examined, strict=True):
            if steps is not None:
                output.result("\n".join([f"{spec.name}: {reward_steps.in_words(steps)}", *reward_steps.table(steps)]))
            _show(spec.name, examination, verdicts, len(data))
    return 0 if is_ok else RewardError.exit_code


def _data(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows from all over the data set, at equal distances; sums of two numbers without one."""
    if options["dataset"] is None:
        pairs = [(7 * i % 53 + 3, 11 * i % 61 + 5) for i in range(options["rows"])]
        return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b), "solution": str(a + b)} for a, b in pairs]
    from covey.cli.columns import column_map
    from covey.data import load

    columns = column_map(options["columns"])
    dataset = load(options["dataset"], prompt_column=options["prompt_column"], columns=columns)
    count = min(options["rows"], len(dataset))
    return [dict(dataset[i * len(dataset) // count]) for i in range(count)]


def _gold_column(column: str | None, columns: list[str]) -> str | None:
    if column is not None and column not in columns:
        raise DataError(f"--gold-column {column}: the data set has {', '.join(columns)}.")
    from covey.doctor.reward_audit.probes import GOLD_COLUMNS

    return column or next((name for name in GOLD_COLUMNS if name in columns), None)


def _examine(
    spec: Any, data: list[dict[str, Any]], gold: str | None, options: dict[str, Any]
) -> tuple[Examination | None, list[Verdict], Calibration | None]:
    """The reward on its probes, the verdicts, and a process reward on all scored steps of the data set; None where there are none."""
    from covey.cli.columns import column_map
    from covey.doctor.reward_audit.examination import examine
    from covey.doctor.reward_audit.probes import rows_of
    from covey.doctor.reward_audit.verdicts import Verdict, judge

    output.say(f"{spec.name}: {len(data)} rows ...")
    column = options["completion_column"]
    if column is not None and column not in data[0]:
        raise DataError(f"--completion-column {column}: the data set has {', '.join(data[0])}.")
    try:
        examination = examine(spec, rows_of(data, gold, column), timeout_seconds=options["timeout"])
        verdicts = judge(examination)
    except RewardError as error:
        examination, verdicts = None, [Verdict("FAIL", "contract", str(error))]
    name, steps = options["dataset"], None
    if name is not None:
        steps = reward_steps.of_dataset(spec.call, name, column_map(options["columns"]))
    if steps is not None and steps.auc.low <= 0.5:
        sentence = "does not tell right steps from wrong ones better than a coin, as far as can be seen"
        verdicts.append(Verdict("WARN", "steps", sentence))
    return examination, verdicts, steps


_LEVELS = {"FAIL": "failure", "WARN": "warning", "NOTE": "note"}


def _is_ok(verdicts: list[Verdict], options: dict[str, Any]) -> bool:
    return not any(v.level == "FAIL" or (options["strict"] and v.level == "WARN") for v in verdicts)


def _show(name: str, examination: Examination | None, verdicts: list[Verdict], num_rows: int) -> None:
    output.result(f"{name} ({num_rows} rows)")
    if examination is not None:
        output.result(f"  {'completion':<42}{'mean':>9}{'min':>9}{'max':>9}{'none':>6}{'ms each':>9}")
        for several in _alike(examination.tried):
            output.result(_line(several, is_main=several[0].probe.name == examination.wording))
        scores = [score for tried in examination.tried for score in tried.finite]
        seconds, size = sum(t.seconds for t in examination.tried), sum(t.size for t in examination.tried)
        output.result(
            f"  {size} completions, {len(set(scores))} different scores, {1000 * seconds / max(size, 1):.3g} ms each"
        )
    for verdict in verdicts:
        output.result(f"  {verdict.level}  {verdict.check}: {verdict.said}")
    count: Counter[str] = Counter(verdict.level for verdict in verdicts)
    counts = [f"{count[level]} {word}" + "s" * (count[level] > 1) for level, word in _LEVELS.items() if count[level]]
    output.result(f"  {name}: {', '.join(counts) or 'nothing wrong was found'}")


def _alike(tried: Sequence[Tried]) -> list[list[Tried]]:
    """Groups of garbage probes with one and the same score, shown on one line; every other probe is alone."""
    groups: list[list[Tried]] = []
    at: dict[tuple[str, float], list[Tried]] = {}
    for trial in tried:
        is_flat = trial.probe.kind == "garbage" and len(set(trial.finite)) == 1 and len(trial.finite) == trial.size
        if is_flat and (key := (trial.probe.kind, trial.finite[0])) in at:
            at[key].append(trial)
            continue
        groups.append([trial])
        if is_flat:
            at[key] = groups[-1]
    return groups


def _line(several: Sequence[Tried], *, is_main: bool) -> str:
    first, all_scores = several[0], [score for tried in several for score in tried.finite]
    is_usual = is_main and first.probe.kind == "gold"
    more = f" and {len(several) - 1} more kinds" if len(several) > 1 else " *" if is_usual else ""
    size = sum(tried.size for tried in several)
    each = 1000 * sum(tried.seconds for tried in several) / max(size, 1)
    scores = [f"{score:.3f}" for score in (first.mean, min(all_scores), max(all_scores))] if all_scores else ["-"] * 3
    label = f"{first.probe.kind}: {first.probe.name}{more}"
    return f"  {label:<42}{''.join(f'{score:>9}' for score in scores)}{size - len(all_scores):>6}{each:>9.2f}"


def _as_json(
    examination: Examination | None, verdicts: list[Verdict], calibration: Calibration | None
) -> dict[str, Any]:
    rows = [{"level": v.level, "check": v.check, "said": v.said, **v.facts} for v in verdicts]
    steps = {} if calibration is None else {"steps": reward_steps.as_json(calibration)}
    if examination is None:
        return {"verdicts": rows, **steps}
    return {
        "name": examination.name,
        "reads_gold": examination.reads_gold,
        "wording": examination.wording,
        "rows": len(examination.rows),
        "verdicts": rows,
        "probes": [
            {
                "kind": tried.probe.kind,
                "name": tried.probe.name,
                "mean": tried.mean,
                "scores": tried.scores,
                "seconds": tried.seconds,
                "errors": tried.errors,
            }
            for tried in examination.tried
        ],
        **steps,
    }


_test = Verb(
    name="reward test",
    usage="--reward REWARD [--dataset DATA] [options]",
    sentence="Tries a reward on right, wrong, empty, endless and cheating completions and reports its faults.",
    flags=lambda: _FLAGS,
    run=run,
    needs={"reward": "--reward: a built-in name, or file.py:function."},
    places={"dataset": "data set"},
    examples=(
        "covey reward test --reward math --dataset train.jsonl --prompt-column question",
        "covey reward test --reward my_rewards.py:short_and_right --reward format --dataset demo",
    ),
)
verb = Verbs(name="reward", usage="...", verbs={"test": _test, "train": reward_train.verb, "audit": reward_audit.verb})
