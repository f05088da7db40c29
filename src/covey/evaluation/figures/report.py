"""Report of a run on one page to share: configuration, learning curves, scores, alerts, and sample completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.evaluation.compare.run_data import Run, read_runs
from covey.evaluation.figures.draw import as_svg
from covey.evaluation.figures.gather import figures_of, interval_at, last_values, step_of
from covey.evaluation.html import page_of, table, text
from covey.names import as_written
from covey.runs import manifest, metrics, rollouts
from covey.runs.storage import write_text

_MOST_ALERTS = 40
_LONGEST = 3000
_MOST_CARD = 200_000
_OPTIONS = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", "max_steps",
    "num_train_epochs", "max_completion_length", "temperature", "beta", "epsilon", "loss_type", "scale_rewards", "seed", "use_peft", "bf16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Score:
    """One evaluation: its mean reward, and the interval of it, for which the file of its answers is read."""

    run: Run
    set_name: str
    step: int
    mean: float

    @cached_property
    def ends(self) -> tuple[float, float] | None:
        """95% interval over questions; None where the answers were not kept, or their file is damaged."""
        try:
            return interval_at(self.run, self.set_name, self.step)
        except RunFolderError:  # the mean is known all the same
            return None


def write_report(folder: Path, path: Path) -> Path:
    """Write the page. RunFolderError for what is no run, StorageError when it cannot be written."""
    return write_text(path, report_of(folder))


def report_of(folder: Path) -> str:
    """The page as text. RunFolderError for a folder that is no run, or holds several."""
    runs = read_runs(str(folder))
    if len(runs) > 1:
        raise RunFolderError(
            f"{folder} holds {len(runs)} runs; give one, such as {runs[0].path}, or compare them with covey compare --html."
        )
    run = runs[0]
    alerts = list(metrics.iterate(run.path / "alerts.jsonl"))
    scores = _scores(run)
    parts = [
        f"<h1>{text(run.name)}</h1>",
        f'<p class="lead">{text(_summary(run, scores, alerts))}</p>',
        "<h2>What ran</h2>",
        table(_facts(run)),
    ]
    parts += [_options(run), _evaluations(scores), _curves(run), _alerts(alerts), _samples(run), _card(run, scores)]
    parts.append(f'<p class="soft">Written by Covey {text(version("covey"))} from the run folder {text(run.name)}.</p>')
    return page_of(f"Report of {run.name}", "\n".join(part for part in parts if part))


def _summary(run: Run, scores: Sequence[_Score], alerts: Sequence[Mapping[str, Any]]) -> str:
    sentence = f"{str(run.manifest.get('state', 'unknown')).capitalize()} at step {step_of(run)}"
    finals = {score.set_name: score for score in scores}
    for name, score in finals.items():
        first = next(score for score in scores if score.set_name == name)
        sentence += f"; held-out reward on {name} {score.mean:.3g}{_ends(score)}"
        sentence += f", from {first.mean:.3g} at step {first.step}" if first.step != score.step else ""
    if not finals and (rewards := last_values(run).get("reward")) is not None:
        sentence += f"; training reward {rewards:.3g} (no held-out evaluation)"
    serious = sum(alert.get("severity") != "info" for alert in alerts)
    return f"{sentence}. {serious or 'No'} warning{'s' if serious != 1 else ''}."


def _ends(score: _Score) -> str:
    return f" (95% {score.ends[0]:.3g} to {score.ends[1]:.3g})" if score.ends else ""


def _facts(run: Run) -> list[tuple[object, ...]]:
    run_json = run.manifest
    seconds = sum(float(row["seconds/step"]) for row in run.curve if isinstance(row.get("seconds/step"), int | float))
    rewards, algorithm, hardware, git = (run_json.get(name) for name in ("rewards", "algorithm", "hardware", "git"))
    rows: list[tuple[object, Any]] = [
        ("model", run.config.get("model") or run.config.get("model_name_or_path") or _name(run_json.get("model"))),
        ("algorithm", _algorithm(run, algorithm)),
        ("rewards", ", ".join(_name(reward) for reward in rewards) if isinstance(rewards, list) else _name(rewards)),
        ("data", _brief(run_json.get("dataset"))),
        ("began", run_json.get("created")),
        ("time in steps", f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"),
        ("hardware", _brief(hardware)),
        ("versions", _brief(run_json.get("versions"))),
        ("commit", git.get("commit") if isinstance(git, Mapping) else None),
    ]
    return [(name, value) for name, value in rows if value]


def _algorithm(run: Run, algorithm: Any) -> str:
    """The preset that was named; else the parts that decide most."""
    named = run.config.get("algorithm")
    if isinstance(named, str):
        return named
    name = _name(algorithm)
    return f"GRPO, loss_type {run.config.get('loss_type')}" if name.endswith(":Algorithm") or not name else name


def _name(value: Any) -> str:
    return "" if value is None else as_written(str(manifest.name_of(value) or ""))


def _brief(value: Any) -> str:
    """The plain entries of a mapping in one line."""
    if not isinstance(value, Mapping):
        return "" if value is None else str(value)
    plain = {name: item for name, item in value.items() if isinstance(item, str | int | float) and str(item) != ""}
    return ", ".join(f"{name} {item}" for name, item in list(plain.items())[:12])


def _options(run: Run) -> str:
    rows: list[tuple[object, ...]] = [(name, run.config[name]) for name in _OPTIONS if run.config.get(name) is not None]
    rest: list[tuple[object, ...]] = [
        (name, value) for name, value in sorted(run.config.items()) if name not in _OPTIONS and value is not None
    ]
    if not rows and not rest:
        return ""
    return f"<details open><summary>main options</summary>{table(rows)}</details><details><summary>all other options ({len(rest)})</summary>{table(rest)}</details>"


def _scores(run: Run) -> list[_Score]:
    """Every evaluation, in order of sets and steps."""
    steps = [(name, step) for name, rows in sorted(run.evaluated.items()) for step in sorted(rows)]
    scores = [_Score(run=run, set_name=name, step=step, mean=run.mean_at(name, step)) for name, step in steps]
    return [score for score in scores if score.mean == score.mean]


def _evaluations(scores: Sequence[_Score]) -> str:
    if not scores:
        return "<h2>Evaluation</h2><p>The run was not evaluated on held-out questions.</p>"
    shown = [scores[0], *scores[1:-1][-8:], scores[-1]] if len(scores) > 10 else scores
    rows: list[tuple[object, ...]] = [
        (
            score.set_name,
            score.step,
            f"{score.mean:.4g}",
            f"{score.ends[0]:.4g} to {score.ends[1]:.4g}" if score.ends else "not known",
        )
        for score in shown
    ]
    left = (
        f"<p class=soft>{len(scores) - len(shown)} evaluations between are left out.</p>"
        if len(shown) < len(scores)
        else ""
    )
    return f"<h2>Evaluation</h2>{table(rows, ('set', 'step', 'mean reward', '95% interval over questions'))}{left}"


def _curves(run: Run) -> str:
    try:
        titles, figures = figures_of([run])
    except RunFolderError as error:
        return f"<h2>Curves</h2><p>{text(error)}</p>"
    drawn = "".join(f"<figure>{as_svg(figure, titles)}</figure>" for figure in figures)
    return f'<h2>Curves</h2><p class="soft">Band: 95% interval over the held-out questions.</p><div class="figures">{drawn}</div>'


def _alerts(alerts: Sequence[Mapping[str, Any]]) -> str:
    if not alerts:
        return "<h2>Alerts</h2><p>None.</p>"
    parts = []
    for alert in alerts[-_MOST_ALERTS:]:
        severity = alert.get("severity") if alert.get("severity") in ("error", "warning", "info") else "info"
        advice = alert.get("try_this")
        tries = (
            f"<br><span class=soft>Try: {text('; '.join(map(str, advice)))}</span>"
            if isinstance(advice, list) and advice
            else ""
        )
        parts.append(
            f'<div class="alert {severity}"><b>step {text(alert.get("step"))}, {text(alert.get("rule"))}</b>: {text(alert.get("said"))}{tries}</div>'
        )
    left = (
        f"<p class=soft>The {len(alerts) - _MOST_ALERTS} before are left out.</p>" if len(alerts) > _MOST_ALERTS else ""
    )
    return f"<h2>Alerts</h2>{left}{''.join(parts)}"


def _samples(run: Run) -> str:
    """The best and the worst completion of three groups, of the first and of the last step that was kept."""
    steps = rollouts.steps(run.path / "rollouts")
    if not steps:
        return ""
    parts = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        try:
            rows = rollouts.read(rollouts.path_of(run.path / "rollouts", step))
        except RunFolderError as error:
            parts.append(f"<p>{text(error)}</p>")
            continue
        parts.append(f"<h3>Step {step}</h3>{''.join(map(_sample, rollouts.by_group(rows)[:3]))}")
    return f'<h2>Samples</h2><p class="soft">The first three groups; of each the best and the worst completion.</p>{"".join(parts)}'


def _sample(group: Sequence[Mapping[str, Any]]) -> str:
    scored = sorted(group, key=lambda row: float("-inf") if row.get("reward") is None else row["reward"])
    chosen = [scored[-1], scored[0]] if scored[0].get("reward") != scored[-1].get("reward") else [scored[-1]]
    parts = []
    for row in chosen:
        reward = "not scored" if row.get("reward") is None else f"reward {row['reward']:.4g}"
        cut = ", cut off at the limit" if row.get("finish") == "length" else ""
        parts.append(f"<div><b>{reward}{cut}</b><pre dir=auto>{_cut(row.get('completion'))}</pre></div>")
    return f"<p><b>prompt</b></p><pre dir=auto>{_cut(group[0].get('prompt'))}</pre>{''.join(parts)}"


def _cut(value: Any) -> str:
    content = "" if value is None else str(value)
    return text(content[:_LONGEST]) + (
        f" … ({len(content) - _LONGEST:,} more characters)" if len(content) > _LONGEST else ""
    )


def _card(run: Run, scores: Sequence[_Score]) -> str:
    """The model card that the run wrote, else one made from its manifest."""
    for path in (run.path / "model" / "README.md", run.path / "README.md"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < _MOST_CARD:
            return f"<h2>Model card</h2><pre>{text(path.read_text(encoding='utf-8', errors='replace'))}</pre>"
    facts = "\n".join(f"* {name}: {value}" for name, value in _facts(run))
    held = "\n".join(f"| {score.set_name} | {score.step} | {score.mean:.4g}{_ends(score)} |" for score in scores[-4:])
    evaluated = f"\n\n## Evaluation\n\n| set | step | mean reward |\n|---|--:|--:|\n{held}" if held else ""
    card = f"# {run.name}\n\nPost-trained with Covey {version('covey')}.\n\n## Training\n\n{facts}{evaluated}\n"
    return f"<h2>Model card</h2><p>Text for a README.md beside the weights; intended use, limits and licence are yours to add.</p><pre>{text(card)}</pre>"
