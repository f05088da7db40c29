"""`covey chat` with a real small model: one answer, a conversation, commands, and nothing that steers the terminal."""

import io
import json

import pytest

from covey.cli import main
from covey.cli.chat import Chat, Sampling, command
from covey.errors import ConfigError
from kit import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return str(where)


def new_chat(**fields):
    tokenizer = tiny_tokenizer(chat=fields.pop("template", True))
    return Chat(tiny_model(), tokenizer, [tokenizer.eos_token_id], Sampling(temperature=0, max_tokens=4), **fields)


def test_one_prompt_gives_one_json_object_on_stdout(folder, capsys):
    words = ["chat", folder, "--prompt", "What is 2 + 2?", "--temperature", "0", "--max-tokens", "3", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["prompt"] == "What is 2 + 2?"
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_a_conversation_runs_without_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("Hello\n/sample temperature=0\n/what\n/sample heat=1\nAgain\n/quit\nnever\n")
    )
    assert main(["chat", folder, "--max-tokens", "2"]) == 0
    shown = capsys.readouterr()
    assert "temperature=0" in shown.err
    assert "/what is not known" in shown.err
    assert "/sample heat=1: write name=value." in shown.err
    assert "> " not in shown.out


def test_settings_of_the_checkpoint_have_no_effect_and_are_named(folder, tmp_path, capsys, monkeypatch):
    chat = new_chat()
    plain = chat.ask("Tom has 3 apples")
    chat.reset()
    chat.model.generation_config.repetition_penalty = 50.0
    chat.model.generation_config.min_new_tokens = 4
    assert chat.ask("Tom has 3 apples") == plain
    assert chat.model.generation_config.repetition_penalty == 50.0
    chat.model.generation_config.update(do_sample=True, top_k=20)
    chat.model.save_pretrained(tmp_path)
    chat.tokenizer.save_pretrained(tmp_path)
    for where, advice in (
        (folder, ""),
        (str(tmp_path), " Its generation_config.json, which is not applied, names top_k=20 "),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main(["chat", where, "--top-p", "0.9"]) == 0
        shown = capsys.readouterr().err
        assert f"Answers are drawn with temperature=0.7 top_p=0.9 top_k=0 max_tokens=512.{advice}" in shown
        assert ("generation_config" in shown) == bool(advice)


def test_the_answer_joins_the_conversation_until_it_is_reset():
    chat = new_chat()
    chat.ask("What is 2 + 2?")
    chat.ask("And 3 + 3?")
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    assert command(chat, "/reset")
    assert chat.messages == []


def test_a_greedy_answer_is_that_of_a_plain_forward_pass():
    chat = new_chat(template=False)
    answer = chat.ask("Tom has 3 apples")
    ids = chat.tokenizer("Tom has 3 apples", return_tensors="pt")["input_ids"]
    for _ in range(4):
        ids = ids.new_tensor([[*ids[0].tolist(), int(chat.model(ids).logits[0, -1].argmax())]])
    expected = chat.tokenizer.decode(ids[0, -4:], skip_special_tokens=True)
    assert expected.startswith(answer)


def test_the_system_message_reaches_the_model():
    chat = new_chat()
    plain = chat._encoded([{"role": "user", "content": "Hi"}], "Hi")
    assert command(chat, "/system Be brief.")
    told = chat._encoded([{"role": "user", "content": "Hi"}], "Hi")
    assert "Be brief." in chat.tokenizer.decode(told[0])
    assert told.shape[1] > plain.shape[1]
    command(chat, "/system")
    assert chat.system is None


def test_a_full_context_is_told_with_the_way_out():
    chat = new_chat()
    with pytest.raises(ConfigError, match="and the model reads 256: /reset starts a new one"):
        chat.ask("What is 12 + 30? " * 60)
    assert chat.messages == []


@pytest.mark.parametrize("words", ["top_p=0", "temperature=-1", "max_tokens=0", "top_k=-1"])
def test_impossible_sampling_is_refused(words):
    with pytest.raises(ConfigError, match="cannot be sampled with"):
        Sampling().changed([words])


def test_sampling_changes_by_name():
    assert Sampling().changed(["temperature=0.5", "top_k=20"]) == Sampling(temperature=0.5, top_k=20)


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("nothing")
    assert main(["chat", str(tmp_path)]) == 2
    assert "holds neither a model (config.json) nor a checkpoint" in capsys.readouterr().err


def test_no_model_is_said(capsys):
    assert main(["chat"]) == 2
    assert "covey chat needs a model" in capsys.readouterr().err
