"""What trackers are told is read back with their own readers: names, steps, alerts, and the same run after a resume."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from tracked_runs import ALERT, elsewhere, part
from transformers import TrainerCallback

from covey.monitor.trackers import Trackers, hurry_mlflow
from faults.small_runs import lines, trainer

TEXT = "warning at step 2, dead_groups: Dead.\n  try: easier"
NAMES = (
    "loss",
    "reward",
    "entropy",
    "completions/mean_length",
    "update/all",
    "learning_rate",
    "rewards/reward_len/mean",
)


def trained(folder: Path, tracker: str, **changed: Any) -> Any:
    """Four steps, of which the last two come after a resume; an alert is told at step 2."""
    part(folder, tracker, 2, **changed)
    return part(folder, tracker, 4, **changed)


def expected(folder: Path, name: str) -> dict[int, float]:
    """By step, what metrics.jsonl says."""
    return {line["step"]: pytest.approx(line[name], rel=1e-5) for line in lines(folder)}


def test_tensorboard_reads_back_every_metric_by_its_step_also_after_a_resume(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(tmp_path / "run", "tensorboard")
    seen: dict[str, dict[int, float]] = {}
    texts: dict[str, list[str]] = {}
    for folder in sorted({path.parent for path in (tmp_path / "run" / "runs").rglob("events.out.*")}):
        read = event_accumulator.EventAccumulator(str(folder))
        read.Reload()
        for name in read.Tags()["scalars"]:
            seen.setdefault(name, {}).update({event.step: event.value for event in read.Scalars(name)})
        for name in read.Tags()["tensors"]:
            texts.setdefault(name, []).extend(event.tensor_proto.string_val[0].decode() for event in read.Tensors(name))
    for name in NAMES:
        assert seen[f"train/{name}"] == expected(tmp_path / "run", name)
    assert texts["alerts/dead_groups/text_summary"] == [TEXT.replace("\n", "  \n")]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = pytest.importorskip("mlflow")
    before = module.get_tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    module.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield module
    module.set_tracking_uri(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_one_run_with_every_step_after_a_resume_and_after_a_last_evaluation(
    tmp_path: Path, mlflow: Any
) -> None:
    last = trained(tmp_path / "run", "mlflow")
    last.evaluate(Dataset.from_list([{"prompt": "Tom has 3 apples.", "answer": "3"}]))
    mlflow.end_run()
    (run,) = mlflow.search_runs(output_format="list")
    client = mlflow.MlflowClient()
    for name in NAMES:
        found = client.get_metric_history(run.info.run_id, name)
        assert {one.step: one.value for one in found} == expected(tmp_path / "run", name)
    assert "eval_reward" in run.data.metrics
    assert run.data.tags["alert.dead_groups"] == TEXT
    assert run.data.tags["covey.run"] == json.loads((tmp_path / "run" / "run.json").read_text())["id"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_hangs_is_told_and_nothing_waits_for_it_at_the_exit(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = pytest.importorskip("mlflow.store.tracking.sqlalchemy_store").SqlAlchemyStore
    released, real, asked = threading.Event(), store.log_batch, list[threading.Thread]()

    def log_batch(self: Any, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        if metrics:
            asked.append(threading.current_thread())
            released.wait(5)
        real(self, run_id, metrics, params, tags)

    monkeypatch.setattr(store, "log_batch", log_batch)
    one = trainer(tmp_path / "run", report_to="mlflow", max_steps=4, logging_steps=1, save_strategy="no")
    one.trackers.patience_seconds = 0.01
    one.train()
    assert caplog.text.count("MLflowCallback has not come back from on_log at step 1") == 1
    assert "did not take 5 of its calls in time" in caplog.text, "four steps and the summary"
    assert [thread.daemon for thread in asked] == [True], "no exit waits for a daemon"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    hurry_mlflow(one.trackers.lane("MLflowCallback"))
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"
    released.set()
    asked[0].join(30)
    mlflow.end_run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_one_run_with_every_step_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    trained(tmp_path / "run", "trackio", project="birds")
    (run,) = trackio.Api().runs("birds")
    assert run.name.startswith("run-"), "the folder's name and the run's id"
    logs = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage.get_logs("birds", run.name)
    for name in NAMES:
        found = {row["train/global_step"]: row[f"train/{name}"] for row in logs if f"train/{name}" in row}
        assert found == expected(tmp_path / "run", name)
    tables = {row["train/global_step"]: row["completions"]["_value"] for row in logs if "completions" in row}
    assert set(tables) == {1, 2, 3, 4}
    assert all(
        row["completion"] == written for step, table in tables.items() for row, written in both(tmp_path, step, table)
    )
    (alert,) = [one for one in run.alerts() if one["title"].startswith("dead_groups")]
    assert (alert["title"], alert["text"], alert["level"]) == ("dead_groups at step 2", TEXT, "warn")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_keeps_one_run_id_every_step_and_the_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (2, 4):
        elsewhere(tmp_path / "run", "wandb", steps)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [record for file in files for record in wandb_records(file)]
    ids = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert ids == {json.loads((tmp_path / "run" / "run.json").read_text())["id"]}
    tables: dict[int, list[str]] = {}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    for name in NAMES:
        found = {row["train/global_step"]: row[f"train/{name}"] for row in rows if f"train/{name}" in row}
        assert found == expected(tmp_path / "run", name)
    for row in (row for row in rows if "completions/path" in row):
        (file,) = tmp_path.glob(f"wandb/offline-run-*/files/{row['completions/path']}")
        table = json.loads(file.read_text())
        place = table["columns"].index("completion")
        tables[row["train/global_step"]] = [line[place] for line in table["data"]]
    assert set(tables) == {1, 2, 3, 4}
    assert all(row == written for step, table in tables.items() for row, written in both(tmp_path, step, table))
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    (alert,) = [one for one in alerts if one.title.startswith("dead_groups")]
    assert (alert.title, alert.text, alert.level) == ("dead_groups at step 2", TEXT, "WARN")


def both(folder: Path, step: int, table: list[Any]) -> Iterator[tuple[Any, str]]:
    """Rows of a tracker's table, each with the completion that the run's own file of the step has in its place."""
    written = pq.read_table(folder / "run" / "completions" / f"completions_{step:05d}.parquet")[
        "completion"
    ].to_pylist()
    yield from zip(table, written, strict=True)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format after seven bytes, in blocks of 32 KiB."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = proto.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_what_a_tracker_raises_is_a_warning_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def add_text(self, *given: Any) -> None:
            raise OSError("no room")

    tell = Trackers(["tensorboard"], lambda: [type("Callback", (), {"tb_writer": Broken()})()])
    tell(ALERT)
    assert "tensorboard did not take an alert (OSError: no room); it is in alerts.jsonl." in caplog.text


class _Away(TrainerCallback):
    """The tracker's server goes away after step 1."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def refuse(*arguments: Any, **keywords: Any) -> None:
            raise ConnectionError("nobody answers")

        for callback in self.handler.callbacks:
            if getattr(callback, "tb_writer", None) is not None:
                callback.tb_writer.add_scalar = refuse


def test_a_tracker_that_fails_in_the_middle_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    one = trainer(tmp_path / "run", report_to="tensorboard", max_steps=3, save_strategy="no", logging_steps=1)
    one.add_callback(_Away(one.callback_handler))
    one.train()
    assert one.state.global_step == 3
    assert caplog.text.count("TensorBoardCallback failed in on_log at step 1 (ConnectionError: nobody answers)") == 1
    assert len(lines(tmp_path / "run")) == 3
