"""covey attest: a running server is proved by its log-probabilities, whatever it says about itself.

The servers here compute with real models and answer over HTTP, in each form that is documented for vLLM, OpenAI, SGLang and TGI.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from covey.cli import main
from covey.evaluation.scored_tokens import FORMS
from covey.models import take_factors
from kit import http_server, rest_nightly, tiny_model, tiny_tokenizer

OTHER_WEIGHTS = 73


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def base(seed: int = 0, **config: Any) -> Any:
    return tiny_model(seed=seed, layers=3, hidden=64, **config)


def nudged(model: Any, by: float, seed: int = 1) -> Any:
    """The model after an update of this size relative to each weight's spread."""
    after, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in after.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((by * weight.float().std() * noise if weight.dim() > 1 else 0 * noise).to(weight.dtype))
    return after


@contextmanager
def serving(
    model: Any, form: str = "echo", models: tuple[str, ...] = ("policy",), length: int | None = None
) -> Iterator[str]:
    """A server that computes with `model` and takes requests of one form only."""
    tokenizer = tiny_tokenizer()
    named = [tokenizer.decode([token]) for token in range(len(tokenizer))]

    @torch.no_grad()
    def logp_of(ids: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def scores(ids: list[int]) -> list[float | None]:
        logp = logp_of(ids)
        return [None, *(float(logp[place, token]) for place, token in enumerate(ids[1:]))]

    def answer(path: str, body: dict[str, Any]) -> Any:
        ids = body.get("input_ids") or body.get("prompt") or tokenizer(body.get("inputs", ""))["input_ids"]
        if path == "/v1/completions" and form == "prompt_logprobs" and "prompt_logprobs" in body:
            pairs = zip(ids, scores(ids), strict=True)
            return {"choices": [{"prompt_logprobs": [v and {str(t): {"logprob": v, "rank": 1}} for t, v in pairs]}]}
        if path == "/v1/completions" and form == "echo" and body.get("echo"):
            return {"choices": [{"logprobs": {"token_logprobs": [*scores(ids), -1.0]}}]}
        if path == "/generate" and form == "input_token_logprobs" and body.get("return_logprob"):
            rows = [[value, token, None] for token, value in zip(ids, scores(ids), strict=True)]
            return {"text": "", "meta_info": {"input_token_logprobs": rows}}
        if path == "/generate" and form == "prefill" and "inputs" in body:
            rows = [{"id": t, "text": named[t], "logprob": v} for t, v in zip(ids, scores(ids), strict=True)]
            return {"generated_text": "", "details": {"prefill": rows}}
        if path == "/v1/completions" and form == "completion" and body.get("logprobs") and "echo" not in body:
            written = list(ids)
            for _ in range(body["max_tokens"]):
                written.append(int(logp_of(written)[-1].argmax()))
            tokens = written[len(ids) :]
            return {
                "choices": [
                    {"logprobs": {"tokens": [named[t] for t in tokens], "token_logprobs": scores(written)[len(ids) :]}}
                ]
            }
        return None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": name, "max_model_len": length} for name in models]})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            found = answer(self.path, json.loads(content))
            self.reply(200 if found else 400, found or {"error": {"message": "unknown field"}})

        def reply(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as url:
        yield url


def attested(capsys: pytest.CaptureFixture[str], url: str, *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["attest", url, *options, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("form", FORMS)
def test_a_server_is_attested_in_whatever_form_it_gives_log_probabilities(form, tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    with serving(base(), form) as url:
        code, result = attested(capsys, url, "--model", folder)
    assert (code, result["verdict"], result["form"]) == (0, "attested", form)
    assert result["distance"] < 1e-5
    assert result["nearest_dtype"] == "float32"


@pytest.mark.parametrize("form", rest_nightly(FORMS, ("prompt_logprobs",)))
def test_another_model_is_refused_in_each_form(form, tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    with serving(base(seed=1), form) as url:
        code, result = attested(capsys, url, "--model", folder)
    assert (code, result["verdict"]) == (OTHER_WEIGHTS, "other weights")
    assert result["chance"] < 1e-6


def test_one_layer_that_is_missing_is_refused(tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    broken = base()
    with torch.no_grad():
        broken.model.layers[1].self_attn.o_proj.weight.zero_()
        broken.model.layers[1].mlp.down_proj.weight.zero_()
    with serving(broken) as url:
        code, result = attested(capsys, url, "--model", folder)
    assert (code, result["verdict"]) == (OTHER_WEIGHTS, "other weights")


def test_a_server_that_computes_in_bfloat16_where_float32_was_expected_is_named(tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    with serving(base().bfloat16()) as url:
        code, result = attested(capsys, url, "--model", folder)
        assert (code, result["verdict"], result["nearest_dtype"]) == (OTHER_WEIGHTS, "other dtype", "bfloat16")
        code, result = attested(capsys, url, "--model", folder, "--dtype", "bfloat16")
        assert (code, result["verdict"]) == (0, "attested")


@pytest.mark.slow
def test_a_base_model_that_is_served_instead_of_a_trained_one_is_told_from_it_far_below_rounding(tmp_path, capsys):
    before = base()
    after = nudged(before, 0.005)
    folder, other = saved(after, tmp_path / "after"), saved(before, tmp_path / "before")
    with serving(copy.deepcopy(before).bfloat16()) as url:
        alone, plain = attested(capsys, url, "--model", folder, "--dtype", "bfloat16")
        code, result = attested(capsys, url, "--model", folder, "--dtype", "bfloat16", "--other", other)
    assert (alone, plain["verdict"]) == (0, "attested")  # it says how small a change it cannot see
    assert plain["detectable"] > result["detectable"]
    assert (code, result["verdict"]) == (OTHER_WEIGHTS, "other weights")
    assert result["slopes"][other]["value"] == pytest.approx(0, abs=0.3)
    assert "those of" in result["sentence"]
    with serving(copy.deepcopy(after).bfloat16()) as url:
        code, result = attested(capsys, url, "--model", folder, "--dtype", "bfloat16", "--other", other)
    assert (code, result["verdict"]) == (0, "attested")
    assert result["slopes"][other]["value"] == pytest.approx(1, abs=0.3)
    assert result["chance"] < 1e-6


def test_an_adapter_that_is_one_update_behind_is_told_from_the_last_one(tmp_path, capsys):
    from peft import LoraConfig, PeftModel, get_peft_model

    source = saved(base(), tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    last = get_peft_model(type(base()).from_pretrained(source), config)
    last.save_pretrained(tmp_path / "last")
    tiny_tokenizer().save_pretrained(tmp_path / "last")
    with torch.no_grad():
        for name, weight in last.named_parameters():
            if "lora_B" in name:
                weight.mul_(1.02)
    last.save_pretrained(tmp_path / "now")
    tiny_tokenizer().save_pretrained(tmp_path / "now")
    stale = PeftModel.from_pretrained(type(base()).from_pretrained(source), tmp_path / "last").eval()
    with serving(stale) as url:
        options = ("--model", str(tmp_path / "now"), "--dtype", "float32", "--other", str(tmp_path / "last"))
        code, result = attested(capsys, url, *options)
    assert (code, result["verdict"]) == (OTHER_WEIGHTS, "other weights")


def test_folders_that_are_the_same_cannot_be_told_apart(tmp_path, capsys):
    folder, other = saved(base(), tmp_path / "a"), saved(base(), tmp_path / "b")
    with serving(base()) as url:
        code, result = attested(capsys, url, "--model", folder, "--other", other)
    assert (code, result["verdict"]) == (1, "not decidable")


@pytest.mark.parametrize("dtype", rest_nightly(["float32", "bfloat16", "float16"], ["bfloat16"]))
@pytest.mark.parametrize("seed", rest_nightly(range(7), 1))
def test_no_honest_server_is_refused(seed, dtype, tmp_path, capsys):
    folder = saved(base(seed), tmp_path / "policy")
    with serving(base(seed).to(getattr(torch, dtype))) as url:
        code, result = attested(capsys, url, "--model", folder, "--dtype", dtype)
    assert (code, result["verdict"]) == (0, "attested")


@pytest.mark.parametrize(("length", "factors"), [(128, "short"), (512, "long")])
def test_a_model_with_two_rope_sets_is_compared_by_that_of_the_servers_length(length, factors, tmp_path, capsys):
    """vLLM takes the long set for every row where its context is longer than the first set's."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    config = Phi3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tiny_tokenizer()), max_position_embeddings=512, original_max_position_embeddings=128, pad_token_id=0,
        rope_parameters={**rope, "partial_rotary_factor": 1.0, "factor": 4.0}, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    served = Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in served.named_parameters():
            weight.mul_(8.0 if "proj" in name else 1.0)
    folder = saved(served, tmp_path / "model")
    take_factors(served, factors)
    with serving(served, length=length) as url:
        assert attested(capsys, url, "--model", folder)[0] == 0
    with serving(served, length=640 - length) as url:  # the other set
        assert attested(capsys, url, "--model", folder)[0] == OTHER_WEIGHTS


def test_a_server_without_log_probabilities_says_so_in_one_sentence(tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    with serving(base(), "none") as url:
        assert main(["attest", url, "--model", folder]) == OTHER_WEIGHTS
    assert "gives no log-probabilities of policy in any form" in capsys.readouterr().err


def test_a_server_of_several_models_has_to_be_told_which(tmp_path, capsys):
    folder = saved(base(), tmp_path / "policy")
    with serving(base(), models=("a", "b")) as url:
        assert main(["attest", url, "--model", folder]) == 2
        assert "serves a, b; say which with --served-name" in capsys.readouterr().err
        assert main(["attest", url, "--model", folder, "--served-name", "b"]) == 0


def test_wrong_input_is_refused_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    folder = saved(base(), tmp_path / "policy")
    monkeypatch.delenv("KEY_OF_TEST", raising=False)
    cases = {
        ("attest",): "needs url",
        ("attest", "http://127.0.0.1:9"): "needs model",
        ("attest", "nowhere://x", "--model", folder): "is no address",
        ("attest", "http://127.0.0.1:9", "--model", folder, "--dtype", "float8"): "is not known",
        ("attest", "http://127.0.0.1:9", "--model", folder, "--api-key-env", "KEY_OF_TEST"): "no such variable",
    }
    for words, sentence in cases.items():
        assert main(list(words)) == 2, words
        assert sentence in capsys.readouterr().err
    assert main(["attest", "http://127.0.0.1:9", "--model", folder]) == OTHER_WEIGHTS
    assert "does not list its models" in capsys.readouterr().err
