"""Sample efficiency: completions until a target accuracy, of plain GRPO and of options that are said to need fewer.

    python benchmarks/sample_efficiency.py --task demo --seeds 0 1 2 3 4
    python benchmarks/sample_efficiency.py --task words --arms plain "4 uses"
    python benchmarks/sample_efficiency.py --task hints      # teachers by token, with the answer in the teacher's prompt

Every completion that is sampled for training counts, also those that dynamic sampling drops: the reward function counts them. About
every 256 completions (64 of `words`) the greedy accuracy on 150 held-out problems is taken; the first value of 90% ends the run. A
run that never gets there counts with its whole budget, marked `>`, so its ratio to plain GRPO is a lower bound of the truth. Tasks:
`demo` is the demo with its settings, as in `step.py --race`. `words` is translation of five words by a model of 0.1 million parameters,
taught here to leave most words as they are; its reward is the share of right words, its accuracy that of whole sentences. `hints`
is the same with a model that was also taught to copy an answer in its prompt, so that it knows more as its own teacher.
`misread` in its JSON lines is the share of held-out answers that use another operation, at each look: the other wrong ones
calculate wrongly. Intervals are 95% t-intervals over seeds; ratios are of the same seed. Runs go to `--out` as JSON lines, and are not made twice.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

from algorithms import T95
from covey import GRPOConfig, GRPOTrainer, demo
from covey.data import PromptStream
from covey.evaluation.assessment import assess
from covey.rewards import Scorer
from covey.rollout import choose_sampler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tiny import learn, taught

Found = dict[str, Any]
HELD_OUT = 150
TARGETS = (0.6, 0.75, 0.8, 0.9)
"""Accuracies whose completions are reported; the last one ends a run."""
COMBINED: Mapping[str, Any] = {
    "curriculum": "frontier",
    "dynamic_sampling": 1,
    "num_iterations": 2,
    "target_kl": 0.02,
}
EVEN: Mapping[str, Any] = {"num_iterations": 4, "adam_epsilon": 1e-3, "learning_rate": 4.0}
"""With an epsilon above most gradients, Adam's updates are nearly those of plain gradient descent."""
ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "MaxRL": {"algorithm": "maxrl"},
    "2 uses": {"num_iterations": 2},
    "2 a group": {"num_generations": 2},
    "2 a group, 2 uses": {"num_generations": 2, "num_iterations": 2},
    "4 uses": {"num_iterations": 4},
    "4 uses, KL target": {"num_iterations": 4, "target_kl": 0.02},
    "2 uses, KL target, learning rate x 2": {"num_iterations": 2, "target_kl": 0.02, "learning_rate": 2.0},
    "curriculum": {"curriculum": "frontier"},
    "dynamic sampling": {"dynamic_sampling": 1},
    "curriculum, dynamic sampling, 2 uses, KL target": COMBINED,
    "the same, 4 uses": {**COMBINED, "num_iterations": 4},
    "the same, 2 a group": {**COMBINED, "num_generations": 2},
    "curriculum, 4 uses, KL target": {"curriculum": "frontier", "num_iterations": 4, "target_kl": 0.02},
    "dynamic sampling, 4 uses, KL target": {"dynamic_sampling": 1, "num_iterations": 4, "target_kl": 0.02},
    "4 uses, beta 0.04": {"num_iterations": 4, "beta": 0.04},
    "4 uses, no momentum": {"num_iterations": 4, "adam_beta1": 0.0},
    "4 uses, epsilon of Adam 1e-3": {"num_iterations": 4, "adam_epsilon": 1e-3},
    "4 uses, epsilon of Adam 1e-3, learning rate x 4": EVEN,
    "4 uses, epsilon of Adam 1e-3, learning rate x 4, beta 0.2": {**EVEN, "beta": 0.2},
    "4 uses, epsilon of Adam 1e-3, learning rate x 4, 4 a group": {**EVEN, "num_generations": 4},
    "learning rate x 2": {"learning_rate": 2.0},
    "learning rate x 4": {"learning_rate": 4.0},
    "learning rate / 2": {"learning_rate": 0.5},
    "beta2 0.95": {"adam_beta2": 0.95},
    "beta2 0.99": {"adam_beta2": 0.99},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "a fifth of the tokens": {"top_entropy_quantile": 0.2},
    "dr_grpo, unscaled": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "half the batch": {"per_device_train_batch_size": 0.5},
    "MaxRL, half the batch": {"algorithm": "maxrl", "per_device_train_batch_size": 0.5},
    "16 a group": {"num_generations": 16},
    "MaxRL, 16 a group": {"algorithm": "maxrl", "num_generations": 16},
    "upper clip 0.28": {"epsilon_high": 0.28},
    "unscaled advantages": {"scale_rewards": "none"},
}
"""Options of each arm beside the task's; a learning rate and a batch are factors on the task's."""
FAST: Mapping[str, Any] = {"num_iterations": 4, "target_kl": 0.02, "curriculum": "frontier"}
DISTILL = "dapo, high=0.2, objective=zero, regularizer=distill(teacher='{teacher}')"
TEACHERS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "fast": FAST,
    "rlsd": {"algorithm": "rlsd, {role}"},
    "sdar": {"algorithm": "sdar, {role}"},
    "reward and divergence": {"algorithm": "grpo, regularizer=distill(teacher='policy', {quoted})"},
    "mopd with the reward": {"algorithm": "mopd, reward=1.0, {role}"},
    "sdpo": {"algorithm": "sdpo, {role}"},
    "opsd": {"algorithm": "opsd, {role}"},
    "sdft": {"algorithm": "sdft, {role}"},
    "rlsd, fast": {"algorithm": "rlsd, {role}", **FAST},
    "reward and divergence, fast": {
        "algorithm": "grpo, regularizer=distill(teacher='policy', {quoted})",
        **FAST,
    },
    "grpo and solutions": {"algorithm": "dapo, high=0.2, regularizer=sft(dataset='{solutions}', weight=1.0)"},
    "mopd": {"algorithm": "mopd, teacher='{teacher}'"},
    "grpo and distill": {"algorithm": "dapo, high=0.2, regularizer=distill(teacher='{teacher}')"},
    "distill": {"algorithm": DISTILL},
    "distill, 4 uses": {"algorithm": DISTILL, "num_iterations": 4},
    "distill, 1 a prompt": {"algorithm": DISTILL, "num_generations": 1},
    "distill, 1 a prompt, half the batch": {
        "algorithm": DISTILL,
        "num_generations": 1,
        "per_device_train_batch_size": 0.5,
    },
    "mopd, 1 a prompt, half the batch": {
        "algorithm": "mopd, teacher='{teacher}'",
        "num_generations": 1,
        "per_device_train_batch_size": 0.5,
    },
    "mopd of another tokenizer, 1 a prompt, half the batch": {
        "algorithm": "mopd, teacher='{other}'",
        "num_generations": 1,
        "per_device_train_batch_size": 0.5,
    },
    "opsd, 1 a prompt, half the batch": {
        "algorithm": "opsd, {role}",
        "num_generations": 1,
        "per_device_train_batch_size": 0.5,
    },
}
"""Arms with a teacher by token. The policy as its own teacher sees `{role}`: the answer where the task has hints, else the
group's best. `{teacher}` is a model that was trained on right answers, and `{solutions}` the file of these. `{other}` is such a
model of the demo with another tokenizer, of half the merges."""


