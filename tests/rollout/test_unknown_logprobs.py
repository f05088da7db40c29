"""Tokens whose sampler reports no log-probabilities reach a listener as such, not as certain."""

import torch

from covey.rollout import SamplingParams
from covey.rollout.calls import report
from covey.rollout.live import LiveRequest
from covey.types import Completion, Prompt


class Heard:
    def __init__(self):
        self.tokens, self.ends = [], []

    def token(self, sample, token, logprob, top):
        self.tokens.append((sample, token, logprob))

    def ended(self, sample, *, stopped):
        self.ends.append((sample, stopped))


def test_an_unknown_log_probability_is_none():
    heard = Heard()
    request = LiveRequest(Prompt(uid="0", token_ids=(1,)), (1, 2), 4, params=SamplingParams(), listener=heard)
    ids = torch.tensor([5, 6])
    drawn = Completion(token_ids=ids, text="", finish="stop", logprobs=torch.tensor([-0.5, -1.0]))
    report(request, (Completion(token_ids=ids, text="", finish="length"), drawn))
    assert heard.tokens == [(0, 5, None), (0, 6, None), (1, 5, -0.5), (1, 6, -1.0)]
    assert heard.ends == [(0, False), (1, True)]
