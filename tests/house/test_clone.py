"""A clone of the repository, alone on another machine, holds all that its tests, scripts and pages read."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("../" + "shared", 'parents[3] / "', 'parent.parent.parent.parent / "')


def test_no_file_reads_a_folder_beside_the_repository():
    environment = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    named = [
        ROOT / name
        for name in listed.split("\0")
        if name.endswith((".py", ".md", ".toml", ".yaml", ".sh", "Makefile", "run"))
    ]
    found = [
        f"{file.relative_to(ROOT)}: {words}"
        for file in named
        if file.is_file() and file != Path(__file__)
        for words in OUTSIDE
        if words in file.read_text(encoding="utf-8")
    ]
    assert not found, "\n".join(found)