@dataclass(frozen=True)
class Task:
    model: str
    rows: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    reward: Callable[..., list[float]]
    right: Callable[..., list[float]]
    """1 for a right answer, 0 for another."""
    options: Mapping[str, Any]
    every: int
    """Completions between two looks at the held-out accuracy."""
    solved: Callable[[random.Random], Mapping[str, Any]]
    """A training problem with a right `completion`."""
    misread: Callable[[Sequence[str]], float] | None = None
    """Share of the held-out answers that calculate with other operations than the problem's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("demo", "words", "hints"), default="demo")
    parser.add_argument("--arms", nargs="*", choices={**ARMS, **TEACHERS})
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON lines")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    arms = {**ARMS, **TEACHERS}
    given.arms = given.arms or list(TEACHERS if given.task == "hints" else ARMS)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.task}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        task = (
            demo_task() if given.task == "demo" else words_task(folder, hinted if given.task == "hints" else sentence)
        )
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        words = placeholders(given.task, given.out)
        if any("{teacher}" in str(arms[arm]) or "{solutions}" in str(arms[arm]) for arm in given.arms):
            make_teacher(task, words["solutions"], words["teacher"])
        if any("{other}" in str(arms[arm]) for arm in given.arms):
            make_other_teacher(task, words["other"])
        for seed in given.seeds:
            for arm in given.arms:
                options = with_role(arms[arm], words)
                if any((one["arm"], one["seed"], one["options"]) == (arm, seed, options) for one in found):
                    continue
                found.append({"arm": arm, "seed": seed, "options": options, **train(task, options, seed)})
                with file.open("a") as lines:
                    lines.write(json.dumps(found[-1]) + "\n")
    chosen = [
        one
        for one in found
        if one["seed"] in given.seeds and one["options"] == with_role(arms.get(one["arm"], {}), words)
    ]
    print(table(chosen, given.arms))


def placeholders(task: str, out: Path) -> dict[str, str]:
    """What stands in an arm for the feedback that a teacher sees, for the file of solutions and for the trained teacher."""
    feedback = "answer" if task == "hints" else "best"
    files = {"solutions": str(out / f"{task}-solutions.jsonl"), "teacher": str(out / f"{task}-teacher")}
    files["other"] = str(out / f"{task}-other")
    return {"role": f"feedback={feedback}", "quoted": f"feedback='{feedback}'", **files}


def make_teacher(task: Task, solutions: str, folder: str) -> None:
    """Write 4,096 training problems with right answers, and the task's model after 300 steps on such, unless they are there."""
    if not Path(solutions).exists():
        rng = random.Random(2)
        Path(solutions).write_text("".join(json.dumps(task.solved(rng)) + "\n" for _ in range(4096)))
    if Path(folder).exists():
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    learn(model, tokenizer, task.solved, random.Random(3), steps=300)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_other_teacher(task: Task, folder: str) -> None:
    """Write the task's model with a tokenizer of half its merges, after 600 steps on right answers, unless it is there."""
    if Path(folder).exists():
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    merges, vocab = state["model"]["merges"], state["model"]["vocab"]
    halved = merges[: len(merges) // 2]
    gone = {"".join(pair) for pair in merges} - {"".join(pair) for pair in halved}
    words = sorted((word for word in vocab if word not in gone), key=vocab.__getitem__)
    state["model"].update(merges=halved, vocab={word: i for i, word in enumerate(words)})
    added = [token for token in state["added_tokens"] if token["content"] in words]
    state["added_tokens"] = [{**token, "id": words.index(token["content"])} for token in added]
    special = {"pad_token": tokenizer.pad_token, "eos_token": tokenizer.eos_token}
    core = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=tokenizer.chat_template, **special)
    rows = torch.tensor([vocab[word] for word in words])
    weight = model.get_parameter("model.embed_tokens.weight").detach()[rows].clone()
    model.resize_token_embeddings(len(words), mean_resizing=False)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").copy_(weight)
    learn(model, tokenizer, task.solved, random.Random(3), steps=600)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_role(options: Mapping[str, Any], words: Mapping[str, str]) -> Found:
    """The options with what the teacher sees."""
    fill = lambda value: value.format(**words) if isinstance(value, str) and "{" in value else value
    return {name: fill(value) for name, value in options.items()}


