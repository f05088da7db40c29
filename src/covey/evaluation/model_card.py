"""The model card: `README.md` of a trained model, from the run's own records. Its fields are those of the hub's model cards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from covey.evaluation.intervals import Estimate, mean_reward, paired_difference
from covey.runs import evaluations, manifest

_SHOWN_CHARACTERS = 60
"""Character limit of a shown option value."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Contents of a model card."""

    model_name: str
    base_model: str | None
    """Name on the hub; None: a local folder or a model created in the script."""
    repo_id: str | None
    dataset_name: str | Sequence[str] | None
    algorithm: str
    options: Mapping[str, Any]
    """Options that differ from their defaults."""
    rewards: Mapping[str, float]
    """Weight of each reward, by its name."""
    step: int
    run_dir: Path
    is_adapter: bool
    tags: Sequence[str] = ()
    language: str | Sequence[str] | None = None
    license: str | None = None

    def text(self) -> str:
        """Text of the card, YAML header included. Facts that the run has not recorded are left out."""
        record = manifest.read(self.run_dir / manifest.NAME) or {}
        sections = [self._intro(), self._use(), self._training(record), self._evaluation(), _versions(record)]
        return f"---\n{self._header()}---\n\n" + "\n".join(section for section in (*sections, _CITATION) if section)

    def _header(self) -> str:
        datasets = [self.dataset_name] if isinstance(self.dataset_name, str) else list(self.dataset_name or ())
        fields = {
            "base_model": self.base_model,
            "datasets": datasets,
            "language": self.language,
            "license": self.license,
            "library_name": "peft" if self.is_adapter else "transformers",
            "pipeline_tag": "text-generation",
            "model_name": self.model_name,
            "tags": sorted({"generated_from_trainer", "covey", "grpo", *self.tags}),
        }
        return yaml.safe_dump({name: value for name, value in fields.items() if value}, sort_keys=False)

    def _intro(self) -> str:
        base = f"[{self.base_model}](https://huggingface.co/{self.base_model})" if self.base_model else "a model"
        what = "an adapter for" if self.is_adapter else "a version of"
        return (
            f"# {self.model_name}\n\nThis is {what} {base}, post-trained with reinforcement learning "
            f"(algorithm `{self.algorithm}`) by Covey.\n"
        )

    def _use(self) -> str:
        return (
            "## Quick start\n\n```python\nfrom transformers import pipeline\n\n"
            f'generator = pipeline("text-generation", model="{self.repo_id or self.model_name}")\n'
            'messages = [{"role": "user", "content": "..."}]\n'
            'print(generator(messages, max_new_tokens=256, return_full_text=False)[0]["generated_text"])\n```\n'
        )

    def _training(self, record: Mapping[str, Any]) -> str:
        data, model = record.get("dataset") or {}, record.get("model") or {}
        rewards = ", ".join(f"`{name}` (weight {weight:g})" for name, weight in self.rewards.items())
        size = f"{model['parameters']:,}, of which {model['trained']:,} trained" if "parameters" in model else None
        rows = {
            "Run": record.get("id"),
            "Algorithm": f"`{self.algorithm}`",
            "Optimizer steps": self.step,
            "Rewards": rewards,
            "Data": self._data(data),
            "Parameters": size,
            "Hardware": _hardware(record.get("hardware") or {}),
            "Seed": (record.get("seeds") or {}).get("seed"),
            "Source code": (record.get("git") or {}).get("commit"),
        }
        table = _table(("", ""), ([name, value] for name, value in rows.items() if value not in (None, "")))
        rest = [[f"`{name}`", _shown(value)] for name, value in sorted(self.options.items())]
        options = f"\nOptions that differ from their defaults:\n\n{_table(('option', 'value'), rest)}\n" if rest else ""
        return f"## Training\n\n{table}\n{options}"

    def _data(self, data: Mapping[str, Any]) -> str:
        names = [self.dataset_name] if isinstance(self.dataset_name, str) else list(self.dataset_name or ())
        parts = [", ".join(names)] if names else []
        if data.get("rows"):
            parts.append(f"{data['rows']:,} prompts")
        if data.get("columns"):
            parts.append(f"columns {', '.join(map(str, data['columns']))}")
        if data.get("fingerprint"):
            parts.append(f"fingerprint `{data['fingerprint']}`")
        return "; ".join(parts)

    def _evaluation(self) -> str:
        rows = [row for name in evaluations.sets(self.run_dir / evaluations.FOLDER) for row in self._evaluated(name)]
        if not rows:
            return "## Evaluation\n\nThis model was not evaluated during its training.\n"
        head = ("held-out set", "first reward", "last reward", "difference", "prompts")
        return f"## Evaluation\n\nMean reward a prompt, with 95% intervals over prompts.\n\n{_table(head, rows)}\n"

    def _evaluated(self, name: str) -> Iterator[list[str]]:
        folder = self.run_dir / evaluations.FOLDER
        steps = [step for step in evaluations.steps(folder, name) if step <= self.step]
        if not steps:
            return
        read = lambda step: evaluations.by_question(evaluations.read(evaluations.path_of(folder, name, step)))
        first, last = read(steps[0]), read(steps[-1])
        both = sorted(set(first) & set(last))
        before, after = _estimated(first, steps[0]), _estimated(last, steps[-1])
        if len(steps) == 1:
            yield [name, "", after, "", str(len(last))]
            return
        gap = paired_difference([first[key] for key in both], [last[key] for key in both])
        difference = f"{gap.value:+.4g} ({gap.low:+.4g} to {gap.high:+.4g}), p = {gap.p_value:.2g}"
        yield [name, before, after, difference, str(len(last))]


def _estimated(scores: Mapping[str, float], step: int) -> str:
    estimate: Estimate = mean_reward(list(scores.values()))
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g}), step {step}"


def _hardware(hardware: Mapping[str, Any]) -> str:
    gpus = [gpu.get("name") for gpu in hardware.get("gpus") or ()]
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"{hardware['cpus']} CPU cores ({hardware.get('processor') or 'CPU'})" if hardware.get("cpus") else ""


def _versions(record: Mapping[str, Any]) -> str:
    lines = "".join(f"* {name}: {version}\n" for name, version in (record.get("versions") or {}).items())
    return f"## Versions\n\n{lines}" if lines else ""


def _table(head: Sequence[str], rows: Iterator[Sequence[Any]] | Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cell = lambda value: str(value).replace("|", "\\|").replace("\n", " ")
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def _shown(value: Any) -> str:
    value = getattr(value, "value", value)
    text = value if isinstance(value, str) else json.dumps(manifest.to_json(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


_CITATION = """## Citation

GRPO is from Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
<https://arxiv.org/abs/2402.03300>.
"""
