"""What lies in examples/distributed/ starts two processes here, on CPUs, that split the model that ships."""

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Cluster, missing

from forked import run
from kit import rest_nightly

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
BIN = Path(sys.executable).parent
RUN = {
    "model": "demo",
    "dataset": "demo",
    "reward": "length(target=3)",
    "max_steps": 2,
    "save_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 6,
    "learning_rate": 1.0e-4,
    "beta": 0.01,  # also where all answers of a group earn the same, the optimizer has a state then
    "use_cpu": True,
    "report_to": "none",
    "output_dir": "run",
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def environment(folder, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **env}
    env["PATH"] = f"{folder}:{BIN}:{env['PATH']}"
    return env


def started(command, folder, **env):
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    env = environment(folder, **env)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


def expect_split_run(done, folder):
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = folder / "run" / "checkpoint-2"
    assert len(list((checkpoint / "sharded").glob("*.distcp"))) == 2, "each process wrote its part"
    assert (checkpoint / "model.safetensors").is_file()
    assert (folder / "run" / "model" / "model.safetensors").is_file()
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.nightly
def test_accelerate_launch_with_the_fsdp2_file_splits_the_model(tmp_path):
    config = EXAMPLES / "fsdp2.yaml"
    launch = ["accelerate", "launch", "--config_file", str(config), "--num_processes", "2"]
    done = started(
        [*launch, "--main_process_port", free_port(), "-m", "covey", "train", "--config", "run.yaml"], tmp_path
    )
    expect_split_run(done, tmp_path)


SCONTROL = """#!/bin/bash
echo 127.0.0.1; echo 127.0.0.1
"""
SRUN = """#!/bin/bash
shift                                  # its own option
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is one for bash")
def test_the_slurm_script_starts_one_agent_on_each_of_two_nodes(tmp_path):
    """`srun` and `scontrol` are stand-ins that start both agents here; torchrun, its rendezvous and the run are real."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    command = ["bash", str(EXAMPLES / "two_nodes.sbatch"), "--config", "run.yaml", "--fsdp", "true"]
    expect_split_run(started(command, tmp_path, PORT=free_port(), **env), tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is one for bash")
def test_the_slurm_script_leaves_a_small_model_whole(tmp_path):
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "8"}
    done = started(
        ["bash", str(EXAMPLES / "two_nodes.sbatch"), "--config", "run.yaml"], tmp_path, PORT=free_port(), **env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "run" / "checkpoint-2" / "sharded").exists(), "each process holds the whole model"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def text_of_agent():
    """The Python in the SLURM script: torchrun that ends with the exit code of its processes."""
    return (EXAMPLES / "two_nodes.sbatch").read_text().split("torchrun='")[1].split("\n'\n")[0]


@pytest.mark.parametrize(
    ("work", "code"),
    rest_nightly([("exit 2", 2), ("kill -TERM $PPID; sleep 60", 75)], [("kill -TERM $PPID; sleep 60", 75)]),
)
def test_the_agent_of_the_slurm_script_ends_with_the_code_of_its_processes_and_a_stop_with_75(work, code, tmp_path):
    own = ["--standalone", "--nproc_per_node", "1", "--no_python", "bash", "-c", work]
    done = run("-c", text_of_agent(), *own, cwd=tmp_path, timeout=120)
    assert done.returncode == code, done.err


@pytest.mark.parametrize(
    ("code", "restarts", "again"), [(75, 0, True), (75, 3, False), (2, 0, False), (76, 0, False), (0, 0, False)]
)
def test_the_slurm_script_is_queued_again_only_where_it_was_stopped_and_not_for_ever(code, restarts, again, tmp_path):
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path}/asked; echo here')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    env |= {"REQUEUE": "3", "SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "two_nodes.sbatch"), "--config", "run.yaml"], env={**os.environ, **env}, check=False
    )
    assert done.returncode == code
    assert ("requeue 7" in (tmp_path / "asked").read_text()) == again


SLOW = """
import time

def reward(completions, **columns):
    time.sleep(0.2)
    return [float(len(text)) for text in completions]
"""


