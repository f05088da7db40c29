"""What the probes share: the library that is asked, small models, and the scenarios, each one trained run."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

TOKENIZER = Path(__file__).parents[2] / "src" / "covey" / "demo" / "model"
ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(8)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
PROBES: dict[str, Callable[[World], Any]] = {}
OWN_RUN: set[str] = set()


def probe(function: Callable[[World], Any]) -> Callable[[World], Any]:
    """A probe of a shared scenario, or of none."""
    PROBES[function.__name__] = function
    return function


def own_run(function: Callable[[World], Any]) -> Callable[[World], Any]:
    """A probe that makes runs of its own, which take a second."""
    OWN_RUN.add(function.__name__)
    return probe(function)


class AtLeast(list[str]):
    """Names of which another library may have more."""


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def one(completions, **columns):
    return [1.0] * len(completions)


def bare(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    return [float(len(answer) == len(prompts))] * len(completions)


async def later(completions, **columns):
    return [2.0] * len(completions)


class Judge:
    def __call__(self, completions, **columns):
        return [3.0] * len(completions)


class Listener(TrainerCallback):
    """Remembers every event with the names of its keyword arguments, and some values."""

    def __init__(self):
        self.events, self.given, self.logs, self.evaluated, self.state = [], {}, [], [], None

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(args, state, control, **named):
            self.events.append(name)
            self.given.setdefault(name, {}).update({key: value for key, value in named.items() if value is not None})
            self.state = state
            if name == "on_log":
                self.logs.append(dict(named["logs"]))
            if name == "on_evaluate":
                self.evaluated.append(dict(named["metrics"]))

        return hear


@dataclass
class World:
    """One library and a folder to work in; scenarios are run once."""

    library: str
    folder: Path
    made: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def lib(self) -> Any:
        return importlib.import_module(self.library)

    def place(self, name: str) -> str:
        return str(self.folder / name)

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(TOKENIZER)

    def _shape(self, **more: Any) -> Qwen2Config:
        tokenizer = self.tokenizer()
        shape = {
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": True,
            "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        }  # fmt: skip
        return Qwen2Config(**{**shape, **more})

    @functools.cached_property
    def model_folder(self) -> str:
        torch.manual_seed(0)
        place, model = self.place("small-model"), Qwen2ForCausalLM(self._shape())
        model.generation_config.eos_token_id = [self.tokenizer().eos_token_id, *range(100, 250)]  # some completions end
        model.save_pretrained(place)
        self.tokenizer().save_pretrained(place)
        return place

    @functools.cached_property
    def judge_folder(self) -> str:
        torch.manual_seed(1)
        place = self.place("small-judge")
        Qwen2ForSequenceClassification(self._shape(num_labels=1)).save_pretrained(place)
        self.tokenizer().save_pretrained(place)
        return place

    def model(self, **generation: Any) -> Any:
        made = Qwen2ForCausalLM.from_pretrained(self.model_folder)
        if "eos" in generation:
            made.generation_config.eos_token_id = generation["eos"]
        return made

    def options(self, **changed: Any) -> Any:
        given = {
            "output_dir": self.place(f"out-{len(os.listdir(self.folder))}"), "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 4, "max_steps": 1, "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "use_cpu": True, "bf16": False, "per_device_eval_batch_size": 4,
        }  # fmt: skip
        return self.lib.GRPOConfig(**{**given, **changed})

    def trainer(
        self, rewards: Any = length, rows: Any = ROWS, model: Any = None, kind: Any = None, **given: Any
    ) -> Any:
        names = set(inspect.signature(self.lib.GRPOTrainer.__init__).parameters)
        own = {name: given.pop(name) for name in list(given) if name in names}
        data = Dataset.from_list(rows) if isinstance(rows, list) else rows
        made = kind or self.lib.GRPOTrainer
        args = own.pop("args", None) or self.options(**given)
        return made(model=model or self.model_folder, reward_funcs=rewards, args=args, train_dataset=data, **own)

    def run(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    # -- scenarios --------------------------------------------------------------------------------------------------

    @property
    def main(self) -> Any:
        """Four steps with two rewards, logs, evaluations and checkpoints of every second, a KL term, two epochs' worth of callbacks."""
        return self.run("main", self._main)

    def _main(self) -> Any:
        listener, calls = Listener(), []

        def half(completions, log_extra, log_metric, **columns):
            calls.append({**columns, "completions": completions})
            log_extra("letters", [len(text) for text in completions])
            log_metric("my_metric", 7.0)
            return [0.5 if i % 2 else None for i in range(len(completions))]

        trainer = self.trainer(
            [length, half], callbacks=[listener], eval_dataset={"easy": Dataset.from_list(ROWS[:2])}, output_dir=self.place("main"),
            reward_weights=[1.0, 2.0], max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, beta=0.1, log_completions=True, num_completions_to_print=1, lr_scheduler_type="constant",
        )  # fmt: skip
        ref_before = trainer.ref_model
        result = trainer.train()
        folder = Path(self.place("main"))
        return SimpleNamespace(
            trainer=trainer, listener=listener, calls=calls, result=result, folder=folder, ref_before=ref_before
        )

    @property
    def plain(self) -> Any:
        """A loaded model, conversations, two optimization passes a batch, two micro-batches a step, SGD of the user's."""
        return self.run("plain", self._plain)

    def _plain(self) -> Any:
        model, listener, calls = self.model(), Listener(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

        def look(prompts, completions, completion_ids, **columns):
            calls.append(SimpleNamespace(prompts=prompts, completions=completions, ids=completion_ids, columns=columns))
            return [float(i) for i in range(len(completions))]

        trainer = self.trainer(
            look, CHAT, model, callbacks=[listener], optimizers=(optimizer, scheduler), processing_class=self.tokenizer(),
            gradient_accumulation_steps=2, num_iterations=2, max_steps=4, logging_steps=1, shuffle_dataset=False, logging_first_step=True,
            eval_dataset=Dataset.from_list(CHAT[:2]),
        )  # fmt: skip
        result = trainer.train()
        return SimpleNamespace(
            trainer=trainer,
            listener=listener,
            calls=calls,
            result=result,
            optimizer=optimizer,
            scheduler=scheduler,
            model=model,
        )

    @property
    def adapter(self) -> Any:
        return self.run("adapter", self._adapter)

    def _adapter(self) -> Any:
        from peft import LoraConfig

        trainer = self.trainer(
            peft_config=LoraConfig(r=2, target_modules="all-linear"), beta=0.1, save_strategy="steps", save_steps=1, max_steps=2,
            output_dir=self.place("adapter"), learning_rate=1e-2,
        )  # fmt: skip
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        return SimpleNamespace(trainer=trainer, before=before, folder=Path(self.place("adapter")))

    @property
    def judged(self) -> Any:
        """A reward model by its folder, a coroutine, an object and a function without **kwargs."""
        return self.run("judged", self._judged)

    def _judged(self) -> Any:
        trainer = self.trainer([self.judge_folder, later, Judge(), bare], eval_dataset=Dataset.from_list(ROWS[:2]))
        trainer.train()
        return trainer

    @property
    def idle(self) -> Any:
        """A trainer that has not trained."""
        return self.run("idle", lambda: self.trainer(eval_dataset=Dataset.from_list(ROWS[:3])))


def first_log(w: World) -> dict[str, Any]:
    return next(entry for entry in w.main.trainer.state.log_history if "loss" in entry)


def keys(found: Any, *starts: str) -> AtLeast:
    return AtLeast(sorted(key for key in found if key.startswith(starts)))


def files(folder: Path) -> AtLeast:
    return AtLeast(sorted(path.name for path in folder.iterdir()))


def stream() -> Any:
    return Dataset.from_list(ROWS).to_iterable_dataset()