def demo_task() -> Task:
    return Task(
        model=str(demo.model_path()),
        rows=demo.rows("train"),
        held_out=demo.rows("test", HELD_OUT),
        reward=demo.reward,
        right=demo.reward,
        options=demo.DEMO_SETTINGS,
        every=256,
        solved=worked,
        misread=misread,
    )


def worked(rng: random.Random) -> Found:
    """A training problem of the demo with its worked answer."""
    problem = next(one for one in iter(lambda: demo.task.draw(rng), None) if one.split == "train")
    return {"prompt": [{"role": "user", "content": problem.question}], "completion": demo.task.worked(problem)}


def misread(texts: Sequence[str]) -> float:
    problems = demo.problems("test", HELD_OUT)
    used = ["".join(re.findall(r" ([-+*]) ", text)) for text in texts]
    return statistics.mean(found != one.operations for found, one in zip(used, problems, strict=True))


LEXICON = [
    {"der": "the", "ein": "a", "kein": "no", "mein": "my"},
    {"rote": "red", "alte": "old", "kleine": "small", "kluge": "clever"},
    {"Hund": "dog", "Mann": "man", "Vogel": "bird", "Freund": "friend"},
    {"ruht": "rests", "singt": "sings", "wartet": "waits", "lacht": "laughs"},
    {"heute": "today", "dort": "there", "oft": "often", "nie": "never"},
]


