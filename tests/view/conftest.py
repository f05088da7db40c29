"""A run that was really trained, and the real server over real HTTP."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.monitor.view import Library, make_app
from kit import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(4)]


def share_of_e(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [text.count("e") / (1 + len(text)) for text in completions]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def train(folder: Path, rows: list[dict[str, str]] = ROWS, **changed: Any) -> Path:
    """A run of four steps with rollouts at steps 1, 2 and 4."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 4,
        "rollout_log_steps": 2,
        "disable_tqdm": True,
        "seed": 7,
    }
    args = GRPOConfig(**{**given, **changed})
    model = tiny_model("qwen2")
    GRPOTrainer(
        model, [share_of_e, length], args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
    ).train()
    return folder


@pytest.fixture(scope="session")
def trained() -> Callable[..., Path]:
    return train


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two trained runs, `first` and `second`, that differ in their learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "first")
    train(folder / "second", learning_rate=1e-3)
    return folder


class Client:
    """Asks the server; answers are `(status, headers, body)`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, Any, bytes]:
        request = urllib.request.Request(self.address + path, headers=headers or {}, method=method)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=20) as reply:
                return reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def get(self, call: str, **query: Any) -> Any:
        """The JSON of an endpoint."""
        status, _, body = self.ask(f"/api/{call}?{urllib.parse.urlencode(query, doseq=True)}")
        assert status == 200, body
        return json.loads(body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def serving(library: Library, token: str | None = None, *, watch: bool = False) -> Iterator[Client]:
    """The server on a free port of this machine, until the block ends."""
    config = uvicorn.Config(make_app(library, token, watch=watch), port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def served() -> Callable[..., Any]:
    return serving


@pytest.fixture(scope="session")
def client_of() -> Callable[[str], Client]:
    """A client of the server at an address."""
    return Client


@pytest.fixture(scope="session")
def client(runs: Path) -> Iterator[Client]:
    """Of a server of both runs, everything indexed."""
    library = Library([runs])
    library.refresh()
    with serving(library) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; a test that asks for it is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for name in names if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def blank(browser: Any) -> Iterator[Any]:
    """An empty page; in the end no script of it may have failed, nor said that something is wrong (`page.wrong`)."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.wrong = []
    page.on("console", lambda said: page.wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    yield page
    assert page.wrong == []
    page.close()
