"""Prompts drawn from a data set: each row once an epoch, in an order that resumes exactly."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pytest
import torch

from covey.data import EngineLength, PromptStream, mix
from covey.data.checks import first_prompts
from covey.data.order import BlockOrder
from covey.errors import DataError, ModelError
from kit import rest_nightly, tiny_tokenizer

CHAT = [{"role": "user", "content": "Hello"}]


def table(n=10):
    return datasets.Dataset.from_list([{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(n)])


def generator_stream(n=10):
    def rows():
        for i in range(n):
            yield {"prompt": f"{i} + 1 =", "answer": str(i + 1)}

    return datasets.IterableDataset.from_generator(rows)


class Endless:
    """A stream that is no data set of `datasets` and cannot say where it is."""

    column_names = None

    def __iter__(self):
        return iter([{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10)])


SOURCES = {
    "table": table,
    "table as stream": lambda: table().to_iterable_dataset(),
    "sharded stream": lambda: table().to_iterable_dataset(num_shards=3),
    "generator": generator_stream,
    "mapped generator": lambda: generator_stream().map(lambda row: {"more": row["answer"] * 2}),
    "shuffled by the user": lambda: table().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=2),
    "no state": Endless,
}


def stream(dataset=None, tokenizer=None, **options):
    options = {"seed": 7, "block_size": 4, **options}
    return PromptStream(table() if dataset is None else dataset, tokenizer or tiny_tokenizer(), **options)


def uids(prompts):
    return [prompt.uid for prompt in prompts]


# -- order -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_comes_once_an_epoch_and_epochs_differ(source, shuffle):
    prompts = stream(source(), shuffle=shuffle).take(30)
    epochs = [[p.text for p in prompts[start : start + 10]] for start in (0, 10, 20)]
    assert [len(set(epoch)) for epoch in epochs] == [10, 10, 10]
    assert len(set(uids(prompts))) == 30
    assert {uid.partition(":")[0] for uid in uids(prompts[10:20])} == {"1"}
    if shuffle:
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("shuffle", rest_nightly([True, False], [True]))
@pytest.mark.parametrize("taken", rest_nightly([10, 13, 0, 1, 4, 6, 20], 2))
def test_a_stream_resumes_exactly_where_its_state_was_taken(source, shuffle, taken):
    through = stream(source(), shuffle=shuffle)
    through.take(taken)
    state = json.loads(json.dumps(through.state_dict()))
    expected = through.take(25)
    resumed = stream(source(), shuffle=shuffle)
    resumed.load_state_dict(state)
    actual = resumed.take(25)
    assert uids(actual) == uids(expected)
    assert [p.text for p in actual] == [p.text for p in expected]


class Shown:
    """A value that counts how often it is looked at whole."""

    count = 0

    def __repr__(self):
        Shown.count += 1
        return "shown"


def test_the_state_of_a_stream_reads_a_block_once_however_often_it_is_asked_for():
    rows = [{"prompt": f"{i} + 1 =", "picture": Shown()} for i in range(12)]
    order = BlockOrder(rows, seed=7, shuffle=True, block_size=4)
    states = []
    for _ in rows:
        order.next()
        states += [order.state_dict(), order.state_dict()]
    assert Shown.count == len(rows)
    assert len({state["digest"] for state in states}) == 3  # blocks


def test_the_first_epoch_has_trls_order():
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(7)).tolist()  # RepeatSampler of TRL 1.16
    assert uids(stream(table()).take(10)) == [f"0:{row}" for row in expected]


def test_without_shuffling_rows_come_in_their_own_order():
    assert uids(stream(table(3), shuffle=False).take(5)) == ["0:0", "0:1", "0:2", "1:0", "1:1"]


def test_seeds_decide_the_order_and_nothing_else_does():
    torch.manual_seed(1)
    first = uids(stream(seed=1).take(20))
    torch.manual_seed(2)
    assert uids(stream(seed=1).take(20)) == first
    assert uids(stream(seed=2).take(20)) != first


def test_taking_in_parts_is_taking_at_once():
    parts = stream()
    assert uids(parts.take(3) + parts.take(9) + parts.take(1)) == uids(stream().take(13))


def test_a_data_set_smaller_than_a_batch_comes_round_again():
    prompts = stream(table(2)).take(5)
    assert [uid.partition(":")[0] for uid in uids(prompts)] == ["0", "0", "1", "1", "2"]


@pytest.mark.parametrize(
    "other, said",
    [
        ({"seed": 8}, "with seed=7 and this run has 8"),
        ({"shuffle": False}, "with shuffle=True and this run has False"),
        ({"dataset": table(11)}, "is not the one of the checkpoint"),
        ({"dataset": table().rename_column("answer", "solution")}, "is not the one of the checkpoint"),
    ],
)
def test_a_position_in_other_data_is_refused(other, said):
    state = stream().state_dict()
    with pytest.raises(DataError, match=said):
        stream(**other).load_state_dict(state)


def mixture(weight):
    return mix({"a": table(4), "b": table(6)}, {"a": weight, "b": 1 - weight})


@pytest.mark.parametrize(
    "before, now",
    [
        (table(), table().remove_columns("answer").add_column("answer", ["0"] * 10)),
        (mixture(0.75), mixture(0.25)),
        (table().add_column("at", [{"day": 1}] * 10), table().add_column("at", [{"day": 2}] * 10)),
    ],
)
def test_a_resume_with_other_answers_or_weights_is_named(before, now, caplog):
    state = json.loads(json.dumps(stream(before).state_dict()))
    stream(before).load_state_dict(state)
    assert not caplog.text
    stream(now).load_state_dict(state)
    assert caplog.text.count("but not its other columns") == 1
    del state["other_columns"]  # as in a checkpoint of before
    stream(now).load_state_dict(state)
    assert caplog.text.count("but not its other columns") == 1


def test_an_empty_stream_is_told():
    with pytest.raises(DataError, match="gave no row"):
        stream(generator_stream(0)).take(1)
    with pytest.raises(DataError, match="is empty"):
        stream(table().select([]))


# -- rendering ---------------------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_as_the_tokenizer_encodes_texts():
    tokenizer = tiny_tokenizer()
    (prompt,) = stream(table(1), tokenizer).take(1)
    assert prompt.text == "0 + 1 ="
    assert list(prompt.token_ids) == tokenizer("0 + 1 =")["input_ids"]
    assert prompt.columns == {"answer": "1"}


def chat(messages, tokenizer=None, extra=None, **options):
    dataset = datasets.Dataset.from_list([{"prompt": messages, **(extra or {})}])
    tokenizer = tokenizer or tiny_tokenizer()
    (prompt,) = stream(dataset, tokenizer, **options).take(1)
    return prompt, tokenizer.decode(prompt.token_ids)


def test_messages_are_rendered_with_the_models_turn_open():
    prompt, text = chat(CHAT)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.raw == CHAT
    assert prompt.text is None


def test_a_conversation_that_ends_with_the_assistant_is_continued():
    _, text = chat([*CHAT, {"role": "assistant", "content": "The answer is"}])
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nThe answer is"


def test_template_options_reach_the_template_from_the_run_and_from_the_row():
    assert chat(CHAT, chat_template_kwargs={"enable_thinking": True})[1].endswith("<think>\n")
    _, text = chat(CHAT, extra={"chat_template_kwargs": {"enable_thinking": True}})
    assert text.endswith("<think>\n")
    assert not chat(CHAT)[1].endswith("<think>\n")


def test_fields_that_only_other_rows_have_do_not_reach_the_template():
    named = [{"role": "user", "content": "Hi", "name": "Ann"}]
    dataset = datasets.Dataset.from_list([{"prompt": named}, {"prompt": CHAT}])
    first, second = stream(dataset, shuffle=False).take(2)
    assert first.messages == tuple(named)
    assert second.messages == tuple(CHAT)


def test_template_options_that_only_other_rows_have_do_not_reach_the_template():
    template = "{{ effort | default('medium') }} {{ tools[0] if tools else 'none' }} {{ thinks }}"
    tool = {"name": "add", "unit": {"default": None, "kind": "text"}}
    options = [{"effort": "high"}, {"thinks": False}, {"tools": [tool]}]
    dataset = datasets.Dataset.from_list([{"prompt": CHAT, "chat_template_kwargs": each} for each in options])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    rows = stream(dataset, tokenizer, shuffle=False, chat_template_kwargs={"thinks": True}).take(3)
    cleaned = {"name": "add", "unit": {"kind": "text"}}
    told = [tokenizer.decode(row.token_ids) for row in rows]
    assert told == ["high none True", "medium none False", f"medium {cleaned} True"]


def test_tools_beside_a_prompt_are_named_once_as_not_shown(caplog):
    for extra in ({"tools": [{"name": "add"}]}, {"tools": None}, {"tools": [1], "chat_template_kwargs": {"tools": []}}):
        chat(CHAT, extra=extra)
    assert caplog.text.count("The column 'tools' is not shown to the model") == 1


def test_no_chat_template_is_told_with_the_fix():
    with pytest.raises(ModelError, match=r"Row 0 .* but the tokenizer has no chat template; use an instruct"):
        chat(CHAT, tiny_tokenizer(chat=False))
    _, text = chat(
        CHAT, tiny_tokenizer(chat=False), chat_template_kwargs={"chat_template": "{{ messages[0].content }}"}
    )
    assert text == "Hello"


def test_a_template_that_refuses_the_messages_is_told_with_the_row():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"Row 0 .* the chat template refused its messages .*roles must alternate"):
        chat(CHAT, tokenizer)


def test_a_row_of_a_stream_is_checked_when_it_is_drawn():
    rows = datasets.Dataset.from_list([{"prompt": "fine"}, {"prompt": ""}]).to_iterable_dataset()
    with pytest.raises(DataError, match=r"Row 1 .* has an empty prompt"):
        stream(rows, shuffle=False).take(2)


# -- length ------------------------------------------------------------------------------------------------------------------


def long_table():
    return datasets.Dataset.from_list([{"prompt": "short"}, {"prompt": "x" * 60}, {"prompt": "also short"}])


def test_a_prompt_that_does_not_fit_is_refused_before_any_work():
    with pytest.raises(DataError, match=r"Row 1 .* has a prompt of 60 tokens, but only 50 fit"):
        stream(long_table(), max_prompt_length=50)
    with pytest.raises(DataError, match=r"Row 1 .* has a prompt of 60 tokens"):
        stream(long_table().to_iterable_dataset(), max_prompt_length=50).take(3)
    assert len(stream(long_table(), max_prompt_length=60).take(3)) == 3


def test_long_conversations_are_measured_after_templating():
    tokenizer = tiny_tokenizer()
    length = len(chat(CHAT, tokenizer)[0].token_ids)
    chat(CHAT, tokenizer, max_prompt_length=length)
    with pytest.raises(DataError, match=f"has a prompt of {length} tokens, but only {length - 1} fit"):
        chat(CHAT, tokenizer, max_prompt_length=length - 1)


def test_tools_of_a_prompt_are_measured_before_any_work():
    """A template that shows tools writes more than a question of two words and the text around it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 1500, "parameters": {}}}]
    rows = [
        {"prompt": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"tools": shown}}
        for shown in (None, tools)
    ]
    with pytest.raises(DataError, match=r"Row 1 .* has a prompt of 1[0-9]+ tokens, but only 1200 fit"):
        PromptStream(datasets.Dataset.from_list(rows), tokenizer, max_prompt_length=1200)
    plain = datasets.Dataset.from_list([{"prompt": rows[0]["prompt"]}])
    with pytest.raises(DataError, match=r"Row 0 .* has a prompt of 1[0-9]+ tokens, but only 1200 fit"):
        PromptStream(plain, tokenizer, max_prompt_length=1200, chat_template_kwargs={"tools": tools})


