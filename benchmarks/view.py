"""`covey view` on a large run, in a real Chromium: how long a reader waits, and how much memory the server and the page take.

    python benchmarks/view.py              # 100,000 steps and 1,000,000 completions: about half an hour, 6 GB of disk for as long
    python benchmarks/view.py --small      # a quick look: 2,000 steps and 20,000 completions

The run is made by Covey's own writers in a temporary folder (`benchmarks/view_run.py`). The server is `covey view` in a process of its
own; it keeps nothing on the disk, so its first visit comes while it still reads the run. A wait ends when the picture is on the screen: the page says it has drawn, and
two frames have passed. Medians of `--repeats`, the slowest beside them. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright
from view_run import EVERY, NEEDLE, THINGS, Size, make, write_rollouts

from covey.monitor.view.prompts import ORDERS, STATES

CHROMIUM = "/usr/bin/chromium"
READY, QUICK = 1500.0, 200.0
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
FOLLOWS_DRAG = 20
TYPING = 150
"""Milliseconds without a key after which a number is looked up."""
ARRIVALS = 60


class Waits:
    """How long each thing took, in milliseconds, with the target it has."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.targets: dict[str, float | None] = {}

    def add(self, name: str, milliseconds: float, target: float | None) -> None:
        self.found.setdefault(name, []).append(milliseconds)
        self.targets[name] = target
        print(f"{name}: {milliseconds:.0f} ms", file=sys.stderr, flush=True)

    def table(self) -> str:
        lines = ["| what the reader waits for | median ms | slowest | target |", "|---|--:|--:|--:|"]
        for name, waits in self.found.items():
            target = self.targets[name]
            middle = statistics.median(waits)
            said = "" if target is None else f"< {target:.0f}" + ("" if middle < target else " **missed**")
            lines.append(f"| {name} | {middle:.0f} | {max(waits):.0f} | {said} |")
        return "\n".join(lines)


