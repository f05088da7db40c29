"""A server that two training processes share: seen once by each, updated by the main one, and no wait for it is deaf to a stop."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_server import FakeServer

from forked import Forked, free_port, rank_environment
from kit import tiny_model, tiny_tokenizer

SCRIPT = """
import sys
import torch
from datasets import Dataset

sys.path.insert(0, sys.argv[1])
from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
args = GRPOConfig(
    sys.argv[2], use_vllm=True, vllm_mode="server", vllm_server_port=int(sys.argv[3]), vllm_server_timeout=200.0, max_steps=int(sys.argv[5]),
    num_generations=2, per_device_train_batch_size=2, max_completion_length=4, save_steps=1000, report_to="none", disable_tqdm=True,
    use_cpu=True, bf16=False, eval_strategy=sys.argv[4], eval_steps=1,
)
rows = Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(800)])
reward = lambda completions, **columns: [float(len(one)) for one in completions]
held_out = rows.select(range(2)) if sys.argv[4] == "steps" else None
model = tiny_model("qwen2", tie_word_embeddings=False)
GRPOTrainer(model, reward, args, rows, held_out, processing_class=tiny_tokenizer()).train()
"""


def until(look, seconds=200.0):
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, evaluates",
    [
        pytest.param(0, "no", marks=pytest.mark.nightly),
        (1, "steps"),
        pytest.param(1, "no", marks=pytest.mark.nightly),
        pytest.param(0, "steps", marks=pytest.mark.nightly),
    ],
)
def test_a_stop_is_heard_by_both_while_the_main_process_waits_for_a_lost_server(asked, evaluates, tmp_path):
    """`asked`: the process that gets the signal. With an evaluation at each step it is that which waits."""
    model, port = tiny_model("qwen2", tie_word_embeddings=False), free_port()
    with FakeServer(model, tiny_tokenizer()) as fake:
        words = ["-c", SCRIPT, Path(__file__).parents[1], tmp_path / "run", fake.port, evaluates, 400]
        ranks = [Forked(*words, env=rank_environment(rank, port)) for rank in range(2)]
        try:
            until(lambda: fake.calls.count("/update_weight_version") >= 3 or ranks[0].poll() is not None)
            assert fake.calls.count("/server_info") == 2, "each process has looked at the server once"
            fake.faults |= {"reload_weights": 503, "/health": 503}
            known = fake.calls.count("/health")
            until(lambda: fake.calls.count("/health") > known or ranks[0].poll() is not None)
            ranks[asked].send_signal(signal.SIGTERM)
            began = time.monotonic()
            codes = [rank.wait(150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
    assert codes == [75, 75], [rank.err for rank in ranks]
    assert time.monotonic() - began < 60, "the server would have been waited for longer"
    assert "The update failed" in ranks[0].err
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1
    assert ("The evaluation was left" in ranks[0].err) == (evaluates == "steps")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[5, 6], pytest.param([6], marks=pytest.mark.nightly)])
def test_a_server_lost_amid_a_rollout_is_sent_the_weights_and_asked_for_what_is_missing(lost, tmp_path):
    """Each process asks for a prompt in each of six rollouts: in the third both lose the answer by a restart, or one by its link."""
    model, port = tiny_model("qwen2", tie_word_embeddings=False), free_port()
    requests, restarted = itertools.count(1), threading.Event()

    def restart():
        fake.restart(model)
        restarted.set()

    def dies(body):
        if "prompt_logprobs" in body or (number := next(requests)) not in lost:
            return None
        if number == lost[-1] and len(lost) == 2:
            threading.Timer(0, restart).start()
        return "half"

    with FakeServer(model, tiny_tokenizer()) as fake:
        fake.faults["/v1/completions"] = dies
        words = ["-c", SCRIPT, Path(__file__).parents[1], tmp_path / "run", fake.port, "no", 6]
        ranks = [Forked(*words, env=rank_environment(rank, port)) for rank in range(2)]
        codes = [rank.wait(150) for rank in ranks]
        assert codes == [0, 0], [rank.err for rank in ranks]
        assert fake.calls.count("/update_weight_version") == 7, "once a step, and once after the loss"
        assert restarted.is_set() == (len(lost) == 2)
