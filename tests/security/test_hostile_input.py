"""Files from elsewhere run nothing: each carries a bomb that would leave a canary, and the canary never appears."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli import main
from covey.data import load
from covey.errors import CoveyError
from covey.models import load_model, load_tokenizer
from covey.runs import checkpoint
from faults.small_runs import trainer
from kit import rest_nightly, tiny_model, tiny_tokenizer


class Bomb:
    """Unpickled, it writes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.canary, "run"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_the_bomb_works(canary: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()


def saved_model(folder: Path) -> Path:
    tiny_model("qwen2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_weights_that_are_a_pickle_do_not_run(tmp_path: Path, canary: Path) -> None:
    folder = saved_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(canary)}, folder / "pytorch_model.bin")
    with pytest.raises((CoveyError, pickle.UnpicklingError)):
        load_model(str(folder))
    assert not canary.exists()


def test_code_beside_a_model_runs_only_when_asked_for(tmp_path: Path, canary: Path) -> None:
    folder = saved_model(tmp_path / "model")
    (folder / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').write('run')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoveyError, match="trust_remote_code"):
        load_model(str(folder))
    assert not canary.exists()


def test_code_beside_a_tokenizer_runs_only_when_asked_for(tmp_path: Path, canary: Path) -> None:
    folder = saved_model(tmp_path / "model")
    (folder / "tok_evil.py").write_text(f"open({str(canary)!r}, 'w').write('run')\nclass Evil: pass\n")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(
        json.dumps({**settings, "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tok_evil.Evil", None]}})
    )
    with contextlib.suppress(CoveyError):  # refused, or loaded without it
        load_tokenizer(None, str(folder))
    assert not canary.exists()


def test_a_chat_template_cannot_leave_its_sandbox(tmp_path: Path, canary: Path) -> None:
    tokenizer = tiny_tokenizer()
    code = f"open({str(canary)!r}, 'w').write('run')"
    tokenizer.chat_template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('true') }}"
        + ("{{ self.__init__.__globals__.__builtins__.exec(" + json.dumps(code) + ") }}")
    )
    run = trainer(tmp_path / "run", train_dataset=_chat(), max_steps=1)
    run.processing_class.chat_template = tokenizer.chat_template
    with pytest.raises(Exception, match=r"unsafe|undefined|template|has no attribute"):
        run.train()
    assert not canary.exists()


def _chat() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}"}]} for i in range(4)])


DATA: dict[str, Callable[[Path, Path], Path]] = {}


def data_file(name: str) -> Callable[[Callable[[Path, Path], Path]], Callable[[Path, Path], Path]]:
    def keep(make: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        DATA[name] = make
        return make

    return keep


@data_file("a pickle called parquet")
def _(folder: Path, canary: Path) -> Path:
    (folder / "train.parquet").write_bytes(pickle.dumps(Bomb(canary)))
    return folder / "train.parquet"


@data_file("a loading script")
def _(folder: Path, canary: Path) -> Path:
    (folder / "set").mkdir()
    (folder / "set" / "set.py").write_text(f"open({str(canary)!r}, 'w').write('run')")
    return folder / "set"


@data_file("a pickle in a data set's folder")
def _(folder: Path, canary: Path) -> Path:
    (folder / "set").mkdir()
    (folder / "set" / "dataset.pkl").write_bytes(pickle.dumps(Bomb(canary)))
    (folder / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "dataset.pkl"}]}))
    return folder / "set"


@pytest.mark.parametrize("name", list(DATA))
def test_data_runs_nothing(name: str, tmp_path: Path, canary: Path) -> None:
    source = DATA[name](tmp_path, canary)
    with pytest.raises(CoveyError):
        list(load(source))
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    rest_nightly(["optimizer.pt", "pytorch_model.bin", "scheduler.pt", "rng_state.pth", "trainer_state.pkl"], 1),
)
def test_a_pickle_planted_in_a_checkpoint_is_not_opened(name: str, tmp_path: Path, canary: Path) -> None:
    trainer(tmp_path / "run", max_steps=1).train()
    (newest,) = checkpoint.checkpoints(tmp_path / "run")
    (newest / name).write_bytes(pickle.dumps(Bomb(canary)))
    again = trainer(tmp_path / "run", max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert not canary.exists()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system ['touch {canary}']", "!!python/name:os.system", "!evil {{}}"]
)
def test_a_configuration_runs_nothing(
    tag: str, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "evil.yaml"
    config.write_text(f"model: {tag.format(canary=canary)}\n")
    assert main(["train", str(config)]) == 2
    assert str(config) in capsys.readouterr().err
    assert not canary.exists()


def test_the_words_of_a_prompt_are_no_command(tmp_path: Path, canary: Path) -> None:
    from datasets import Dataset

    words = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"'; import os; os.system('touch {canary}')",
        "{{ 7 * 7 }}",
        "%s%n",
        "../" * 20,
    ]
    run = trainer(
        tmp_path / "run",
        train_dataset=Dataset.from_list([{"prompt": word} for word in words]),
        max_steps=2,
        rollout_log_steps=1,
    )
    run.train()
    assert not canary.exists()


def test_a_foreign_folder_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "holiday.jpg").write_text("mine")
    assert main(["train", "demo", "--output-dir", str(folder), "--max-steps", "1"]) == 2
    assert "photos" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["holiday.jpg"]
