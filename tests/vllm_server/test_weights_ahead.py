"""Weights of a server that writes ahead, each for the orders that they are of."""

from __future__ import annotations

import pytest
from fake_server import FakeServer

from covey.rollout import SamplingParams
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.ahead import ServedWeights
from covey.rollout.worker import Order
from kit import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("takes_newest", "expected"), [(False, [0, 0, 1, 4, 2, 3]), (True, [0, 1, 1, 6, 2, 3])])
def test_an_order_has_its_weights_also_if_it_begins_late_or_the_run_went_back(takes_newest, expected, tmp_path):
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with FakeServer(model, tiny_tokenizer()) as fake:
        server = ServerSampler(model, tiny_tokenizer(), eos_ids=[2], port=fake.port, directory=tmp_path)
        weights, versions = ServedWeights(server, takes_newest=takes_newest), []

        def begin(at_least: int, *published: int) -> None:
            for version in published:
                weights.collect(model, version)
            weights.begin(Order(0, (), 1, SamplingParams(max_tokens=1), at_least))
            versions.append(server.version)

        weights.attach(lambda message: None, lambda: None)
        begin(0, 0)
        begin(0, 1)  # late: the learner has made its next step
        begin(1)
        begin(4, 4, 5, 6)
        weights.attach(lambda message: None, lambda: None)
        begin(2, 2)  # after a return to a checkpoint
        begin(3, 3)
    assert versions == expected
