"""`covey serve` in a process of its own, asked by the real OpenAI client: the same tokens as the sampler and `generate`."""

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import demo
from covey.cli import main
from covey.rollout import NativeSampler, SamplingParams
from covey.serving.scoring import score_prompt
from serving.clients import QUESTIONS, chat, client, server

IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def url():
    with server("--sampler-dtype", "float32", "--max-output-tokens", "200") as (_, url):
        yield url


@pytest.fixture
def ask(url):
    with client(url) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sampler(model, tokenizer):
    return NativeSampler(model, tokenizer, dtype="float32")


def sampled(sampler, prompt, n=1, **params):
    (group,) = sampler.sample([prompt], n, SamplingParams(**params))
    return group


def test_the_model_is_listed_with_its_context(ask):
    (listed,) = ask.models.list().data
    assert (listed.id, listed.max_model_len, listed.owned_by) == ("demo", 2048, "covey")
    assert ask.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("question", QUESTIONS[:2])
def test_a_greedy_answer_is_the_samplers_and_generates(ask, sampler, model, tokenizer, question):
    said = ask.chat.completions.create(
        model="demo", messages=chat(question), temperature=0, max_tokens=40, extra_body=IDS
    )
    group = sampled(sampler, chat(question), temperature=0, max_tokens=40)
    assert said.prompt_token_ids == list(group.prompt.token_ids)
    assert said.choices[0].token_ids == group.completions[0].token_ids.tolist()
    assert said.choices[0].message.content == group.completions[0].text
    ids = torch.tensor([said.prompt_token_ids])
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    assert said.choices[0].token_ids == generated[0, ids.shape[1] :].tolist()
    assert said.usage.completion_tokens == len(said.choices[0].token_ids)


def test_a_seed_gives_the_samplers_completions_and_gives_them_again(ask, sampler):
    how = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 30, "seed": 7}
    body = {**IDS, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    drawn = [
        ask.completions.create(model="demo", prompt="Tom has", n=4, extra_body=body, **how).choices for _ in range(2)
    ]
    group = sampled(sampler, "Tom has", 4, top_k=40, min_p=0.01, repetition_penalty=1.1, **how)
    expected = [one.token_ids.tolist() for one in group.completions]
    assert [one.token_ids for one in drawn[0]] == [one.token_ids for one in drawn[1]] == expected
    assert len(set(map(tuple, expected))) > 1
    other = ask.completions.create(model="demo", prompt="Tom has", n=4, extra_body=body, **{**how, "seed": 8})
    assert [one.token_ids for one in other.choices] != expected


def joined(stream):
    """Text, token ids, log-probabilities and reason of each choice of a stream, and its usage."""
    found, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            held = found.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "finish": None})
            held["text"] += choice.delta.content or ""
            held["ids"] += choice.token_ids
            held["logprobs"] += [one.logprob for one in (choice.logprobs.content if choice.logprobs else [])]
            held["finish"] = choice.finish_reason or held["finish"]
    return found, usage


def test_a_streamed_answer_is_the_whole_one(ask):
    how = {"model": "demo", "messages": chat(QUESTIONS[2]), "n": 3, "seed": 3, "temperature": 1.2, "max_tokens": 25}
    how |= {"stop": ["####", "= 4"], "logprobs": True, "extra_body": IDS}
    whole = ask.chat.completions.create(**how)
    found, usage = joined(ask.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert usage == whole.usage
    for choice in whole.choices:
        logprobs = [one.logprob for one in choice.logprobs.content]
        streamed = found[choice.index]
        assert (streamed["text"], streamed["finish"]) == (choice.message.content, choice.finish_reason)
        assert (streamed["ids"], streamed["logprobs"]) == (choice.token_ids, logprobs)


def test_streamed_text_comes_in_pieces_and_the_echoed_prompt_first(ask):
    how = {"model": "demo", "prompt": QUESTIONS[0], "echo": True, "temperature": 0, "max_tokens": 12}
    pieces = [chunk.choices[0].text for chunk in ask.completions.create(**how, stream=True)]
    assert pieces[0] == QUESTIONS[0]
    assert len(pieces) > 3
    assert "".join(pieces) == ask.completions.create(**how).choices[0].text


def test_a_stop_string_ends_the_answer_and_is_not_in_it(ask, sampler):
    how = {"temperature": 0, "max_tokens": 40}
    whole = sampled(sampler, chat(QUESTIONS[0]), **how).completions[0].text
    assert "####" in whole
    said = ask.chat.completions.create(model="demo", messages=chat(QUESTIONS[0]), stop=["nowhere", "####"], **how)
    (choice,) = said.choices
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index("####")], "stop")
    assert choice.stop_reason == "####"
    cut = ask.chat.completions.create(model="demo", messages=chat(QUESTIONS[0]), max_completion_tokens=3, temperature=0)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


