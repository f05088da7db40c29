"""A server that does not fit is told before the weights of the model are loaded: here they cannot be."""

from __future__ import annotations

import json
import time

import pytest
from datasets import Dataset
from fake_server import FakeServer
from transformers import AutoConfig

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError, DataError, ModelError, ServerError
from covey.models import load_tokenizer
from covey.rollout.vllm.client import Address, Client
from covey.rollout.vllm.server import Server, refuse_other_model
from kit import tiny_model, tiny_tokenizer
from modalities.models import tiny_vlm


@pytest.fixture
def folder(tmp_path):
    """A model whose weights are no weights, so that loading them is an error."""
    place = tmp_path / "policy"
    tiny_model("qwen2", tie_word_embeddings=False).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    (place / "model.safetensors").write_bytes(b"not weights")
    return place


@pytest.fixture
def fake(folder):
    with FakeServer(tiny_model("qwen2", tie_word_embeddings=False), load_tokenizer(None, folder)) as server:
        yield server


def trainer(folder, port, **options):
    given = {
        "vllm_server_port": port,
        "vllm_server_timeout": 30.0,
        "per_device_train_batch_size": 4,
        "report_to": "none",
    }
    args = GRPOConfig(
        str(folder.parent / "run"), use_vllm=True, vllm_mode="server", num_generations=4, **{**given, **options}
    )
    rows = Dataset.from_list([{"prompt": "2 + 2 ="}])
    return GRPOTrainer(str(folder), lambda completions, **columns: [0.0] * len(completions), args, rows)


def no_server(fake):
    fake.faults["/health"] = 503


def another_program(fake):
    fake.paths.remove("/health")


def no_endpoints(fake):
    fake.paths.remove("/pause")


def other_vocabulary(fake):
    fake.tokenizer = lambda text, add_special_tokens: {"input_ids": [1, 2, 3]}


def fewer_tokens(fake):
    fake.faults["/v1/completions"] = lambda body: 400


def raw_log_probabilities(fake):
    fake.logprobs_mode = "raw_logprobs"


def quantized_checkpoint(fake):
    fake.quantization = "awq"


def drafted_tokens(fake):
    fake.speculative = {"method": "ngram"}


def no_folder(fake):
    fake.paths.remove("/collective_rpc")


@pytest.mark.parametrize(
    ("fault", "options", "error", "said"),
    [
        (no_server, {"vllm_server_timeout": 0.3}, ServerError, "No vLLM server answers at http://127.0.0.1"),
        (another_program, {}, ServerError, "answers, but has no /health, so that no vLLM server listens there"),
        (no_endpoints, {}, ConfigError, "lacks /pause, which updating its weights needs"),
        (other_vocabulary, {}, ConfigError, "has another vocabulary"),
        (fewer_tokens, {}, ConfigError, r"does not know token \d+ of this run's vocabulary"),
        (raw_log_probabilities, {"temperature": 0.5}, ConfigError, "--logprobs-mode processed_logprobs"),
        (drafted_tokens, {}, ConfigError, r"drafts tokens \(ngram\), and vLLM on a CPU then gives no log-prob"),
        (no_folder, {}, ConfigError, "lacks /collective_rpc"),
        (
            quantized_checkpoint,
            {},
            ConfigError,
            r"whose weights are quantized \(awq\), and the run's weights cannot be loaded",
        ),
        (lambda fake: None, {"temperature": 0.005}, ConfigError, "vLLM draws at no less than 0.01"),
        (lambda fake: None, {"temperature": 2.5}, ConfigError, "vLLM draws at no more than 2; give that or less"),
        (lambda fake: None, {"vllm_transport": "nccl"}, ConfigError, "the server computes on cpu"),
        (lambda fake: None, {}, ModelError, "could not be loaded"),
    ],
)
def test_what_does_not_fit_is_told_before_weights_are_loaded(folder, fake, fault, options, error, said):
    fault(fake)
    with pytest.raises(error, match=said):
        trainer(folder, fake.port, **options)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 64}, "hidden_size 64, this run's model 32"),
        ({"rope_theta": 1e6}, r"rope_theta 1000000.0, this run's model 10000"),
        ({"rms_norm_eps": 1e-5}, r"rms_norm_eps 1e-05, this run's model 1e-06"),
    ],
)
def test_a_server_of_another_model_is_told_before_weights_are_loaded(folder, fake, tmp_path, changed, said):
    """One whose tensors have the same shapes too. `rope_theta` stands where older files have it."""
    (tmp_path / "other").mkdir()
    config = json.loads((folder / "config.json").read_text())
    if "rope_theta" in changed:
        del config["rope_parameters"]
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **changed}))
    fake.folder = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"serves another model: .* has {said}"):
        trainer(folder, fake.port)


