"""The page in a real Chromium: what is on it, what can be done with it, and what text from a run can do to it: nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.monitor.view import Library

pytestmark = pytest.mark.slow  # Chromium starts and stops for it

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'></svg>",
    "</pre><iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "javascript:window.hit=1",
    "{{constructor.constructor('window.hit = 1')()}}",
]


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, trained: Callable[..., Path], served: Callable[..., Any]
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "first")
    rows = [{"prompt": attack, "answer": attack} for attack in ATTACKS]
    trained(folder / "<b>second<b>", rows, seed=8)
    with served(Library([folder]), watch=True) as client:
        yield client.address + "/"


@pytest.fixture
def page(blank: Any, address: str) -> Iterator[Any]:
    page = blank
    page.outside = []
    page.on("dialog", lambda dialog: (page.wrong.append(dialog.message), dialog.dismiss()))
    page.on(
        "request", lambda request: page.outside.append(request.url) if not request.url.startswith(address) else None
    )
    page.goto(address)
    page.get_by_role("link", name="first").wait_for()
    yield page
    assert [url for url in page.outside if not url.startswith(("data:", "blob:"))] == []


def go(page: Any, name: str) -> None:
    page.locator("#nav").get_by_text(name, exact=True).click()
    page.get_by_role("heading", name=name, exact=True).wait_for()


def test_the_overview_lists_the_runs(page: Any) -> None:
    table = page.inner_text("table")
    assert "first" in table
    assert "<b>second<b>" in table  # as text
    assert "finished" in table


def test_curves_are_drawn_and_metrics_can_be_found(page: Any) -> None:
    go(page, "Curves")
    page.locator("canvas").first.wait_for()
    few = page.locator("canvas").count()
    assert few >= 2
    page.get_by_placeholder("Find a metric").fill("grad_norm")
    page.get_by_text("grad_norm").first.wait_for()
    page.wait_for_function("count => document.querySelectorAll('canvas').length < count", arg=few)


def test_a_group_shows_its_completions_side_by_side(page: Any) -> None:
    go(page, "Rollouts")
    page.get_by_text("group 0").first.click()
    page.get_by_text("#3", exact=True).wait_for()
    body = page.inner_text("main")
    assert "advantage" in body
    assert "share_of_e" in body
    assert "length" in body


def test_completions_are_searched_and_filtered(page: Any) -> None:
    go(page, "Rollouts")
    page.get_by_text("group 0").first.wait_for()
    page.get_by_placeholder("Search prompts and comple").fill("no such words anywhere")
    page.get_by_text("group 0").first.wait_for(state="detached")


@pytest.mark.nightly
def test_differences_between_runs_are_listed(page: Any) -> None:
    for place in range(2):
        page.locator("table input[type=checkbox]").nth(place).check()
    go(page, "Differences")
    page.get_by_text("seed").first.wait_for()


def test_text_of_a_run_is_shown_and_never_obeyed(page: Any, address: str) -> None:
    page.goto(f"{address}#rollouts?run=%3Cb%3Esecond%3Cb%3E")
    page.reload()
    page.get_by_text("group 0").first.wait_for()
    seen = set()
    for row in page.get_by_text(re.compile(r"^group \d+$")).all()[:8]:
        row.click()
        page.get_by_text("#0", exact=True).wait_for()
        seen |= {attack for attack in ATTACKS if attack in page.inner_text("main")}
    for name in ("Runs", "Curves", "Differences", "Facts"):
        go(page, name)
        page.wait_for_timeout(300)
    assert seen, "the hostile prompts were shown"
    assert page.evaluate("window.hit") is None
    assert page.locator("main script, main iframe, main img, main svg[onload]").count() == 0


def test_the_page_is_usable_from_the_keyboard(page: Any) -> None:
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_the_page_fits_a_phone_and_the_dark(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(address)
    page.get_by_role("link", name="first").wait_for()
    go(page, "Curves")
    page.locator("canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 391  # nothing sticks out
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert sum(int(part) for part in ink[ink.index("(") + 1 : -1].split(",")[:3]) > 500  # light on dark
    page.close()


@pytest.mark.nightly
def test_the_rollouts_open_on_the_group_that_tells_most(page: Any) -> None:
    go(page, "Rollouts")
    page.wait_for_function("() => location.hash.includes('group=')")
    assert page.locator(".row[aria-current]").count() == 1
    page.get_by_text("#3", exact=True).wait_for()


@pytest.mark.nightly
def test_columns_are_chosen_sorted_and_grouped(page: Any) -> None:
    go(page, "Runs")
    page.locator("summary", has_text="Columns").click()
    page.get_by_label("entropy").check()
    page.get_by_label("model").uncheck()
    heads = page.inner_text("table.runs thead")
    assert "entropy" in heads
    assert "model" not in heads
    page.get_by_label("Group runs by").select_option("state")
    assert page.locator("tr.group").count() >= 1
    page.locator("table.runs thead button", has_text="state").click()
    assert page.locator("th[aria-sort=descending]").inner_text() == "state"


@pytest.mark.nightly
def test_tags_and_notes_are_kept_in_the_browser(page: Any) -> None:
    go(page, "Runs")
    field = page.locator("input.note").first
    field.fill("baseline")
    field.press("Enter")
    page.reload()
    page.locator("input.note").first.wait_for()
    assert page.locator("input.note").first.input_value() == "baseline"
    page.get_by_label("Filter runs").fill("baseline")
    page.wait_for_function("() => document.querySelectorAll('table.runs tbody tr').length === 1")


def test_a_note_that_is_being_written_outlives_its_page_and_reaches_another_tab(browser: Any, address: str) -> None:
    context = browser.new_context()
    writing, reading = context.new_page(), context.new_page()
    for tab in (writing, reading):
        tab.goto(f"{address}#runs")
        tab.locator("input.note").first.wait_for()
    writing.locator("input.note").first.press_sequentially("half a th")
    writing.reload()  # without Enter, and no field is left
    reading.wait_for_function("() => document.querySelector('input.note').value === 'half a th'")
    context.close()


def test_a_run_has_a_sentence_on_top_and_its_alerts_above_the_charts(page: Any) -> None:
    go(page, "Curves")
    page.locator(".stories p").first.wait_for()
    assert "at step" in page.locator(".stories p").first.inner_text()
    page.locator(".alerts").wait_for()
    page.locator("canvas").first.wait_for()
    tops = page.evaluate(
        "['.stories', '.alerts', '.plots'].map((name) => document.querySelector(name).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)


@pytest.mark.nightly
def test_the_axis_of_values_can_be_set(page: Any) -> None:
    go(page, "Curves")
    page.locator("canvas").first.wait_for()
    page.get_by_label("Highest value").fill("7")
    page.get_by_label("Highest value").press("Enter")
    page.wait_for_function("() => location.hash.includes('high=7')")
