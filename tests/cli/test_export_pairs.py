"""`covey export pairs`: the best against the worst of each group, in TRL's columns."""

import json
from dataclasses import replace

import pytest
import torch

from covey.cli import main
from covey.runs import rollouts
from covey.types import EpisodeNotes
from kit import group


def run_of(folder, steps):
    for step, groups in steps.items():
        rollouts.write(folder / "rollouts", step, groups, ["right", "short"])
    return folder


def scored(texts, totals, **given):
    made = group(texts, rewards=[[total, -total] for total in totals], **given)
    return replace(made, totals=torch.tensor(totals))


def exported(folder, *flags):
    path = folder / "pairs.jsonl"
    path.unlink(missing_ok=True)
    assert main(["export", "pairs", str(folder), "-o", str(path), *flags]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_best_against_worst_with_trls_columns(tmp_path):
    run_of(tmp_path, {1: [scored(["4", "5", "six"], [1.0, 0.5, 0.0]), scored(["a", "b"], [1.0, 1.0])]})
    assert exported(tmp_path) == [
        {"prompt": "2 + 2 =", "chosen": "4", "rejected": "six", "score_chosen": 1.0, "score_rejected": 0.0, "step": 1}
    ]


def test_a_chat_stays_one(tmp_path):
    question = [{"role": "user", "content": "2 + 2?"}]
    run_of(tmp_path, {1: [scored(["4", "5"], [1.0, 0.0], question=question)]})
    (pair,) = exported(tmp_path)
    assert pair["prompt"] == question
    assert pair["chosen"] == [{"role": "assistant", "content": "4"}]


@pytest.mark.parametrize("own", [[], [{"role": "system", "content": "use tools"}]], ids=["environment", "agent"])
def test_an_episode_is_exported_with_all_of_its_turns(tmp_path, own):
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}] if not own else []
    question = [*history, {"role": "user", "content": "2 + 2?"}]
    turns = lambda answer: [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": "done"},
    ]
    made = scored(["done", "done"], [1.0, 0.0], question=question)  # the texts of the last turns are the same
    notes = [EpisodeNotes(conversation=(*own, *question, *turns(answer))) for answer in "45"]
    done = tuple(replace(one, episode=note) for one, note in zip(made.completions, notes, strict=True))
    run_of(tmp_path, {1: [replace(made, completions=done)]})
    (pair,) = exported(tmp_path)
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ([*own, *question], turns("4"), turns("5"))


def test_history_in_an_endpoints_form_stays_in_the_prompt_and_an_agent_that_asked_no_model_has_its_answer(tmp_path):
    call = lambda arguments: [{"function": {"name": "add", "arguments": arguments}}]
    ask = lambda arguments, content: [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": content, "tool_calls": call(arguments)},
        {"role": "tool", "content": "4"},
    ]
    answer = lambda text: [{"role": "assistant", "content": text}]
    sent = [{"role": "system", "content": "Be short."}, *ask('{"of": [2, 2]}', "")]
    made = scored(["4", "5"], [1.0, 0.0], question=ask({"of": [2, 2]}, None))
    asked = lambda one: replace(one, episode=EpisodeNotes(conversation=(*sent, *answer(one.text))))
    silent = lambda one: replace(one, messages=())
    best, worst = made.completions
    for step, pair in enumerate(
        [(asked(best), asked(worst)), (asked(best), silent(worst)), (silent(best), silent(worst))], 1
    ):
        run_of(tmp_path, {step: [replace(made, completions=pair)]})
    plain = scored(["4", "5"], [1.0, 0.0])
    run_of(tmp_path, {4: [replace(plain, completions=tuple(map(silent, plain.completions)))]})
    first, third, fourth = exported(tmp_path)  # the second repeats the first
    assert (first["prompt"], first["chosen"], first["rejected"]) == (sent, answer("4"), answer("5"))
    assert (third["chosen"], third["rejected"]) == (answer("4"), answer("5"))
    assert (fourth["prompt"], fourth["chosen"], fourth["rejected"]) == ("2 + 2 =", "4", "5")


