"""The first second: options are judged without torch, a header comes before the work, and what is long is counted."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pty
import subprocess
import sys

import pytest

import covey
from covey.cli.completion import names_in
from covey.cli.early import option_types, refuse_early
from covey.cli.header import header_lines
from covey.errors import ConfigError
from covey.process.counting import Counter
from covey.process.importing import ImportProgress
from kit import rest_nightly


@pytest.mark.parametrize(
    "words",
    rest_nightly(
        [
            ["--temperature", "0"],
            ["--loss-type", "grpoo"],
            ["--dataset", "nosuch.jsonl"],
            ["--max-steps", "0"],
            ["--save-steps", "-3"],
            ["--lr-scheduler-type", "cosin"],
            ["--lora-r", "0"],
            ["--seed", "-1"],
            ["--seed", str(2**32)],
            ["--model", "./nosuch"],
            ["--report-to", "comet_ml"],
        ],
        1,
    ),
)
def test_a_wrong_option_is_answered_before_torch_is_imported(words):
    code = f"import sys; from covey.cli import main; rc = main(['train', 'demo', *{words!r}]); assert rc == 2; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


MODEL, ROWS = "The model folder './no-run' does not exist", "The data set 'no.jsonl' does not exist"
RUN = "no-run is no folder; give the folder of a run"
MISSING = {
    "chat ./no-run": MODEL,
    "serve ./no-run": MODEL,
    "serve-vllm ./no-run": MODEL,
    "init new --model ./no-run": MODEL,
    "merge demo ./no-run -o new": MODEL,
    "merge demo demo --choose no.jsonl -o new": ROWS,
    "export ./no-run --format gguf -o new.gguf": MODEL,
    "attest http://localhost:1 --model demo --other ./no-run": MODEL,
    "eval ./no-run --dataset demo --reward demo": MODEL,
    "eval demo --dataset no.jsonl --reward demo": ROWS,
    "data check no.jsonl": ROWS,
    "data clean demo --against demo no.jsonl -o new.jsonl": ROWS,
    "data pivots no.jsonl -o new.jsonl": ROWS,
    "features no.jsonl --features length --output new.jsonl": ROWS,
    "reward test --reward exact --dataset no.jsonl": ROWS,
    "reward train --model ./no-run --dataset demo -o new": MODEL,
    "reward audit no-run --reward math": RUN,
    "env check maze:Maze --model ./no-run": MODEL,
    "tune demo --eval-dataset no.jsonl --search beta=0:1": ROWS,
    "sft --model ./no-run --dataset demo": MODEL,
    "why no-run --step 3": RUN,
}


def test_a_place_that_is_missing_is_named_by_every_command_before_torch_is_imported(tmp_path):
    code = f"""
import sys, contextlib, io
from covey.cli import main
for line, expected in {MISSING!r}.items():
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(line.split())
    assert (code, errors.getvalue().count(chr(10))) == (2, 1) and expected in errors.getvalue(), (line, code, errors.getvalue())
    assert 'torch' not in sys.modules, line
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_trainer_imports_neither_peft_nor_bitsandbytes():
    code = "import sys, covey.training.trainer; assert not {'peft', 'bitsandbytes'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gemm_4bit" not in done.stderr


