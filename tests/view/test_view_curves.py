"""The page of curves in a real Chromium: zoom, smoothing, several runs, alerts, rewards by group, time by phase; and the keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.monitor.view import Library
from covey.runs import RunFolder
from covey.runs.metrics import JsonLines

pytestmark = pytest.mark.slow  # a browser and a training run
SAID = "the reward fell <b>and</b> stayed there"


def grown(folder: Path, steps: int, reward: float) -> None:
    """A run of many steps, as a training loop writes it."""
    run = RunFolder.create(folder)
    run.describe(args={"seed": 0, "learning_rate": reward})
    for step in range(1, steps + 1):
        logs = {"reward": reward + step / steps, "num_tokens": 500.0, "memory/learn_gb": 1.5}
        run.append_metrics(step, logs, {"rollout": 0.2, "reward": 0.1, "learn": 0.3, "step": 1.0})
    run.close()


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, trained: Callable[..., Path], served: Callable[..., Any]
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "real", beta=0.1)
    grown(folder / "long", 3000, 0.0)
    grown(folder / "other", 2000, 1.0)
    alert = {"step": 1000, "rule": "r", "severity": "error", "said": SAID, "evidence": {"slope": -1}, "try_this": ["x"]}
    JsonLines(folder / "long" / "alerts.jsonl").append(alert)
    library = Library([folder])
    library.refresh()
    with served(library, watch=True) as client:
        yield client.address + "/"


@pytest.fixture
def page(blank: Any) -> Any:
    blank.set_default_timeout(60_000)
    return blank


def curves(page: Any, address: str, *runs: str) -> None:
    page.goto(f"{address}#curves?{'&'.join(f'run={run}' for run in runs)}")
    page.wait_for_function("() => document.documentElement.dataset.drawn")


def plot(page: Any, metric: str) -> Any:
    return page.locator(f'figure[data-metric="{metric}"]')


def wait_for_address(page: Any, pattern: str) -> None:
    page.wait_for_function("pattern => new RegExp(pattern).test(location.hash)", arg=pattern)


def test_dragging_over_a_plot_shows_that_stretch_and_a_double_click_all(page: Any, address: str) -> None:
    curves(page, address, "long")
    box = plot(page, "reward").locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80, steps=8)
    page.mouse.up()
    wait_for_address(page, "from=")
    low, high = (int(re.search(rf"{name}=(\d+)", page.url)[1]) for name in ("from", "to"))
    assert 700 <= low <= 800
    assert 1450 <= high <= 1550
    assert page.get_by_label("From step").input_value() == str(low)
    plot(page, "reward").locator(".u-over").dblclick(position={"x": 200, "y": 80})
    wait_for_address(page, "^((?!from=).)*$")


def test_runs_lie_over_each_other_and_a_tooltip_names_both(page: Any, address: str) -> None:
    curves(page, address, "long", "other")
    plot(page, "reward").locator(".u-over").hover(position={"x": 100, "y": 80})
    tip = plot(page, "reward").locator(".tip")
    tip.wait_for()
    assert re.search(r"long: 0\.", tip.inner_text())
    assert re.search(r"other: 1\.", tip.inner_text())


@pytest.mark.nightly
def test_smoothing_is_kept_in_the_address(page: Any, address: str) -> None:
    curves(page, address, "long")
    page.get_by_label("Smoothing").select_option("50")
    wait_for_address(page, "smooth=50")


def test_an_alert_is_a_mark_on_the_curves_that_opens_what_was_seen(page: Any, address: str) -> None:
    curves(page, address, "long")
    area = plot(page, "reward").locator(".u-over")
    area.click(position={"x": area.bounding_box()["width"] / 3, "y": 40})  # step 1000 of 3000
    page.locator("details[open]").get_by_text("Evidence").wait_for()
    assert SAID in page.locator("details[open]").inner_text()  # as text


def test_rewards_of_groups_and_the_time_and_memory_of_steps_are_drawn(page: Any, address: str) -> None:
    curves(page, address, "real")
    for title in (
        "rewards of groups (real)",
        "rewards within groups (real)",
        "seconds by phase (real)",
        "tokens per second",
    ):
        figure = page.locator("figure").filter(has_text=title)
        figure.scroll_into_view_if_needed()
        figure.locator("canvas").wait_for()
    assert "rollout" in page.locator("figure").filter(has_text="seconds by phase").inner_text()
    curves(page, address, "long")
    page.get_by_placeholder("Find a metric").fill("memory")
    page.locator("figure").filter(has_text="memory in GB (long)").locator("canvas").wait_for()


def test_tokens_are_coloured_by_what_is_known_of_them(page: Any, address: str) -> None:
    page.goto(f"{address}#rollouts?run=real")
    page.locator(".row").first.click()
    page.locator(".completion span[data-at]").first.wait_for()
    offered = page.get_by_label("Colour tokens by").locator("option").all_inner_texts()
    assert {"colour: advantage", "colour: logprobs", "colour: kl"} <= set(offered)
    for quantity in ("logprobs", "kl"):
        page.get_by_label("Colour tokens by").select_option(quantity)
        page.wait_for_function(
            "() => document.querySelectorAll('.completion span[data-at][style*=background]').length > 8"
        )
    page.locator(".completion span[data-at]").first.hover()
    assert "kl" in page.locator(".token-facts").first.inner_text()


@pytest.mark.nightly
def test_every_stop_of_the_tab_key_can_be_seen_and_the_first_leads_past_the_links(page: Any, address: str) -> None:
    page.goto(f"{address}#rollouts?run=real")
    page.locator(".row").first.wait_for()
    look = (
        "(() => { const it = document.activeElement, box = it.getBoundingClientRect(); return [it.className || it.id, "
        "it !== document.body, getComputedStyle(it).outlineStyle !== 'none' && box.width > 0 && box.left >= 0]; })()"
    )
    stops = []
    page.keyboard.press("Tab")
    while len(stops) < 60 and (found := page.evaluate(look))[1]:
        stops.append(found)
        page.keyboard.press("Tab")
    assert stops[0][0] == "skip"
    assert [name for name, _, is_seen in stops if not is_seen] == []
    assert [name for name, *_ in stops].count("row") == 1  # the list is one stop; j and k move in it
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert "#rollouts" in page.url


@pytest.mark.nightly
def test_pages_and_groups_are_reached_by_keys(page: Any, address: str) -> None:
    page.goto(f"{address}#runs")
    page.get_by_role("link", name="real").wait_for()
    page.keyboard.press("2")
    page.wait_for_function("() => document.documentElement.dataset.drawn")
    page.keyboard.press("+")
    wait_for_address(page, "curves.*from=")
    page.goto(f"{address}#rollouts?run=real")
    page.locator(".row").first.wait_for()
    page.keyboard.press("n")
    page.locator(".completion").first.wait_for()
    wait_for_address(page, "group=")
    before = page.url
    page.keyboard.press("p")
    page.wait_for_function("before => location.href !== before", arg=before)
    page.keyboard.press("n")
    page.wait_for_function("before => location.href === before", arg=before)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"


@pytest.mark.nightly
def test_on_a_phone_a_title_stands_above_its_plot(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    curves(page, address, "real")
    for figure in page.locator("figure").all()[:4]:
        title, picture = (figure.locator(name).bounding_box() for name in ("figcaption b", ".picture"))
        assert title["y"] + title["height"] <= picture["y"] + 1
    assert page.locator("nav a").last.bounding_box()["y"] < 90  # the links fit in one row
    page.close()


@pytest.mark.nightly
def test_a_finger_sideways_over_a_plot_shows_that_stretch_and_a_double_tap_all(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    curves(page, address, "long")
    over = plot(page, "reward").locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    middle = box["y"] + box["height"] / 2
    session = context.new_cdp_session(page)
    touch = lambda kind, *points: session.send(
        "Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": middle} for x in points]}
    )
    touch("touchStart", box["x"] + 0.3 * box["width"])
    for part in (0.4, 0.5, 0.6, 0.7):
        touch("touchMove", box["x"] + part * box["width"])
    touch("touchEnd")
    wait_for_address(page, "from=")
    low, high = (int(re.search(rf"{name}=(\d+)", page.url)[1]) for name in ("from", "to"))
    assert 850 <= low <= 950
    assert 2050 <= high <= 2150
    for _ in range(2):
        touch("touchStart", box["x"] + 0.5 * box["width"])
        touch("touchEnd")
    wait_for_address(page, "^((?!from=).)*$")
    context.close()


def test_a_page_that_is_open_follows_a_run_that_grows(page: Any, tmp_path: Path, served: Callable[..., Any]) -> None:
    grown(tmp_path / "young", 5, 0.0)
    with served(Library([tmp_path]), watch=True) as client:
        curves(page, client.address + "/", "young")
        note = plot(page, "reward").locator("figcaption small")
        page.wait_for_function("() => document.querySelector('figcaption small').textContent === '1'")
        log = JsonLines(tmp_path / "young" / "metrics.jsonl")
        log.append({"step": 6, "reward": 0.375})
        page.wait_for_function("() => document.querySelector('figcaption small').textContent === '0.3750'")
        assert note.inner_text() == "0.3750"
        page.goto("about:blank")


@pytest.mark.nightly
def test_a_plot_is_saved_as_a_picture(page: Any, address: str) -> None:
    curves(page, address, "long")
    with page.expect_download() as saved:
        page.get_by_label("Save reward as PNG").click()
    assert saved.value.suggested_filename == "reward.png"
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")
