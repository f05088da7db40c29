"""The endpoint beside other work, over real sockets: tools, adapters, keys, limits, clients that go away, and every call recorded."""

import contextlib
import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from covey import demo
from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
from covey.serving import Call, Endpoint, Limits
from covey.serving.chats import tools_in
from covey.serving.counters import Counters
from covey.serving.errors import APIError
from covey.serving.fields import Fields
from covey.serving.loading import with_merged_adapter
from covey.serving.replies import token_bytes
from environments.acting import chat_tokenizer, trained_on
from kit import tiny_model, tiny_tokenizer
from serving.clients import client

IDS = {"return_token_ids": True}
KEY = "a-key-of-some-length"
JSON = {"Content-Type": "application/json"}


def tiny_sampler(seed=0, **options):
    return NativeSampler(tiny_model(seed=seed), tiny_tokenizer(), dtype="float32", **options)


@contextlib.contextmanager
def serving(samplers, key="none", **options):
    """An open endpoint, and a client of it."""
    with Endpoint(samplers, **options) as endpoint, client(endpoint.url, key) as ask:
        yield endpoint, ask


def write(ask, **how):
    how = {"model": "policy", "prompt": "2 + 2", "temperature": 1.0, "seed": 1, "max_tokens": 8, **how}
    return ask.completions.create(extra_body={**IDS, **how.pop("extra_body", {})}, **how)


# -- tools --------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
BEFORE = "<|im_start|>system\nTools: add <|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
BRIDGE = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": NUMBERS}}


@pytest.fixture(scope="module")
def caller():
    """A model that calls `add` when it is shown, and says the result once it has read it."""
    model = trained_on(((BEFORE, CALL), (BEFORE + CALL + BRIDGE, "7<|im_end|>")))
    return NativeSampler(model, chat_tokenizer(), dtype="float32")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_is_answered(caller, streamed):
    messages = [{"role": "user", "content": "q"}]
    calls: list[Call] = []
    with serving(caller, on_call=calls.append) as (_, ask):
        how = {"model": "policy", "tools": [ADD], "temperature": 0, "max_tokens": 120}
        if streamed:
            *_, last = ask.chat.completions.create(messages=messages, stream=True, **how)
            (choice,), said = last.choices, last.choices[0].delta
        else:
            (choice,) = ask.chat.completions.create(messages=messages, **how).choices
            said = choice.message
        assert choice.finish_reason == "tool_calls"
        assert said.content is None
        (call,) = said.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
        function = {"name": call.function.name, "arguments": call.function.arguments}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        (answer,) = ask.chat.completions.create(messages=messages, **how).choices
        assert (answer.message.content, answer.finish_reason) == ("7", "stop")
        assert answer.message.tool_calls is None
    first, second = (call.group for call in calls)
    written = [*first.prompt.token_ids, *first.completions[0].token_ids.tolist()]
    assert list(second.prompt.token_ids[: len(written)]) == written, (
        "the second prompt goes on from the tokens of the first"
    )


@pytest.mark.slow
def test_a_call_that_is_no_json_stays_text(caller):
    model = trained_on(((BEFORE, "<tool_call>\n{broken</tool_call><|im_end|>"),), steps=80)
    with serving(NativeSampler(model, chat_tokenizer(), dtype="float32")) as (_, ask):
        messages = [{"role": "user", "content": "q"}]
        (choice,) = ask.chat.completions.create(
            model="policy", messages=messages, tools=[ADD], temperature=0, max_tokens=80
        ).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "{broken" in choice.message.content


@pytest.mark.parametrize("parameters", ["x", [1], {"properties": [1]}, {"properties": None}], ids=str)
def test_parameters_of_a_tool_are_an_object_before_anything_is_written(caller, parameters):
    tool = {"type": "function", "function": {**ADD["function"], "parameters": parameters}}
    how = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "temperature": 0, "max_tokens": 120}
    with serving(caller) as (_, ask):
        if parameters == {"properties": None}:
            assert ask.chat.completions.create(tools=[tool], **how).choices[0].message.tool_calls
            return
        for place in ({"tools": [tool]}, {"extra_body": {"chat_template_kwargs": {"tools": [tool]}}}):
            with pytest.raises(openai.BadRequestError, match="its parameters as an object"):
                ask.chat.completions.create(**place, **how)


@pytest.mark.parametrize("tools, others", [([], [ADD]), (None, [ADD]), ([ADD], []), ([ADD], [ADD]), ([ADD], None)])
def test_tools_among_the_options_of_the_template_are_shown_too(tools, others):
    assert tools_in(Fields({"tools": tools}), {"tools": others}) == [ADD]


