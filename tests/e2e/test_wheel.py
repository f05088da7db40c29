"""The wheel, built and installed into an environment that has neither the sources nor a compiler, trains."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of a new environment with Covey's wheel; torch and the rest are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"]
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run([sys.executable, *install], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # a path alone: its own .pth files are not read
    return python


def run(python, *words, folder):
    environment = {"PATH": str(python.parent), "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_package_is_the_wheels_own(installed, tmp_path):
    found = run(installed, "-c", "import covey; print(covey.__file__)", folder=tmp_path).stdout
    assert Path(found.strip()).is_relative_to(installed.parents[1])


def test_the_demo_trains_without_a_compiler_and_says_so_once(installed, tmp_path):
    words = ["-m", "covey", "demo", "--steps", "2", "--held-out", "8", "--json", "--output-dir", tmp_path / "run"]
    done = run(installed, *words, folder=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert done.stderr.count("there is no C++ compiler (install g++)") == 1


def test_the_page_of_the_dashboard_and_the_c_sources_are_in_it(installed):
    (site,) = installed.parents[1].glob("lib/python*/site-packages")
    assert (site / "covey" / "kernels" / "cpp" / "decode.cpp").is_file()
    assert any((site / "covey" / "monitor" / "view" / "page").glob("*.js"))
    assert not (site / "tests").exists()
    assert os.access(installed.parent / "covey", os.X_OK)
