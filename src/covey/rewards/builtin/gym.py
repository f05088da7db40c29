"""Reasoning Gym's own graders as a reward, each answer in a worker process that is killed past its limit."""

from typing import Any

from covey.data import gym as tasks
from covey.rewards.builtin.answers import answer_text_of, conclusion, marked_answer
from covey.rewards.builtin.text import last_tagged
from covey.rewards.decorators import per_completion


@per_completion(isolated=True, concurrency=2, timeout=60)
def gym_reward(completion: Any, gym: str | None, **columns: Any) -> float | None:
    r"""Score of the answer by the grader of the row's task, from 0 to 1; `None` for a row of another source.

    The answer is in the last `<answer>`, after `####`, in `\boxed{}`, or all that follows the thinking. Needs the column `gym` of
    a data set `gym:<task>`.
    """
    return None if gym is None else tasks.score(answer_of(answer_text_of(completion, "answer")), gym)


def answer_of(text: str) -> str:
    """The answer in a text, as graders want it.

    >>> answer_of("<think>7?</think> <answer> 8 </answer>"), answer_of("<think>7?</think>\\n8")
    ('8', '8')
    """
    text = conclusion(text)
    tagged = last_tagged(text, "answer")
    if tagged is not None:
        return tagged.strip()
    marked = marked_answer(text)
    return text.strip() if marked is None else marked