def test_tools_that_differ_from_those_of_the_template_are_refused():
    other = {"type": "function", "function": {"name": "subtract"}}
    with pytest.raises(APIError, match="give them in one place") as refused:
        tools_in(Fields({"tools": [ADD]}), {"tools": [other]})
    assert refused.value.status == 400


def test_tools_are_not_shown_with_tool_choice_none_and_cannot_be_forced(caller):
    how = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "tools": [ADD], "max_tokens": 4}
    calls: list[Call] = []
    with serving(caller, on_call=calls.append) as (_, ask):
        ask.chat.completions.create(tool_choice="none", **how)
        with pytest.raises(openai.BadRequestError, match="cannot be forced"):
            ask.chat.completions.create(tool_choice="required", **how)
    assert "Tools: add" not in caller.tokenizer.decode(calls[0].group.prompt.token_ids)


# -- numbers ------------------------------------------------------------------------------------------------------------


def test_counts_have_every_digit_after_a_long_time():
    counters = Counters()
    for tokens in (123_456_789, 1):
        counters.add("covey_completion_tokens_total", tokens)
    counters.took(1_234_567.25)
    lines = counters.text({}).splitlines()
    assert "covey_completion_tokens_total 123456790" in lines
    assert "covey_request_seconds_sum 1234567.25" in lines


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_that_are_never_drawn_have_openais_least_log_probability(streams):
    how = {"model": "policy", "prompt": "2", "max_tokens": 2, "logprobs": 3, "top_k": 1, "stream": streams}
    with serving(tiny_sampler(), logprobs_mode="processed_logprobs") as (endpoint, _):
        request = urllib.request.Request(f"{endpoint.url}/completions", json.dumps(how).encode(), JSON)
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
    assert "Infinity" not in text
    first = json.loads(text.split("\n")[0].removeprefix("data: "))["choices"][0]["logprobs"]
    assert sorted(first["top_logprobs"][0].values()) == [-9999.0, -9999.0, 0.0]


def test_parts_of_a_character_have_their_bytes_and_its_place():
    shipped = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32)
    sampler = NativeSampler(shipped, AutoTokenizer.from_pretrained(demo.model_path()), dtype="float32")
    with serving(sampler) as (_, ask):
        how = {"model": "policy", "prompt": "é😀 a", "max_tokens": 1, "temperature": 0}
        echoed = ask.completions.create(echo=True, logprobs=1, **how).choices[0].logprobs
    assert echoed.text_offset[:7] == [0, 0, 1, 1, 1, 1, 2]  # two bytes, four bytes, and " a"
    assert (
        b"".join(token_bytes(sampler.tokenizer, token) for token in sampler.tokenizer("é😀 a").input_ids).strip()
        == "é😀 a".encode()
    )


def stripping_tokenizer():
    """Of Llama 2's layout: words begin with a mark, and decoding strips the first space."""
    vocabulary = {"<unk>": 0, "\u2581hello": 1, "\u2581world": 2, "!": 3, "\u2581": 4}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("ids", [(1, 2, 3), (2, 1, 1), (4, 2), (1, 4, 2), (3, 2)], ids=str)
def test_tokens_whose_space_the_decoder_strips_have_their_bytes(ids):
    tokenizer = stripping_tokenizer()
    pieces = [token_bytes(tokenizer, token, begins=not i) for i, token in enumerate(ids)]
    assert b"".join(pieces).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_tokens_are_those_in_the_text_where_the_decoder_strips_spaces(echo):
    sampler = NativeSampler(tiny_model("qwen2", vocab_size=5), stripping_tokenizer(), dtype="float32")
    how = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 12, "temperature": 1.0, "seed": 20, "logprobs": 1}
    with serving(sampler) as (_, ask):
        (choice,) = ask.completions.create(echo=echo, **how).choices
    offsets = [*choice.logprobs.text_offset, len(choice.text)]
    pieces = [choice.text[start:end] for start, end in itertools.pairwise(offsets)]
    assert pieces == [choice.logprobs.tokens[0].strip(), *choice.logprobs.tokens[1:]]
    assert " " in choice.logprobs.tokens[-4:], "the decoder shows nothing of one that stands alone"
    assert " world" in choice.logprobs.tokens, "a word is not the same token as its end of a word"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_and_its_completion_are_one_text(stream):
    """The decoder strips the first space of what it decodes, and that of a completion stands within the text."""
    tokenizer = stripping_tokenizer()
    sampler = NativeSampler(tiny_model("qwen2", vocab_size=5), tokenizer, dtype="float32")
    for seed in range(6):
        how = {"model": "policy", "prompt": [1, 3], "max_tokens": 4, "temperature": 1.0, "seed": seed}
        with serving(sampler) as (_, ask):
            made = ask.completions.create(echo=True, stream=stream, extra_body={"return_token_ids": True}, **how)
            choices = [piece.choices[0] for piece in made] if stream else made.choices
        text, ids = "".join(choice.text for choice in choices), [i for choice in choices for i in choice.token_ids]
        assert text == tokenizer.decode([1, 3, *(i for i in ids[-4:])])


