"""What the page leaves out, it says; and what belongs to one thing is not shown as another's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.monitor.view import Library
from covey.monitor.view.browsing import conversation_of, group_of
from covey.monitor.view.groups import GroupIndex
from covey.runs import rollouts
from covey.types import Completion, Group, Prompt
from covey.types.media import Media

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c626001000000ffff03000006000557bfabd40000000049454e44ae426082"
)


def answer(text: str, media: Media | None = None) -> Completion:
    return Completion(token_ids=torch.arange(3), text=text, finish="stop", media=media)


def seen(*digests: str) -> Media:
    files = tuple(PNG + digest.encode() for digest in digests)
    return Media(tensors={}, count=len(digests), digests={"image": digests}, previews=files)


def written(folder: Path, step: int = 1, uid: str = "0:0", **changed: Any) -> None:
    ask = ({"role": "user", "content": "What is it?"},)
    prompt = Prompt(uid=uid, token_ids=(1,), messages=ask)
    group = Group(prompt=prompt, completions=(answer("a"), answer("b")), rewards=torch.tensor([[1.0], [0.0]]))
    rollouts.write(folder / "rollouts", step, [replace(group, **changed)], ["code"])


def read(folder: Path, step: int = 1) -> dict[str, Any]:
    index = GroupIndex(folder / "rollouts")
    index.refresh()
    return group_of(folder, index, step, 0)


def test_images_of_a_tools_answer_are_those_of_its_completion_and_not_of_the_prompt(tmp_path: Path) -> None:
    ask = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},)
    prompt = Prompt(uid="0:0", token_ids=(1,), messages=ask, media=seen("asked"))
    completions = (answer("a", seen("asked", "tool1")), answer("b"), answer("c", seen("asked", "tool2", "tool3")))
    written(tmp_path, prompt=prompt, completions=completions, rewards=None)
    shown = read(tmp_path)
    names = [seen(digest).names[0] for digest in ("asked", "tool1", "tool2", "tool3")]
    assert shown["media"] == [names[0]]
    assert [one["media"] for one in shown["completions"]] == [[names[1]], [], [names[2], names[3]]]


def test_what_is_cut_ends_with_how_much_is_missing(tmp_path: Path) -> None:
    talk = json.dumps([{"role": "assistant", "content": "x" * 20_007}] * 203)
    messages = conversation_of(talk) or []
    assert messages[0]["content"].endswith("xxx\n[7 more characters are not shown]")
    assert messages[-1]["content"] == "3 more messages are not shown."
    rows = Group(
        prompt=Prompt(uid="0:0", text="p", token_ids=(1,), columns={"tests": "y" * 4012}),
        completions=(answer("z" * 400_009), *[answer("z")] * 1029),
    )
    rollouts.write(tmp_path / "rollouts", 1, [rows], [])
    shown = read(tmp_path)
    assert shown["columns"]["tests"].endswith("[12 more characters are not shown]")
    assert shown["completions"][0]["completion"].endswith("[9 more characters are not shown]")
    assert (len(shown["completions"]), shown["left_out"]) == (1024, 6)


def test_a_long_conversation_and_large_tests_are_shown_cut_and_do_not_hide_their_group(tmp_path: Path) -> None:
    ask = ({"role": "user", "content": "x" * 400_001},)
    written(tmp_path, prompt=Prompt(uid="0:0", token_ids=(1,), messages=ask, columns={"tests": "y" * 400_001}))
    shown = read(tmp_path)
    assert shown["prompt"].endswith("more characters are not shown]")
    assert shown["columns"]["tests"].endswith("[396,001 more characters are not shown]")
    assert [one["completion"] for one in shown["completions"]] == ["a", "b"]


def test_visits_of_a_prompt_are_counted_beyond_those_that_are_named(tmp_path: Path) -> None:
    for step in range(1, 104):
        written(tmp_path, step)
    shown = read(tmp_path, 103)
    assert (len(shown["elsewhere"]), shown["visits"]) == (100, 103)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, served: Callable[..., Any]) -> Iterator[Any]:
    """A server of 70 runs with a metric; one of them with a group whose reward logs a text under its own name."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(70):
        (folder / f"run{number:02}").mkdir()
        extra = {} if number == 1 else {"kl": 0.1 * number}
        (folder / f"run{number:02}" / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "reward": number, **extra}) + "\n"
        )
    written(folder / "run00", extras={"code": ["passed: 1 of 1", None]})
    library = Library([folder])
    library.refresh()
    with served(library, watch=True) as client:
        yield client


def test_curves_that_are_not_drawn_are_counted_and_a_csv_has_all(many: Any) -> None:
    names = [f"run{number:02}" for number in range(70)]
    told = many.get("series", run=names, metric="reward")
    assert (len(told["curves"]), told["left_out"]) == (64, 6)
    assert many.get("series", run=names[:3], metric=["reward", "kl"])["left_out"] == 0
    _, _, body = many.ask("/api/values?metric=reward&" + "&".join(f"run={name}" for name in names))
    assert body.decode().splitlines()[1].split(",")[1:] == [f"{number}.0" for number in range(70)]
    status, _, body = many.ask("/api/values?metric=reward&" + "&".join(f"run=r{number}" for number in range(257)))
    assert (status, b"choose fewer runs" in body) == (400, True)


@pytest.mark.slow
def test_a_reward_and_what_it_logs_under_its_name_are_both_shown(blank: Any, many: Any) -> None:
    blank.goto(f"{many.address}/#rollouts?run=run00&step=1&group=0")
    blank.locator(".rewards").first.wait_for()
    assert blank.locator(".rewards").first.inner_text().split() == ["code", "1", "code", "passed:", "1", "of", "1"]
    assert blank.locator(".rewards").nth(1).inner_text().split() == ["code", "0", "code", "–"]


@pytest.mark.slow
def test_runs_without_a_value_come_last_in_either_order(blank: Any, many: Any) -> None:
    blank.goto(f"{many.address}/#runs")
    blank.locator("summary", has_text="Columns").click()
    blank.get_by_label("KL").check()
    head = blank.locator("table.runs thead button", has_text="KL")
    for first in ("run69", "run00"):
        head.click()
        names = blank.locator("table.runs tbody td:nth-child(2) a").all_inner_texts()
        assert (names[0], names[-1]) == (first, "run01")


@pytest.mark.slow
def test_runs_beyond_those_that_are_drawn_are_told(blank: Any, many: Any) -> None:
    blank.goto(f"{many.address}/#curves?" + "&".join(f"run=run{number:02}" for number in range(70)))
    blank.locator("figure[data-metric=reward]", has_text="6 more runs are not drawn").wait_for()


@pytest.mark.slow
def test_a_group_is_listed_once_though_others_come_before_it(
    blank: Any, tmp_path: Path, served: Callable[..., Any]
) -> None:
    for step in range(1, 71):
        written(tmp_path / "run", step, f"0:{step}")
    library = Library([tmp_path])
    library.refresh()
    blank.set_viewport_size({"width": 1300, "height": 300})
    with served(library) as client:
        blank.goto(f"{client.address}/#rollouts?run=run&step=1&group=0")
        blank.wait_for_function("() => document.querySelectorAll('.list .row').length === 50")
        for step in range(71, 76):
            written(tmp_path / "run", step, f"0:{step}")
        library.refresh()
        blank.locator(".list .row").last.scroll_into_view_if_needed()
        blank.wait_for_function("() => document.querySelectorAll('.list .row').length >= 70")
        steps = blank.locator(".list .row b").all_text_contents()
    assert steps == [f"step {step}" for step in range(70, 0, -1)]
