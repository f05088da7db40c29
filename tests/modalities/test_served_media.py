"""`covey serve` of a model that sees or hears: parts of chat messages reach it, and what it cannot compute is refused in a sentence."""

import openai
import pytest
import torch
from acting_models import acting_model, prompt_of
from models import picture

from covey.cli import serve
from covey.cli.serve import samplers_of
from covey.rollout import choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.serving import Endpoint
from covey.types import Completion, Group
from modalities.agents import png
from serving.clients import client

ASK = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("seeing")
    model, processor = acting_model("llava")
    model.save_pretrained(where)
    processor.save_pretrained(where)
    return where


def options_of(folder):
    left_out = {flag.name: flag.default for flag in serve._FLAGS}
    return left_out | {"model": str(folder), "served_model_name": "seeing", "sampler_dtype": "float32", "use_cpu": True}


def answered(samplers, processor, *parts):
    """The answer to a message of these parts."""
    with Endpoint(samplers, processor=processor) as endpoint, client(endpoint.url) as ask:
        messages = [{"role": "user", "content": list(parts)}]
        more = {"return_token_ids": True}
        return ask.chat.completions.create(
            model="seeing", messages=messages, max_tokens=8, temperature=0, logprobs=True, extra_body=more
        )


def asked(folder, *parts):
    """The answer of `covey serve`, and the sampler and processor behind it."""
    samplers, processor = samplers_of(options_of(folder))
    return answered(samplers, processor, *parts), samplers["seeing"], processor


def test_an_image_is_seen_as_in_a_plain_forward(folder):
    image = picture(2, (48, 48), seed=3)
    reply, sampler, processor = asked(folder, png(image), ASK)
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": image}, ASK]}]}
    prompt = prompt_of(processor, row, tools=())
    assert reply.prompt_token_ids == list(prompt.token_ids)
    (answer,) = reply.choices
    ids = torch.tensor(answer.token_ids)
    written = Completion(token_ids=ids, text="", finish="length")
    (expected,) = plain_logprobs(sampler.model, [Group(prompt=prompt, completions=(written,))])
    got = torch.tensor([token.logprob for token in answer.logprobs.content])
    torch.testing.assert_close(got, expected[: len(got)], atol=1e-4, rtol=1e-4)
    other, *_ = asked(folder, png(picture(3, (48, 48), seed=9)), ASK)
    assert other.choices[0].logprobs.content[0].logprob != answer.logprobs.content[0].logprob


def test_a_modality_that_the_model_lacks_is_a_bad_request(folder):
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    with pytest.raises(openai.BadRequestError) as refused:
        asked(folder, sound, ASK)
    assert "reads text and images alone" in str(refused.value)


def test_an_image_that_the_engine_cannot_compute_is_a_bad_request():
    model, processor = acting_model("gemma3")
    sampler = choose_sampler(model, processor.tokenizer, backend="native", dtype="float32")
    with pytest.raises(openai.BadRequestError, match="attend to each other in both directions"):
        answered({"seeing": sampler}, processor, png(picture(2)), ASK)