def test_places_of_tokens_leave_out_control_tokens_that_the_text_does_not_show():
    """The beginning of a text is a token that the tokenizer adds, and that is in no text."""
    tokenizer = stripping_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<unk> $A", special_tokens=[("<unk>", 0)])
    sampler = NativeSampler(tiny_model("qwen2", vocab_size=5), tokenizer, dtype="float32")
    with serving(sampler) as (_, ask):
        for prompt, offsets in (("!!", [0, 0, 1]), ([0, 3, 3], [0, 5, 6])):
            (choice,) = ask.completions.create(
                model="policy", prompt=prompt, echo=True, logprobs=1, max_tokens=0
            ).choices
            assert choice.logprobs.text_offset == offsets
            assert [choice.text[at] for at in offsets[1:]] == ["!", "!"]


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("completions", {"prompt": [3, -1]}, "token id -1; ids begin at 0"),
        ("chat/completions", {"messages": [{"role": "user", "content": "2 + 2"}], "chat_template_kwargs": {"truncation": True, "max_length": 2}}, "may not hold max_length"),
        ("chat/completions", {"messages": [{"role": "user", "content": "2 + 2"}], "chat_template_kwargs": {"padding": "max_length"}}, "may not hold padding"),
    ],
)  # fmt: skip
def test_a_prompt_is_never_another_than_the_one_that_is_sent(path, body, said, caller):
    content = json.dumps({"max_tokens": 1, **body}).encode()
    with serving(caller) as (endpoint, _), pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint.url}/{path}", content, JSON))
    assert refused.value.code == 400
    assert said in json.loads(refused.value.read())["error"]["message"]


# -- adapters -----------------------------------------------------------------------------------------------------------


def test_adapters_are_models_by_name_and_leave_the_base_as_it_was(tmp_path):
    shipped = lambda: AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32).eval()
    base, tokenizer = shipped(), AutoTokenizer.from_pretrained(demo.model_path())
    before = {name: held.clone() for name, held in base.state_dict().items()}
    how = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(shipped(), how).eval()
    with torch.no_grad():
        for name, held in adapted.named_parameters():
            if "lora_B" in name:
                held.normal_(std=0.2)
    adapted.save_pretrained(tmp_path)
    merged = with_merged_adapter(base, tmp_path)
    models = {"base": base, "polite": merged}
    samplers = {name: NativeSampler(one, tokenizer, dtype="float32") for name, one in models.items()}
    with serving(samplers) as (_, ask):
        listed = {one.id: one.parent for one in ask.models.list().data}
        found = {name: write(ask, model=name, temperature=0).choices[0].token_ids for name in models}
    assert listed == {"base": None, "polite": "base"}
    ids = tokenizer("2 + 2", return_tensors="pt")["input_ids"]
    for name, model in {"base": base, "polite": adapted}.items():
        expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert found[name] == expected[0, ids.shape[1] :].tolist()
    assert found["base"] != found["polite"]
    assert all(torch.equal(held, before[name]) for name, held in base.state_dict().items())
    shared = {held.data_ptr() for held in base.parameters()} & {held.data_ptr() for held in merged.parameters()}
    assert len(shared) == sum(1 for _ in base.parameters()) - 3 * 4, "what the adapter leaves alone is not copied"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("more", [-6, 6])
def test_an_adapter_that_resizes_embeddings_leaves_its_base_as_it_was(tmp_path, tied, more):
    resized, base = (tiny_model("qwen2", tie_word_embeddings=tied) for _ in range(2))
    ids = torch.arange(3, 9)[None]
    before = base(ids).logits
    resized.resize_token_embeddings(before.shape[-1] + more, mean_resizing=False)
    adapted = get_peft_model(resized, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    merged = with_merged_adapter(base, tmp_path)
    assert torch.equal(base(ids).logits, before)
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)


