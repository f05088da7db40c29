"""`covey compare` as a user meets it: tables, JSON, Markdown and HTML of run folders, and one sentence for what cannot be compared."""

import json
import logging
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folders import write_run

from covey.cli import main
from kit import rest_nightly

EVIL = "<script>alert(1)</script>|`x`"


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch):
    logger = logging.getLogger("covey")
    before = logger.handlers[:], logger.level, logger.propagate
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("covey.cli.output.start_logging", lambda: None)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def write_sides(folder, gain, seeds=3, count=80, **config):
    """Two sides of runs; the second is right on `gain` more of the questions."""
    rng = np.random.default_rng(8)
    base = rng.random(count) < 0.5
    for name, more in (("base", 0.0), ("fast", gain)):
        for seed in range(seeds):
            right = base | (rng.random(count) < more)
            flipped = right ^ (rng.random(count) < 0.05)
            options = {"learning_rate": 1e-3, **config} if name == "fast" else {}
            write_run(folder / f"{name}-{seed}", seed=seed, scores={0: base, 2: base, 4: flipped}, **options)
    return [str(path) for path in sorted(folder.iterdir())]


def test_a_true_difference_is_said_in_a_sentence_with_interval_and_seeds(tmp_path, capsys):
    assert main(["compare", *write_sides(tmp_path, gain=0.5)]) == 0
    shown = capsys.readouterr().out
    last = shown.strip().splitlines()[-1]
    form = r"B \(fast\) is better than A \(base\) by (\d+\.\d) points, 95% (\d+\.\d) to (\d+\.\d), p = \S+, 3 seeds, 80 questions\."
    value, low, high = map(float, re.fullmatch(form, last).groups())
    assert 0 < low < value < high
    assert re.search(r"config: learning_rate +1e-05 +0.001", shown)


