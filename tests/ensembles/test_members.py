"""Members as a user gives them: text, models, folders, endpoints; their tokens, their share of a group, and what is refused."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from endpoints import endpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey import Ensemble, GRPOConfig, GRPOTrainer, Member
from covey.data.rendering import say_once
from covey.ensembles.loading import load_writer
from covey.ensembles.writers import Encoding, LocalWriter
from covey.environments.messages import with_messages, with_thoughts_apart
from covey.errors import ConfigError, CoveyError
from covey.rollout import SamplingParams
from covey.training import build
from covey.types import Completion, Group, Prompt
from environments.acting import CHATML, HARMONY, chat_tokenizer
from kit import prompt, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Another tokenizer: one token a byte, and none of the merges of `tiny_tokenizer`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def foreign(seed: int = 2) -> tuple:
    tokenizer = letters_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return tiny_model(seed=seed, vocab_size=len(tokenizer), **ids), tokenizer


def encoding() -> Encoding:
    tokenizer = tiny_tokenizer()
    return Encoding.of(tiny_model(), tokenizer, (tokenizer.eos_token_id,))


def config(folder, **options) -> GRPOConfig:
    args = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "max_completion_length": 8, "learning_rate": 1e-3,
        "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
        "logging_steps": 1, "rollout_log_steps": 1,
    }  # fmt: skip
    return GRPOConfig(str(folder), **{**args, **options})


ROWS = Dataset.from_list([{"prompt": f"{i} + 2 ="} for i in range(4)])


def test_a_member_is_written_as_text_a_mapping_or_an_object():
    ensemble = Ensemble(
        [
            "hub/some-model,role=baseline,samples=2,name=old",
            {"model": "hub/other-model", "role": "rescue"},
            "hub/other-model",
            Member("http://localhost:1/v1", served_model_name="qwen"),
            tiny_model(),
        ]
    )
    assert [(one.role, one.samples) for one in ensemble.members] == [
        ("baseline", 2), ("rescue", 1), (None, 1), (None, 1), (None, 1)
    ]  # fmt: skip
    assert ensemble.names == ["old", "other-model", "other-model-2", "qwen", "Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "has no members"),
        (["m,role=friend"], "role='friend' must be 'sibling', 'baseline', 'rescue' or None"),
        (["m,samples=0"], "samples=0 must be at least 1"),
        (["m,samples=two"], "samples=two is no number"),
        (["m,sample=2"], "sample is not an option of a member. Did you mean samples?"),
        ([",role=rescue"], "names no model"),
        (["./nowhere"], "does not exist"),
        (["http://localhost:1/v1"], "say which model it serves"),
        (["http://localhost:1/v1,served_model_name=q,role=sibling"], "cannot be a sibling"),
        (["m,name=policy"], "and not policy"),
        (["m,name=a", "n,name=a"], "two members have the name 'a'"),
    ],
)
def test_a_member_that_cannot_be_is_refused_in_a_sentence(given, said):
    with pytest.raises(CoveyError, match=said.replace("?", r"\?")):
        Ensemble(given)


def test_members_write_at_most_their_share_of_a_group(tmp_path):
    member = Member(tiny_model(seed=1), tokenizer=tiny_tokenizer(), samples=4)
    Ensemble([member]).refuse_share(4)
    with pytest.raises(ConfigError, match=r"write 4 of 7 completions of a group, more than max_share=0.5"):
        Ensemble([member]).refuse_share(3)
    with pytest.raises(ConfigError, match="more than max_share=0.2"):
        GRPOTrainer(tiny_model(), max_reward, config(tmp_path), ROWS, ensemble=Ensemble([member], max_share=0.2))


def max_reward(completions, **columns):
    return [1.0] * len(completions)


def test_a_member_that_cannot_call_the_runs_tools_is_refused():
    model, tokenizer = foreign()
    episodes = lambda over, model, *parts: over(model)
    for member in (Member(model, tokenizer=tokenizer), Member("http://localhost:1/v1", served_model_name="m")):
        with pytest.raises(ConfigError, match="Ensemble member other writes text of .* tools cannot answer"):
            load_writer(member, "other", CPU, encoding(), episodes=episodes)


def test_the_role_follows_from_the_tokenizer():
    same = load_writer(Member(tiny_model(seed=1), tokenizer=tiny_tokenizer()), "same", CPU, encoding())
    model, tokenizer = foreign()
    other = load_writer(Member(model, tokenizer=tokenizer), "other", CPU, encoding())
    assert (same.role, other.role) == ("sibling", "rescue")
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        load_writer(Member(model, tokenizer=tokenizer, role="sibling"), "other", CPU, encoding())


def test_a_member_with_another_tokenizer_comes_back_in_the_policys_tokens_or_not_at_all():
    model, tokenizer = foreign()
    ours = tiny_tokenizer()
    writer = load_writer(Member(model, tokenizer=tokenizer, samples=64), "other", CPU, encoding())
    (group,) = writer.write([prompt("2 + 2 =", tokenizer=ours)], SamplingParams(max_tokens=6, seed=0))
    kept = group.completions
    assert 0 < len(kept) < 64  # random bytes are mostly no text
    for one in kept:
        ids = one.token_ids.tolist()
        assert ours.decode(ids, skip_special_tokens=True) == one.text
        assert (ids[-1] == ours.eos_token_id) == (one.finish == "stop")
        assert one.source == "other"


@pytest.mark.parametrize(
    ("text", "finish", "limit", "is_kept"),
    [
        ("Tom has 3 apples", "stop", 40, True),
        ("Tom has 3 apples", "stop", 2, False),  # longer than a completion may be
        ("", "stop", 40, False),
        ("a <|im_end|> b", "stop", 40, False),  # a special token as text
        ("cut", "length", 40, True),
    ],
)
def test_text_is_kept_if_it_comes_back_equal(text, finish, limit, is_kept):
    ids = encoding()(text, finish, limit)
    assert (ids is not None) == is_kept
    if ids is not None:
        assert (ids[-1] == tiny_tokenizer().eos_token_id) == (finish == "stop")


def test_an_endpoint_rescues(tmp_path):
    def reward(completions, **columns):
        return [float(text == " 42") for text in completions]

    with endpoint(lambda body: " 42") as (url, asked):
        trainer = GRPOTrainer(
            tiny_model(), reward, config(tmp_path), ROWS, processing_class=tiny_tokenizer(),
            ensemble=[f"{url},served_model_name=big,samples=2"],
        )  # fmt: skip
        trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["ensemble/big/used"] == 1.0
    assert logs["ensemble/big/reward"] == 1.0
    assert logs["reward"] == 0.0
    assert asked[0]["model"] == "big"
    assert asked[0]["messages"][0]["content"].endswith("+ 2 =")
    assert len({body["seed"] for body in asked[:2]}) == 2
    import pyarrow.parquet as pq

    written = pq.read_table(tmp_path / "rollouts" / "step-000001.parquet").to_pylist()
    assert sorted(row["source"] for row in written) == ["big", "big", *["policy"] * 4]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def written_by_endpoint(message: dict, template: str | None, limit: int = 60) -> tuple:
    """The completion of an endpoint's message, the text of its tokens, and the number of requests."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = ({"role": "user", "content": "2 + 2 ="},)
    ids = tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"])
    row = Prompt(uid="0", token_ids=ids, messages=messages)
    form = Encoding.of(tiny_model(), tokenizer, (tokenizer.eos_token_id,))
    with endpoint(lambda body: message) as (url, asked):
        writer = load_writer(Member(url, served_model_name="big"), "big", CPU, form)
        ((completion,),) = [group.completions for group in writer.write([row], SamplingParams(max_tokens=limit))]
    return completion, tokenizer.decode(completion.token_ids, skip_special_tokens=True), len(asked)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("message", "template", "text"),
    [
        ({"content": "\n\n4"}, THINKING, "<think>\nTwo and two.\n</think>\n\n4"),
        ({"content": "4"}, OPENED, "Two and two.\n</think>\n\n4"),
        ({"content": "<think>Two and two.</think>4"}, THINKING, "<think>Two and two.</think>4"),
        ({"content": None, "finish_reason": "length"}, THINKING, "<think>\nTwo and two."),
        ({"content": "4"}, None, "4"),
    ],
)
def test_an_endpoints_thoughts_are_written_once_as_the_policys_template_writes_them(
    message, template, text, field, caplog
):
    say_once.cache_clear()
    completion, decoded, requests = written_by_endpoint({**message, field: "Two and two.\n"}, template)
    assert (completion.text, decoded, requests) == (text, text, 1)
    assert completion.finish == message.get("finish_reason", "stop")
    note = "Ensemble member big answers with thoughts apart, for which the policy's prompts"
    assert (note in caplog.text) == (template is None)


