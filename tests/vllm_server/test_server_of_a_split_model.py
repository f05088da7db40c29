"""A server whose weights come from a model that FSDP2 splits over two processes: gathered a block at a time, sent once, proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_server import FakeServer
from safetensors.torch import load_file

from forked import Forked, free_port, rank_environment
from kit import tiny_model, tiny_tokenizer

SCRIPT = """
import json, sys
import torch
from datasets import Dataset

sys.path.insert(0, sys.argv[1])
from covey import GRPOConfig, GRPOTrainer
from covey.process.sharding import Shards
from kit import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
folder, port, processes, rank, lora = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
transport, group_port = sys.argv[8], int(sys.argv[9])
largest = [0]
blocks = Shards.each_block

def watched(shards):
    for module in blocks(shards):
        held = sum(p.numel() for p in module.parameters() if not hasattr(p, "to_local"))
        largest[0] = max(largest[0], held)
        yield module

Shards.each_block = watched
args = GRPOConfig(
    folder, use_vllm=True, vllm_mode="server", vllm_server_port=port, vllm_transport=transport, vllm_group_port=group_port, max_steps=3, num_generations=2, learning_rate=0.5, optim="sgd",
    per_device_train_batch_size=4 // processes, max_completion_length=4, save_strategy="no", report_to="none",
    disable_tqdm=True, use_cpu=True, bf16=False, logging_steps=1, fsdp=processes > 1, gradient_checkpointing=False,
)
rows = Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(12)])
reward = lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids]
model = tiny_model("qwen2", layers=3, tie_word_embeddings=sys.argv[7] == "tied")
peft = None
if lora != "full":
    from peft import LoraConfig, RandLoraConfig, VeraConfig
    kinds = {"lora": LoraConfig, "vera": VeraConfig, "randlora": RandLoraConfig, "saved": LoraConfig}
    saved = {"modules_to_save": ["lm_head"]} if lora == "saved" else {}
    peft = kinds[lora](r=2, target_modules=["q_proj", "v_proj"], **saved)
trainer = GRPOTrainer(model, reward, args, rows, processing_class=tiny_tokenizer(), peft_config=peft)
trainer.train()
trainer.save_model(folder + "/end")
if rank == 0:
    whole = sum(p.numel() for p in tiny_model("qwen2", layers=3, tie_word_embeddings=sys.argv[7] == "tied").parameters())
    print(json.dumps({"largest": largest[0], "whole": whole}))
