"""Uploads to the hub, against a stand-in server: what is uploaded and when, the model card, and a hub that refuses or fails."""

import json

import pytest
import yaml
from datasets import Dataset
from huggingface_hub import close_session
from safetensors.torch import load
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.files import hub as reach
from covey.runs.hub import UploadError
from kit import rest_nightly, tiny_model, tiny_tokenizer
from trainer.hub_server import serving

ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(12)]


def reward_len(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture
def hub(monkeypatch):
    """What a hub holds that huggingface_hub talks to in this test."""
    from huggingface_hub import constants

    close_session()  # its time limit is that of an earlier test
    with serving() as (address, repositories):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        reach._is_reachable.cache_clear()
        yield repositories
    reach._is_reachable.cache_clear()


def trainer(tmp_path, evaluates=False, **changed):
    given = {
        "output_dir": str(tmp_path / "apples"),
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "push_to_hub": True,
    }
    if evaluates:
        given |= {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=reward_len,
        args=GRPOConfig(**{**given, **changed}),
        train_dataset=Dataset.from_list(ROWS),
        eval_dataset=Dataset.from_list(ROWS[:4]) if evaluates else None,
        processing_class=tiny_tokenizer(),
    )


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def header_of(card):
    return yaml.safe_load(card.split("---")[1])


def test_push_to_hub_uploads_the_model_its_tokenizer_and_a_card_and_no_record_of_the_run(tmp_path, hub):
    one = trainer(tmp_path, hub_private_repo=True)
    assert one.hub_model_id == "someone/apples", "the repository is there before training"
    one.train()
    assert hub.commits == [], "hub_strategy every_save uploads at saves, and none was asked for"
    commit = one.push_to_hub(dataset_name="org/apples")
    assert commit.oid == f"{1:040x}"
    assert hub.made["someone/apples"].get("visibility", "private") == "private"
    assert hub.made["someone/apples"].get("private", True) is True
    assert hub.messages == ["End of training"]
    assert set(hub.files()) >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not {name for name in hub.files() if "run.json" in name or "rollouts" in name or "metrics" in name}
    trained = load(hub.files()["model.safetensors"])
    weights = one.model.state_dict()
    assert all((weights[name] == value).all() for name, value in trained.items())
    assert (tmp_path / "apples" / "README.md").read_bytes() == hub.files()["README.md"]
    assert not list((tmp_path / "apples").glob(".upload-*"))
    assert hub.tokens == {"Bearer hf_of_the_test"}


def test_the_card_tells_data_algorithm_rewards_run_and_evaluations_with_their_intervals(tmp_path, hub):
    one = trainer(tmp_path, evaluates=True, beta=0.1, hub_token="hf_secret")
    one.train()
    one.create_model_card(dataset_name="org/apples", tags="math", license="mit")
    card = (tmp_path / "apples" / "README.md").read_text()
    header = header_of(card)
    assert header["datasets"] == ["org/apples"]
    assert (header["license"], header["library_name"], header["model_name"]) == ("mit", "transformers", "apples")
    assert {"covey", "grpo", "math"} <= set(header["tags"])
    assert json.loads((tmp_path / "apples" / "run.json").read_text())["id"] in card
    assert "`reward_len` (weight 1)" in card
    assert "`dapo`" in card
    assert "| `beta` | 0.1 |" in card
    assert "12 prompts" in card
    found = {line["step"]: line["eval_reward"] for line in lines_of(tmp_path / "apples" / "evaluations.jsonl")}
    assert f"{found[0]:.4g} (" in card
    assert f"{found[2]:.4g} (" in card
    row = next(line for line in card.splitlines() if line.startswith("| eval |"))
    assert " to " in row
    assert "p = " in row
    assert row.endswith("| 4 |")
    assert "hf_secret" not in card
    assert "hf_secret" not in str(json.loads((tmp_path / "apples" / "run.json").read_text())["config"])


def test_uploads_are_committed_in_the_order_in_which_they_were_started(tmp_path, hub):
    one = trainer(tmp_path)
    (tmp_path / "apples").mkdir(exist_ok=True)
    (tmp_path / "apples" / "file").write_text("content")
    hub.waits.clear()
    uploads = [one.hub.upload(tmp_path / "apples", ["file"], f"save {i}") for i in range(12)]
    hub.waits.set()
    assert [upload.result(60).oid for upload in uploads] == [f"{i + 1:040x}" for i in range(12)]
    assert hub.messages == [f"save {i}" for i in range(12)]


@pytest.mark.parametrize(
    ("strategy", "places"),
    rest_nightly(
        [
            ("every_save", ["", ""]),
            ("checkpoint", ["", "last-checkpoint/", "", "last-checkpoint/"]),
            ("end", []),
            ("all_checkpoints", ["", "checkpoint-1/", "", "checkpoint-2/"]),
        ],
        [("checkpoint", ["", "last-checkpoint/", "", "last-checkpoint/"])],
    ),
)
def test_hub_strategy_says_what_a_save_uploads(tmp_path, hub, strategy, places):
    one = trainer(
        tmp_path, hub_strategy=strategy, save_strategy="steps", save_steps=1, save_total_limit=1, hub_always_push=True
    )
    one.train()
    names = [next(name for name in sorted(files) if "config.json" in name) for _, _, _, files in hub.commits]
    assert [name.removesuffix("config.json").removesuffix("generation_") for name in names] == places
    assert all(message.startswith("Training in progress, step") for message in hub.messages)
    for place, (_, _, _, files) in zip(places, hub.commits, strict=True):
        has_state = any("covey_state" in name for name in files)
        assert has_state == bool(place), "what a resume needs goes with whole checkpoints only"
    one.save_model(str(tmp_path / "final"))
    assert hub.messages[-1] == "Model save"
    assert "model.safetensors" in hub.files()


def test_while_an_upload_goes_on_the_next_is_left_out_unless_hub_always_push(tmp_path, hub):
    class Release(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            if state.global_step == 3:
                hub.waits.set()

    hub.waits.clear()
    one = trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, save_async=False)
    one.add_callback(Release())
    one.train()
    assert hub.messages[0] == "Training in progress, step 1"
    assert "Training in progress, step 2" not in hub.messages


def test_a_hub_that_fails_never_ends_a_run_and_is_told(tmp_path, hub, caplog):
    hub.commit_status = 413  # huggingface_hub tries again by itself after a 5xx, for a while
    one = trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    assert one.train().global_step == 2
    assert "to the hub failed" in caplog.text
    events = lines_of(tmp_path / "apples" / "events.jsonl")
    assert {event["kind"] for event in events} == {"upload_failed"}
    one.save_model()
    assert (tmp_path / "apples" / "model.safetensors").is_file()
    with pytest.raises(UploadError, match="not uploaded to someone/apples .* It is whole in"):
        one.push_to_hub()
    hub.commit_status = None
    one.push_to_hub()
    assert "model.safetensors" in hub.files()


def test_a_hub_that_refuses_the_repository_is_told_before_work_is_spent(tmp_path, hub):
    hub.status = 403
    with pytest.raises(ConfigError, match="does not take the repository 'org/apples'.*hf auth login"):
        trainer(tmp_path, hub_model_id="org/apples")


def test_a_name_that_no_repository_can_have_is_refused_also_without_the_hub(tmp_path, hub):
    hub.status = 503
    with pytest.raises(ConfigError, match="'a/b/c' cannot be the name of a repository; set hub_model_id"):
        trainer(tmp_path, hub_model_id="a/b/c")


def test_a_hub_that_does_not_answer_is_told_and_tried_again_later(tmp_path, hub, caplog):
    hub.status = 503
    one = trainer(tmp_path, hub_model_id="org/apples", hub_revision="trial")
    assert "every upload tries again" in caplog.text
    assert one.hub_model_id is None
    with pytest.raises(UploadError, match="not uploaded to org/apples .* or `hf upload org/apples "):
        one.push_to_hub()
    hub.status = None
    one.train()
    one.push_to_hub(commit_message="At last", blocking=False).result(timeout=120)
    assert hub.commits[-1][:3] == ("org/apples", "trial", "At last")
    assert hub.branches == ["trial"]
    assert one.hub_model_id == "org/apples"


def test_a_hub_that_takes_a_request_and_never_answers_holds_up_no_start(tmp_path, hub, caplog, monkeypatch):
    monkeypatch.setattr(reach, "_SILENCE_SECONDS", 0.1)
    hub.answers.clear()
    one = trainer(tmp_path)
    assert "ReadTimeout: timed out; training begins, and every upload tries again" in caplog.text
    assert one.hub_model_id is None


@pytest.mark.nightly  # huggingface_hub tries five more times, and waits 23 seconds between them
def test_an_upload_that_is_never_answered_ends_as_a_failed_one(tmp_path, hub, caplog, monkeypatch):
    monkeypatch.setattr(reach, "_SILENCE_SECONDS", 0.1)
    one = trainer(tmp_path, save_strategy="steps", save_steps=2)
    hub.waits.clear()
    one.train()
    (event,) = lines_of(tmp_path / "apples" / "events.jsonl")
    assert event["kind"] == "upload_failed"
    assert "ReadTimeout" in event["said"]


def test_an_adapter_is_uploaded_as_one(tmp_path, hub):
    from peft import LoraConfig

    one = GRPOTrainer(
        model=tiny_model(), reward_funcs=reward_len, train_dataset=Dataset.from_list(ROWS), processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
        args=GRPOConfig(output_dir=str(tmp_path / "adapter"), push_to_hub=True, report_to="none", max_steps=1),
    )  # fmt: skip
    one.push_to_hub()
    assert "adapter_model.safetensors" in hub.files()
    assert "model.safetensors" not in hub.files()
    assert header_of(hub.files()["README.md"].decode())["library_name"] == "peft"