def test_long_prompts_may_be_left_out_and_are_counted(caplog):
    dropping = stream(long_table(), max_prompt_length=50, on_too_long="drop", shuffle=False)
    assert uids(dropping.take(4)) == ["0:0", "0:2", "1:0", "1:2"]
    assert dropping.num_dropped == 2
    assert caplog.text.count("such prompts are left out") == 1
    resumed = stream(long_table(), max_prompt_length=50, on_too_long="drop", shuffle=False)
    resumed.load_state_dict(dropping.state_dict())
    assert resumed.num_dropped == 2


def test_prompts_that_are_too_long_for_an_engine_are_counted_when_they_are_drawn():
    engine = EngineLength(51, 8, "the vLLM server's --max-model-len")
    dropping = stream(long_table(), engine=engine, on_too_long="drop", shuffle=False)
    assert dropping.num_dropped == 0
    assert uids(dropping.take(4)) == ["0:0", "0:2", "1:0", "1:2"]
    assert dropping.num_dropped == 2


def test_nothing_that_fits_is_an_error_and_not_an_endless_search():
    dropping = stream(long_table().select([1]), max_prompt_length=50, on_too_long="drop")
    with pytest.raises(DataError, match=r"Every prompt .* is longer than the 50 tokens"):
        dropping.take(1)
    with pytest.raises(DataError, match="No room for a prompt"):
        stream(max_prompt_length=0)


def test_prompts_are_measured_many_rows_at_a_time_and_a_row_that_cannot_be_read_is_named():
    good, bad = b"1 + 1 =", b"\xff\xfe"
    offsets, values = [0], b""
    for text in [good] * 1500 + [bad, good]:
        values += text
        offsets.append(len(values))
    texts = pa.StringArray.from_buffers(
        len(offsets) - 1, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(values)
    )
    dataset = datasets.Dataset(pa.table({"prompt": texts}))
    found = first_prompts(dataset, 1502, "train.jsonl")
    assert [next(found) for _ in range(1500)] == [("1 + 1 =", None)] * 1500
    with pytest.raises(DataError, match=r"^Row 1500 \(counting from 0\) of train.jsonl cannot be read"):
        next(found)


def test_prompts_of_a_formatted_data_set_are_measured_too():
    stream = PromptStream(table().with_format("numpy"), tiny_tokenizer(), max_prompt_length=50)
    assert stream.num_rows == 10
