"""Files around the project: workflows that call targets which exist, versions that agree, notes of a release."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load(ROOT / "docs/release.py")


def steps_of(file):
    for job in yaml.safe_load(file.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            run = step.get("run", "")
            names = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", run)
            values = matrix[names[0]] if names else [""]
            yield from (re.sub(r"\$\{\{ matrix\.\w+ \}\}", value, run) for value in values)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_targets_of_the_makefile(file):
    targets = [target for run in steps_of(file) for target in re.findall(r"\bmake ([\w.-]+)", run)]
    assert targets
    for target in targets:
        pattern = "smoke-%" if target.startswith("smoke-") else target
        assert re.search(rf"^{re.escape(pattern)}:", MAKEFILE, re.MULTILINE), target


def test_ci_runs_what_the_script_of_ci_runs():
    script = (ROOT / ".ci/run").read_text()
    of_script = {
        word for line in re.findall(r"^beside (.*)", script, re.MULTILINE) for word in line.split("#")[0].split()
    }
    targets = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]["strategy"]["matrix"][
        "target"
    ]
    assert {word for word in of_script if re.fullmatch(r"[a-z]+", word)} - {"dev"} <= set(targets)


@pytest.mark.parametrize("file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda file: file.name)
def test_templates_of_issues_are_forms(file):
    form = yaml.safe_load(file.read_text())
    if file.name != "config.yml":
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["type"] in ("textarea", "input", "markdown") for field in form["body"])


def test_the_version_is_the_same_everywhere():
    assert len(set(release.versions().values())) == 1


def test_the_notes_of_a_release_are_its_section_of_the_changelog():
    text = "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n* New.\n\n## 0.1.0 (2026-11-01)\n\n* Old.\n"
    assert release.notes(text, "0.2.0") == "* New.\n"
    assert release.notes(text, "0.1.0") == "* Old.\n"
    with pytest.raises(SystemExit, match="no section"):
        release.notes(text, "0.3.0")
    with pytest.raises(SystemExit, match="write the date"):
        release.notes("## 0.3.0 (unreleased)\n", "0.3.0")


@pytest.mark.parametrize("tag, said", [("0.1", "is no version"), ("v9.9.9", "says 0.1.0")])
def test_a_tag_that_is_not_the_version_is_refused(tag, said):
    with pytest.raises(SystemExit, match=said):
        release.main(tag)


def test_the_citation_has_what_a_citation_needs():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