def plain_logprobs(model, ids):
    """[L - 1, V] log-probabilities of what follows each token, at temperature 1."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_log_probabilities_are_those_of_a_forward_pass(ask, model):
    how = {"temperature": 0.7, "seed": 1, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    body = {**IDS, "top_k": 5}
    said = ask.chat.completions.create(model="demo", messages=chat(QUESTIONS[3]), extra_body=body, **how)
    (choice,) = said.choices
    expected = plain_logprobs(model, said.prompt_token_ids + choice.token_ids)[len(said.prompt_token_ids) - 1 :]
    assert len(choice.logprobs.content) == len(choice.token_ids)
    for one, token, row in zip(choice.logprobs.content, choice.token_ids, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert "".join(one.token for one in choice.logprobs.content).removesuffix("<|im_end|>") == choice.message.content


def test_echo_scores_the_prompt_as_a_forward_pass_does(ask, model, tokenizer):
    prompts = [QUESTIONS[0], "2 + 2 = 4"]
    said = ask.completions.create(model="demo", prompt=prompts, echo=True, logprobs=2, max_tokens=0)
    for choice, prompt in zip(said.choices, prompts, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        expected = plain_logprobs(model, ids)
        assert choice.text == prompt
        assert choice.logprobs.token_logprobs[0] is None
        own = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
        for top, row in zip(choice.logprobs.top_logprobs[1:], expected, strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert [prompt[at:][:1] for at in choice.logprobs.text_offset] == [one[:1] for one in choice.logprobs.tokens]


def test_echo_scores_in_the_precision_that_is_sampled_in(model, tokenizer):
    ids = torch.tensor([tokenizer(QUESTIONS[0])["input_ids"]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    for dtype, is_rounded in (("bfloat16", True), ("float32", False)):
        scored = score_prompt(NativeSampler(model, tokenizer, dtype=dtype), ids[0].tolist(), 0)
        assert ([logp for logp, _ in scored] == pytest.approx(rounded, abs=1e-6)) == is_rounded


def test_tokens_can_be_named_by_their_ids(ask, model, tokenizer):
    ids = tokenizer(QUESTIONS[0])["input_ids"]
    by_id = {"return_tokens_as_token_ids": True}
    [choice] = ask.completions.create(
        model="demo", prompt=ids, echo=True, logprobs=3, max_tokens=0, extra_body=by_id
    ).choices
    assert choice.logprobs.tokens == [f"token_id:{one}" for one in ids]
    for top, row in zip(choice.logprobs.top_logprobs[1:], plain_logprobs(model, ids), strict=True):
        best = row.topk(3)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert top[f"token_id:{token}"] == pytest.approx(value, abs=1e-4)


def test_requests_that_share_a_batch_get_what_they_get_alone(ask, sampler):
    ways = [
        {"prompt": QUESTIONS[i % 4], "seed": i, "temperature": (0, 0.7, 1.3)[i % 3], "max_tokens": 5 + 3 * i, "n": 1 + i % 2}
        for i in range(12)
    ]  # fmt: skip
    with ThreadPoolExecutor(12) as together:
        said = list(together.map(lambda how: ask.completions.create(model="demo", extra_body=IDS, **how), ways))
    for answer, how in zip(said, ways, strict=True):
        prompt, n = how.pop("prompt"), how.pop("n")
        expected = [one.token_ids.tolist() for one in sampled(sampler, prompt, n, **how).completions]
        assert [choice.token_ids for choice in answer.choices] == expected


WRONG = {
    "a prompt that is longer than the context": ({"prompt": "a " * 4000}, "context of 2048 leaves no room"),
    "no prompt": ({"prompt": []}, "prompt must be a text"),
    "an unknown token id": ({"prompt": [1, 99999]}, "99999"),
    "a negative temperature": ({"temperature": -1}, "temperature is -1"),
    "more tokens than the server writes": ({"max_tokens": 5000}, "writes at most 200"),
    "too many answers": ({"n": 200}, "asks for 200 answers"),
    "a parameter that nobody knows": ({"extra_body": {"temprature": 1}}, "Did you mean temperature"),
    "a penalty that is not computed": ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    "an empty stop string": ({"stop": [""]}, "stop holds an empty string"),
    "too many log-probabilities": ({"logprobs": 50}, "give 0 to 20"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(ask, wrong):
    body, said = WRONG[wrong]
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        ask.completions.create(**{"model": "demo", "prompt": "Tom has", **body})
    assert caught.value.type == "invalid_request_error"


def test_parameters_that_ask_for_nothing_are_taken(ask):
    harmless = {"user": "me", "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1}
    assert ask.completions.create(model="demo", prompt="Tom has", max_tokens=1, **harmless).choices


def test_an_unknown_model_and_an_unknown_page_are_404(ask, url):
    with pytest.raises(openai.NotFoundError, match="Did you mean demo"):
        ask.completions.create(model="dem", prompt="Tom has")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        ask.embeddings.create(model="demo", input="Tom has")


def test_tools_need_a_template_that_writes_calls(ask):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    with pytest.raises(openai.BadRequestError, match="does not write tool calls"):
        ask.chat.completions.create(model="demo", messages=chat("hello"), tools=tools)


def test_metrics_count_requests_and_tokens(ask, url):
    ask.completions.create(model="demo", prompt="Tom has", max_tokens=2)
    page = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics").read().decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values['covey_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(values["covey_completion_tokens_total"]) >= 2
    assert values["covey_rows_running"] == "0"
    assert float(values['covey_request_seconds_bucket{le="+Inf"}']) == float(values["covey_request_seconds_count"])
    assert urllib.request.urlopen(url.removesuffix("/v1") + "/health").read() == b"ok\n"


def test_the_tokenizer_is_shown_as_vllm_shows_it(url, tokenizer):
    def post(path, body):
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url.removesuffix("/v1") + path, json.dumps(body).encode(), kind)
        return json.load(urllib.request.urlopen(asked))

    ids = post("/tokenize", {"prompt": QUESTIONS[0], "add_special_tokens": False})["tokens"]
    assert ids == tokenizer(QUESTIONS[0])["input_ids"]
    assert post("/detokenize", {"tokens": ids})["prompt"] == QUESTIONS[0]


@pytest.mark.slow
def test_sigterm_lets_a_running_answer_end_and_the_process_with_it():
    with server("--sampler-dtype", "float32", COVEY_API_KEY="a-key-of-some-length") as (process, url):
        with client(url, "a-key-of-some-length") as ask:
            how = {"model": "demo", "prompt": "Tom", "max_tokens": 600, "extra_body": {"ignore_eos": True, **IDS}}
            stream = iter(ask.completions.create(**how, stream=True, stream_options={"include_usage": True}))
            next(stream)
            process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.usage.completion_tokens == 600
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("options, said", [
    (["--host", "0.0.0.0"], "give an API key"),
    (["--api-key", "short"], "short enough to be guessed"),
    (["--adapter", "polite"], "write NAME=FOLDER"),
    (["--adapter", "polite=nowhere"], "nowhere"),
    (["--max-waiting", "0"], "max_waiting is 0"),
    (["--port", "70000"], "--port 70000 must be from 0 to 65535"),
])  # fmt: skip
def test_a_wrong_option_is_told_before_anything_is_served(capsys, options, said):
    assert main(["serve", "demo", *options]) == 2
    assert said in capsys.readouterr().err
