"""Pages that stay open in a real Chromium while a run begins, goes on, and is replaced by another of its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.monitor.view import Library
from covey.runs import RunFolder
from covey.types import Completion, Event, Group, Prompt

pytestmark = pytest.mark.slow  # a browser


def group(text: str) -> Group:
    completions = tuple(Completion(token_ids=torch.tensor([1]), text=f"{text} {n}", finish="stop") for n in range(2))
    return Group(
        prompt=Prompt(uid="0:0", token_ids=(1,), text=text), completions=completions, rewards=torch.eye(2)[:, :1]
    )


def begin(folder: Path, seed: int) -> RunFolder:
    run = RunFolder.create(folder)
    run.describe(args={"seed": seed, "output_dir": str(folder)})
    return run


def record(run: RunFolder, step: int, text: str) -> None:
    run.append_metrics(step, {"reward": 0.5})
    run.write_rollouts(step, [group(text)], ["right"])


@pytest.fixture
def opened(tmp_path: Path, blank: Any, served: Callable[..., Any]) -> Iterator[Callable[[str], Any]]:
    """Opens a page of the runs in `tmp_path / "runs"`, watched."""
    blank.set_default_timeout(120_000)  # a browser on a machine that others load; what is awaited comes in a second
    (tmp_path / "runs").mkdir()
    with served(Library([tmp_path / "runs"]), watch=True) as client:

        def open_page(name: str) -> Any:
            blank.goto(f"{client.address}/#{name}")
            blank.wait_for_function("name => document.documentElement.dataset.ready === name", arg=name)
            return blank

        yield open_page


def test_the_rollouts_of_a_run_that_begins_appear_and_later_ones_are_offered(tmp_path: Path, opened: Any) -> None:
    run = begin(tmp_path / "runs" / "run", seed=1)
    page = opened("rollouts")
    record(run, 1, "the first question")
    page.locator(".row").get_by_text("the first question").first.wait_for()
    record(run, 2, "the second question")
    page.locator(".stories", has_text="step 2").wait_for()
    page.get_by_role("button", name="show new groups (1)").click()
    page.locator(".row").get_by_text("the second question").first.wait_for()
    run.close()


def test_the_facts_of_a_run_follow_it_and_what_was_opened_stays_open(tmp_path: Path, opened: Any) -> None:
    run = begin(tmp_path / "runs" / "run", seed=1)
    page = opened("facts")
    page.locator("summary", has_text="versions").click()
    record(run, 3, "a question")
    run.append_events(3, [Event(kind="reward_error", said="a reward failed")])
    run.close()
    page.locator(".fact", has_text="state").get_by_text("finished").wait_for()
    assert "a reward failed" in page.text_content("main")
    assert page.locator("details", has_text="versions").first.get_attribute("open") is not None


def test_a_second_run_and_what_differs_in_it_appear_among_the_differences(tmp_path: Path, opened: Any) -> None:
    begin(tmp_path / "runs" / "one", seed=1).close()
    page = opened("compare")
    page.get_by_text("There is only one run here.").wait_for()
    begin(tmp_path / "runs" / "two", seed=2).close()
    page.get_by_text("Choose two or more").wait_for()


@pytest.mark.parametrize("name", ["rollouts", "prompts", "facts"])
def test_a_page_of_a_run_that_is_replaced_shows_the_other(name: str, tmp_path: Path, opened: Any) -> None:
    for seed, text in ((101_101_101, "the first question"), (202_202_202, "an altogether different one")):
        shutil.rmtree(tmp_path / "runs" / "run", ignore_errors=True)
        run = begin(tmp_path / "runs" / "run", seed)
        record(run, 1, text)
        run.close()
        if seed == 101_101_101:
            page = opened(name)
        shown = "101101101" if name == "facts" else "the first question"
        later = "202202202" if name == "facts" else "an altogether different one"
        expected = shown if seed == 101_101_101 else later
        page.wait_for_function("text => document.querySelector('main').textContent.includes(text)", arg=expected)
    assert shown not in page.text_content("main")
    forgive_missing(page)


def forgive_missing(page: Any) -> None:
    """While a folder is away, its run is not found: the browser logs the answer 404."""
    page.wrong[:] = [text for text in page.wrong if "404 (Not Found)" not in text]


@pytest.mark.parametrize("name", ["rollouts", "prompts", "lengths"])
def test_runs_that_come_and_go_can_be_chosen_and_leave_nothing(name: str, tmp_path: Path, opened: Any) -> None:
    page = opened(name)
    select = "document.querySelector(\"select[aria-label='Run']\")"  # none while the page is built anew
    names = f"() => {select} && [...{select}.options].map((one) => one.value).join()"
    for run_name, expected in (("b-run", "b-run"), ("a-run", "a-run,b-run")):
        run = begin(tmp_path / "runs" / run_name, seed=1)
        record(run, 1, f"a question of {run_name}")
        run.close()
        page.wait_for_function(f"expected => ({names})() === expected", arg=expected)
    assert page.get_by_label("Run", exact=True).input_value() == "b-run"  # the one that is shown
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    page.wait_for_function(f"() => ({names})() === ''")
    page.wait_for_function("() => !document.querySelector('main').textContent.includes('a question of')")
    with page.expect_response(lambda answer: "/api/runs" in answer.url):
        pass  # a beat later, nothing of them has come back
    assert "a question of" not in page.text_content("main")
    assert page.locator("canvas, .heat").count() == 0
    forgive_missing(page)
