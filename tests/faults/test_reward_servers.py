"""A judge behind a real socket that refuses, answers slowly, cuts its answer short and comes back."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from covey.rewards import Scorer, reward
from kit import group


class Judge(BaseHTTPRequestHandler):
    """Answers by the server's mood: ok, slow, cut or broken."""

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mood = self.server.mood
        self.server.calls += 1
        body = json.dumps([float(len(text)) for text in texts]).encode()
        self.send_response(500 if mood == "broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if mood == "slow":
            for i in range(len(body) - 1):
                self.wfile.write(body[i : i + 1])
                if self.server.over.wait(0.2):
                    return
        self.wfile.write(body[:2] if mood == "cut" else body)

    def log_message(self, *args):
        return


@pytest.fixture
def server():
    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, address):
            return  # a client that gave up

    server = Quiet(("127.0.0.1", 0), Judge)
    server.mood, server.calls, server.over = "ok", 0, threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def scorer(server):
    @reward(streams=True, concurrency=2, timeout=0.5)
    def judge(completions, **columns):
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with urllib.request.urlopen(address, json.dumps(completions).encode(), timeout=5) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            error.close()
            raise

    scorer = Scorer([judge], isolate=False)
    yield scorer
    scorer.close()


def groups(count):
    return [group(["a", "bbb"], question=f"q{i}", uid=f"0:{i}") for i in range(count)]


def test_a_judge_that_flaps_costs_the_batches_in_which_it_is_down_and_no_more(server, scorer):
    kinds = []
    for mood in ("ok", "broken", "ok", "cut", "ok"):
        server.mood = mood
        scored = scorer.score(groups(2))
        kinds.append([None if not g.events else g.events[0].details["error"] for g in scored])
        assert all(g.rewards.isnan().all() or g.rewards[:, 0].tolist() == [1.0, 3.0] for g in scored)
    assert kinds == [[None] * 2, ["HTTPError"] * 2, [None] * 2, ["IncompleteRead"] * 2, [None] * 2]


def test_a_judge_that_drips_is_given_up_at_the_limit_and_not_asked_for_every_group(server, scorer):
    server.mood = "slow"
    scored = scorer.score(groups(40))
    assert all(g.rewards.isnan().all() for g in scored)
    assert server.calls <= 4  # of 40: the others are not waited for
    assert scored[0].events[0].kind == "reward_timeout"
    server.mood = "ok"
    assert not any(g.rewards.isnan().any() for g in scorer.score(groups(40)))
