"""One answer out of several: votes by hand, from models and endpoints, and evaluated with intervals on the command line."""

from __future__ import annotations

import json
import math

import pytest
from endpoints import endpoint

from covey import Ensemble, Member
from covey.cli import main
from covey.ensembles.answers import Candidate, answer_key, choose
from covey.errors import ConfigError
from kit import tiny_model, tiny_tokenizer

FIVE = [
    Candidate(text="so it is #### 7", source="a", reward=0.1),
    Candidate(text="12", source="a", reward=0.9),
    Candidate(text="The answer is 7.0", source="b", reward=0.3),
    Candidate(text=r"\boxed{8}", source="b", reward=math.nan),
    Candidate(text="7", source="b", reward=0.2),
]


@pytest.mark.parametrize(
    ("vote", "place", "support"),
    [
        ("majority", 2, 3 / 5),  # 7 three times; of those the one with the highest reward
        ("weighted", 1, 0.9 / 1.5),  # 0.9 for 12 against 0.6 for 7
        ("best", 1, 0.9),
    ],
)
def test_votes_by_hand(vote, place, support):
    assert choose(FIVE, vote) == (place, pytest.approx(support))


def test_of_equals_the_first_wins():
    equal = [Candidate(text=text, source="a") for text in ("b", "a", "a", "b")]
    assert choose(equal, "majority")[0] == 0
    assert choose(equal, "best")[0] == 0


@pytest.mark.parametrize(
    ("rewards", "vote", "place"),
    [
        ((-0.1, -0.1, -0.4), "weighted", 0),  # 0.3 twice and 0 from the lowest, where plain sums are -0.2 and -0.4
        ((-0.3, -0.3, -0.2), "weighted", 2),
        ((-1.0, -1.0, -1.0), "weighted", 0),  # nothing tells them apart: the most frequent
        ((-0.3, -0.2, math.nan), "best", 1),  # one that is not scored loses
        ((-0.3, -0.2, math.nan), "weighted", 1),
    ],
)
def test_rewards_below_zero_and_unknown_ones(rewards, vote, place):
    given = [Candidate(text=text, source="a", reward=x) for text, x in zip(("7", "7", "8"), rewards, strict=True)]
    assert choose(given, vote)[0] == place


def test_answers_without_a_number_are_the_same_as_texts():
    assert answer_key(" Paris\n") == answer_key("paris") != answer_key("Lyon")


def test_members_vote_and_a_reward_judges():
    words = {"m1": "Paris", "m2": "Lyon", "m3": "paris"}
    with endpoint(lambda body: words[body["model"]]) as (url, _):
        ensemble = Ensemble([Member(url, served_model_name=name) for name in words])
        voted = ensemble.answer("The capital of France?")
        assert (voted.text, voted.source, voted.support) == ("Paris", "m1", pytest.approx(2 / 3))
        assert [one.source for one in voted.candidates] == ["m1", "m2", "m3"]

        def likes(completions, wanted, **columns):
            return [float(text == word) for text, word in zip(completions, wanted, strict=True)]

        judged = ensemble.answer([{"role": "user", "content": "Which?"}], rewards=lambda completions, wanted, **k: likes([one[-1]["content"] for one in completions], wanted), wanted="Lyon")  # fmt: skip
        assert (judged.text, judged.source, judged.support) == ("Lyon", "m2", 1.0)


def test_an_answer_of_local_models_is_drawn_with_its_seed():
    tokenizer = tiny_tokenizer()
    ensemble = Ensemble([Member(tiny_model(seed=i), tokenizer=tokenizer, samples=2) for i in range(2)])
    draw = lambda seed: [one.text for one in ensemble.answer("2 + 2 =", max_tokens=6, seed=seed).candidates]
    assert draw(1) == draw(1) != draw(2)
    assert len(draw(1)) == 4


@pytest.mark.parametrize(("vote", "said"), [("best", "needs rewards"), ("most", "none of majority, weighted, best")])
def test_a_vote_that_cannot_be_taken_is_refused_before_a_model_is_loaded(vote, said):
    with pytest.raises(ConfigError, match=said):
        Ensemble(["hub/never-loaded"]).answer("2 + 2 =", vote)


@pytest.fixture
def place(tmp_path):
    for i, name in enumerate(("a", "b")):
        tiny_model(seed=i).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    rows = [{"prompt": f"{i} + 2 =", "answer": str(i + 2)} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "def even(completions, **columns):\n    return [float(len(text) % 2 == 0) for text in completions]\n"
    )
    return tmp_path


def words(place, *more):
    data, reward = str(place / "rows.jsonl"), f"{place / 'mine.py'}:even"
    return ["eval", f"{place / 'a'},samples=3", "--dataset", data, "--reward", reward, "--max-tokens", "6", *more]


def test_eval_gives_the_vote_and_each_member_with_intervals(place, capsys):
    others = ["--ensemble", f"{place / 'b'},samples=2", "--judge", f"{place / 'mine.py'}:even", "--json"]
    assert main(words(place, *others)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vote"] == "best"
    assert set(found["members"]) == {"a", "b"}
    ensemble = found["ensemble"]
    assert ensemble["accuracy"] >= max(one["accuracy"] for one in found["members"].values())  # the judge is the reward
    for one in (ensemble, *found["members"].values()):
        low, high = one["accuracy_interval"]
        assert low <= one["accuracy"] <= high
    assert found["difference"]["minus"] in ("a", "b")
    assert main(words(place, "--ensemble", str(place / "b"))) == 0
    assert "vote majority" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--vote", "best"], "--vote belongs to --ensemble"),
        (["--ensemble", "B", "--vote", "best"], "needs rewards"),
        (["--ensemble", "B", "--num-samples", "4"], "--num-samples does not apply with --ensemble"),
        (["--ensemble", "B", "--device", "cpu"], "--device does not apply with --ensemble"),
    ],
)
def test_eval_refuses_flags_that_would_not_act(place, more, said, capsys):
    assert main(words(place, *[str(place / "b") if word == "B" else word for word in more])) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_train_takes_an_ensemble_and_its_recipe_repeats_it(place, capsys):
    run = [
        "train",
        "--model",
        str(place / "a"),
        "--dataset",
        str(place / "rows.jsonl"),
        "--reward",
        f"{place / 'mine.py'}:even",
    ]
    run += [
        "--max-steps",
        "1",
        "--num-generations",
        "4",
        "--per-device-train-batch-size",
        "4",
        "--max-completion-length",
        "4",
    ]
    run += ["--use-cpu", "--bf16", "false", "--report-to", "none", "--learning-rate", "1e-4"]
    members = ["--ensemble", f"{place / 'b'},role=baseline,samples=2", "--ensemble-max-share", "0.4"]
    assert main([*run, *members, "--output-dir", str(place / "run"), "--ema-decay", "0.9"]) == 0
    line = json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["ensemble/b/asked"] == 1.0
    assert main(["train", "--from-run", str(place / "run"), "--output-dir", str(place / "again")]) == 0
    again = json.loads((place / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert {name: again[name] for name in line if name.startswith("ensemble/")} == {
        name: line[name] for name in line if name.startswith("ensemble/")
    }
    capsys.readouterr()
    assert main([*run, "--ensemble-threshold", "1", "--output-dir", str(place / "third")]) == 2
    assert "--ensemble-threshold belongs to --ensemble" in capsys.readouterr().err
