"""docs/combinations.md, written from the table of refusals and the pairs that tests run: `python tests/combinations/page.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from combinations.pairs import ELSEWHERE, PAIRS, RAN, REAL, TRIPLES
from covey.config.combinations import FEATURES, IDLE, RECORDS, REFUSALS, VARIANTS, Idle, Refusal, refusal_of

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
EQUAL = {
    "DDP or FSDP2, asynchronous, native or a vLLM server, or with tools, an environment or an agent": "test_asynchronous_learners.py",
    "tools and environments over a vLLM server, ahead, over transformers": "test_tools_over_vllm.py",
    "tools, environments and rollout_func with images, over every sampler, ahead, DDP or FSDP2": "test_acting_with_media.py",
    "tools that answer with images, over every sampler, DDP or FSDP2": "test_shown_answers.py",
    "agents with images, over a vLLM server, ahead, over transformers, DDP or FSDP2": "test_seeing_agents.py",
    "agents over a vLLM server, ahead, over transformers": "test_agents_over_vllm.py",
    "context parallelism, DDP or FSDP2, adapters, references": "../learner/test_context_parallel.py",
    "teachers, local or served, with context parallelism": "test_teachers_in_context.py",
    "tools, environments and agents ahead, in worker processes": "test_episodes_ahead.py",
    "FSDP2 with teachers, examples, media, averages, ensembles, agents": "test_split_models.py",
}
"""Combinations whose weights or completions are compared with one process, or with the native engine; in tests/combinations."""
HEAD = """# Combinations

What works alone works together. This page is written by `python tests/combinations/page.py` (`make pages`) from the table that the code
asks (`covey/config/combinations.py`). A test fails when they disagree.

* **yes**: a tiny run of the pair trained in `tests/combinations/test_every_pair.py`, on the CPU. Two processes use gloo, and a vLLM server is
  a stand-in that computes with the weights it reads. `ran.txt` in the same folder lists these pairs.
* **open**: nothing refuses the pair, and the same test runs it in `make nightly`. No run of it has been recorded yet.
* **no**: refused before work is spent, in the sentence below.
* **real**: a test with real vLLM on a CPU trains the pair and passes (`make test-vllm`).
* **card**: nothing refuses it, and no test here can run it, because QLoRA needs a GPU.
* **–**: a run has one of the two at most.

A run without any of these is one process, the native engine, synchronous, on text, with all weights trained. Ray as the place of the workers
is tested by `make test-ray`.
"""
NARROW = """## Refused within features

These refusals need more than a pair, or a setting that is no feature. A word in italics is the run's own.

| setting | |
|---|---|"""

NAMED = """## Idle options

An option that is set and changes nothing is accepted and named once, with this reason. `tests/combinations/test_idle_options.py` sets every
option of sampling and of vLLM, for every sampler in every place: each acts, is named, or is refused. The reasons are tried from above. So it
is for the options of the loss: one without which they give an equal algorithm is named.

| option | the reason | in runs with | unless they have |
|---|---|---|---|"""


def idle_line(idle: Idle) -> str:
    """The row of idle options."""
    words = lambda names: ", ".join(f"`{name}`" if "=" in name else RECORDS.get(name, name) for name in names)
    return f"| {', '.join(f'`{name}`' for name in idle.options)} | {idle.why} | {words(idle.idle_in)} | {words(idle.needs)} |"


def cell(one: str, other: str) -> str:
    """The word of the page for a pair."""
    pair = next((pair for pair in PAIRS if set(pair) == {one, other}), None)
    if pair is None:
        return "–"
    if refusal_of(pair) is not None:
        return "no"
    if pair in REAL:
        return "real"
    if ELSEWHERE.keys() & set(pair):
        return "card"
    return "yes" if pair in RAN else "open"


def is_narrow(refusal: Refusal) -> bool:
    """True where more than a pair of features is refused."""
    return len(refusal.terms) > 2 or not FEATURES.keys() >= {name for names in refusal.choices for name in names}


def line(refusal: Refusal) -> str:
    """The row of a refusal; the run's own words in italics."""
    more = f", {refusal.at_once}" if refusal.at_once else ""
    why = re.sub(r"\{(\w+)(!r)?\}", r"*\1*", refusal.why)
    together = " + ".join(f"({term})" if " or " in term else term for term in refusal.terms)
    return f"| {together}{more} | {why} |"


def text() -> str:
    """The whole page."""
    names = list(FEATURES)
    lines = [HEAD, "## Features", "", "| | feature | |", "|--:|---|---|"]
    lines += [f"| {i} | {name} | {what} |" for i, (name, what) in enumerate(FEATURES.items(), 1)]
    lines += ["", "## Pairs", "", "| | " + " | ".join(str(i) for i in range(1, len(names) + 1)) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for i, one in enumerate(names):
        row = [cell(one, other) if j < i else "" for j, other in enumerate(names)]
        lines.append(f"| {i + 1} {one} | " + " | ".join(row) + " |")
    counts = [cell(*pair) for pair in PAIRS]
    told = ", ".join(f"{counts.count(word)} {word}" for word in ("yes", "open", "real", "card", "no"))
    lines += ["", f"Of {len(PAIRS)} pairs: {told}.", "", "## Refused", "", "| together | the sentence |", "|---|---|"]
    lines += [line(refusal) for refusal in REFUSALS if not is_narrow(refusal)]
    lines += ["", NARROW]
    lines += [f"| {name} | {what} |" for name, what in VARIANTS.items()]
    lines += ["", "| together | the sentence |", "|---|---|"]
    lines += [line(refusal) for refusal in REFUSALS if is_narrow(refusal)]
    lines += ["", NAMED, *map(idle_line, IDLE)]
    lines += ["", "## Triples", "", "| together | |", "|---|---|"]
    for triple in TRIPLES:
        found = refusal_of(triple)
        runs = "runs" if triple in RAN else "card" if ELSEWHERE.keys() & set(triple) else "open"
        lines.append(f"| {' + '.join(triple)} | {runs if found is None else 'no: ' + found.why} |")
    lines += ["", "## Compared", "", "| combination | test in `tests/combinations` |", "|---|---|"]
    lines += [f"| {what} | `{test}` |" for what, test in EQUAL.items()]
    lines += ["", "No GPU has run this page."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