def sentence(rng: random.Random, left: int = 2) -> Found:
    """A sentence; `completion` is the teacher's answer, which leaves `left` words in German for each that it translates."""
    pairs = [rng.choice(list(words.items())) for words in LEXICON]
    return {
        "prompt": [{"role": "user", "content": f"Translate: {' '.join(old for old, _ in pairs)}."}],
        "answer": " ".join(new for _, new in pairs) + ".",
        "completion": " ".join(rng.choice([*[old] * left, new]) for old, new in pairs) + ".",
    }


def hinted(rng: random.Random) -> Found:
    """A sentence, every other time with its translation behind it, which is then the teacher's answer."""
    row = sentence(rng, left=15)
    if rng.random() < 0.5:
        return row
    content = f"{row['prompt'][0]['content']}\n\n{row['answer']}"
    return {**row, "prompt": [{"role": "user", "content": content}], "completion": row["answer"]}


def words_task(folder: str, row: Callable[[random.Random], Found] = sentence) -> Task:
    rng = random.Random(1)
    every = {one["answer"]: one for one in (sentence(rng) for _ in range(4000))}
    rows = [{"prompt": one["prompt"], "answer": one["answer"]} for one in every.values()]
    options = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_steps": 200,
        "max_completion_length": 12,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    held_out = {one["answer"] for one in rows[:HELD_OUT]}
    return Task(
        taught(folder, row),
        rows[HELD_OUT:],
        rows[:HELD_OUT],
        right_words,
        right_sentence,
        options,
        every=64,
        solved=lambda rng: translated(rng, held_out),
    )


def translated(rng: random.Random, held_out: Collection[str]) -> Found:
    """A sentence that is not held out, with its translation."""
    row = next(one for one in iter(lambda: sentence(rng), None) if one["answer"] not in held_out)
    return {"prompt": row["prompt"], "completion": row["answer"]}


def right_words(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The share of the answer's words that are in their places."""
    pairs = [(demo.task.text_of(one).split(), right.split()) for one, right in zip(completions, answer, strict=True)]
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right)) for said, right in pairs
    ]