WORDS = ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "[INST]", "[THINK]", "[/THINK]")
ANALYSIS = "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
THINKING_HARMONY = HARMONY.replace(
    "assistant<|channel|>final", "assistant{% if m.thinking %}" + ANALYSIS + "{% endif %}<|channel|>final"
)
IN_CHANNELS = (
    "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% elif m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def written_with_marks(message: dict, template: str) -> tuple:
    """The completion of an endpoint's message for a policy whose marks are control tokens, its tokens' text, and its tokenizer."""
    tokenizer = chat_tokenizer(template, WORDS, eos="<|return|>")
    messages, high = ({"role": "user", "content": "2 + 2 ="},), {"reasoning_effort": "high"}
    ids = tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **high)["input_ids"])
    row = Prompt(uid="0", token_ids=ids, messages=messages)
    form = Encoding.of(tiny_model(vocab_size=len(tokenizer)), tokenizer, (tokenizer.eos_token_id,), high)
    with endpoint(lambda body: message) as (url, _):
        writer = load_writer(Member(url, served_model_name="big"), "big", CPU, form)
        (group,) = writer.write([row], SamplingParams(max_tokens=200))
    (done,) = with_messages(group, tokenizer).completions
    return done, tokenizer.decode(done.token_ids, skip_special_tokens=False)