class Server:
    """`covey view FOLDER` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "covey", "view", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        self.address = next(word for word in said.split() if word.startswith("http"))
        self.started = time.monotonic()
        while not self._answers():
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self.ask("runs")
        except OSError:
            return False
        return True

    def ask(self, call: str) -> Any:
        with urllib.request.urlopen(f"{self.address}api/{call}", timeout=60) as reply:
            return json.load(reply)

    def wait_until_indexed(self) -> float:
        """Seconds since the start until everything was read."""
        while True:
            left = [run["indexed"] for run in self.ask("runs")["runs"]]
            if left and all(one["bytes"] >= one["of"] and not one["files_left"] and one["of"] for one in left):
                return time.monotonic() - self.started
            time.sleep(0.2)

    def memory(self) -> tuple[float, float]:
        """Resident megabytes now, and the most there were."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        words = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
        return int(words["VmRSS"]) / 1024, int(words["VmHWM"]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def visit(browser: Browser) -> Iterator[Page]:
    """A page of a visitor who was never here: no cache, no storage."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto("about:blank")
    yield page
    context.close()


def ready(page: Page, address: str, mark: str = "drawn") -> float:
    """Milliseconds until an address shows its curves (`drawn`) or its list (`listed`)."""
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_function(f"() => document.documentElement.dataset.{mark}")
    page.evaluate(FRAMES)
    return 1000 * (time.perf_counter() - start)


def after(page: Page, act: Callable[[], Any], mark: str = "drawn") -> float:
    """Milliseconds from an act until the page has drawn or listed anew."""
    before = page.evaluate(f"document.documentElement.dataset.{mark} ?? ''")
    start = time.perf_counter()
    act()
    page.wait_for_function(f"() => document.documentElement.dataset.{mark} !== {json.dumps(before)}")
    page.evaluate(FRAMES)
    return 1000 * (time.perf_counter() - start)


def curves(page: Page, waits: Waits) -> None:
    """Zoom by key and by hand, back to all steps, smoothing, and down the page of all metrics."""
    for key, name in (("+", "zoom in (key)"), ("ArrowLeft", "move along (key)"), ("0", "all steps (key)")):
        waits.add(f"curves: {name}", after(page, partial(page.keyboard.press, key)), QUICK)
    box = page.locator("canvas").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 80, y, steps=FOLLOWS_DRAG)
    waits.add("curves: zoom by dragging, after the button is let go", after(page, page.mouse.up), QUICK)
    waits.add("curves: smoothing", after(page, lambda: page.get_by_label("Smoothing").select_option("50")), QUICK)
    after(page, lambda: page.get_by_label("Smoothing").select_option("1"))
    after(page, lambda: page.keyboard.press("0"))
    page.get_by_label("all metrics").check()
    page.wait_for_function("() => document.querySelectorAll('figure').length > 40")
    page.wait_for_timeout(300)
    for _ in range(3):
        waits.add("curves: scroll to plots not drawn yet", after(page, lambda: page.mouse.wheel(0, 1000)), QUICK)
        page.wait_for_timeout(200)


def browse(page: Page, waits: Waits, turn: int) -> None:
    """Filters, orders and searches in the list of groups, and one group whole; in each turn other words, as answers are remembered."""
    listed = lambda act: after(page, act, "listed")
    waits.add("rollouts: scroll to the next rows", listed(lambda: page.evaluate(
        "document.querySelector('.side').scrollTop = 1e9")), QUICK)  # fmt: skip
    for label in ("cut off", "rewards differ"):
        waits.add(f"rollouts: filter '{label}'", listed(lambda label=label: page.get_by_label(label).check()), QUICK)
        listed(lambda label=label: page.get_by_label(label).uncheck())
    for order in ("highest reward", "biggest gain", "longest"):
        choose = lambda order=order: page.get_by_label("Order").select_option(order)
        waits.add(f"rollouts: order '{order}'", listed(choose), QUICK)
    listed(lambda: page.get_by_label("Order").select_option("newest"))
    search = page.get_by_label("Search prompts and completions")
    waits.add("search: common words, first rows", listed(lambda: search.fill(THINGS[turn % len(THINGS)])), QUICK)
    waits.add("search: rare words, first answer", listed(lambda: search.fill(NEEDLE[: len(NEEDLE) - turn])), QUICK)
    for name in ("words that are nowhere, all completions searched", "the same words again"):
        listed(lambda: search.fill(""))
        start = time.perf_counter()
        search.fill(f"a heron of iron {turn}")
        page.get_by_text("all were searched").wait_for()
        waits.add(f"search: {name}", 1000 * (time.perf_counter() - start), None if name.startswith("words") else QUICK)
    listed(lambda: search.fill(""))
    row = page.locator(".row").nth(1)
    start = time.perf_counter()
    row.click()
    page.locator(".completion").first.wait_for()
    page.evaluate(FRAMES)
    waits.add("rollouts: open a group", 1000 * (time.perf_counter() - start), QUICK)


def prompts(page: Page, waits: Waits, address: str) -> None:
    """The page of prompts: every state, every order, the next rows, another threshold, and one prompt's groups."""
    listed = lambda act: after(page, act, "prompts")
    waits.add("prompts: first rows", ready(page, f"{address}#prompts", "prompts"), READY)
    for state in (*STATES, "forgotten", "all"):
        press = lambda state=state: page.get_by_role("button", name=f"{state} ", exact=False).first.click()
        waits.add(f"prompts: '{state}'", listed(press), QUICK)
    for order in ORDERS:
        choose = lambda order=order: page.get_by_label("Order").select_option(order)
        waits.add(f"prompts: order '{order}'", listed(choose), QUICK)
    page.wait_for_timeout(300)  # for the rows below the screen
    waits.add("prompts: scroll to the next rows", listed(lambda: page.evaluate("scrollTo(0, 1e9)")), QUICK)
    page.evaluate("scrollTo(0, 0)")
    threshold = lambda: page.get_by_label("Threshold of a right answer").fill("1.2")
    waits.add(
        f"prompts: another threshold ({TYPING} ms of it the pause after typing)", listed(threshold), QUICK + TYPING
    )
    waits.add("prompts: open one", after(page, lambda: page.locator(".said a").first.click(), "listed"), QUICK)


def spreads(page: Page, waits: Waits, address: str) -> None:
    """The pages of lengths, policy and rewards, and what is chosen on them; a page is complete with its whole sample."""
    ready(page, f"{address}#rollouts", "listed")
    for key, name in (("5", "lengths"), ("6", "policy"), ("7", "rewards")):
        press = partial(page.keyboard.press, key)
        waits.add(f"{name}: from another page (key)", after(page, press, "spread"), READY)
    for key, name in (("5", "lengths"), ("6", "policy"), ("7", "rewards")):
        waits.add(f"{name}: again (key)", after(page, partial(page.keyboard.press, key), "spread"), QUICK)
    score = lambda: page.get_by_label("Reward", exact=True).select_option("brief")
    waits.add("rewards: spread of another", after(page, score, "spread"), QUICK)
    waits.add("runs (key)", after(page, lambda: page.keyboard.press("1"), "ready"), QUICK)
    waits.add("differences (key)", after(page, lambda: page.keyboard.press("8"), "ready"), QUICK)
    waits.add("facts (key)", after(page, lambda: page.keyboard.press("9"), "ready"), QUICK)


def going_on(page: Page, waits: Waits, address: str) -> None:
    """The lists while new completions arrive (`arriving`): each wait may be the first after they did."""
    ready(page, f"{address}#prompts", "prompts")
    for state in ("flaky", "unsolved", "all"):
        page.wait_for_timeout(700)
        press = lambda state=state: page.get_by_role("button", name=f"{state} ", exact=False).first.click()
        waits.add("while the run goes on: prompts, another state", after(page, press, "prompts"), QUICK)
    for order in ("biggest loss", "lowest reward", "last seen"):
        page.wait_for_timeout(700)
        choose = lambda order=order: page.get_by_label("Order").select_option(order)
        waits.add("while the run goes on: prompts, another order", after(page, choose, "prompts"), QUICK)
    after(page, lambda: page.keyboard.press("3"), "listed")
    for order in ("biggest gain", "longest", "newest"):
        page.wait_for_timeout(700)
        choose = lambda order=order: page.get_by_label("Order").select_option(order)
        waits.add("while the run goes on: rollouts, another order", after(page, choose, "listed"), QUICK)


@contextmanager
def arriving(folder: Path, seed: int) -> Iterator[None]:
    """Two steps of rollouts a second, renamed into place as Covey does; they are gone afterwards."""
    last = max(int(path.stem.split("-")[1]) for path in (folder / "rollouts").iterdir() if path.suffix == ".parquet")
    steps = range(last + EVERY, last + EVERY * ARRIVALS, EVERY)
    done = threading.Event()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        write_rollouts(Path(scratch), steps, 100, seed)
        made = sorted((Path(scratch) / "rollouts").iterdir())
        bring = lambda: [path.replace(folder / "rollouts" / path.name) for path in made if not done.wait(0.5)]
        thread = threading.Thread(target=bring)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            for path in made:
                (folder / "rollouts" / path.name).unlink(missing_ok=True)


def page_memory(browser: Browser, page: Page) -> tuple[float, float]:
    """Megabytes: the JavaScript heap of the page, and what the largest process that draws pages holds."""
    session = page.context.new_cdp_session(page)
    heap = {
        m["name"]: m["value"]
        for m in (session.send("Performance.enable"), session.send("Performance.getMetrics"))[1]["metrics"]
    }
    sizes = [
        one.memory_info().rss
        for one in psutil.Process().children(recursive=True)
        if "--type=renderer" in " ".join(one.cmdline())
    ]
    return heap["JSHeapUsedSize"] / 2**20, max(sizes) / 2**20


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()


def measure(browser: Browser, folder: Path, repeats: int) -> tuple[Waits, list[str]]:
    waits, told = Waits(), []
    for _ in range(repeats):
        with serving(folder) as server, visit(browser) as page:
            waits.add("first visit: curves, nothing read yet", ready(page, f"{server.address}#curves"), READY)
        with serving(folder) as server, visit(browser) as page:
            waits.add(
                "first visit: the list of groups, nothing read yet",
                ready(page, f"{server.address}#rollouts", "listed"),
                READY,
            )
        with serving(folder) as server, visit(browser) as page:
            waits.add(
                "first visit: prompts, nothing read yet", ready(page, f"{server.address}#prompts", "prompts"), READY
            )
    with serving(folder) as server:
        told.append(f"everything read {server.wait_until_indexed():.1f} s after the start of the server")
        told.append("server then {:.0f} MB resident, at most {:.0f}".format(*server.memory()))
        for turn in range(repeats):
            with visit(browser) as page:
                waits.add("later visit: curves", ready(page, f"{server.address}#curves"), READY)
                curves(page, waits)
                drawn = page_memory(browser, page)
            with visit(browser) as page:
                waits.add("later visit: the list of groups", ready(page, f"{server.address}#rollouts", "listed"), READY)
                browse(page, waits, turn)
                listed = page_memory(browser, page)
            with visit(browser) as page:
                prompts(page, waits, server.address)
            with visit(browser) as page:
                spreads(page, waits, server.address)
            with arriving(folder, turn), visit(browser) as page:
                going_on(page, waits, server.address)
        told.append("server {:.0f} MB resident after all of it, at most {:.0f}".format(*server.memory()))
    told.append("page of curves: JavaScript {:.0f} MB, process {:.0f} MB".format(*drawn))
    told.append("page of rollouts: JavaScript {:.0f} MB, process {:.0f} MB".format(*listed))
    return waits, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--small", action="store_true", help="2,000 steps, 20,000 completions")
    parser.add_argument("--run", type=Path, help="a folder made before (None: made now and removed after)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped and the run removed
    size = Size(2_000, 20_000) if given.small else Size(given.steps, given.completions)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = given.run or Path(scratch) / "run"
        if given.run is None:
            start = time.monotonic()
            make(folder, size, given.seed)
            print(f"made in {time.monotonic() - start:.0f} s", flush=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        waits, told = measure(browser, folder, given.repeats)
        browser.close()
    print(waits.table())
    print("\n".join(f"* {line}" for line in told))
    print(f"* load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
