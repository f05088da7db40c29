"""An OpenAI-compatible server on this machine, for members of an ensemble."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from kit import http_server


@contextmanager
def endpoint(reply):
    """An OpenAI-compatible server on this machine; `reply(body)` gives text, the fields of a message, or a status code."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            answer = reply(body)
            is_text = not isinstance(answer, int)
            message = dict(answer) if isinstance(answer, dict) else {"content": answer}
            choice = {"finish_reason": message.pop("finish_reason", "stop"), "message": message}
            data = json.dumps({"choices": [choice]} if is_text else {}).encode()
            self.send_response(200 if is_text else answer)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with http_server(Handler) as address:
        yield f"{address}/v1", asked
