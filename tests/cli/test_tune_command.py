"""`covey tune`: trials are runs, judged by held-out prompts; the hopeless end early; an interrupted search goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.cli import main, tune
from covey.errors import RunFolderError
from covey.experiments import child
from covey.experiments.attempt import Attempt, Watch
from covey.experiments.shared_trials import train_trials
from covey.experiments.study import forget_weights, next_trial, state_of
from covey.runs.signals import StopRequest
from kit import tiny_model, tiny_tokenizer

optuna = pytest.importorskip("optuna")

REWARD = "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
WHAT = "--model model --dataset train.jsonl --eval-dataset test.jsonl --reward mine.py:digits"
SMALL = "--max-completion-length 6 --num-generations 4 --per-device-train-batch-size 8 --use-cpu --disable-tqdm"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, count in (("train", 6), ("test", 3)):
        rows = [{"prompt": f"What is {i} + {i}?"} for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(REWARD)
    return tmp_path


def words(*more):
    return ["tune", *WHAT.split(), *SMALL.split(), "--output-dir", "runs/t", *map(str, more)]


RATES = ("--search", "learning_rate=1e-5:1e-2:log")


@pytest.mark.nightly
def test_trials_are_runs_and_the_best_ones_options_can_be_trained(place, capsys):
    assert main(words(*RATES, "--max-steps", 2, "--trials", 2, "--learning-rate", "1e-3", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in found["trials"]] == ["complete", "complete"]
    assert found["trials"][0]["params"] == {"learning_rate": 1e-3}  # what was given is tried first
    best = max(found["trials"], key=lambda row: row["value"])
    assert found["best"]["value"] == best["value"]
    for row in found["trials"]:
        folder = place / "runs" / "t" / f"trial-{row['trial']:03d}"
        recorded = json.loads((folder / "run.json").read_text())
        assert recorded["config"]["learning_rate"] == row["params"]["learning_rate"]
        assert (folder / "model").is_dir() == (row["trial"] == found["best"]["trial"])
    assert main(["train", "runs/t/best.yaml", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["learning_rate"] == found["best"]["params"]["learning_rate"]
    # nothing is left to do: the table of what there is
    assert main(words(*RATES, "--max-steps", 2, "--trials", 2, "--learning-rate", "1e-3")) == 0
    assert f"best: trial {found['best']['trial']}" in capsys.readouterr().out


@pytest.mark.nightly
def test_an_interrupted_search_goes_on_with_the_trial_that_it_was_at(place, capsys):
    given = words(*RATES, "--max-steps", 60, "--trials", 1, "--logging-steps", 1)
    command = [sys.executable, "-m", "covey", *given]
    metrics = place / "runs" / "t" / "trial-000" / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for _ in range(2400):
            if process.poll() is not None or (metrics.is_file() and metrics.read_text().count("\n") >= 2):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "go on with: covey tune" in said
    reached = json.loads((metrics.parent / "run.json").read_text())["step"]
    assert main([*given, "--json"]) == 0
    shown = capsys.readouterr()
    assert "trial 0 goes on where it was interrupted" in shown.err
    assert [row["state"] for row in json.loads(shown.out)["trials"]] == ["complete"]
    recorded = json.loads((metrics.parent / "run.json").read_text())
    assert [attempt["from_step"] for attempt in recorded["attempts"]] == [0, reached]


@pytest.mark.nightly
def test_a_run_that_is_over_is_asked_to_save_and_stop(place):
    given = [*WHAT.split(), *SMALL.split(), "--max-steps", "5000", "--logging-steps", "1", "--output-dir", "run"]
    metrics = place / "run" / "metrics.jsonl"
    with StopRequest() as stop:
        is_over = lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2
        ended = child.train(given, place / "run.log", stop, is_quiet=True, is_over=is_over)
    assert ended.code == 75
    assert ended.result == {}
    assert any((place / "run").glob("checkpoint-*"))


def tuning(tmp_path, **changes):
    from covey.cli.train import flags
    from covey.experiments.search import dimensions

    plain = {
        "folder": tmp_path,
        "options": {},
        "search": tuple(dimensions(["learning_rate=1e-5:1e-2:log"], {flag.name: flag.kind for flag in flags()})),
        "metric": "eval_reward",
        "is_smaller_better": False,
        "pruner": "median",
        "trials": 5,
        "keeps_all": False,
        "seed": 0,
    }
    return tune.Tuning(**{**plain, **changes})


def evaluated(folder, *values):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": 10 * i, "set": "eval", "eval_reward": value}) for i, value in enumerate(values, 1)]
    (folder / "evaluations.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_trial_worse_than_half_of_those_before_it_is_hopeless(tmp_path):
    asked = tuning(tmp_path)
    study = tune.open_study(asked)
    for value in (0.5, 0.6, 0.7, 0.8):
        trial = study.ask({one.name: one.distribution() for one in asked.search})
        trial.report(value, 10)
        study.tell(trial, value)
    for value, is_hopeless in ((0.9, False), (0.1, True)):
        trial = study.ask({one.name: one.distribution() for one in asked.search})
        watch = Watch(asked.place(trial.number), "eval_reward", trial)
        assert not watch.is_hopeless()  # nothing was evaluated yet
        evaluated(asked.place(trial.number), value)
        assert watch.is_hopeless() == is_hopeless
        assert watch.last == value
        study.tell(trial, state=state_of("PRUNED"))


def test_a_study_is_read_back_with_its_trials_and_draws_other_values(tmp_path):
    asked = tuning(tmp_path)
    distributions = {one.name: one.distribution() for one in asked.search}
    first = tune.open_study(asked)
    trial = first.ask(distributions)
    trial.report(0.3, 10)
    again = tune.open_study(asked)
    resumed = next_trial(asked, again, print)
    assert (resumed.number, resumed.params) == (trial.number, trial.params)
    evaluated(asked.place(0), 0.3, 0.4)  # step 10 was reported before the interruption
    watch = Watch(asked.place(0), "eval_reward", resumed)
    assert not watch.is_hopeless()
    again.tell(resumed, 0.4)
    assert again.trials[0].intermediate_values == {10: 0.3, 20: 0.4}
    second = next_trial(asked, again, print)
    assert second.number == 1
    assert second.params != trial.params


def test_weights_of_all_but_the_best_trial_go_and_what_was_measured_stays(tmp_path):
    asked = tuning(tmp_path, is_smaller_better=True)
    study = tune.open_study(asked)
    for value in (0.5, 0.2, 0.7):
        trial = study.ask({one.name: one.distribution() for one in asked.search})
        evaluated(asked.place(trial.number), value)
        for name in ("model", "checkpoint-10"):
            (asked.place(trial.number) / name).mkdir()
        study.tell(trial, value)
    forget_weights(asked, study)
    kept = [sorted(path.name for path in asked.place(number).iterdir()) for number in range(3)]
    assert kept == [["evaluations.jsonl"], ["checkpoint-10", "evaluations.jsonl", "model"], ["evaluations.jsonl"]]


@pytest.mark.parametrize(
    "more, said",
    [
        ([], "--search is missing"),
        (["--search", "num_generations=3:5"], "--search num_generations, at 3"),
        ([*RATES, "--trials", "0"], "--trials 0 must be at least 1"),
        ([*RATES, "--n-jobs", "0"], "--n-jobs 0 must be at least 1"),
        (
            [*RATES, "--n-jobs", "2"],
            "--n-jobs 2 trains adapters on one base: without --lora-r a trial changes the base",
        ),
        ([*RATES, "--pruner", "mean"], "--pruner is median, halving or none"),
        (["--serch", "beta=0,1"], "Did you mean --search?"),
    ],
)
def test_what_makes_no_search_is_said_before_anything_runs(place, capsys, more, said):
    assert main(words(*more)) == 2
    assert said in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_held_out_prompts_are_asked_for(place, capsys):
    given = [word for word in words(*RATES) if word not in ("--eval-dataset", "test.jsonl")]
    assert main(given) == 2
    assert "give --eval-dataset" in capsys.readouterr().err


def test_a_folder_of_another_search_is_refused(place):
    from covey.experiments.series import claim

    claim(place / "t", {"search": ["beta=0,1"]}, "a search")
    claim(place / "t", {"search": ["beta=0,1"]}, "a search")
    with pytest.raises(RunFolderError, match=r"holds a search of a run with other options \(search\)"):
        claim(place / "t", {"search": ["beta=0,2"]}, "a search")


def test_a_run_that_was_killed_before_its_first_checkpoint_makes_way(tmp_path):
    from covey.experiments.series import make_way

    run = tmp_path / "trial-000"
    make_way(run)  # there is none
    run.mkdir()
    (run / "run.json").write_text("{}")
    make_way(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial-000.previous-1"]


@pytest.mark.slow
def test_a_run_whose_series_was_killed_keeps_its_folder_as_long_as_it_trains(tmp_path):
    from covey.experiments.series import make_way

    script = """