@pytest.mark.parametrize("how", [{"bias": "all"}, {"bias": "lora_only"}, {"init_lora_weights": "pissa"}], ids=str)
def test_an_adapter_that_writes_to_its_base_leaves_that_one_as_it_was(tmp_path, how):
    adapted = get_peft_model(
        tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **how)
    )
    with torch.no_grad():
        for weight in (weight for weight in adapted.parameters() if weight.requires_grad):
            weight.add_(0.3)
    adapted.save_pretrained(tmp_path)
    base, ids = tiny_model("qwen2"), torch.arange(3, 9)[None]
    before = {name: held.clone() for name, held in base.state_dict().items()}
    merged = with_merged_adapter(base, tmp_path)
    assert all(torch.equal(held, before[name]) for name, held in base.state_dict().items())
    torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits)


# -- who may ask, and how much ------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_where_there_is_one():
    with serving(tiny_sampler(), key=KEY, api_key=KEY) as (endpoint, ask):
        assert write(ask).choices
        with client(endpoint.url, "another-key-of-some-length") as stranger:
            with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
                write(stranger)
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        assert urllib.request.urlopen(endpoint.url.removesuffix("/v1") + "/health").status == 200


def test_an_endpoint_without_a_key_listens_on_this_machine_only():
    with pytest.raises(ConfigError, match="give an API key"):
        Endpoint(tiny_sampler()).open("0.0.0.0")


def raw(url, body, **headers):
    """Status and error of a request that no client library would send."""
    headers = {"Content-Type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + "/completions", body, headers)) as reply:
            return reply.status, {}
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_what_is_no_request_is_refused_in_openais_shape():
    with serving(tiny_sampler(), limits=Limits(max_body_bytes=1000)) as (endpoint, _):
        ok = json.dumps({"prompt": "2", "max_tokens": 1}).encode()
        assert raw(endpoint.url, ok) == (200, {})
        cases = {
            413: raw(endpoint.url, b'{"prompt": "' + b"x" * 2000 + b'"}'),
            415: raw(endpoint.url, ok, **{"Content-Type": "text/plain"}),
            400: raw(endpoint.url, b"{broken"),
        }
        assert {wanted: status for wanted, (status, _) in cases.items()} == {413: 413, 415: 415, 400: 400}
        for _, error in cases.values():
            assert set(error) == {"message", "type", "param", "code"}
        assert raw(endpoint.url, b"[" * 900)[0] == 400
        assert raw(endpoint.url, b"[1]")[1]["message"] == "The body must be a JSON object."
        status, error = raw(endpoint.url, ok, Host="evil.example:80")
        assert (status, "under the name of this machine" in error["message"]) == (400, True)


ENDLESS = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


def until(condition):
    """Wait for what another thread is about to do; the test's own time limit ends it."""
    while not condition():
        time.sleep(0.005)


class Held:
    """Decoding that waits at every step: one goes on with `step`, all with `free`. As a context manager, all at its end."""

    def __init__(self, sampler):
        self.steps, self.is_free, self.forward = threading.Semaphore(0), False, sampler.forward
        self.decode = sampler.forward.decode
        sampler.forward.decode = self

    def __call__(self, *args):
        if not self.is_free:
            self.steps.acquire()
        return self.decode(*args)

    def step(self):
        self.steps.release()

    def free(self):
        self.is_free = True
        self.steps.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


def test_a_full_queue_is_429_with_the_time_to_come_back():
    sampler = tiny_sampler(max_rows=2)
    held = Held(sampler)
    with serving(sampler, limits=Limits(max_waiting=2)) as (endpoint, ask), ThreadPoolExecutor(4) as clients, held:

        def asked():
            return clients.submit(write, ask, extra_body={"ignore_eos": True})

        tasks = [asked()]
        until(lambda: endpoint.engine.num_running == 1)
        tasks.append(asked())
        until(lambda: endpoint.engine.num_waiting == 1)
        held.step()  # the second one joins
        until(lambda: endpoint.engine.num_running == 2)
        for waiting in (1, 2):
            tasks.append(asked())
            until(lambda waiting=waiting: endpoint.engine.num_waiting == waiting)
        with pytest.raises(openai.RateLimitError, match="at most 2 may") as caught:
            write(ask)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.code == "queue_full"
        held.free()
        assert all(task.result().choices for task in tasks)
        assert write(ask).choices


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_frees_its_rows(streamed):
    sampler = tiny_sampler()
    held = Held(sampler)
    with serving(sampler) as (endpoint, _), held:
        there = http.client.HTTPConnection(endpoint.url.removeprefix("http://").removesuffix("/v1"))
        body = {"prompt": "2", "max_tokens": 200, "ignore_eos": True, "n": 3, "stream": streamed}
        there.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: endpoint.engine.num_running == 3)
        there.close()
        until(lambda: endpoint.engine._gone)
        held.free()
        until(lambda: "covey_cancelled_total 1" in endpoint.engine.counters.text({}))  # counted once its rows are gone
        assert endpoint.engine.num_running == 0
        assert "covey_completion_tokens_total 0" in endpoint.engine.counters.text({})


