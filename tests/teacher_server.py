"""A teacher behind an endpoint: /v1/completions of a model, for the tests of a served teacher."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler

import torch

from kit import http_server


@contextmanager
def serving(model, tokenizer, refuse=None, lasts=None, late=None):
    """/v1/completions of a model: `echo`, `logprobs` and `return_tokens_as_token_ids` as covey serve and vLLM answer them.

    After `lasts` requests it refuses, or answers `late` seconds later.
    """
    asked, stopped = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            is_unknown = max(body["prompt"]) >= model.config.vocab_size
            is_over = lasts is not None and len(asked) > lasts
            if is_over and late is not None:
                stopped.wait(late)
            status = refuse or (400 if is_unknown else 503 if is_over else 200)
            data = json.dumps(answer(body) if status == 200 else {}).encode()
            with suppress(ConnectionError):  # who asked has waited long enough
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    @torch.no_grad()
    def answer(body):
        ids = body["prompt"]
        is_by_id = body.get("return_tokens_as_token_ids")
        named = lambda token: f"token_id:{token}" if is_by_id else tokenizer.decode([token])
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        best = logp.topk(body["logprobs"])
        tops = [
            {named(token): value for token, value in [*zip(ids_at, values, strict=True), (own, float(row[own]))]}
            for ids_at, values, own, row in zip(
                best.indices.tolist(), best.values.tolist(), ids[1:], logp, strict=False
            )
        ]
        return {"choices": [{"logprobs": {"tokens": list(map(named, ids)), "top_logprobs": [None, *tops]}}]}

    with http_server(Handler) as address:
        try:
            yield f"{address}/v1", asked
        finally:
            stopped.set()
