"""The Tab key: the script that a real bash reads completes verbs and options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from covey.cli import VERBS, main

ASK = 'source {script}; COMP_WORDS=({words}); COMP_CWORD={place}; _covey; printf "%s\\n" "${{COMPREPLY[@]}}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from covey.cli.completion import script as written

    file = tmp_path_factory.mktemp("shell") / "covey.sh"
    file.write_text(written("bash"))
    return file


def completed(script: Path, *words: str) -> set[str]:
    command = ASK.format(script=script, words=" ".join(f"'{word}'" for word in words), place=len(words) - 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_verbs_and_options(script: Path) -> None:
    assert completed(script, "covey", "") == set(VERBS)
    assert completed(script, "covey", "tr") == {"train"}
    assert completed(script, "covey", "train", "--learning-r") == {"--learning-rate"}
    assert "--num-samples" in completed(script, "covey", "eval", "--")
    assert "--against" in completed(script, "covey", "data", "--a")
    assert completed(script, "covey", "train", "some-file") == set()  # bash's own completion of files is left to it


def test_the_other_shells_get_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert "complete -c covey -n '__fish_seen_subcommand_from train' -l learning-rate" in capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


def test_a_shell_of_no_known_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "Did you mean bash?" in capsys.readouterr().err
