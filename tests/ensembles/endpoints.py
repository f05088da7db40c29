"""An OpenAI-compatible server on this machine, for members of an ensemble."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from kit import http_server


@contextmanager
def endpoint(reply):
    """An OpenAI-compatible server on this machine; `reply(body)` gives text, or a status code."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            answer = reply(body)
            is_text = isinstance(answer, str)
            choice = {"message": {"content": answer}, "finish_reason": "stop"}
            data = json.dumps({"choices": [choice]} if is_text else {}).encode()
            self.send_response(200 if is_text else answer)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with http_server(Handler) as address:
        yield f"{address}/v1", asked