def test_thoughts_and_answers_of_an_endpoint_get_the_control_tokens_of_the_policys_template(caplog):
    apart = {"content": "4", "reasoning_content": "Two and two.\n"}
    done, text = written_with_marks(apart, THINKING_HARMONY)
    assert text == IN_CHANNELS
    assert done.messages == ({"role": "assistant", "content": "4", "thinking": "Two and two."},)
    done, text = written_with_marks({"content": "4"}, THINKING_HARMONY)
    assert text == "<|channel|>final<|message|>4<|return|>"
    assert done.messages == ({"role": "assistant", "content": "4"},)
    for answer in ("a", "final"):  # words of the marks before it
        assert written_with_marks({"content": answer}, THINKING_HARMONY)[1] == (
            f"<|channel|>final<|message|>{answer}<|return|>"
        )
    done, text = written_with_marks(apart, MISTRAL)
    assert (text, done.text) == ("[THINK]Two and two.[/THINK]4<|return|>", "Two and two.4")
    assert not caplog.records
    say_once.cache_clear()
    done, text = written_with_marks(apart, HARMONY)
    assert text == "<|channel|>final<|message|>4<|return|>"
    assert "with thoughts apart" in caplog.text


class Writes:
    """A sampler whose every completion is this text."""

    def __init__(self, text: str, tokenizer) -> None:
        self.ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        self.text = tokenizer.decode(self.ids, skip_special_tokens=True)

    def sample(self, prompts, n, params):
        done = Completion(token_ids=self.ids, text=self.text, finish="stop")
        return [Group(prompt=row, completions=(done,) * n) for row in prompts]


def taken_over(text: str, theirs: str, template: str, words: tuple = WORDS, policy_words: tuple = WORDS) -> str | None:
    """Text of the tokens in which a policy with this template takes over a member's turn; None where it takes none."""
    member, tokenizer = chat_tokenizer(theirs, words), chat_tokenizer(template, policy_words)
    messages = ({"role": "user", "content": "2 + 2 ="},)
    ids = tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"])
    form = Encoding.of(tiny_model(vocab_size=len(tokenizer)), tokenizer, (tokenizer.eos_token_id,))
    writer = LocalWriter("big", "rescue", 1, Writes(text, member), member, form, True, with_thoughts_apart)
    (group,) = writer.write([Prompt(uid="0", token_ids=ids, messages=messages)], SamplingParams(max_tokens=200))
    texts = [tokenizer.decode(done.token_ids, skip_special_tokens=False) for done in group.completions]
    return texts[0] if texts else None


