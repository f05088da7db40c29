"""Run apart: torchrun's own launcher, `--max-restarts 2`, over two ranks that are forks of this process, so that none imports torch again.

`python relaunched.py SCRIPT WORDS...`; each rank runs the script with the words.
"""

import runpy
import signal
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(script: str, words: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # those of the launcher
        signal.signal(number, signal.SIG_DFL)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"exit code {ended.code}") from None


if __name__ == "__main__":
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=2,
        start_method="fork",
    )
    elastic_launch(how, rank)(sys.argv[1], sys.argv[2:])