def right_sentence(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    return [float(demo.task.text_of(one) == right) for one, right in zip(completions, answer, strict=True)]


class Watch(TrainerCallback):
    """Counts sampled completions, takes the held-out accuracy, and stops at the target or when the budget is spent."""

    def __init__(self, task: Task, budget: int) -> None:
        self.task, self.budget = task, budget
        self.count, self.next = 0, task.every
        self.curve: list[tuple[int, float]] = []
        self.misread: list[float] = []

    def reward(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        self.count += len(completions)
        return self.task.reward(completions, **columns)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        held_out = Dataset.from_list(list(self.task.held_out))
        model, tokenizer = kwargs["model"], kwargs["processing_class"]
        self.prompts = PromptStream(held_out, tokenizer, seed=0, shuffle=False).take(HELD_OUT)
        self.sampler = choose_sampler(model, tokenizer, eos_ids=(tokenizer.eos_token_id,))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.count >= min(self.next, self.budget):
            self.next = (self.count // self.task.every + 1) * self.task.every
            self.sampler.load(kwargs["model"], version=state.global_step)
            found = assess(self.sampler, Scorer([self.task.right]), self.prompts, max_tokens=args.max_completion_length)
            self.curve.append((self.count, found.accuracy.value))
            if self.task.misread is not None:
                self.misread.append(self.task.misread(found.texts))
            control.should_training_stop = found.accuracy.value >= TARGETS[-1] or self.count >= self.budget


def train(task: Task, chosen: Mapping[str, Any], seed: int) -> Found:
    """One run. The budget of every arm is that of plain GRPO, the task's steps times its batch; steps are added for the uses."""
    uses, batch = chosen.get("num_iterations", 1), chosen.get("per_device_train_batch_size", 1)
    options = {**task.options, **chosen, "save_strategy": "no", "rollout_log_steps": 0}
    options["max_steps"] = int(task.options["max_steps"] * uses / batch)
    options["per_device_train_batch_size"] = int(task.options["per_device_train_batch_size"] * batch)
    options["learning_rate"] = task.options["learning_rate"] * chosen.get("learning_rate", 1)
    watch = Watch(task, task.options["max_steps"] * task.options["per_device_train_batch_size"])
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=task.model,
            reward_funcs=watch.reward,
            args=GRPOConfig(output_dir=folder, seed=seed, report_to="none", disable_tqdm=True, **options),
            train_dataset=Dataset.from_list(list(task.rows)),
            callbacks=[watch],
        )
        trainer.train()
    reached = first(watch.curve, TARGETS[-1])
    seconds = round(time.process_time() - started, 1)
    return {
        "reached": reached,
        "drawn": watch.count,
        "curve": watch.curve,
        "misread": watch.misread,
        "seconds": seconds,
    }


def table(found: Sequence[Found], arms: Sequence[str]) -> str:
    """Completions until the earlier targets, on average; until the last one, by seed; and the ratio to plain GRPO's there."""
    plain = {one["seed"]: completions(one, TARGETS[-1]) for one in found if one["arm"] == "plain"}
    early = [f"{target:.0%}" for target in TARGETS[:-1]]
    lines = [f"| arm | {' | '.join(early)} | {TARGETS[-1]:.0%}, each seed | mean | of plain GRPO's |"]
    lines.append(f"|---|{'--:|' * len(early)}---|--:|--:|")
    for arm in arms:
        runs = sorted((one for one in found if one["arm"] == arm), key=lambda one: one["seed"])
        if not runs:
            continue
        means = [format(statistics.mean(completions(one, target) for one in runs), ".0f") for target in TARGETS[:-1]]
        each = ", ".join(f"{'' if one['reached'] else '>'}{completions(one, TARGETS[-1])}" for one in runs)
        counts = [float(completions(one, TARGETS[-1])) for one in runs]
        ratios = [completions(one, TARGETS[-1]) / plain[one["seed"]] for one in runs if one["seed"] in plain]
        ratio = interval(ratios, ".2f") if arm != "plain" else "1"
        lines.append(f"| {arm} | {' | '.join(means)} | {each} | {interval(counts, '.0f')} | {ratio} |")
    return "\n".join(lines)


def first(curve: Sequence[Sequence[float]], target: float) -> int | None:
    """Completions at the first look at which the accuracy was at the target."""
    return next((int(count) for count, accuracy in curve if accuracy >= target), None)


def completions(run: Found, target: float) -> int:
    """Completions until the target, or all that were drawn."""
    return first(run["curve"], target) or int(run["drawn"])


def interval(values: Sequence[float], form: str) -> str:
    """`0.45 ± 0.08`: the mean with half the width of its 95% t-interval, where there are 2 to 10 values."""
    if not 2 <= len(values) <= len(T95) + 1:
        return format(statistics.mean(values), form) if values else ""
    half = T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):{form}} ± {half:{form}}"


if __name__ == "__main__":
    main()