"""


def trained(
    fake: FakeServer, folder: Path, processes: int, *, lora: str = "full", tied: bool = False, transport: str = "auto"
) -> dict[str, int]:
    port, group_port = free_port(), free_port()
    words = ["-c", SCRIPT, Path(__file__).parents[1], folder, fake.port, processes]
    ranks = []
    for rank in range(processes):
        env = {} if processes == 1 else rank_environment(rank, port)
        more = [rank, lora, "tied" if tied else "apart", transport, group_port]
        ranks.append(Forked(*words, *more, env=env))
    codes = [rank.wait(200) for rank in ranks]
    assert codes == [0] * processes, [rank.err[-3000:] for rank in ranks]
    return json.loads(ranks[0].out.splitlines()[-1])


def weights_of(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / "end" / name)


@pytest.mark.nightly
@pytest.mark.parametrize("tied, has_digest", [(False, False), (True, True)], ids=["apart", "tied"])
def test_a_split_model_trains_with_a_server_as_one_process_does(tied, has_digest, tmp_path):
    ends = {}
    for processes in (1, 2):
        model = tiny_model("qwen2", layers=3, tie_word_embeddings=tied)
        with FakeServer(model, tiny_tokenizer(), has_digest=has_digest) as fake:
            fake.is_varied = True
            seen = trained(fake, tmp_path / str(processes), processes, tied=tied)
            ends[processes] = weights_of(tmp_path / str(processes))
            assert fake.calls.count("/update_weight_version") == 3, "one update a step"
            sent = sum(fake.calls.count(name) for name in ("reload_weights", "covey_reload", "covey_receive"))
            assert sent == 3 or (has_digest and sent >= 2), "a step without signal changes no weights"
            assert fake.version.endswith(":2")
    assert seen["largest"] < 0.7 * seen["whole"], "no process holds a whole copy"
    start = dict(tiny_model("qwen2", layers=3, tie_word_embeddings=tied).state_dict())
    moved = max((ends[1][name] - start[name]).abs().max().item() for name in ends[1])
    apart = max((ends[1][name] - ends[2][name]).abs().max().item() for name in ends[1])
    assert moved > 1e-3
    assert apart < 1e-6, f"{apart:.2g} apart where training moved them by {moved:.2g}"


@pytest.mark.slow
def test_a_split_model_is_broadcast_a_piece_at_a_time_and_again_after_a_fault(tmp_path):
    ends, failures = {}, [503]
    for processes in (1, 2):
        with FakeServer(
            tiny_model("qwen2", layers=3, tie_word_embeddings=False), tiny_tokenizer(), has_digest=True
        ) as fake:
            fake.is_varied = True
            if processes == 2:
                fake.faults["covey_receive"] = lambda body: failures.pop() if failures else None
            seen = trained(
                fake, tmp_path / str(processes), processes, transport="gloo" if processes == 2 else "directory"
            )
            ends[processes] = weights_of(tmp_path / str(processes))
    assert failures == []
    assert seen["largest"] < 0.7 * seen["whole"], "no process holds a whole copy"
    assert fake.calls.count("covey_receive") == 4, "three updates, one of them twice"
    assert fake.calls.count("covey_join") == 2
    assert "reload_weights" not in fake.calls
    assert not list((tmp_path / "2").rglob("vllm-weights/**/*.safetensors"))
    assert max((ends[1][name] - ends[2][name]).abs().max().item() for name in ends[1]) < 1e-6


@pytest.mark.parametrize(
    "has_digest", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_an_adapter_on_a_split_model_is_sent_alone(has_digest, tmp_path):
    """With digests it is asked first whether the server has its base."""
    ends = {}
    for processes in (1, 2):
        model = tiny_model("qwen2", layers=3, tie_word_embeddings=False)
        with FakeServer(model, tiny_tokenizer(), lora_rank=4, has_digest=has_digest) as fake:
            fake.is_varied = True
            trained(fake, tmp_path / str(processes), processes, lora="lora")
            assert fake.calls.count("covey_digest") == has_digest
            ends[processes] = weights_of(tmp_path / str(processes), "adapter_model.safetensors")
            assert fake.calls.count("/v1/load_lora_adapter") == 3
            assert "reload_weights" not in fake.calls
    apart = max((ends[1][name] - ends[2][name]).abs().max().item() for name in ends[1])
    assert apart < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["vera", "randlora", "saved"])
def test_an_adapter_that_is_merged_on_a_split_model_is_so_once_a_layer_is_whole(kind, tmp_path):
    """The buffers of VeRA and RandLora, which layers share, are whole while the layers' weights are still split. As one process trains."""
    ends = {}
    for processes in (1, 2):
        model, folder = tiny_model("qwen2", layers=3, tie_word_embeddings=False), tmp_path / str(processes)
        with FakeServer(model, tiny_tokenizer(), has_digest=True) as fake:
            fake.is_varied = True
            trained(fake, folder, processes, lora=kind)
            assert fake.calls.count("/update_weight_version") == 3
        logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seen = [entry for entry in logs if "vllm/exact" in entry]
        assert len(seen) == processes + 1, "one process is sent the first weights by a check before its first step"
        assert all(entry["vllm/exact"] == 1 and entry["vllm/probe_difference"] < 1e-5 for entry in seen)
        assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in seen)
        ends[processes] = weights_of(folder, "adapter_model.safetensors")
    assert max((ends[1][name] - ends[2][name]).abs().max().item() for name in ends[1]) < 1e-6


@pytest.mark.slow
def test_a_disk_that_refuses_the_weights_of_a_split_model_ends_all_processes_in_one_sentence(tmp_path):
    model, port = tiny_model("qwen2", layers=3, tie_word_embeddings=False), free_port()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "vllm-weights").write_text("a file where the folder of the weights belongs")
    with FakeServer(model, tiny_tokenizer()) as fake:
        words = ["-c", SCRIPT, Path(__file__).parents[1], tmp_path / "run", fake.port, 2]
        ranks = [
            Forked(*words, rank, "full", "apart", "auto", 1, env=rank_environment(rank, port)) for rank in range(2)
        ]
        codes = [rank.wait(120) for rank in ranks]
    assert all(code not in (0, None) for code in codes)
    assert "vllm-weights" in ranks[0].err
    assert "on the main process; its log says why" in ranks[1].err