def test_margin_reward_steps_and_repetition(tmp_path):
    near, far = scored(["4", "5"], [0.6, 0.5]), scored(["4", "6"], [1.0, 0.0])
    run_of(tmp_path, {1: [near], 2: [far], 3: [far]})
    assert [pair["rejected"] for pair in exported(tmp_path)] == ["5", "6"]
    assert [pair["rejected"] for pair in exported(tmp_path, "--min-margin", "0.5")] == ["6"]
    assert [pair["step"] for pair in exported(tmp_path, "--steps", "3:")] == [3]
    assert [pair["rejected"] for pair in exported(tmp_path, "--max-per-prompt", "1")] == ["6"]
    assert [pair["chosen"] for pair in exported(tmp_path, "--reward", "short")] == ["5", "6"]


def test_a_cut_completion_is_left_out_when_asked(tmp_path):
    whole = scored(["4", "5", "6"], [0.5, 0.0, 1.0])
    cut = replace(whole, completions=(*whole.completions[:2], replace(whole.completions[2], finish="length")))
    run_of(tmp_path, {1: [cut]})
    assert exported(tmp_path)[0]["chosen"] == "6"
    assert exported(tmp_path, "--finished-only")[0]["chosen"] == "4"


@pytest.mark.parametrize(
    "flags, said",
    [
        ([], "--output is missing: name a file that ends in .jsonl or .parquet."),
        (["-o", "pairs.txt"], "must be a file that ends in .jsonl or .parquet"),
        (["-o", "new.jsonl", "--reward", "rihgt"], "Did you mean"),
        (["-o", "new.jsonl", "--steps", "7:"], "has no rollouts of these steps; --steps must meet one from 1 to 1"),
        (["-o", "new.jsonl", "--steps", "a"], "is no FIRST:LAST"),
        (["-o", "new.jsonl", "--min-margin", "9"], "far enough apart"),
    ],
)
def test_what_gives_no_pairs_is_said_in_a_sentence(tmp_path, monkeypatch, capsys, flags, said):
    run_of(tmp_path, {1: [scored(["4", "5"], [1.0, 0.0])]})
    monkeypatch.chdir(tmp_path)
    assert main(["export", "pairs", str(tmp_path), *flags]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()


def test_a_mistyped_folder_is_told_as_such(tmp_path, capsys):
    assert main(["export", "pairs", str(tmp_path / "nowhere"), "-o", str(tmp_path / "new.jsonl")]) != 0
    assert "nowhere is no folder; give the folder of a run" in capsys.readouterr().err
    assert main(["export", "pairs", str(tmp_path), "-o", str(tmp_path / "new.jsonl")]) != 0
    assert f"{tmp_path} has no rollouts; give the folder of a run" in capsys.readouterr().err


def test_a_file_that_its_run_removes_meanwhile_is_left_out(tmp_path, monkeypatch):
    run_of(tmp_path, {step: [scored([str(step), "x"], [1.0, 0.0])] for step in range(1, 5)})
    real = rollouts.steps

    def thinned(folder):
        listed = real(folder)
        rollouts.path_of(folder, 2).unlink()
        return listed

    monkeypatch.setattr(rollouts, "steps", thinned)
    assert [pair["step"] for pair in exported(tmp_path)] == [1, 3, 4]


def test_lists_with_an_entry_a_token_are_not_read(tmp_path, monkeypatch):
    run_of(tmp_path, {1: [scored(["4", "5"], [1.0, 0.0])]})
    read, columns = rollouts.read, set()
    monkeypatch.setattr(rollouts, "read", lambda *given: (rows := read(*given), columns.update(*rows))[0])
    assert len(exported(tmp_path, "--finished-only")) == 1
    assert {"prompt", "reward/right"} <= columns
    assert not {"token_ids", "prompt_ids"} & columns