def test_a_server_of_an_older_file_of_the_runs_model_is_taken(fake, tmp_path):
    """Files of Qwen2.5-VL on the hub have the shape of the text beside the rest, where transformers 5 has it inside `text_config`."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    stored = {"model_type": "qwen2_5_vl", "vocab_size": 64, "rope_theta": 1e6, **shape, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config, fake.folder = AutoConfig.from_pretrained(tmp_path), str(tmp_path)
    assert "hidden_size" not in config.to_dict()
    server = Server.connect(Client(Address.of(None, "127.0.0.1", fake.port)), 30.0)
    refuse_other_model(server, config, fake.tokenizer)


def test_a_server_of_another_text_beside_the_same_images_is_told(tmp_path):
    model, processor = tiny_vlm("qwen2_5_vl")
    model.config.save_pretrained(tmp_path)
    with FakeServer(model, processor.tokenizer) as fake:
        fake.folder = str(tmp_path)
        server = Server.connect(Client(Address.of(None, "127.0.0.1", fake.port)), 30.0)
        refuse_other_model(server, model.config, fake.tokenizer)
        model.config.text_config.rms_norm_eps = 1e-6
        with pytest.raises(ConfigError, match="has rms_norm_eps 1e-05, this run's model 1e-06"):
            refuse_other_model(server, model.config, fake.tokenizer)


def test_a_server_that_still_starts_is_waited_for_and_named(folder, fake, caplog):
    until = time.monotonic() + 0.5
    fake.faults["/health"] = lambda body: 503 if time.monotonic() < until else None
    with pytest.raises(ModelError, match="could not be loaded"):
        trainer(folder, fake.port)
    assert (
        f"No vLLM server answers at http://127.0.0.1:{fake.port} yet; waiting up to 30 seconds (vllm_server_timeout)"
        in caplog.text
    )


def test_a_server_that_the_network_reaches_is_warned_of_before_weights_are_loaded(folder, caplog):
    model, tokenizer = tiny_model("qwen2", tie_word_embeddings=False), load_tokenizer(None, folder)
    with FakeServer(model, tokenizer, host="0.0.0.0") as open_server, pytest.raises(ModelError):
        trainer(folder, open_server.port)
    assert "is in development mode and listens on all interfaces" in caplog.text
    assert "start it with --host 127.0.0.1" in caplog.text


def run_of(fake, folder, tmp_path, **options):
    """A run whose prompts have 1 and 9 tokens and whose completions, which never end by themselves, may have 16."""
    args = GRPOConfig(
        str(tmp_path / "run"), use_vllm=True, vllm_mode="server", vllm_server_port=fake.port, max_steps=1, num_generations=2,
        per_device_train_batch_size=4, max_completion_length=16, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, bf16=False, logging_steps=1, mask_truncated_completions=True, **options,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "2"}, {"prompt": "123456789"}])
    reward = lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids]
    tokenizer = load_tokenizer(None, folder)
    return GRPOTrainer(tiny_model("qwen2", tie_word_embeddings=False), reward, args, rows, processing_class=tokenizer)


def refuse_long(fake):
    """As vLLM, which answers 400 to a request that may become longer than its --max-model-len."""
    fake.requests = []

    def answer(body):
        fake.requests.append((len(body["prompt"]), body["max_tokens"]))
        return 400 if sum(fake.requests[-1]) > fake.max_model_length else None

    fake.faults["/v1/completions"] = answer


def drawn_by(fake):
    """Tokens of each prompt of the data, and the most that its completions may have; without the checks at the start."""
    return sorted((prompt, most) for prompt, most in fake.requests if prompt in (1, 9))


@pytest.mark.parametrize("length", [20, 200])
def test_completions_that_a_short_server_ends_are_warned_of_once_and_count_as_truncated(
    folder, fake, tmp_path, caplog, length
):
    fake.max_model_length = length
    refuse_long(fake)
    run = run_of(fake, folder, tmp_path)
    run.train()
    lines = [line for line in caplog.messages if "max-model-len" in line]
    shorter = "Row 1 (counting from 0) of the data set has a prompt of 9 tokens, and the vLLM server's --max-model-len is 20: completions of such "
    shorter += "prompts end before max_completion_length=16 and count as truncated."
    assert lines == ([shorter] if length == 20 else [])
    assert drawn_by(fake) == [(1, 16), (9, 11 if length == 20 else 16)]
    entry = next(line for line in run.state.log_history if "completions/clipped_ratio" in line)
    assert entry["completions/clipped_ratio"] == 1
    assert entry["completions/min_length"] == (11 if length == 20 else 16)


@pytest.mark.parametrize("options", [{}, {"on_long_prompt": "drop"}], ids=["error", "drop"])
def test_prompts_that_a_server_does_not_hold_are_told_before_it_gets_anything(folder, fake, tmp_path, caplog, options):
    fake.max_model_length = 9
    refuse_long(fake)
    run = run_of(fake, folder, tmp_path, **options)
    if options:
        run.train()
        assert "Row 1 (counting from 0) of the data set has a prompt of 9 tokens where 8 fit; such" in caplog.text
        assert set(drawn_by(fake)) == {(1, 8)}
        return
    with pytest.raises(
        DataError, match="has a prompt of 9 tokens, and the vLLM server's --max-model-len is 9; shorten it"
    ):
        run.train()
    assert "reload_weights" not in fake.calls
