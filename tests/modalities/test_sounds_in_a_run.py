"""A run on sounds: trained, resumed exactly, recorded as WAV files, played by the dashboard, and started from the command line."""

import json
import wave

import datasets
import numpy as np
import pytest
import torch
from sound_models import RATE, needs_soundfile, tiny_hearing_model, tone, write_wav

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from covey import GRPOConfig, GRPOTrainer
from covey.cli import main
from covey.data.prompts import to_prompt
from covey.models import load_model
from covey.monitor.view.app import make_app
from covey.monitor.view.reading import Library
from covey.runs import previews, rollouts
from covey.types import Completion, Group


def rows():
    ask = lambda text: [{"role": "user", "content": text}]
    return [
        {"prompt": ask("Which tone?"), "audios": [tone(440)]},
        {"prompt": ask("What is 2 + 3?"), "audios": []},
        {"prompt": ask("Which is higher?"), "audios": [tone(300, 1.0), tone(900, 0.3)]},
        {"prompt": ask("And here?"), "audios": [tone(700)]},
    ]


def trained(path, kind="qwen2_audio", steps=4, resume=None, **options):
    heard = []

    def reward(completions, audios, **columns):
        heard.extend(audios)
        return [float(len(set(str(completion)))) for completion in completions]

    model, processor = tiny_hearing_model(kind)
    args = GRPOConfig(
        output_dir=str(path), max_steps=steps, per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
        learning_rate=1e-3, lr_scheduler_type="constant", report_to="none", save_strategy="steps", save_steps=3, logging_steps=1, disable_tqdm=True,
        bf16=False, use_cpu=True, seed=3, **options,
    )  # fmt: skip
    trainer = GRPOTrainer(model, reward, args, datasets.Dataset.from_list(rows()), processing_class=processor)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, heard


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Completions of prompts with media are written by plain transformers")  # Gemma 3n
@pytest.mark.parametrize(
    "kind", ["qwen2_audio", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("qwen2_5_omni", "gemma3n"))]
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, kind):
    if kind == "gemma3n":
        pytest.importorskip("timm", reason="Gemma 3n is read from a folder with timm")
    whole, heard = trained(tmp_path / "whole", kind, steps_per_generation=2)
    trained(tmp_path / "cut", kind, steps=3, steps_per_generation=2)  # in the middle of a rollout
    resumed, _ = trained(tmp_path / "cut", kind, steps_per_generation=2, resume=True)
    for (name, mine), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert {len(sound["array"]) for sounds in heard for sound in sounds} == {8000, 16000, 4800}
    files = list((tmp_path / "whole" / "rollouts" / "audios").iterdir())
    assert files
    assert all(path.read_bytes().startswith(b"RIFF") for path in files)
    assert not (tmp_path / "whole" / "rollouts" / "images").exists()


def group(uid, hertz):
    _, processor = tiny_hearing_model("qwen2_audio")
    row = {"prompt": [{"role": "user", "content": "Which?"}], "audio": tone(hertz), "answer": "A"}
    prompt = to_prompt(row, uid, "row", processor.tokenizer, {}, processor)
    done = Completion(token_ids=torch.tensor([5, 2]), text="A", finish="stop")
    return Group(prompt=prompt, completions=(done, done), rewards=torch.ones(2, 1))


def test_a_run_folder_keeps_names_of_sounds_and_the_dashboard_plays_them(tmp_path):
    folder = tmp_path / "run"
    groups = [group("0:0", 440), group("0:1", 700), group("0:2", 440)]
    rollouts.write(folder / "rollouts", 1, groups, ["r"])
    previews.write(folder / "rollouts", groups)
    (folder / "run.json").write_text(json.dumps({"schema": 1, "state": "finished"}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    stored = rollouts.read(folder / "rollouts" / "step-000001.parquet")
    assert "images" not in stored[0]
    assert json.loads(stored[0]["columns"]) == {"answer": "A"}
    names = {name for row in stored for name in json.loads(row["audios"])}
    assert names == {path.name for path in (folder / "rollouts" / "audios").iterdir()}
    assert len(names) == 2
    client = TestClient(make_app(Library([tmp_path]), watch=False), base_url="http://localhost")
    run = client.get("/api/runs").json()["runs"][0]
    run = run.get("run", run.get("name"))
    (name,) = client.get("/api/rollout", params={"run": run, "step": 1, "group": 0}).json()["media"]
    response = client.get("/api/media", params={"run": run, "name": name})
    assert response.headers["content-type"] == "audio/wav"
    assert "media-src 'self'" in response.headers["content-security-policy"]
    (tmp_path / "played.wav").write_bytes(response.content)
    with wave.open(str(tmp_path / "played.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, 8000)
        samples = np.frombuffer(file.readframes(8000), "<i2") / 32767
    np.testing.assert_allclose(samples, tone(440)["array"], atol=1e-4)
    (folder / "rollouts" / "audios" / name).write_bytes(b"<svg onload=alert(1)>")
    assert client.get("/api/media", params={"run": run, "name": name}).status_code == 404


@pytest.mark.slow
def test_a_run_of_the_command_line_reads_an_audio_column(tmp_path, capsys):
    needs_soundfile()
    model, processor = tiny_hearing_model("qwen2_audio")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    assert type(load_model(tmp_path / "model")) is type(model)
    ask = [{"role": "user", "content": "Which tone?"}]
    lines = []
    for i in range(4):
        write_wav(tmp_path / f"{i}.wav", tone(300 + 200 * i))
        lines.append(json.dumps({"prompt": ask, "audio": f"{i}.wav", "answer": str(i)}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    words = [
        "train",
        "--model",
        str(tmp_path / "model"),
        "--dataset",
        str(tmp_path / "train.jsonl"),
        "--reward",
        "length",
    ]
    words += ["--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--num-generations", "2", "--bf16", "false"]
    words += ["--per-device-train-batch-size", "4", "--max-completion-length", "4", "--use-cpu"]
    assert main(words) == 0, capsys.readouterr().err
    assert len(list((tmp_path / "run" / "rollouts" / "audios").iterdir())) == 2
    assert (tmp_path / "run" / "checkpoint-1" / "processor_config.json").is_file()


def test_the_part_of_a_speaking_model_that_writes_is_loaded(tmp_path):
    from covey.models import auto_class

    model, _ = tiny_hearing_model("qwen2_5_omni")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen2_5_omni", "thinker_config": model.config.to_dict(), "enable_audio_output": False}
        )
    )
    assert auto_class(str(tmp_path)) is type(model)