def test_thoughts_and_answers_of_a_local_member_with_another_tokenizer_stay_apart(caplog):
    thought = "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    marks = ("<think>", "</think>")
    assert taken_over(IN_CHANNELS, THINKING_HARMONY, THINKING) == thought
    assert taken_over(IN_CHANNELS, THINKING_HARMONY, OPENED) == thought.removeprefix("<think>\n")
    assert taken_over(thought, THINKING, THINKING) == thought
    assert taken_over(thought, THINKING, THINKING, marks) == thought, "marks that are control tokens of the member"
    assert taken_over(thought.removeprefix("<think>\n"), OPENED, THINKING) == thought
    in_channels = IN_CHANNELS.replace("<|return|>", "<|im_end|>")
    assert taken_over(thought, THINKING, THINKING_HARMONY) == in_channels
    assert taken_over("4<|im_end|>", THINKING, THINKING_HARMONY) == in_channels[in_channels.index("<|channel|>final") :]
    assert taken_over("4<|im_end|>", THINKING, THINKING) == "4<|im_end|>"
    assert not caplog.records
    say_once.cache_clear()
    assert taken_over(thought, THINKING, CHATML) == "4<|im_end|>"
    assert "with thoughts apart" in caplog.text


def test_a_run_reads_the_turns_of_its_local_members(tmp_path, monkeypatch):
    turns = []
    monkeypatch.setattr(build, "with_thoughts_apart", lambda tokenizer, ids, prefix: turns.append(list(ids)))
    model, tokenizer = foreign()
    tokenizer.chat_template = THINKING
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} + 2 ="}]} for i in range(4)])
    member = Member(model, tokenizer=tokenizer, role="baseline")
    reward = lambda completions, **columns: [0.0] * len(completions)
    GRPOTrainer(tiny_model(), reward, config(tmp_path, max_steps=1), rows, ensemble=[member],
                processing_class=tiny_tokenizer()).train()  # fmt: skip
    assert turns
    assert all(turns)


def test_an_answer_that_is_an_object_is_sent_as_json_and_a_request_that_is_refused_says_why_in_one_sentence():
    call = lambda arguments: [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    messages = (
        {"role": "user", "content": "2 + 2 ="},
        {"role": "assistant", "content": None, "tool_calls": call({"of": [2, 2]})},
        {"role": "tool", "content": {"sum": 4, "exact": None}},
    )
    row = Prompt(uid="0", token_ids=(1,), messages=messages)
    with endpoint(lambda body: 400) as (url, asked):
        writer = load_writer(Member(url, served_model_name="big"), "big", CPU, encoding())
        with pytest.raises(ConfigError) as caught:
            writer.write([row], SamplingParams(max_tokens=4))
    called = {**messages[1], "tool_calls": call('{"of": [2, 2]}')}
    assert asked[0]["messages"] == [messages[0], called, {"role": "tool", "content": '{"sum": 4, "exact": null}'}]
    assert str(caught.value).startswith(
        f"Ensemble member big: The ensemble member big at {url} refuses model 'big': HTTP 400 "
    )


@pytest.mark.parametrize("fault", ["slow down", "no key"])
def test_an_endpoint_that_fails_costs_its_completions_and_one_that_refuses_ends_the_run(
    fault, tmp_path, monkeypatch, caplog
):
    from covey.rewards.builtin import chat_endpoint

    monkeypatch.setattr(chat_endpoint.Endpoint, "_pause", lambda self, attempt: 0.0)
    with endpoint(lambda body: 503 if fault == "slow down" else 401) as (url, _):
        trainer = GRPOTrainer(
            tiny_model(), lambda completions, **k: [0.0] * len(completions), config(tmp_path, max_steps=2), ROWS,
            processing_class=tiny_tokenizer(), ensemble=[f"{url},served_model_name=big"],
        )  # fmt: skip
        if fault == "slow down":
            trainer.train()
            assert [entry["ensemble/big/lost"] for entry in trainer.state.log_history[:2]] == [1.0, 1.0]
            (said,) = [line for line in caplog.messages if "did not answer" in line]
            assert said.startswith(f"Ensemble member big at {url} did not answer ")
            return
        with pytest.raises(ConfigError, match=r"ensemble member big .* refuses .* 401.*OPENAI_API_KEY"):
            trainer.train()


def test_a_folder_and_an_adapter_can_be_members(tmp_path):
    from peft import LoraConfig, get_peft_model

    tokenizer = tiny_tokenizer()
    base = tiny_model(seed=1)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    loaded = type(base).from_pretrained(tmp_path / "base")
    adapted = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    asked, how = [prompt("2 + 2 =", tokenizer=tokenizer)], SamplingParams(max_tokens=8, seed=0)

    def written(member):
        return [
            one.logprobs.tolist()
            for one in load_writer(Member(member, samples=4), "m", CPU, encoding()).write(asked, how)[0].completions
        ]

    assert written(str(tmp_path / "base")) != written(str(tmp_path / "adapter"))
    assert len(written(str(tmp_path / "adapter"))) == 4
