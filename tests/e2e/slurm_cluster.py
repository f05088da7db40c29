"""A SLURM of two nodes on this machine, in a temporary folder: its own munge, controller and two slurmd; nothing of /etc is read or changed."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forked import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = (socket.gethostname(), f"{socket.gethostname()}-2")
"""The processes of a run meet at the first one, so its name has to be one that this machine knows."""

CONFIGURATION = """\
ClusterName=covey
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
"""


def missing() -> str | None:
    """A sentence about a program of SLURM or munge that is not here; None: all are."""
    names = (*DAEMONS, "sbatch", "srun", "scontrol", "squeue")
    absent = [name for name in names if found(name) is None]
    return f"{absent[0]} is not installed (apt-get install slurm-wlm munge)" if absent else None


def found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Cluster:
    """`with Cluster(where, environment) as cluster:` has two idle nodes of one core and one GPU, which is none."""

    def __init__(self, where: Path, environment: Mapping[str, str]) -> None:
        self.where = where
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the name of a socket has a limit
        self.folder.chmod(0o755)  # munge's clients have to reach its socket
        self.running: list[subprocess.Popen[bytes]] = []
        self.environment = {**environment, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *words: str, **more: str) -> str:
        """What a command of SLURM says. Raises CalledProcessError."""
        env = {**self.environment, **more}
        return subprocess.run(
            words, env=env, check=True, capture_output=True, text=True, timeout=60, cwd=self.where
        ).stdout

    def state(self, job: str) -> str:
        """State of a job, such as PENDING, RUNNING, COMPLETED or FAILED."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def logs(self) -> str:
        return "\n".join(
            f"{file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in self.folder.glob("*.out.log")
        )

    def _start(self) -> None:
        nodes = "".join(f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 Gres=gpu:1\n" for name in NODES)
        given = {"folder": self.folder, "user": getpass.getuser(), "controller": free_port()}
        partition = f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**given) + nodes + partition)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        own = [
            f"--{name}={self.folder}/munge.{name.split('-')[0]}"
            for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._run("munged", "--foreground", "--force", f"--key-file={key}", *own)
        self.until(lambda: (self.folder / "munge.socket").exists(), 20, "munged")
        self._run("slurmctld", "-D")
        for name in NODES:
            self._run("slurmd", "-D", "-N", name)
        idle = lambda: self.call("sinfo", "--noheader", "--format", "%T %D").split() == ["idle", str(len(NODES))]
        self.until(idle, 60, "idle nodes")

    def _run(self, name: str, *words: str) -> None:
        program = found(name)
        assert program is not None
        with (self.folder / f"{name}.out.log").open("ab") as log:
            self.running.append(subprocess.Popen([program, *words], env=self.environment, stdout=log, stderr=log))

    def until(self, look: Callable[[], Any], seconds: float, what: str) -> Any:
        """The first answer of `look` that is true; a command of SLURM that fails is none."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if answer := look():
                    return answer
            except subprocess.CalledProcessError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"{what} did not come within {seconds:g} s\n{self.logs()}")
