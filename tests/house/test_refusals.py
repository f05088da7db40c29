"""A combination is refused from one table: a sentence about two features elsewhere is one that no page lists."""

import ast
import re
from itertools import combinations

import pytest
from sources import FILES, SRC, nodes_of

from covey.config.combinations import FEATURES, REFUSALS, VARIANTS

ELSEWHERE = {"cli", "doctor", "evaluation", "experiments", "feedback", "files", "merging", "rewards", "serving"}
"""Rooms whose sentences are about no run of training."""
WORDS = {
    "DDP": r"\bprocesses\b",
    "FSDP2": r"\bfsdp\b|\bis split\b|\bDTensor",
    "context parallel": r"\bcp_size\b",
    "LoRA": r"\badapters?\b|\bpeft_config\b",
    "QLoRA": r"\bquantized\b|\b4.?bits?\b",
    "8-bit optimizer": r"\bbitsandbytes\b|8bit",
    "vLLM server": r"v(?:llm|LLM)",
    "vLLM in process": r"\bcolocate",
    "transformers": r"rollout_backend",
    "generate": r"transformers' generate",
    "asynchronous": r"\basync_rollouts\b|\bmax_staleness\b|\brun ahead\b",
    "media": r"\bimages?\b|\bsounds?\b|\bvideos?\b|\bmedia\b",
    "tools": r"\btools?\b",
    "environment": r"\benvironments?\b|\benvironment_factory\b",
    "agent": r"\bagents?\b",
    "rollout_func": r"\brollout_func\b",
    "ensemble": r"\bensemble\b",
    "teacher": r"\bteachers?\b",
    "served teacher": r"\bteachers?\b.*\bendpoints?\b",
    "examples": r"\bsft\b",
    "critic": r"\bcritic\b",
    "reference sync": r"\bsync_ref_model\b",
    "process rewards": r"\bprocess rewards?\b",
    "average": r"\bema_decay\b|\bsoup_steps\b|\baveraged weights\b",
    "CPU offload": r"\boffload",
    "optimizer for whole tensors": r"\boptim\b",
    "paged optimizer": r"\bpages\b|\bpaged\b",
    "optimizer object": r"\boptimizers=",
    "device_map": r"\bdevice_map\b",
    "router_replay": r"\brouter_replay\b",
    "thinking budget": r"\bthinking_token_budget\b",
    "regular expression": r"\bvllm_structured_outputs_regex\b",
    "several beams": r"\bbeams\b",
    "tensor parallel": r"tensor_parallel|\btp_size\b",
    "separate critic": r"\bcritic\b",
    "_calculate_rewards": r"\b_calculate_rewards\b",
    "other tokenizer": r"\banother tokenizer\b",
    "teaching adapter": r"\banother adapter\b",
    "LoRA on the output layer": r"\badapter on the output layer\b",
    "full-distribution KL": r"\bfull-distribution\b",
    "sampler's environment": r"\ba sampler\b.*\benvironment\b",
}
"""How a sentence names each feature and setting."""
SAME = [
    {"LoRA", "QLoRA", "LoRA on the output layer", "teaching adapter"},
    {"teacher", "served teacher", "other tokenizer", "teaching adapter"},
    {"critic", "separate critic"},
    {"vLLM server", "vLLM in process", "transformers", "generate"},
    {"environment", "sampler's environment"},
    {"8-bit optimizer", "QLoRA"},
    {"optimizer for whole tensors", "8-bit optimizer", "paged optimizer", "optimizer object"},
    {"DDP", "FSDP2"},
    {"DDP", "context parallel"},
]
"""Names that one word names, or that are ways of one thing."""
SINGLE = {
    "vllm_structured_outputs_regex={} cannot be honoured": "names what the option needs",
    "an agent calls its tools itself": "of AXES, where a run has one of them",
    "This part reads the answers of tools": "one of them is missing",
    "The algorithm learns from the answers of tools": "one of them is missing",
    "the verifiers environment {} scores whole groups": "one kind of environment",
    "reset() of the environment of prompt": "a fault of the environment, which runs with members",
    "the tokenizer's chat template leaves out": "a fault of the tokenizer",
    "rollout_func gave": "a fault of the function",
    "parallelism_config has tp_size": "what is not there with or without another feature",
    "fsdp's offload keeps weights": "too little memory; the others are what to do instead",
    "The state of {} ({} MiB)": "too little memory; the others are what to do instead",
    "peft_config: {} does not go with an adapter on experts": "options of one adapter",
    "A quantized model cannot be trained on a CPU": "a device",
    "use_vllm=True with vllm_mode='colocate' needs vLLM in this environment": "an environment of Python",
    "--python {} cannot be run": "an environment of Python",
    "The teacher's server": "a server that lacks a part of the protocol",
    "vLLM does not take prompt": "a model's media that vLLM computes otherwise",
    "{} has no vLLM; pip install": "an environment of Python",
    "vLLM computes images or sounds otherwise": "a measured fault of a model in vLLM",
    "vLLM cannot be handed": "a kind of adapter or of quantization",
    "The adapter does not change {} alike": "an adapter on one of two tied weights",
    "The adapter on {} cannot be merged": "a kind of adapter",
    "router_replay='R3' needs the experts of": "a vLLM that returns none",
    "The server at {} takes no images": "a server that lacks Covey's plugin",
}
"""Beginnings of sentences that name two features and refuse no combination of them, and what they are about."""


def sentences():
    """The literal text of every error that is raised about a run, with `{}` for its values."""
    for file in FILES:
        room = file.relative_to(SRC).parts[0]
        for node in nodes_of(file) if room not in ELSEWHERE else ():
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = literal(node.exc.args[0])
                if text:
                    yield f"{file.relative_to(SRC)}:{node.lineno}", text


def literal(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return (
        "".join(map(literal, node.values))
        if isinstance(node, ast.JoinedStr)
        else "{}" * isinstance(node, ast.FormattedValue)
    )


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Features that a sentence names together."""
    named = [name for name, pattern in WORDS.items() if re.search(pattern, text)]
    return [pair for pair in combinations(named, 2) if not any(set(pair) <= same for same in SAME)]


def test_every_sentence_about_two_features_is_in_the_table():
    beside = [
        f"{place}: {text} (names {' and '.join(pairs_of(text)[0])})"
        for place, text in sentences()
        if pairs_of(text) and not text.startswith(tuple(SINGLE))
    ]
    assert beside == [], "put it into REFUSALS of covey/config/combinations.py, and ask expect_together"


def test_no_exception_is_idle():
    assert [start for start in SINGLE if not any(text.startswith(start) for _, text in sentences())] == []


def test_every_name_of_the_table_has_words():
    assert WORDS.keys() == FEATURES.keys() | VARIANTS.keys()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: " + ".join(one.terms))
def test_a_sentence_of_the_table_would_be_noticed_elsewhere(refusal):
    assert pairs_of(refusal.why.replace("{writer}", refusal.terms[1]))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_setting_of_the_table_is_asked_for(name):
    table = SRC / "config" / "combinations.py"
    calls = (node for file in FILES if file != table for node in nodes_of(file) if isinstance(node, ast.Call))
    asked = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "expect_together")
    texts = (part.value for call in asked for part in ast.walk(call) if isinstance(part, ast.Constant))
    assert name in texts
