"""Messages of completions: thoughts and calls apart, by a tokenizer's response template or harmony's channels, as TRL's rewards get them."""

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.environments import Template
from covey.environments.messages import with_messages
from covey.errors import ModelError
from covey.types import Completion, Group, Prompt
from environments.acting import CHATML, HARMONY, calls_in, chat_tokenizer, tiny_llama

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""A response template of ChatML with Hermes tool calls, as transformers' documentation writes one."""
THINKS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")
"""The prompt opens the thoughts, so that a turn alone does not tell where they begin."""


def harmony():
    words = ("<|call|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    return chat_tokenizer(HARMONY, words, eos="<|return|>")


def with_response(template=CHATML):
    tokenizer = chat_tokenizer(template)
    tokenizer.response_template = RESPONSE
    return tokenizer


def message(tokenizer, text, *, prompt=None, is_chat=True):
    """The messages that rewards get for a completion of this text."""
    ask = ({"role": "user", "content": "q"},)
    before = tokenizer.apply_chat_template(list(ask), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(before if prompt is None else prompt, add_special_tokens=False)["input_ids"]
    answer = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    done = Completion(token_ids=answer, text=tokenizer.decode(answer, skip_special_tokens=True), finish="stop")
    chat = {"messages": ask} if is_chat else {"text": "q"}
    group = Group(prompt=Prompt(uid="0", token_ids=tuple(ids), **chat), completions=(done,))
    return with_messages(group, tokenizer).completions[0].messages


def test_the_final_channel_of_harmony_is_the_content_and_analysis_is_apart():
    text = "<|channel|>analysis<|message|>Seven.<|end|><|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
    assert message(harmony(), text) == ({"role": "assistant", "content": "It is 7.", "thinking": "Seven."},)
    assert message(harmony(), "<|channel|>final<|message|>7<|return|>") == ({"role": "assistant", "content": "7"},)
    cut = message(harmony(), "<|channel|>analysis<|message|>Sev")
    assert cut == ({"role": "assistant", "content": "", "thinking": "Sev"},)
    assert message(harmony(), "<|channel|>analy") == ({"role": "assistant", "content": ""},)


def test_a_response_template_reads_content_thoughts_and_calls():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    (read,) = message(with_response(), f"<think>Add.</think>Now.{call}<|im_end|>")
    assert (read["content"], read["reasoning_content"]) == ("Now.", "Add.")
    assert read["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    (read,) = message(with_response(THINKS), "Seven.</think>It is 7.<|im_end|>")  # the prompt wrote <think>
    assert read == {"role": "assistant", "reasoning_content": "Seven.", "content": "It is 7."}


def test_a_turn_that_does_not_follow_its_response_template_is_its_text():
    assert message(with_response(), "Now.<tool_call>{no</tool_call><|im_end|>") == (
        {"role": "assistant", "content": "Now.<tool_call>{no</tool_call>"},
    )
    assert message(with_response(THINKS), "") == ({"role": "assistant", "content": ""},)


def test_text_prompts_and_plain_templates_have_no_messages():
    assert message(with_response(), "Now.<|im_end|>", is_chat=False) is None
    assert message(chat_tokenizer(), "<think>Add.</think>Now.<|im_end|>") is None


def test_calls_are_read_by_the_response_template_where_there_is_one():
    tokenizer = with_response(THINKS)
    template = Template(tokenizer, [tokenizer.eos_token_id], {})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = tokenizer(f"Add.</think>Now.{call}<|im_end|>", add_special_tokens=False)["input_ids"]
    before = tokenizer("<|im_start|>assistant\n<think>", add_special_tokens=False)["input_ids"]
    text, calls, thoughts = template.turn_in(ids, before)
    assert (text, thoughts) == ("Now.", {"reasoning_content": "Add."})
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1})]


def test_a_response_template_that_misses_the_calls_is_refused_before_a_run():
    tokenizer = with_response()
    tokenizer.response_template = {**RESPONSE, "fields": {"content": RESPONSE["fields"]["content"]}}
    with pytest.raises(
        ModelError, match="response_template does not read the tool calls that its chat template writes"
    ):
        Template(tokenizer, [tokenizer.eos_token_id], {})


@pytest.mark.slow
def test_rewards_of_a_run_read_the_final_channel(tmp_path):
    """A model that writes nothing but thoughts: rewards get no content, and the thoughts apart."""
    tokenizer, seen = harmony(), []
    analysis = tokenizer("<|channel|>analysis<|message|>", add_special_tokens=False)["input_ids"]

    def reward(completions, **columns):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    model = tiny_llama(tokenizer)
    ask = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True)
    start = tokenizer(ask, add_special_tokens=False)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        ids = torch.tensor([start + analysis + [40, 41] * 3])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=16,
        temperature=0.1, report_to="none", save_strategy="no", use_cpu=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}]}] * 2)
    GRPOTrainer(model, reward, config, train_dataset=rows, processing_class=tokenizer).train()
    assert seen
    assert all(turn["content"] == "" and turn["thinking"] for (turn,) in seen)


def test_a_call_nested_too_deep_or_with_half_of_a_character_ends_no_run():
    tokenizer = with_response()
    deep = '<tool_call>{"name": "add", "arguments": ' + "[" * 5000
    assert message(tokenizer, deep)[0]["content"].startswith("<tool_call>")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    template = Template(tokenizer, [tokenizer.eos_token_id], {"tools": tools})
    half = tokenizer(
        r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call><|im_end|>', add_special_tokens=False
    )
    _, calls = calls_in(template, half["input_ids"])
    assert [call.arguments for call in calls] == [{"a": "\ufffd"}]
