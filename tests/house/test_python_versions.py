"""Every file parses, and finds what it imports of the standard library, under the oldest and the newest Python that Covey names."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kit import rest_nightly

ROOT = Path(__file__).parents[2]
LOOK = """
import ast, importlib, json, sys
wrong = []
for file in sys.argv[1:]:
    try:
        tree = ast.parse(open(file, encoding="utf-8").read())
    except SyntaxError as error:
        wrong.append(f"{file}: {error}")
        continue
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] not in sys.stdlib_module_names:
                continue
            try:
                found = importlib.import_module(module)
                if name is not None and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError:
                wrong.append(f"{file}:{node.lineno}: {module} {name or ''}")
print(json.dumps(wrong))
"""


def interpreter(version):
    """A Python of that version, if this machine has one that starts."""
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    candidates += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for one in candidates:
        if subprocess.run([one, "-c", "import ssl, sqlite3, ctypes"], capture_output=True).returncode == 0:
            return one
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", rest_nightly(["3.10", "3.13"], 1))
def test_all_files_parse_and_find_their_standard_library(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    files = [str(file) for part in ("src", "tests", "examples", "benchmarks") for file in (ROOT / part).rglob("*.py")]
    done = subprocess.run([python, "-W", "ignore", "-c", LOOK, *files], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
