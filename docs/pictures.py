"""The pictures of the README and of the site, from runs of the demo: `.venv/bin/python docs/pictures.py [RUNS]`.

Without a folder of runs, `covey train demo` is run with three seeds first, in minutes on a CPU. Needs a Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parent / "pictures"
PORT = 8517
HOME = f"http://127.0.0.1:{PORT}"
SIZE = {"width": 1280, "height": 720}


def runs_of_the_demo(folder: Path) -> Path:
    """Three runs of the demo, which differ in their seed."""
    covey("train", "demo", "--seeds", "3", "--max-steps", "60", "--output-dir", str(folder / "demo"))
    return folder


def covey(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "covey", *words], check=True)


def shoot(page: Page, address: str, name: str) -> None:
    """A picture of an address of the viewer once it has drawn, light and dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.goto("about:blank")
        page.goto(f"{HOME}/{address}")
        page.wait_for_timeout(2500)
        page.screenshot(path=OUT / f"{name}-{scheme}.png")


def main(runs: Path) -> None:
    OUT.mkdir(exist_ok=True)
    covey(
        "plot",
        *(str(run) for run in sorted((runs / "demo").glob("seed-?"))),
        "-o",
        str(OUT / "curve.svg"),
        "--metrics",
        "reward",
    )
    chromium = next((place for name in ("chromium", "google-chrome") if (place := shutil.which(name))), None)
    server = subprocess.Popen([sys.executable, "-m", "covey", "view", str(runs / "demo"), "--port", str(PORT)])
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(HOME, timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
            shoot(page, "#rollouts", "rollouts")
            shoot(page, "#curves", "curves")
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else runs_of_the_demo(Path(folder)))
