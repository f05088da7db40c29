"""The command line as one meets it: quick help, one sentence for a mistake, results on stdout and all else on stderr."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from covey.cli import VERBS, main
from covey.cli.output import result, say
from covey.errors import ConfigError
from kit import rest_nightly


def covey(*words):
    return subprocess.run(
        [sys.executable, "-m", "covey", *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "words",
    rest_nightly(
        [
            ["--help"],
            ["train", "--help"],
            ["train", "--help-all"],
            ["chat", "--help"],
            ["eval", "--help"],
            ["demo", "--help"],
            ["env"],
        ],
        [["--help"], ["train", "--help-all"], ["env"]],
    ),
)
def test_help_and_versions_import_neither_torch_nor_transformers(words):
    code = f"import sys; from covey.cli import main; main({words!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "first, given, spins",
    [
        ("", {}, "3000"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("", {"OMP_WAIT_POLICY": "PASSIVE"}, "None"),
        ("sys.modules['torch'] = sys; ", {}, "None"),
    ],
    ids=["nobody has said", "how long is said", "to sleep at once is said", "torch has read it already"],
)
def test_importing_covey_lets_threads_spin_for_microseconds_unless_the_user_has_said_how_long(first, given, spins):
    code = f"import os, sys; {first}import covey; print(os.environ.get('GOMP_SPINCOUNT'))"
    unsaid = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run(
        [sys.executable, "-c", code], env={**unsaid, **given}, check=True, capture_output=True, text=True
    )
    assert told.stdout.strip() == spins


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)


def test_help_fits_the_terminal(capsys, monkeypatch):
    for columns in (70, 80, 110):
        monkeypatch.setenv("COLUMNS", str(columns))
        for words in (["--help"], ["help", "train"], ["train", "--help-all"], ["doctor", "--help"]):
            assert main(words) == 0
            shown = capsys.readouterr().out.splitlines()
            assert [line for line in shown if len(line) > columns and not line.startswith("  $ ")] == []


def test_help_before_a_verb_is_help_of_the_verb(capsys):
    assert main(["chat", "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["help", "chat"]) == 0
    assert capsys.readouterr().out == shown


def test_no_verb_shows_help_and_says_that_something_is_missing(capsys):
    assert main([]) == 2
    assert "usage: covey VERB" in capsys.readouterr().out


def test_the_version_is_the_package_version(capsys):
    import covey

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == covey.__version__ + "\n"


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian"], "error: covey has no verb 'trian'. Did you mean train?"),
        (["env", "chek", "games.py:Maze"], "error: covey env has no 'chek'. Did you mean check?"),
        (
            ["train", "--epsilon-hihg", "0.3"],
            "error: --epsilon-hihg is not an option here. Did you mean --epsilon-high?",
        ),
        (["train", "--evaluation_strategy", "no"], "Use eval_strategy."),
        (["train", "--dataset_name", "x"], "Use dataset."),
        (["env", "--jsn"], "Did you mean --json?"),
        (["eval", "--ensemble", "a", "b", "--reward", "math"], "covey eval A --ensemble B C."),
        (["eval", "demo", "--dataset", "demo", "--reward", "demo", "--k", "0"], "pass@0 is no share"),
        (
            ["eval", "demo", "--dataset", "demo", "--reward", "demo", "--batch-size", "0"],
            "--batch-size 0 must be at least 1",
        ),
        (["eval", "demo", "--dataset", "demo", "--reward", "demo", "--num-samples", "-1"], "--num-samples -1 must be"),
        (["demo", "--steps", "-3"], "--steps -3 must be at least 1."),
        (["doctor", "demo", "--seeds", "3"], "--seeds is not an option here. One run is checked"),
        (["doctor", "--from-run", "runs/x"], "covey doctor runs/x/train.yaml"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(words, said, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_typo_is_answered_before_anything_heavy_is_imported():
    code = (
        "import sys; from covey.cli import main; main(['train', '--max-step', '1']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_debug_may_stand_before_the_verb():
    with pytest.raises(ConfigError, match="--jsn is not an option here"):
        main(["--debug", "env", "--jsn"])


def test_debug_shows_the_traceback():
    shown = covey("env", "--jsn", "--debug")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr


@pytest.mark.slow
def test_an_unexpected_error_is_short_and_says_how_to_see_more():
    code = (
        "import sys; import covey.cli.env as env; import covey.cli\n"
        "def boom(): raise RuntimeError('no such thing')\n"
        "env.facts = boom\n"
        "sys.exit(covey.cli.main(['env']))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert "\nunexpected RuntimeError: no such thing\n" in f"\n{shown.stderr}"
    assert "--debug" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("covey.cli.env.facts", interrupt)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_env_is_one_json_object_without_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:word@example.org")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    shown = covey("env", "--json")
    found = json.loads(shown.stdout)
    assert found["environment"]["HF_TOKEN"] == "(set)"
    assert found["environment"]["HF_ENDPOINT"] == "https://(hidden)@example.org"
    assert found["environment"]["TOKENIZERS_PARALLELISM"] == "false"
    assert "hf_secret" not in shown.stdout
    assert "torch" in found["packages"]


def test_a_reader_that_stops_reading_is_no_error():
    code = "import sys; from covey.cli import main; sys.exit(main(['train', '--help-all']))"
    shown = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" | head -1'], capture_output=True, text=True, check=False
    )
    assert shown.stdout.startswith("usage: covey train")
    assert "BrokenPipe" not in shown.stderr


def test_a_full_disk_under_stdout_is_one_sentence_and_exit_code_74():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "covey", "train", "--help-all"]
        shown = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert shown.returncode == 74
    assert shown.stderr == "error: the result cannot be written to stdout: No space left on device.\n"


def test_what_is_printed_cannot_steer_the_terminal(capsys):
    result("a\x1b[31mb\tc\nd\u202ee")
    say("x\x1b]0;title\x07y")
    shown = capsys.readouterr()
    assert shown.out == "ab\tc\nd\ufffde\n"
    assert shown.err == "xy\n"


@pytest.mark.parametrize(
    "words, code, act",
    [
        (["--version"], 0, ""),
        (["nosuch"], 2, ""),
        (["env"], 1, "cli._run = lambda words: 1 / 0;"),
        (["env"], 75, "cli._run = lambda words: sys.exit(75);"),
    ],
)
def test_a_process_whose_exit_is_held_up_says_so_and_ends_with_its_own_code(words, code, act):
    script = (
        f"import sys, threading, time; import covey.cli as cli; threading.Thread(target=time.sleep, args=[50]).start(); {act}"
        f"cli._PATIENCE_SECONDS, cli._LONGEST_EXIT_SECONDS = 0.05, 0.1; sys.argv = ['covey', *{words}]; sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == code
    assert done.stderr.count("a library holds this process up") == 1


def test_help_through_a_pipe_fits_the_terminal_that_it_is_read_on():
    terminal, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for stderr, width in ((ours, 72), (subprocess.DEVNULL, 110)):
        words = [sys.executable, "-m", "covey", "eval", "--help"]
        page = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True, check=True
        ).stdout
        widest = max(len(line) for line in page.splitlines() if not line.startswith("  $"))
        assert width - 10 < widest <= width
    os.close(terminal)
    os.close(ours)
