"""Pictures of the built site at the width of a desk and of a phone, light and dark: `.venv/bin/python docs/screenshots.py`.

Fails if a page is wider than its window or off its centre, prints an error to the console, or requests anything of another host. Needs
`make docs` first, a Chromium, and a font with Chinese characters (`fonts-wqy-microhei`).
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

HTML = Path(__file__).parents[1] / ".site" / "html"
OUT = HTML.parent / "pictures"
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
PAGES = (
    "index.html",
    "readme.html",
    "tutorials/first-run.html",
    "mathematics.html",
    "options.html",
    "troubleshooting.html",
    "alerts.html",
    "from-verl.html",
    "reference/algorithms.html",
    "zh/index.html",
    "zh/choosing.html",
    "zh/from-trl.html",
    "zh/troubleshooting.html",
    "zh/plan.html",
    "zh/distributed.html",
    "zh/algorithms.html",
)
OFF_CENTRE = """() => {
  const box = document.querySelector(".md-content__inner").getBoundingClientRect();
  return (box.left + box.right - document.body.clientWidth) / 2;
}"""
"""Pixels between the middle of the text and that of the window, without its scrollbar."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of each request."""

    def log_message(self, *said: object) -> None:
        """Nothing."""


def main() -> int:
    """Draw every page of PAGES; returns 1 if one is wrong."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    chromium = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
                page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
                page.on("pageerror", lambda error: wrong.append(str(error)))
                page.on(
                    "request",
                    lambda asked: None if asked.url.startswith((home, "data:", "blob:")) else wrong.append(asked.url),
                )
                for name in PAGES if scheme == "light" else PAGES[:3]:
                    page.goto(f"{home}/{name}", wait_until="load")
                    page.wait_for_timeout(300)
                    page.screenshot(path=OUT / f"{name.replace('/', '-')[:-5]}-{size}-{scheme}.png")
                    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    if wide > 0:
                        wrong.append(f"{name} at {size}: {wide} pixels wider than its window")
                    off = page.evaluate(OFF_CENTRE)
                    if abs(off) > 1:
                        wrong.append(f"{name} at {size}: its text is {off} pixels off the centre")
                page.close()
        browser.close()
    print("\n".join(wrong) or f"{len(list(OUT.glob('*.png')))} pictures in {OUT}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
