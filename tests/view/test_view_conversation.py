"""An agent's episode on the page: its turns, calls and answers, folded, and tokens by who wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.monitor.view import Library
from covey.runs import rollouts
from covey.types import Completion, EpisodeNotes, Group, Prompt

CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": {"x": "6*7"}}}
TALK = (
    {"role": "user", "content": "6 times 7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42\n<img src=x onerror='window.hit = 1'>"},
    {"role": "assistant", "content": "It is 42."},
)


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, trained: Callable[..., Path], served: Callable[..., Any]
) -> Iterator[str]:
    folder = trained(tmp_path_factory.mktemp("runs") / "agent")
    mask = torch.tensor([True, True, False, False, False, True])
    notes = EpisodeNotes(conversation=TALK)
    one = Completion(token_ids=torch.arange(6), text="It is 42.", finish="stop", mask=mask, episode=notes)
    branch = Completion(
        token_ids=torch.arange(6),
        text="It is 41.",
        finish="stop",
        mask=mask,
        episode=EpisodeNotes(conversation=TALK[:2], shares=0),
    )
    group = Group(prompt=Prompt(uid="0:0", token_ids=(1,), messages=TALK[:1]), completions=(one, branch))
    rollouts.write(folder / "rollouts", 4, [group], [])
    with served(Library([folder.parent]), watch=False) as client:
        yield client.address + "/"


@pytest.mark.slow
def test_an_episode_is_shown_as_a_conversation_with_folded_answers(blank: Any, address: str) -> None:
    page = blank
    page.goto(f"{address}#rollouts?run=agent&step=4&group=0")
    page.locator(".conversation").first.wait_for()
    shown = page.locator(".conversation").first
    assert "2 turns, 1 calls · tokens: model 3, tools and prompts 3" in shown.inner_text()
    assert 'calc({"x": "6*7"})' in shown.inner_text()
    answer = shown.locator("details")
    assert not answer.evaluate("one => one.open")
    answer.locator("summary").click()
    assert "<img src=x" in answer.inner_text()  # as text
    assert page.evaluate("window.hit") is None
    assert "another path of #0, with its advantage" in page.locator(".conversation").nth(1).inner_text()
