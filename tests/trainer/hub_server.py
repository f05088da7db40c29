"""A stand-in for the Hugging Face hub on this machine: makes repositories and branches, takes commits, can refuse or fail."""

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from kit import http_server


class Repositories:
    """What was uploaded: `commits` in order, each `(repository, branch, message, {path: bytes})`."""

    def __init__(self):
        self.made, self.branches, self.commits, self.tokens = {}, [], [], set()
        self.status = None
        """Answer every request so, when set."""
        self.commit_status = None
        """Answer commits so, when set."""
        self.waits = threading.Event()
        """Commits wait until it is set."""
        self.answers = threading.Event()
        """No request that changes something is answered until it is set."""
        self.waits.set()
        self.answers.set()

    @property
    def messages(self):
        return [message for _, _, message, _ in self.commits]

    def files(self, index=-1):
        return self.commits[index][3]


def _handler(repositories):
    class Hub(BaseHTTPRequestHandler):
        def answer(self, status, body):
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            self.answer(404, {"error": "nothing to read here"})

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            repositories.answers.wait(20)
            repositories.tokens.add(self.headers.get("Authorization"))
            if repositories.status is not None:
                self.answer(repositories.status, {"error": "the hub says no"})
            elif self.path == "/api/repos/create":
                asked = json.loads(content)
                name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
                repositories.made.setdefault(name, asked)
                host = f"http://{self.headers['Host']}/{name}"
                self.answer(200, {"url": host, "name": name, "id": name})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"warnings": [], "errors": []})
            elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", self.path):
                repositories.branches.append(match[2])
                self.answer(200, {})
            elif re.fullmatch(r"/api/models/(.+)/preupload/(.+)", self.path):
                asked = json.loads(content)["files"]
                modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
                self.answer(200, {"files": modes})
            elif match := re.fullmatch(r"/api/models/(.+)/commit/([^?]+).*", self.path):
                repositories.waits.wait(20)
                if repositories.commit_status is not None:
                    self.answer(repositories.commit_status, {"error": "the disk of the hub is full"})
                    return
                lines = [json.loads(line) for line in content.splitlines()]
                message = next(one["value"]["summary"] for one in lines if one["key"] == "header")
                files = {
                    one["value"]["path"]: base64.b64decode(one["value"]["content"])
                    for one in lines
                    if one["key"] == "file"
                }
                repositories.commits.append((match[1], match[2], message, files))
                url = f"http://{self.headers['Host']}/{match[1]}/commit/{len(repositories.commits):040x}"
                self.answer(200, {"commitUrl": url, "commitOid": f"{len(repositories.commits):040x}"})
            else:
                self.answer(404, {"error": f"{self.path} is not known"})

        def log_message(self, *words):
            return

    return Hub


@contextmanager
def serving():
    """The address of a running hub, and what it holds."""
    repositories = Repositories()
    with http_server(_handler(repositories)) as address:
        try:
            yield address, repositories
        finally:
            repositories.waits.set()
            repositories.answers.set()
