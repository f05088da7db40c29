"""Prompts, lengths, policy and rewards: the numbers behind their pages, on runs that are small enough to count by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.monitor.view import Library, samples
from covey.monitor.view.distributions import correlations_of
from covey.monitor.view.groups import GroupIndex
from covey.monitor.view.prompts import PromptIndex
from covey.monitor.view.samples import Sample
from covey.runs import RunFolder, rollouts
from covey.types import Completion, Group, Prompt


def group(question: str, right: list[float], short: list[float], lengths: list[int]) -> Group:
    done = [
        Completion(
            token_ids=torch.arange(n),
            text="x" * n,
            finish="length" if n == 8 else "stop",
            logprobs=torch.full((n,), -1.0),
            old_logp=torch.full((n,), -0.75),
        )
        for n in lengths
    ]
    rewards = torch.tensor([right, short], dtype=torch.float32).T
    advantages = rewards.sum(1) - rewards.sum(1).mean()
    prompt = Prompt(uid=question, token_ids=(1,), text=question)
    return Group(prompt=prompt, completions=tuple(done), rewards=rewards, advantages=advantages)


STEPS = {
    1: [group("easy", [0, 1], [0, 0], [2, 4]), group("hard", [0, 0], [0, 0], [8, 8]), group("lost", [1, 1], [0, 0], [3, 3])],
    2: [group("easy", [1, 1], [0, 0], [4, 4]), group("hard", [0, 0], [0, 0], [8, 8]), group("lost", [0, 0], [0, 0], [2, 2])],
    3: [group("even", [0, 1], [1, 0], [2, 6])],
}  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, served: Callable[..., Any]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("spread")
    run = RunFolder.create(folder / "run")
    run.describe(args={"seed": 0})
    for step, groups in STEPS.items():
        run.append_metrics(step, {"reward": 0.5}, {"step": 1.0})
        run.write_rollouts(step, groups, ["right", "short"])
    run.close()
    library = Library([folder])
    library.refresh()
    with pytest.MonkeyPatch.context() as patch, served(library) as client:
        patch.setattr(samples, "_SECONDS", 60.0)  # an answer holds what was read by then; here all of it
        yield client


def states(told: Any) -> dict[str, str]:
    return {row["prompt"]: row["state"] for row in told["rows"]}


def test_a_prompt_is_solved_flaky_or_unsolved_by_its_newest_group(asked: Any) -> None:
    told = asked.get("prompts", run="run", threshold=0.75)
    assert states(told) == {"easy": "solved", "hard": "unsolved", "lost": "unsolved", "even": "solved"}
    assert told["counts"] == {"solved": 2, "flaky": 0, "unsolved": 2, "forgotten": 1}
    assert states(asked.get("prompts", run="run", threshold=1.5))["easy"] == "unsolved"


def test_a_prompt_that_was_right_before_and_is_wrong_now_is_forgotten(asked: Any) -> None:
    (row,) = asked.get("prompts", run="run", state="forgotten")["rows"]
    assert (row["prompt"], row["first"], row["last"], row["gain"], row["visits"]) == ("lost", 1.0, 0.0, -1.0, 2)


def test_the_history_of_a_prompt_names_every_group_it_had(asked: Any) -> None:
    (row,) = (row for row in asked.get("prompts", run="run")["rows"] if row["prompt"] == "easy")
    assert [(one["step"], one["reward"], one["lowest"], one["highest"]) for one in row["history"]] == [
        (1, 0.5, 0.0, 1.0),
        (2, 1.0, 1.0, 1.0),
    ]


def test_the_threshold_is_three_quarters_of_the_way_to_the_best_reward(asked: Any) -> None:
    assert asked.get("prompts", run="run")["threshold"] == 0.75


def test_prompts_come_in_parts_and_whole_as_csv(asked: Any) -> None:
    first = asked.get("prompts", run="run", sort="biggest loss", most=1)
    assert (first["rows"][0]["prompt"], first["next"], first["matching"]) == ("lost", 1, 4)
    _, headers, body = asked.ask("/api/prompts?run=run&csv=1&state=unsolved")
    rows = list(csv.DictReader(io.StringIO(body.decode())))
    assert headers["content-type"].startswith("text/csv")
    assert [row["state"] for row in rows] == ["unsolved", "unsolved"]
    told = asked.get("prompts", run="run", state="unsolved")["rows"]
    assert [{name: str(value) for name, value in row.items()} for row in rows] == [
        {name: f"{one[name]:g}" if isinstance(one[name], float) else str(one[name]).lower() for name in rows[0]}
        for one in told
    ]


def test_lengths_are_counted_by_step_and_by_the_sign_of_the_advantage(asked: Any) -> None:
    told = asked.get("lengths", run="run")
    at = {int(low): place for place, low in enumerate(told["edges"][:-1])}
    assert told["steps"] == [1, 2, 3]
    assert told["counts"][0][at[8]] == 2
    assert told["counts"][1][at[4]] == 2
    assert (told["above"][at[4]], told["below"][at[2]], sum(told["above"])) == (1, 1, 1)
    assert told["cut"] == pytest.approx([2 / 6, 2 / 6, 0.0])


def test_rewards_that_exclude_each_other_correlate_negatively(asked: Any) -> None:
    told = asked.get("correlations", run="run", **{"from": 3})
    assert told["names"] == ["right", "short", "reward (total)", "length (tokens)"]
    assert told["table"][0][1] is None  # two completions are no correlation
    told = asked.get("correlations", run="run")
    one, other = [0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1], [0] * 12 + [1, 0]
    expected = torch.corrcoef(torch.tensor([one, other], dtype=torch.float64))[0, 1].item()
    assert told["table"][0][1] == pytest.approx(expected)
    assert told["table"][0][1] < 0
    assert told["completions"] == 14


def test_the_ratio_by_position_is_that_of_learner_and_sampler(asked: Any) -> None:
    told = asked.get("policy", run="run")
    assert told["positions"] == [0, 1, 2, 3, 4, 6, 8]
    assert told["by_position"]["ratio"][0] == pytest.approx([0.25] * 6)
    assert told["by_position"]["ratio"][2][:5] == pytest.approx([0.25] * 5)
    tokens = sum(one.num_tokens for groups in STEPS.values() for g in groups for one in g.completions)
    assert sum(told["histograms"]["ratio"]["counts"]) == tokens
    assert "entropy" not in told["by_position"]


def test_a_long_run_is_shown_by_a_sample_that_says_so(asked: Any) -> None:
    told = asked.get("lengths", run="run", most=2)
    assert (told["steps"], told["read"], told["of"], told["left"]) == ([1, 3], 2, 3, 0)


def of_files(folder: Path) -> tuple[GroupIndex, PromptIndex]:
    """Indexes of a run with the steps of `STEPS`."""
    run = RunFolder.create(folder / "run")
    for step, groups in STEPS.items():
        run.write_rollouts(step, groups, ["right", "short"])
    run.close()
    index = GroupIndex(folder / "run" / "rollouts")
    index.refresh()
    return index, PromptIndex(index)


def test_states_follow_the_groups_that_arrive_after_somebody_has_asked(tmp_path: Path) -> None:
    index, prompts = of_files(tmp_path)
    asked = {"state": "all", "sort": "last seen", "threshold": 0.75, "start": 0, "most": 9}
    assert states(prompts.rows(**asked))["hard"] == "unsolved"
    rollouts.write(index.folder, 4, [group("hard", [1, 1], [0, 0], [8, 8])], ["right", "short"])
    index.refresh()
    prompts.refresh()
    told = prompts.rows(**asked)
    assert (states(told)["hard"], told["rows"][0]["prompt"], told["rows"][0]["visits"]) == ("solved", "hard", 3)
    assert [one["step"] for one in told["rows"][0]["history"]] == [1, 2, 4]


@pytest.mark.slow
def test_the_list_of_prompts_goes_on_as_long_as_its_end_is_in_sight(
    tmp_path: Path, served: Callable[..., Any], blank: Any
) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.describe(args={"seed": 0})
    run.write_rollouts(1, [group(f"question {n}", [0, 1], [0, 0], [2, 4]) for n in range(130)], ["right", "short"])
    run.close()
    library = Library([tmp_path])
    library.refresh()
    shown = "document.querySelectorAll('.said a').length"
    with served(library) as client:
        blank.set_viewport_size({"width": 1300, "height": 1600})
        blank.goto(f"{client.address}/#prompts")
        blank.wait_for_function(f"() => {shown} >= 40")  # more than one answer of the server holds
        blank.wait_for_timeout(300)
        before = blank.evaluate(shown)
        assert before < 130
        blank.evaluate("scrollTo(0, document.body.scrollHeight)")
        blank.wait_for_function(f"() => {shown} > {before}")


@pytest.mark.slow
def test_a_view_of_prompts_can_be_sent_as_a_link(asked: Any, blank: Any) -> None:
    blank.goto(f"{asked.address}/#prompts?run=run&state=forgotten&sort=biggest+loss")
    blank.wait_for_function("() => document.documentElement.dataset.prompts")
    assert [one.inner_text() for one in blank.locator(".said a").all()] == ["lost"]
    blank.get_by_role("button", name="solved").first.click()
    blank.wait_for_function("() => location.hash.includes('state=solved')")
    blank.wait_for_function("() => document.querySelectorAll('.said a').length === 2")
    blank.locator(".visits a").first.click()
    blank.wait_for_function("() => location.hash.startsWith('#rollouts') && location.hash.includes('group=')")
    for key, name in (("5", "lengths"), ("6", "policy"), ("7", "rewards")):
        blank.keyboard.press(key)
        blank.wait_for_function(f"() => document.documentElement.dataset.ready === '{name}'")


def test_the_text_of_a_prompt_that_was_shown_is_read_from_no_file_again(tmp_path: Path) -> None:
    index, prompts = of_files(tmp_path)
    asked = {"state": "all", "threshold": None, "start": 0, "most": 9}
    shown = {row["uid"]: row["prompt"] for row in prompts.rows(sort="last seen", **asked)["rows"]}
    assert sorted(shown.values()) == ["easy", "even", "hard", "lost"]
    for step in STEPS:
        index.path_of(step).unlink()
    assert {row["uid"]: row["prompt"] for row in prompts.rows(sort="biggest loss", **asked)["rows"]} == shown


def test_the_first_right_answers_of_a_hard_task_are_drawn() -> None:
    """Ten thousand wrong answers come first, all of one reward."""
    rewards = [np.zeros(1024)] * 11 + [np.tile([0.0, 1.0], 512)]
    spread = correlations_of({step: sample(reward=values) for step, values in enumerate(rewards)}, None)
    assert [sum(counts) for counts in spread["counts"]] == [1024] * 12
    assert (spread["edges"][0], spread["edges"][-1]) == (0.0, 1.0)
    assert (spread["counts"][-1][0], spread["counts"][-1][-1]) == (512, 512)


def sample(**rewards: np.ndarray) -> Sample:
    none = np.zeros(len(next(iter(rewards.values()))))
    return Sample(lengths=none, is_cut=none > 0, rewards=rewards, advantages=none, by_position={}, histograms={})


def test_the_page_says_how_many_tokens_of_a_step_are_counted() -> None:
    page = Path(samples.__file__).parent / "page" / "spread.js"
    assert f"at most the first {samples._MOST_TOKENS:,} tokens are counted" in page.read_text()
