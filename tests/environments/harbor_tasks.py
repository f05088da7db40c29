"""Folders of tasks in Harbor's format, and an image of this machine's own shell."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

IMAGE = "covey-tests/shell:1"
WRITE_4 = "Write 4 to /answer.\n"
WANTS = '#!/bin/sh\nif [ "$(cat /answer)" = {0} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def task(folder: Path, toml: str = "", test: str = WANTS.format(4), image: str | None = IMAGE) -> Path:
    """A task; `toml` is written above its `[environment]`."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    environment = "[environment]\n" + ("" if image is None else f'docker_image = "{image}"\n')
    (folder / "task.toml").write_text(f'version = "1.0"\n{toml}\n{environment}')
    (folder / "instruction.md").write_text(WRITE_4)
    (folder / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY missing /missing\n")
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text("echo 4 > /answer  # the solution\n")
    return folder


def make_image() -> None:
    """The image, from this machine's busybox and bash: no registry is asked."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("bin", "tmp", "etc", "root", "proc", "sys", "dev"):
            (root / folder).mkdir()
        libraries = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
        for file in ("/bin/bash", *re.findall(r"/\S+", libraries)):
            (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / file[1:])
        shutil.copy(str(shutil.which("busybox")), root / "bin" / "busybox")
        listed = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
        for applet in set(listed) - {"busybox", "bash"}:
            (root / "bin" / applet).symlink_to("busybox")
        (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (root / "tmp").chmod(0o1777)
        archive = shutil.make_archive(str(root / "image"), "tar", root)
        subprocess.run(["docker", "import", archive, IMAGE], check=True, capture_output=True)