@pytest.mark.nightly
def test_a_model_of_peft_is_known_to_transformers_after_an_import_without_peft():
    code = (
        "import covey.training.trainer, torch; from transformers.trainer_utils import _is_peft_model as known; from peft import LoraConfig, get_peft_model;"
        "net = torch.nn.Sequential(torch.nn.Linear(2, 2));"
        "assert not known(net); assert known(get_peft_model(net, LoraConfig(r=1, target_modules=['0'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_types_read_from_source_are_those_of_the_options():
    from dataclasses import fields

    from covey import GRPOConfig

    assert {field.name for field in fields(GRPOConfig)} == set(option_types())


def test_what_trl_accepts_is_still_accepted():
    refuse_early({"max_steps": -1, "save_steps": 0.2, "max_grad_norm": float("inf"), "report_to": ["none"]})


def test_the_names_for_the_tab_key_are_the_real_ones():
    from covey.algorithms.presets import PRESETS
    from covey.rewards import BUILTIN

    assert set(names_in("algorithms/presets.py", "PRESETS")) == set(PRESETS)
    assert set(names_in("rewards/builtin/registry.py", "BUILTIN")) == set(BUILTIN)


def test_the_header_says_what_is_trained_and_where_it_goes_on(tmp_path):
    (tmp_path / "checkpoint-8").mkdir()
    given = {"model": "demo", "dataset": "a.jsonl", "reward": ["math"], "resume": "auto", "lora_r": 4}
    lines = header_lines(given, {"output_dir": str(tmp_path), "max_steps": 20, "per_device_train_batch_size": 16})
    text = "\n".join(lines)
    assert "demo, LoRA of rank 4" in text
    assert "16 completions a step, 8 a prompt; 20 steps" in text
    assert f"{tmp_path}, goes on from step 8" in text
    assert "algorithm  dapo, TRL's default loss of GRPO\n" in text
    chosen = header_lines(given, {"output_dir": str(tmp_path), "loss_type": "grpo"})
    assert "algorithm  grpo" in chosen


def test_the_header_is_there_before_torch_is():
    code = (
        "import sys; from covey.cli import main, train\n"
        "def stop(*a, **k): raise SystemExit(0 if 'torch' not in sys.modules else 1)\n"
        "train.load_prompts = stop\nmain(['train', 'demo', '--max-steps', '1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("model      demo\n")


def test_the_demo_says_what_it_trains_before_torch_is_loaded(tmp_path):
    code = (
        "import sys; from covey.cli import main, demo\n"
        "def stop(*a, **k): raise SystemExit(0 if 'torch' not in sys.modules else 1)\n"
        f"demo._trainer = stop\nmain(['demo', '--output-dir', {str(tmp_path / 'run')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("model: 1.0M parameters (shipped)")


def test_a_script_gets_a_line_before_torch_is_loaded_and_a_library_none():
    code = (
        "import sys, covey, importlib.abc\n"
        "class Stop(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from covey import {name}"
    )
    for name, shown in (
        ("GRPOTrainer", f"covey {covey.__version__}: loading PyTorch and transformers\n"),
        ("rollout", ""),
    ):
        words = [sys.executable, "-c", code.format(name=name)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, shown)


def test_a_script_that_has_loaded_torch_through_datasets_gets_the_line_too():
    code = (
        "import sys, types, importlib.abc\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "class Stop(importlib.abc.MetaPathFinder):\n"
        "    is_due = False\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if self.is_due: raise SystemExit(0)\n"
        "        self.is_due = name == 'covey.training.trainer'\n"
        "from covey import names\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from covey import GRPOTrainer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"covey {covey.__version__}: loading PyTorch and transformers\n")


def test_imports_are_counted_on_a_terminal_while_a_heavy_package_loads(tmp_path, monkeypatch):
    (tmp_path / "heavy_one.py").write_text("import light_one")
    (tmp_path / "light_one.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    counts, stream = [], io.StringIO()

    class Shown(Counter):
        def __call__(self, what, done, total):
            counts.append((what, done, total))

    finder = ImportProgress(["heavy_one"], Shown(stream), "loading", stream)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("heavy_one") is not None
    assert stream.getvalue() == ""  # a package that is only looked for
    importlib.import_module("heavy_one")
    assert stream.getvalue() == "loading\n"
    assert counts == [("loading PyTorch and transformers, modules", 1, None)]


def test_covey_train_demo_has_the_settings_of_the_demo():
    from covey.cli.train import PRESETS
    from covey.demo import DEMO_SETTINGS

    assert PRESETS["demo"] == {"model": "demo", "dataset": "demo", "reward": ["demo"], **DEMO_SETTINGS}


def test_a_count_is_redrawn_on_a_terminal_and_leaves_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    outside, inside = pty.openpty()
    now = iter(range(100))
    with os.fdopen(inside, "w") as stream:
        counter = Counter(stream, clock=lambda: float(next(now)))
        for done in range(4):
            counter("rows", done, 3)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal that nobody writes to any more; one read may get less than all
        while read := os.read(outside, 4096):
            shown += read
    os.close(outside)
    shown = shown.decode()
    assert "rows: 1 of 3, 0:02 left" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_count_into_a_file_is_a_line_for_each_tenth_that_took_a_while():
    stream, now = io.StringIO(), iter(range(0, 1000, 3))
    counter = Counter(stream, clock=lambda: float(next(now)))
    for done in range(101):
        counter("rows", done, 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "rows: 10 of 100, 4:30 left"
    assert lines[-1] == "rows: 100 of 100"


@pytest.mark.parametrize("steps", [0, -2, 1.5, float("nan")])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ConfigError, match="max_steps"):
        refuse_early({"max_steps": steps})
