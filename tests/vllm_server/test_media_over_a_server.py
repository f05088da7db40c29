"""Images beside token ids over a (stand-in) server: the learner's own tensors, sent once, and compared with the learner at every update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_server import FakeServer, nudged
from peft import LoraConfig, get_peft_model

from covey.data import PromptStream
from covey.data.prompts import to_prompt
from covey.errors import AttestationError, ConfigError, DataError, ModelError
from covey.rollout import SamplingParams, TransformersSampler
from covey.rollout.agreement import expect_agreement
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.weights import why_not_alone
from covey.rollout.vllm.worker.covey_media import Media as Middleware
from covey.rollout.vllm.worker.covey_media import name_of, runs_of
from modalities.models import picture, tiny_vlm
from modalities.sound_models import tiny_hearing_model, tone

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ROWS = [
    {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]},
    {"prompt": [{"role": "user", "content": "How many?"}], "image": picture(2)},
    {"prompt": [{"role": "user", "content": "More in the first?"}], "images": [picture(3, (64, 32), 1), picture(1)]},
]


@pytest.fixture(scope="module")
def seeing():
    return tiny_vlm("qwen2_5_vl")


def prompts_of(processor, rows=ROWS):
    return [to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(rows)]


def sampler_of(fake, model, tokenizer, tmp_path, **options):
    return ServerSampler(model, tokenizer, port=fake.port, directory=tmp_path, deadlines={"connect": 2}, **options)


def drawn(sampler, prompts, n=1):
    return {group.prompt.uid: group.completions for group in sampler.sample(prompts, n, GREEDY)}


def test_completions_are_those_of_the_learners_model_and_every_image_is_sent_once(seeing, tmp_path):
    model, processor = seeing
    prompts = prompts_of(processor)
    here = drawn(TransformersSampler(model, processor.tokenizer), prompts)
    with FakeServer(model, processor.tokenizer, has_digest=True) as fake:
        sampler = sampler_of(fake, model, processor.tokenizer, tmp_path, example=prompts[1])
        for version in range(2):
            sampler.load(model, version)
            there = drawn(sampler, prompts)
            for uid, (one,) in here.items():
                assert there[uid][0].token_ids.tolist() == one.token_ids.tolist()
                assert torch.allclose(there[uid][0].logprobs, one.logprobs, atol=1e-4)
        assert fake.calls.count("/covey/media") == 2
        fake.uploads.clear()  # as if it had been started again
        drawn(sampler, prompts[1:])
        assert fake.calls.count("/covey/media") == 4


def test_a_sound_goes_the_same_way(tmp_path):
    model, processor = tiny_hearing_model("qwen2_audio")
    prompts = prompts_of(processor, [{**ROWS[1], "image": None, "audio": tone(440)}])
    here = drawn(TransformersSampler(model, processor.tokenizer), prompts)
    with FakeServer(model, processor.tokenizer) as fake:
        there = drawn(sampler_of(fake, model, processor.tokenizer, tmp_path, example=prompts[0]), prompts)
    assert there["0:0"][0].token_ids.tolist() == here["0:0"][0].token_ids.tolist()


@pytest.mark.slow
def test_a_server_that_sees_otherwise_is_refused_with_the_measured_gap(seeing, tmp_path):
    model, processor = seeing
    prompts = prompts_of(processor)
    with FakeServer(model, processor.tokenizer) as fake:
        fake.sees = lambda media: replace(
            media, tensors={**media.tensors, "pixel_values": media.tensors["pixel_values"] * 2}
        )
        sampler = sampler_of(fake, model, processor.tokenizer, tmp_path, example=prompts[1])
        with pytest.raises(
            AttestationError, match=r"computes images or sounds otherwise .* are \d\S* nats .* leave use_vllm out"
        ):
            drawn(sampler, prompts)
        bare = sampler_of(fake, model, processor.tokenizer, tmp_path)
        with pytest.raises(
            ModelError, match=r"behind an image or a sound are .* a token from those of a plain forward"
        ):
            expect_agreement(bare, model, prompts[1])


class Blind(FakeServer):
    """A server whose updates do not reach the vision tower."""

    def _work(self, method, kwargs):
        before = {name: value.clone() for name, value in self.replicas[0].state_dict().items() if "visual" in name}
        out = super()._work(method, kwargs)
        self.replicas[0].load_state_dict(before, strict=False)
        return out


@pytest.mark.slow
def test_a_vision_tower_that_an_update_does_not_reach_is_seen(tmp_path):
    """The probe of text cannot see it."""
    model, processor = tiny_vlm("qwen2_5_vl")
    prompts = prompts_of(processor)
    with Blind(model, processor.tokenizer) as fake:
        text = sampler_of(fake, model, processor.tokenizer, tmp_path)
        seen = sampler_of(fake, model, processor.tokenizer, tmp_path, example=prompts[1])
        drawn(seen, prompts)
        nudged(model.model.visual, by=0.5)
        text.load(model, 1)
        drawn(text, prompts[:1])
        fake.version = seen.sync.label
        seen.load(model, 1)
        with pytest.raises(AttestationError, match="otherwise than the learner"):
            drawn(seen, prompts[:1])


def test_a_server_without_the_endpoints_is_refused_before_work_is_spent(seeing, tmp_path):
    model, processor = seeing
    with FakeServer(model, processor.tokenizer) as fake:
        fake.paths.remove("/covey/completions")
        sampler = sampler_of(fake, model, processor.tokenizer, tmp_path)
        with pytest.raises(
            ConfigError, match="takes no images or sounds beside token ids; start it with covey serve-vllm"
        ):
            sampler.sample(prompts_of(processor), 1, GREEDY)


def test_what_the_server_does_not_take_is_one_sentence_that_names_the_prompt(seeing, tmp_path):
    model, processor = seeing
    with FakeServer(model, processor.tokenizer) as fake:
        sampler = sampler_of(fake, model, processor.tokenizer, tmp_path)
        fake.faults["/covey/completions"] = lambda body: 400 if "media" in body else None
        with pytest.raises(DataError, match="vLLM does not take prompt 0:1 with its images or sounds"):
            drawn(sampler, prompts_of(processor)[1:2])


def test_an_adapter_on_the_vision_tower_does_not_travel_alone(seeing):
    """vLLM applies adapters to the language model only."""
    make = lambda targets: get_peft_model(tiny_vlm("qwen2_5_vl")[0], LoraConfig(r=2, target_modules=targets))
    assert why_not_alone(make(["q_proj", "v_proj"]), 8, 1) is None
    assert why_not_alone(make(["q_proj", "qkv"]), 8, 1) == "the adapter changes what reads images or sounds"


def test_the_example_is_the_first_row_with_an_image_and_moves_no_position(seeing):
    from datasets import Dataset

    _, processor = seeing
    rows = Dataset.from_list([{"images": [], **ROWS[0]}, {"images": [picture(2)], "prompt": ROWS[1]["prompt"]}])
    stream = PromptStream(rows, processor.tokenizer, processor=processor)
    before = stream.state_dict()
    assert stream.first_with_media().media.count == 1
    assert stream.state_dict() == before
    assert PromptStream(rows.select([0]), processor.tokenizer, processor=processor).first_with_media() is None


def test_runs_of_places_and_names_of_tensors():
    assert runs_of([]) == []
    assert runs_of([3, 4, 5, 9]) == [(3, 6), (9, 10)]
    ones = torch.ones(2, 3)
    assert len({name_of({"a": x}) for x in (ones, ones.T, ones * 2, ones.bfloat16(), ones.half())}) == 5


def test_a_server_keeps_the_uploads_used_last(monkeypatch):
    monkeypatch.setattr("covey.rollout.vllm.worker.covey_media._MOST_BYTES", 8)
    kept = Middleware(None)
    names = [kept.keep(content) for content in (b"abcd", b"efgh", b"ijkl")]
    assert list(kept.uploads) == names[1:]