def test_decoding_that_fails_is_a_500_and_the_next_request_is_answered():
    sampler = tiny_sampler()
    decode, failures = sampler.forward.decode, [RuntimeError("broken")]

    def once(*args):
        if failures:
            raise failures.pop()
        return decode(*args)

    sampler.forward.decode = once
    with serving(sampler) as (_, ask):
        with pytest.raises(openai.InternalServerError, match="The server failed"):
            write(ask)
        assert write(ask).choices


# -- beside a run -------------------------------------------------------------------------------------------------------


def test_every_call_is_recorded_exactly_with_the_weights_that_wrote_it():
    sampler, calls = tiny_sampler(), []
    other = tiny_model(seed=5)
    with serving(sampler, on_call=calls.append) as (endpoint, ask):
        first = write(ask, n=2, extra_body={"top_k": 20}, extra_headers={"X-Session-Id": "episode-1"})
        endpoint.load(other, version=3)
        second = write(ask)
    assert [(call.id, call.session) for call in calls] == [(first.id, "episode-1"), (second.id, None)]
    assert (first.weights_version, second.weights_version) == (0, 3)
    assert [[one.version for one in call.group.completions] for call in calls] == [[0, 0], [3]]
    for said, call in zip((first, second), calls, strict=True):
        assert list(call.group.prompt.token_ids) == said.choices[0].prompt_token_ids
        assert [one.token_ids.tolist() for one in call.group.completions] == [one.token_ids for one in said.choices]
    params = SamplingParams(max_tokens=8, seed=1, top_k=20)
    (expected,) = tiny_sampler().sample(["2 + 2"], 2, params)
    for mine, one in zip(calls[0].group.completions, expected.completions, strict=True):
        torch.testing.assert_close(mine.logprobs, one.logprobs)
    (later,) = NativeSampler(other, tiny_tokenizer(), dtype="float32").sample(
        ["2 + 2"], 1, SamplingParams(max_tokens=8, seed=1)
    )
    assert calls[1].group.completions[0].token_ids.tolist() == later.completions[0].token_ids.tolist()


def test_new_weights_wait_for_the_answers_that_run():
    sampler, calls = tiny_sampler(), []
    held = Held(sampler)
    with serving(sampler, on_call=calls.append) as (endpoint, ask), held:
        running = threading.Thread(target=write, args=(ask,), kwargs=ENDLESS)
        running.start()
        until(lambda: endpoint.engine.num_running == 1)
        loading = threading.Thread(target=endpoint.load, args=(tiny_model(seed=5), 1))
        loading.start()
        until(lambda: endpoint.engine._idle_jobs)
        held.free()
        running.join()
        loading.join()
        write(ask)
    assert [call.group.completions[0].version for call in calls] == [0, 1]
    assert calls[0].group.completions[0].num_tokens == 200


def test_a_call_that_cannot_be_recorded_is_an_error_for_its_client():
    def fails(call):
        raise OSError("disk full")

    with serving(tiny_sampler(), on_call=fails) as (_, ask), pytest.raises(openai.InternalServerError):
        write(ask)


def test_processed_log_probabilities_are_those_of_the_draw():
    with serving(tiny_sampler(), logprobs_mode="processed_logprobs") as (_, ask):
        (choice,) = write(ask, logprobs=0, temperature=0.5, extra_body={"top_k": 3}).choices
    (group,) = tiny_sampler().sample(["2 + 2"], 1, SamplingParams(max_tokens=8, seed=1, temperature=0.5, top_k=3))
    assert choice.token_ids == group.completions[0].token_ids.tolist()
    assert choice.logprobs.token_logprobs == pytest.approx(group.completions[0].logprobs.tolist(), abs=1e-5)


def test_weights_for_an_endpoint_that_has_closed_are_refused_and_not_waited_for():
    sampler = tiny_sampler()
    with Endpoint(sampler) as endpoint:
        pass
    with pytest.raises(APIError, match="stopping"):
        endpoint.load(sampler.model, version=1)