def test_no_difference_is_said_to_be_none_and_how_large_a_one_would_be_found(tmp_path, capsys):
    assert main(["compare", *write_sides(tmp_path, gain=0.0)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("No difference can be told: B (fast) is ")
    assert re.search(r"a true difference of \d+\.\d points would be found 4 times in 5\.$", last)


def test_one_seed_each_says_that_it_is_of_these_runs_alone(tmp_path, capsys):
    assert main(["compare", *write_sides(tmp_path, gain=0.5, seeds=1)]) == 0
    shown = capsys.readouterr().out
    assert "1 seed each, so of these two runs alone" in shown
    assert "note: one seed alone: A (base-0), B (fast-0)" in shown


def test_json_has_everything_and_stands_alone_on_stdout(tmp_path, capsys):
    paths = write_sides(tmp_path, gain=0.5)
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (effect,) = found["results"][0]["effects"]
    assert effect["is_real"]
    assert effect["low"] < effect["value"] < effect["high"]
    assert effect["seeds"] == [3, 3]
    assert [side["name"] for side in found["sides"]] == ["base", "fast"]
    assert found["differences"][0]["name"] == "learning_rate"
    held_out = found["curves"][0]["lines"]
    assert [line["steps"] for line in held_out] == [[0, 2, 4], [0, 2, 4]]
    assert all(
        low <= mean <= high for low, mean, high in zip(*(held_out[1][k] for k in ("low", "mean", "high")), strict=True)
    )


def test_a_comma_makes_sides_by_hand_and_each_takes_runs_one_by_one(tmp_path, capsys):
    paths = write_sides(tmp_path, gain=0.5, seeds=2)
    assert main(["compare", f"{paths[0]},{paths[2]}", f"{paths[1]},{paths[3]}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[run["seed"] for run in side["runs"]] for side in found["sides"]] == [[0, 0], [1, 1]]
    assert any("several runs of seed 0" in caution for caution in found["cautions"])
    assert main(["compare", *paths[:2], "--each", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sides"]) == 2


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.outside, self.texts = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.outside += [
            value for name, value in attributes if name in ("src", "href", "action") or name.startswith("on")
        ]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_html_report_stands_alone_and_shows_hostile_text_as_text(tmp_path, capsys):
    paths = write_sides(tmp_path / "runs", gain=0.5, run_note=EVIL)
    assert main(["compare", *paths, "--html", str(tmp_path / "out" / "report.html")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert page.outside == []
    assert {"svg", "polygon", "polyline", "table"} <= page.tags
    assert EVIL in page.texts
    assert any("B (fast) is better than A (base)" in part for part in page.texts)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)


def test_one_evaluation_of_several_seeds_is_a_bar():
    from covey.evaluation.compare.curves import Curve, line_of
    from covey.evaluation.compare.svg import svg_of

    line = line_of([[(4.0, 0.1)], [(4.0, 0.5)]])
    picture = svg_of(Curve(name="eval/reward", title="held-out reward", scale=1.0, lines=[line]), ["A"])
    bar = re.search(r'<polyline points="([^"]+)" stroke="[^"]+" stroke-width="6"', picture)
    (x, low), (same_x, high) = (place.split(",") for place in bar[1].split())
    assert x == same_x
    assert float(low) - float(high) > 50, "it is as long as the two are apart, downwards in SVG"


def test_a_side_that_is_named_like_a_tag_is_text_in_pictures_too(tmp_path):
    for name in ("<img src=x onerror=alert(1)>\x1b[31m\x01-0", "other-0"):
        write_run(tmp_path / name, scores={4: [0, 1, 1, 0]}, learning_rate=len(name))
    paths = [str(path) for path in tmp_path.iterdir()]
    assert main(["compare", *paths, "--html", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md")]) == 0
    assert "img" not in Page((tmp_path / "r.html").read_text()).tags
    assert "<img" not in (tmp_path / "r.md").read_text().replace("\\<img", "")
    for picture in (tmp_path / "r-curves").iterdir():
        ET.fromstring(picture.read_text())


def test_the_markdown_report_has_its_pictures_beside_it(tmp_path, capsys):
    paths = write_sides(tmp_path / "runs", gain=0.5, run_note=EVIL)
    assert main(["compare", *paths, "--markdown", str(tmp_path / "report.md")]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "<script" not in text.replace("\\<script", "")
    named = re.findall(r"!\[[^]]+\]\(<([^>]+)>\)", text)
    assert len(named) >= 3
    for name in named:
        assert (tmp_path / name).read_text().startswith("<svg")
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| config: run")}
    assert columns == {4}, "a bar in a value does not make a column"


@pytest.mark.parametrize(
    "words, said",
    rest_nightly(
        [
            (["{a}", "{b}"], "differ in nothing but the seed"),
            (["{a}", "{none}"], "has no evaluation"),
            (["{a}", "{c}", "--set", "other"], "was not evaluated on a set 'other'; it has eval"),
            (["{a},{b}", "{c}", "--each"], "give one of the two"),
            ([], "covey compare needs runs"),
            (["{a}"], "needs two runs or more"),
            (["{a}", "{a}"], "named twice"),
            (["{a}", "{here}/nothing"], "nothing does not exist"),
            (["{a}", "{c}", "--score", "style"], "--score style: every run has reward, reward/match"),
            (["{a}", "{c}", "--step", "3"], "not evaluated at step 3; it was at 4"),
            (["{a}", "{c}", "--threshold", "high"], "threshold=high cannot be read as a number"),
        ],
        4,
    ),
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, capsys, words, said):
    write_run(tmp_path / "a", scores={4: [0, 1]})
    write_run(tmp_path / "b", seed=1, scores={4: [0, 1]})
    write_run(tmp_path / "c", scores={4: [1, 1]}, beta=0.1)
    write_run(tmp_path / "none", beta=0.2)
    places = {"here": tmp_path, **{name: tmp_path / name for name in ("a", "b", "c", "none")}}
    assert main(["compare", *(word.format(**places) for word in words)]) == 2
    shown = capsys.readouterr().err.strip()
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_a_damaged_file_of_answers_is_named(tmp_path, capsys):
    for name, rate in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, scores={4: [0, 1]}, learning_rate=rate)
    (tmp_path / "b" / "evaluations" / "eval" / "step-000004.parquet").write_bytes(b"PAR1 broken")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "step-000004.parquet cannot be read" in capsys.readouterr().err


@pytest.mark.nightly
def test_looking_at_runs_waits_for_no_torch(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, rate in ((a, 1), (b, 2)):
        write_run(folder, scores={4: [0, 1, 1]}, learning_rate=rate)
    verbs = (
        ["compare", a, b, "--html", tmp_path / "r.html"],
        ["report", a, "-o", tmp_path / "report.html"],
        ["plot", a, "-o", tmp_path / "plot.svg"],
        ["checkpoints", "list", a],
    )
    code = (
        "import sys; from covey.cli import main\n"
        f"for words in {[[*map(str, words)] for words in verbs]!r}:\n"
        "    assert main(words) == 0, words\n"
        "    assert 'torch' not in sys.modules, words"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