def steps_of(folder):
    metrics = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_under_a_real_slurm_the_script_trains_on_two_nodes_and_goes_on_where_it_was_stopped(tmp_path):
    """The signal is the one that SLURM sends before a job's time is over."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "max_steps": 12, "reward": "slow.py:reward"}))
    with Cluster(tmp_path, environment(tmp_path)) as slurm:
        asked = ["sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=1"]
        job = slurm.call(
            *asked, str(EXAMPLES / "two_nodes.sbatch"), "--config", "run.yaml", "--fsdp", "true", REQUEUE="1"
        ).strip()
        slurm.until(lambda: len(steps_of(tmp_path)) >= 2, 120, "two steps")
        slurm.call("scancel", "--signal=TERM", job)
        slurm.until(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", job), 60, "its place in the queue")
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM would wait for two minutes
        stopped_at = steps_of(tmp_path)[-1]
        assert slurm.until(lambda: slurm.state(job) in ("COMPLETED", "FAILED") and slurm.state(job), 240, "the end")
    said = "\n".join(file.read_text() for file in tmp_path.glob("slurm-*.out"))
    assert 2 <= stopped_at < 12, said
    assert steps_of(tmp_path) == list(range(1, 13)), said
    assert len(list((tmp_path / "run" / "checkpoint-12" / "sharded").glob("*.distcp"))) == 2, "each node wrote its part"


@pytest.mark.nightly
def test_a_ray_cluster_starts_one_torchrun_on_each_node(tmp_path):
    """On a real Ray whose one machine holds both nodes (`make test-ray`)."""
    pytest.importorskip("ray")
    own = ["--nodes", "2", "--gpus-per-node", "0", "--strategy", "PACK"]
    command = [sys.executable, str(EXAMPLES / "on_each_node.py"), *own]
    run = ["-m", "covey", "train", "--config", "run.yaml", "--fsdp", "true", "--resume", "auto"]
    expect_split_run(started([*command, *run], tmp_path, RAY_ADDRESS="local"), tmp_path)


def faults(value, schema, place=""):
    """What a manifest has that the schema has not, or lacks: a dict of fields ("!": required), a list of one element's, a type, or a choice."""
    if isinstance(schema, dict) and isinstance(value, dict):
        known = {name.removesuffix("!"): inner for name, inner in schema.items()}
        found = [f"{place}.{name} is missing" for name in known if f"{name}!" in schema and name not in value]
        found += [f"{place}.{name} is not known" for name in value if name not in known]
        return found + [
            one for name in value if name in known for one in faults(value[name], known[name], f"{place}.{name}")
        ]
    if isinstance(schema, list) and isinstance(value, list):
        return [found for i, one in enumerate(value) for found in faults(one, schema[0], f"{place}[{i}]")]
    if (
        isinstance(schema, (dict, list))
        or not isinstance(value, schema)
        or isinstance(value, bool) is not (schema is bool)
    ):
        return [f"{place} is a {type(value).__name__}"]
    return []


AMOUNTS = {"nvidia.com/gpu": int, "cpu": int, "memory": str}
POD = {
    "spec!": {
        "containers!": [{"name!": str, "image": str, "resources": {"limits": AMOUNTS, "requests": AMOUNTS},
                         "volumeMounts": [{"name!": str, "mountPath!": str}]}],
        "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}],
    }
}  # fmt: skip
RAY_JOB = {
    "apiVersion!": str, "kind!": str, "metadata!": {"name!": str},
    "spec!": {"entrypoint!": str, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int, "backoffLimit": int,
              "rayClusterSpec!": {
                  "rayVersion": str,
                  "headGroupSpec!": {"rayStartParams!": {"num-gpus": str}, "template!": POD},
                  "workerGroupSpecs": [{"groupName!": str, "replicas": int, "minReplicas!": int, "maxReplicas!": int,
                                        "rayStartParams!": {"num-gpus": str}, "template!": POD}]}},
}  # fmt: skip
"""Fields of ray.io/v1 RayJob and of pods that the manifest uses, with their types, and which are required, by KubeRay 1.4's Go types."""


def manifest():
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        (("spec",), "backofLimit", 3, ".spec.backofLimit is not known"),
        (("spec",), "ttlSecondsAfterFinished", "600", ".spec.ttlSecondsAfterFinished is a str"),
        (("spec", "rayClusterSpec"), "workerGroupSpecs", {}, ".spec.rayClusterSpec.workerGroupSpecs is a dict"),
        (
            ("spec", "rayClusterSpec", "headGroupSpec"),
            "template",
            None,
            ".spec.rayClusterSpec.headGroupSpec.template is",
        ),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"), "num-gpus", 8, "num-gpus is a int"),
    ],
)
def test_a_manifest_that_kuberay_would_refuse_is_found(place, name, value, said):
    told = inner = copy.deepcopy(manifest())
    for step in place:
        inner = inner[step]
    inner[name] = value
    if value is None:
        del inner[name]
    (found,) = faults(told, RAY_JOB)
    assert said in found


def test_the_kuberay_manifest_has_fields_of_its_schema_and_a_command_that_covey_takes():
    told = manifest()
    assert faults(told, RAY_JOB) == []
    assert (told["apiVersion"], told["kind"]) == ("ray.io/v1", "RayJob")
    cluster = told["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    words = told["spec"]["entrypoint"].split()
    assert words[words.index("--nodes") + 1] == str(sum(group.get("replicas", 1) for group in groups))
    assert (EXAMPLES / Path(words[1]).name).is_file()
    for group in groups:
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        assert group["rayStartParams"]["num-gpus"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    from covey.cli import train

    known = {flag.spelled for flag in train.flags()} | {"--config"} | {flag.spelled for flag in train.other_flags()}
    asked = words[words.index("train") + 1 :]
    assert {word for word in asked if word.startswith("--")} <= known


def test_the_fsdp2_file_says_nothing_that_is_refused(monkeypatch):
    """As `accelerate launch` hands its entries on."""
    from covey import GRPOConfig

    told = yaml.safe_load((EXAMPLES / "fsdp2.yaml").read_text())
    assert told["distributed_type"] == "FSDP"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, value in told["fsdp_config"].items():
        monkeypatch.setenv(name.upper(), json.dumps(value).strip('"'))
    assert GRPOConfig(output_dir="unused", use_cpu=True).sharding is not None