import sys
from pathlib import Path
from covey.runs import RunFolder
run = RunFolder.create(Path(sys.argv[1]))
run.describe(args={})
print("trains", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "seed-0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as orphan:
        assert orphan.stdout.readline() == "trains\n"
        with pytest.raises(RunFolderError, match=f"process {orphan.pid} on .* trains in it now"):
            make_way(tmp_path / "seed-0")
        orphan.communicate()
    make_way(tmp_path / "seed-0")
    assert [path.name for path in tmp_path.iterdir()] == ["seed-0.previous-1"]


def test_a_search_that_runs_elsewhere_gets_no_trial_of_this_one(place, capsys):
    script = """
import sys
from pathlib import Path
from covey.runs.lock import FolderLock
FolderLock(Path(sys.argv[1])).take()
print("searches", flush=True)
sys.stdin.read()
"""
    folder = place / "runs" / "t"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "searches\n"
        assert main(words(*RATES, "--learning-rate", "1e-3")) == 2
        other.communicate()
    assert f"process {other.pid} on" in capsys.readouterr().err
    assert not (folder / "study.journal").exists()


def adapter_of(run):
    return (Path(run) / "model" / "adapter_model.safetensors").read_bytes()


@pytest.mark.nightly
def test_trials_that_train_together_are_each_the_run_of_its_options_alone(place, capsys):
    shape = ["--lora-r", 2, "--max-steps", 2, "--seed", 3, "--eval-steps", 2]
    given = words("--search", "learning_rate=1e-3,3e-3", "beta=0,0.1", *shape, "--trials", 3, "--n-jobs", 2)
    assert main([*map(str, given), "--keep-all", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("trials share one base, in this process") == 1
    found = json.loads(shown.out)["trials"]
    assert [row["state"] for row in found] == ["complete"] * 3
    assert "trial-000" in Path("runs/t/trial-000.log").read_text()
    for row in found[1:]:  # one that began beside another, and one that took its place
        params = [word for name, value in row["params"].items() for word in (f"--{name}", value)]
        assert main(["train", *map(str, [*words()[1:], *shape, *params, "--output-dir", f"alone-{row['trial']}"])]) == 0
        assert adapter_of(f"alone-{row['trial']}") == adapter_of(f"runs/t/trial-{row['trial']:03d}")


def attempts(place, study, search, hopeless=()):
    """Trials of so many params; those of `hopeless` numbers are, from their first step on."""
    for params in search:
        study.enqueue_trial(params)
    for number in range(len(search)):
        trial = study.ask({"learning_rate": optuna.distributions.FloatDistribution(1e-5, 1e-1)})
        watch = Watch(place / f"{number}", "eval_reward", trial)
        watch.is_pruned = number in hopeless
        yield Attempt(trial=trial, place=place / f"{number}", watch=watch)


SHARED = {
    "model": "model", "dataset": "train.jsonl", "reward": ["mine.py:digits"], "lora_r": 2, "use_cpu": True, "max_steps": 3,
    "max_completion_length": 4, "num_generations": 4, "per_device_train_batch_size": 4, "disable_tqdm": True,
}  # fmt: skip


@pytest.mark.slow
def test_a_hopeless_trial_leaves_and_another_takes_its_place(place):
    given = attempts(place, optuna.create_study(), [{"learning_rate": rate} for rate in (1e-3, 2e-3, 3e-3)], {1})
    with StopRequest() as stop:
        trials = train_trials(tune.steps_on_one_base(SHARED), lambda: next(given, None), 2, stop)
        ended = {attempt.number: ended for attempt, ended in trials}
        assert not stop.requested
    assert list(ended) == [1, 0, 2]
    assert (ended[1].code, ended[1].result) == (75, {})
    assert [path.name for path in (place / "1").glob("checkpoint-*")] == ["checkpoint-1"]
    assert ended[0].code == ended[2].code == 0


def test_a_trial_that_fails_leaves_the_others_to_end(place):
    options = {**SHARED, "max_steps": 1}
    given = attempts(place, optuna.create_study(), [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}])
    bad, good = (next(given) for _ in range(2))
    waiting = iter([Refused(**vars(bad)), good])
    with StopRequest() as stop:
        trials = train_trials(tune.steps_on_one_base(options), lambda: next(waiting, None), 2, stop)
        assert {attempt.number: ended.code for attempt, ended in trials} == {0: 2, 1: 0}
    assert "has no 'none'" in bad.log.read_text()


class Refused(Attempt):
    """A trial of options that its run refuses."""

    @property
    def params(self):
        return {"reward": ["mine.py:none"]}


STOPS = """
import os, signal

seen = []

def stops(completions, **kwargs):
    seen.append(1)
    if len(seen) == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    return digits(completions)
"""


@pytest.mark.slow
def test_a_search_that_is_stopped_goes_on_with_all_trials_that_it_was_at(place, capsys):
    given = words("--search", "beta=0:0.1", "--lora-r", 2, "--max-steps", 4, "--trials", 2, "--n-jobs", 2)
    Path("mine.py").write_text(REWARD + STOPS)
    given = [str(word).replace(":digits", ":stops") for word in given]
    assert main([*given, "--json"]) == 75
    assert "Stopped; go on with: covey" in capsys.readouterr().err
    reached = [json.loads((place / f"runs/t/trial-00{i}/run.json").read_text())["step"] for i in range(2)]
    assert all(0 < step < 4 for step in reached)
    assert main([*given, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("goes on where it was interrupted") == 2
    assert [row["state"] for row in json.loads(shown.out)["trials"]] == ["complete", "complete"]
    attempts = [json.loads((place / f"runs/t/trial-00{i}/run.json").read_text())["attempts"] for i in range(2)]
    assert [[one["from_step"] for one in both] for both in attempts] == [[0, reached[0]], [0, reached[1]]]


@pytest.mark.parametrize(
    "options, searched, said",
    [
        ({}, ["learning_rate"], "without --lora-r"),
        ({"lora_r": 2}, ["dtype"], "--search dtype"),
        ({"lora_r": 2}, ["max_prompts"], "--search max_prompts"),
        ({"lora_r": 2, "streaming": True}, ["beta"], "--streaming"),
        ({"lora_r": 2, "report_to": "wandb"}, ["beta"], "one run a process"),
        ({"lora_r": 2}, ["learning_rate", "beta", "reward", "seed"], None),
        ({}, ["lora_r"], None),
    ],
)
def test_trials_share_a_base_where_only_adapters_differ(options, searched, said):
    from covey import GRPOConfig
    from covey.experiments.shared_trials import reason_against

    config = GRPOConfig("runs/x", report_to=options.get("report_to", "none"))
    reason = reason_against(options, searched, config)
    assert reason is None if said is None else said in reason
