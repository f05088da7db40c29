"""Words of `covey serve --learn` and `covey feedback` where something is missing or wrong: a sentence, before a model is loaded."""

import pytest

from covey.cli import main
from covey.cli.serve import FLAGS, settings_of


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "demo", "--learn"], "--learn needs --fixed-set"),
        (["serve", "demo", "--learn", "--fixed-set", "demo:test"], "--learn needs --reward"),
        (["serve", "demo", "--reward", "demo"], "--reward belongs to --learn"),
        (["serve", "demo", "--learn-users"], "--learn-users belongs to --learn"),
        (["serve", "demo", "--tolerance", "0.1"], "--tolerance belongs to --learn"),
        (
            ["serve", "demo", "--learn", "--fixed-set", "demo:test", "--reward", "demo"],
            "demo is no folder to keep versions in; give --learn-folder",
        ),
        (["feedback"], "does one of ID SCORE, --status and --rollback"),
        (["feedback", "chatcmpl-1"], "needs a score from -1 to 1"),
        (["feedback", "chatcmpl-1", "good"], "'good' is no score"),
        (["feedback", "chatcmpl-1", "1", "--url", "localhost"], "is no address"),
    ],
)
def test_what_is_missing_is_named(capsys, words, said):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_is_named(capsys):
    assert main(["feedback", "chatcmpl-1", "-1", "--url", "http://127.0.0.1:9/v1"]) != 0
    assert "http://127.0.0.1:9/v1/feedback does not answer" in capsys.readouterr().err


def test_a_fixed_set_too_small_for_the_tolerance_is_refused(capsys, tmp_path):
    words = ["serve", "demo", "--learn", "--fixed-set", "demo:test", "--fixed-set-prompts", "50", "--reward", "demo"]
    assert main([*words, "--learn-folder", str(tmp_path)]) == 2
    assert "the fixed set has 50 prompts, too few" in capsys.readouterr().err


def test_options_of_learning_reach_its_settings(tmp_path):
    options = {flag.name: flag.default for flag in FLAGS}
    options |= {
        "model": "demo",
        "dtype": "float32",
        "trust_remote_code": None,
        "use_cpu": True,
        "max_output_tokens": None,
    }
    options |= {"fixed_set": "demo:test", "reward": ["demo"], "learn_folder": str(tmp_path), "max_feedback_hours": 2.0}
    options |= {"learn_users": True, "tolerance": 0.1, "fixed_set_prompts": 60, "lora_r": 4}
    found = settings_of(options)
    assert (found.max_age_seconds, found.users, found.tolerance, found.lora_r) == (7200.0, True, 0.1, 4)
    assert (len(found.fixed_rows), found.folder, found.rewards) == (60, tmp_path, ("demo",))
