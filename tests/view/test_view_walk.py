"""Every page and dialog in a real Chromium, over healthy, poor and strange runs: what is shown is true and can be reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_runs import BAD

from covey.monitor.view import Library
from covey.runs import RunFolder, evaluations, manifest
from covey.types import Alert, Completion, Group, Prompt
from kit import rest_nightly

pytestmark = pytest.mark.slow  # a browser
NONSENSE = re.compile(r"\[object|undefined|NaN")
PAGES = ("runs", "curves", "rollouts", "prompts", "lengths", "policy", "rewards", "compare", "facts")
SAID = "the reward fell"


def group(texts: list[str], rewards: list[float], question: str = "2 + 2 =") -> Group:
    completions = [Completion(token_ids=torch.tensor([1, 2]), text=text, finish="stop") for text in texts]
    prompt = Prompt(uid=f"0:{question}", token_ids=(1,), text=question)
    return Group(prompt=prompt, completions=tuple(completions), rewards=torch.tensor(rewards)[:, None])


def written(folder: Path, *, seed: int = 0, steps: int = 30, beta: float = 0.0, bad: bool = False) -> RunFolder:
    run = RunFolder.create(folder)
    found = run.describe(args={"seed": seed, "beta": beta, "output_dir": str(folder)})
    manifest.write(folder / manifest.NAME, {**found, "git": None})  # whose diff may hold any word
    for step in range(1, steps + 1):
        reward = float("nan") if bad and step % 3 == 0 else 0.4 + 0.01 * step + 0.02 * seed
        logs = {"reward": reward, "rewards/right/mean": reward, "rewards/short/mean": 0.5, "kl": 0.00101 + step * 1e-6,
                "frac_reward_zero_std": 0.25, "num_tokens": 100.0}  # fmt: skip
        run.append_metrics(step, logs, {"step": 0.5, "learn": 0.25})
        if step % 10 == 0 or step == 1:
            groups = [group(["four", "four", "it is five or six", "it is four or six"], [1.0, 1.0, 0.0, 0.5 + seed])]
            run.write_rollouts(step, groups, ["right"])
            rows = evaluations.rows_of([*groups, group(["x", "y"], [0.0, 1.0], "3 + 3 =")], ["right"], [1.0])
            run.write_evaluation(step, "eval", {"eval_reward": 0.5, "eval_rewards/right/mean": 0.5}, rows)
    run.append_alert(
        Alert(
            rule="r",
            severity="warning",
            said=SAID,
            step=max(1, steps // 2),
            evidence={"a": {"b": [1]}},
            try_this=("x",),
        )
    )
    run.close()
    return run


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, served: Callable[..., Any]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("walk") / "runs"
    for seed in range(3):
        written(folder / f"seed-{seed}", seed=seed)
    written(folder / "nans", beta=0.5, bad=True)
    written(folder / "one-step", beta=0.7, steps=1)
    for name in ("empty files", "nothing in every field", "lists in every field", "folders in place of files",
                 "rollouts with columns of other types", "rollouts that are a pipe"):  # fmt: skip
        (folder / name).mkdir()
        BAD[name](folder / name)
    (folder / "sparse").mkdir()
    (folder / "sparse" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "reward": 1}\n')
    (folder / "sparse" / "alerts.jsonl").write_text('{"step": 1, "said": "x"}\n{}\n{"step": 2}\n')
    (folder / "sparse" / "events.jsonl").write_text('{"step": 1}\n{"kind": 3}\n')
    library = Library([folder])
    library.refresh()
    with served(library, watch=True) as client:
        yield client.address + "/"


def go(page: Any, address: str, page_name: str, *runs: str, more: str = "") -> None:
    page.goto("about:blank")
    page.goto(f"{address}#{page_name}?{'&'.join(f'run={run}' for run in runs)}{more}")
    page.wait_for_function("name => document.documentElement.dataset.ready === name", arg=page_name)
    page.wait_for_timeout(400)


def all_text(page: Any) -> str:
    """All text, that of closed details and of labels among it."""
    return str(
        page.evaluate("""() => { document.querySelectorAll('details').forEach((one) => { one.open = true; });
        const labels = [...document.querySelectorAll('*')].flatMap((one) => [one.title, one.getAttribute('aria-label'), one.placeholder, one.getAttribute('href')]);
        return document.body.textContent + ' ' + labels.filter(Boolean).join(' '); }""")
    )


SETS = [("seed-0", "seed-1", "nans"), ("nothing in every field",), ("folders in place of files", "seed-0"), ("nans",),
        ("one-step",), ("sparse",), ("empty files",), ("lists in every field",), ("rollouts that are a pipe", "seed-0"),
        ("rollouts with columns of other types",)]  # fmt: skip


@pytest.mark.parametrize(["runs"], rest_nightly([(one,) for one in SETS], 1), ids=" and ".join)
def test_no_page_ever_shows_what_a_program_says_for_nothing(runs: tuple[str, ...], page: Any, address: str) -> None:
    for name in PAGES:
        go(page, address, name, *runs)
        assert not (found := NONSENSE.search(all_text(page))), (name, found)
        assert page.inner_text("main").strip()
    go(page, address, "rollouts", runs[0])
    for row in page.locator(".row").all()[:3]:
        row.click()
        page.wait_for_timeout(200)
        assert not NONSENSE.search(all_text(page))
    go(page, address, "curves", *runs, more="&x=time&seeds=1&smooth=10")
    for figure in page.locator("figure").all()[:4]:
        figure.hover(position={"x": 120, "y": 100})
    assert not NONSENSE.search(all_text(page))


@pytest.fixture
def page(blank: Any) -> Any:
    blank.set_default_timeout(20_000)
    yield blank
    blank.wrong = [said for said in blank.wrong if "422" not in said and "404" not in said]  # what a bad run answers


@pytest.mark.nightly
def test_the_dialog_of_keys_names_them(page: Any, address: str) -> None:
    go(page, address, "runs")
    page.keyboard.press("?")
    told = page.inner_text("dialog")
    assert "colour tokens by the next quantity" in told
    assert not NONSENSE.search(told)


def test_held_out_results_and_groups_without_signal_are_in_the_table(page: Any, address: str) -> None:
    go(page, address, "runs")
    row = page.locator("tbody tr").filter(has=page.get_by_role("link", name="seed-0", exact=True))
    assert row.locator("td[data-label='best held-out']").inner_text() == "0.500"
    page.locator(".columns summary").click()
    page.locator(".columns label", has_text="groups without signal").click()
    assert row.locator("td[data-label='groups without signal']").inner_text() == "0.250"


def test_a_narrow_window_sorts_runs_by_name_too(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    go(page, address, "runs")
    page.get_by_role("button", name="run", exact=True).click()
    names = [link.inner_text() for link in page.locator("tbody tr a").all() if link.inner_text().startswith("seed-")]
    assert names == ["seed-2", "seed-1", "seed-0"]


def test_held_out_curves_and_each_reward_are_drawn_at_first(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0")
    shown = [figure.get_attribute("data-metric") for figure in page.locator("figure").all()]
    assert {"eval_reward", "rewards/right/mean", "rewards/short/mean"} <= set(shown)
    assert "eval_rewards/right/mean" not in shown  # the only held-out reward is drawn once, as eval_reward
    figure = page.locator('figure[data-metric="eval_reward"]')
    assert "95% interval" in figure.inner_text()
    figure.locator(".u-over").hover(position={"x": 150, "y": 80})
    assert re.search(r"seed-0: 0\.5\d* \(.+ to .+\)", figure.locator(".tip").inner_text())


@pytest.mark.nightly
def test_small_numbers_on_an_axis_differ(page: Any, address: str) -> None:
    go(page, address, "runs")
    for places in (
        [0.001, 0.0011, 0.0012],
        [0.0, 0.002, 0.004],
        [1e-6, 2e-6, 3e-6],
        [10.01, 10.02, 10.03],
        [0, 5e5, 1e6],
        [-2, 0, 2],
    ):
        texts = page.evaluate("async (places) => (await import('/dom.js')).axisTexts(places)", places)
        assert len(set(texts)) == len(places), texts


@pytest.mark.nightly
def test_an_open_first_bin_says_where_it_ends(page: Any, address: str) -> None:
    go(page, address, "runs")
    marks = "async (edges) => (await import('/heat.js')).begins(edges)"
    assert page.evaluate(marks, [None, -0.5, 0, 0.5, None]) == ["< -0.5", "-0.5", "0.0", "0.5"]
    assert page.evaluate(marks, [None, 2, None]) == ["< 2", "2"]
    assert page.evaluate(marks, [0, 1, 2]) == ["0", "1"]


def ink(page: Any, colour: str, metric: str = "reward") -> int:
    """Pixels of about this colour in a plot."""
    return int(page.evaluate("""([metric, wanted]) => { const canvas = document.querySelector(`figure[data-metric="${metric}"] canvas`);
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data; let count = 0;
        for (let at = 0; at < data.length; at += 4) if (Math.abs(data[at] - wanted[0]) + Math.abs(data[at + 1] - wanted[1]) + Math.abs(data[at + 2] - wanted[2]) < 24 && data[at + 3] > 200) count += 1;
        return count; }""", [metric, [int(colour[at : at + 2], 16) for at in (1, 3, 5)]]))  # fmt: skip


@pytest.mark.nightly
def test_a_press_on_the_legend_hides_a_run_and_its_alerts(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0", "seed-2")
    colour = page.evaluate("async () => (await import('/state.js')).colourOf('seed-2')")
    assert ink(page, colour) > 20
    button = page.locator(".legend button").filter(has_text="seed-2")
    button.press("Enter")
    page.wait_for_function("() => location.hash.includes('hide=seed-2')")
    page.wait_for_timeout(500)
    assert ink(page, colour) == 0
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    page.wait_for_timeout(500)
    assert ink(page, colour) > 20


def test_an_alert_is_on_the_curves_of_its_own_run_only(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0", "one-step")
    for title, said in (("rewards of groups (seed-0)", True), ("rewards of groups (one-step)", False)):
        figure = page.locator("figure").filter(has_text=title)
        figure.scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        box = figure.locator(".u-over").bounding_box()
        tips = []
        for at in range(0, int(box["width"]), 4):
            page.mouse.move(box["x"] + at, box["y"] + 60)
            tips.append(figure.locator(".tip").text_content())
        assert any("of seed-0" in tip for tip in tips) == said


def test_seeds_are_joined_to_a_mean_with_a_band(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0", "seed-1", "seed-2", "nans")
    page.get_by_label("mean over seeds").check()
    figure = page.locator('figure[data-metric="reward"]')
    figure.get_by_text("lowest to highest").wait_for()
    figure.locator(".u-over").hover(position={"x": 150, "y": 80})
    assert "mean of 3 seeds" in figure.locator(".tip").inner_text()
    assert "nans" in figure.locator(".tip").inner_text()


def test_curves_lie_over_time_and_tokens_and_a_stretch_of_them_is_one_of_steps(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0")
    page.get_by_label("Axis").select_option("tokens")
    page.wait_for_timeout(500)
    figure = page.locator('figure[data-metric="reward"]')
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
    page.wait_for_timeout(100)
    assert "tokens" in figure.locator(".tip").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 80, steps=6)
    page.mouse.up()
    page.wait_for_function("() => /from=1\\d/.test(location.hash)")
    page.get_by_label("Axis").select_option("time")
    page.wait_for_function("() => location.hash.includes('x=time')")


def test_all_values_are_saved_as_csv_and_a_picture_with_title_and_legend(page: Any, address: str) -> None:
    go(page, address, "curves", "seed-0", "nans")
    with page.expect_download() as saved:
        page.get_by_label("Save reward as CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert lines[0] == "step,seed-0: reward,nans: reward"
    assert lines[3].endswith(",nan")
    assert len(lines) == 31
    with page.expect_download() as picture:
        page.get_by_label("Save reward as PNG").click()
    content = picture.value.path().read_bytes()
    height = page.evaluate("""() => document.querySelector('figure[data-metric="reward"] canvas').height""")
    assert int.from_bytes(content[20:24], "big") >= height + 40  # a title above, a legend below


@pytest.mark.nightly
def test_identical_completions_are_folded_and_two_are_compared(page: Any, address: str) -> None:
    go(page, address, "rollouts", "seed-0", more="&step=10&group=0")
    page.locator(".completion").first.wait_for()
    assert page.locator(".completion").count() == 3
    assert "2 identical" in page.locator(".completion").first.inner_text()
    page.get_by_text("identical ones folded").click()
    assert page.locator(".completion").count() == 4
    for at in (2, 3):
        page.locator(f'[data-compare="{at}"]').check()
    assert page.locator(".compared del").all_inner_texts() == ["five"]
    assert page.locator(".compared ins").all_inner_texts() == ["four"]


def test_on_a_phone_every_value_of_facts_and_every_column_of_runs_is_in_sight(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    look = """(selector) => [...document.querySelectorAll(selector)].filter((one) => { const box = one.getBoundingClientRect();
        return box.width > 0 && (box.right > 391 || box.left < 0); }).map((one) => one.textContent.slice(0, 80))"""
    for name, selector in (
        ("runs", "table.runs td"),
        ("facts", "table.facts td, .fact code"),
        ("compare", "table.diff td"),
    ):
        go(page, address, name, "seed-0", "nans")
        all_text(page)
        assert page.locator(selector).count() > 2
        assert page.evaluate(look, selector) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 391
    page.close()


@pytest.mark.nightly
def test_on_a_phone_words_of_figures_are_whole_filters_make_way_and_a_tap_tells_a_value(
    browser: Any, address: str
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    cut = "() => [...document.querySelectorAll('figcaption *')].filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map((one) => one.textContent)"
    for name in ("curves", "lengths", "rewards"):
        go(page, address, name, "seed-0")
        page.wait_for_function("() => document.querySelectorAll('figcaption small').length > 1")
        assert page.evaluate(cut) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= 391
    page.locator(".heat canvas").first.tap()
    page.get_by_text("completions").last.wait_for()
    assert page.locator(".tip:visible").count() == 1
    go(page, address, "rollouts", "seed-0")
    page.get_by_label("Order").wait_for()
    page.locator(".row").first.tap()
    page.locator(".completion").first.wait_for()
    assert not page.get_by_label("Order").is_visible()
    context.close()


CONTRAST = """() => { const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const behind = (one) => { for (let at = one; at; at = at.parentElement) { const colour = getComputedStyle(at).backgroundColor;
        if (/^rgb\\(/.test(colour)) return colour; } return 'rgb(255, 255, 255)'; };
    const bad = [];
    for (const one of document.querySelectorAll('body *')) {
        const style = getComputedStyle(one);
        if (!one.getClientRects().length) continue;
        const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        const isMark = one.matches('.mark, canvas *');
        if (isText && !isMark && ratio(style.color, behind(one)) < 4.5) bad.push(['text', one.tagName, one.className, one.textContent.slice(0, 30)]);
        if (isMark && ratio(style.color, behind(one)) < 3) bad.push(['mark', one.textContent, style.color]);
        if (one.matches('button:not(.plain), select, input:not([type=checkbox])') && (/, 0\\)$/.test(style.borderTopColor) || ratio(style.borderTopColor, behind(one.parentElement)) < 3)) bad.push(['border', one.tagName, one.textContent]);
    }
    return bad; }"""


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", rest_nightly(["light", "dark"], 1))
def test_text_and_the_borders_of_controls_have_enough_contrast(scheme: str, browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=scheme)
    for name in PAGES:
        go(page, address, name, "seed-0", "nans", "sparse", more="&step=10&group=0" if name == "rollouts" else "")
        assert page.evaluate(CONTRAST) == [], name
    page.close()


@pytest.mark.parametrize(
    ("page_name", "pressed", "then"),
    [("prompts", ".states button >> nth=1", "state=solved"), ("runs", "tbody a", "#curves")],
)
def test_a_click_counts_though_the_run_goes_on_while_the_button_is_down(
    page_name: str, pressed: str, then: str, blank: Any, tmp_path: Path, served: Callable[..., Any]
) -> None:
    written(tmp_path / "runs" / "live", steps=1)
    library = Library([tmp_path / "runs"])
    library.refresh()
    with served(library, watch=True) as client:
        go(blank, f"{client.address}/", page_name, "live")
        box = blank.locator(pressed).first.bounding_box()
        blank.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
        blank.mouse.down()
        with (
            blank.expect_response(
                lambda reply: "api/runs" in reply.url and '"step":2' in reply.text().replace(" ", "")
            ),
            (tmp_path / "runs" / "live" / "metrics.jsonl").open("a") as metrics,
        ):
            metrics.write('{"step": 2, "reward": 0.9}\n')
        blank.wait_for_timeout(300)
        blank.mouse.up()
        blank.wait_for_function("then => location.hash.includes(then)", arg=then, timeout=5000)
