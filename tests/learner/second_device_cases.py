"""The learner and the decode step on a second device, beside the same on the CPU: printed as JSON. `test_second_device.py` runs `main`."""

import json
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from causal_classes import build
from plain_sampling import collect, ids_of, plain_logprobs
from static_runs import PROMPTS, WAYS, finishes_of, logprobs_of, writer
from whole_logits import groups

import second_device
from covey import algorithms as alg
from covey.evaluation.assessment import assess
from covey.learner import FrozenCopy, Policy, ValueHead
from covey.learner.expert_choices import Balance, repeats_in
from covey.learner.packing import rows_of
from covey.learner.preparation import checkpoint_activations
from covey.learner.shared_prompt import share_rows
from covey.rewards import Scorer
from covey.rewards.builtin.reward_model import ModelReward
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.graph_scheduler import GraphScheduler
from covey.types import Prompt
from covey.types.metrics import WITHOUT_FLOAT64
from kit import learner_of, tiny_model, tiny_reward_model, tiny_tokenizer
from second_device import WAITS, SecondDevice, to_second

LEARNERS = {
    "shared prompts": {},
    "padded rows": {"attention": "eager"},
    "gpt2": {"arch": "gpt2"},
    "weights in bfloat16": {"dtype": torch.bfloat16},
    "recomputed": {"checkpoints": True},
    "several micro-batches": {"max_rows": 1},
    "a reference": {"algorithm": alg.grpo(kl=alg.KL(coefficient=0.04))},
    "a critic": {"algorithm": alg.ppo()},
    "top entropy": {"algorithm": alg.dapo().replace(weights=(alg.TopEntropy(0.3),))},
    "GSPO": {"algorithm": alg.gspo()},
    "layers with states": {"arch": "lfm2"},
}
STATES = ("recurrent_gemma", "qwen3_5_text", "falcon_h1", "lfm2", "mamba", "zamba2")
"""Models of layers with states, without experts: those count in a type that a CPU has no histogram of."""
KINDS = ("padded rows", "layers with states", "weights in bfloat16", "recomputed", "several micro-batches", "a critic")


def learned(
    is_second, *, arch="qwen2", attention=None, dtype=torch.float32, checkpoints=False, max_rows=8, algorithm=None
):
    """Weights after a step, its numbers, and what waited in annotate, in the micro-batches and after them."""
    algorithm = algorithm or alg.dapo()
    model = (build(arch) if arch in STATES else tiny_model(arch, layers=2)).to(dtype).train()
    if attention:
        model.config._attn_implementation = attention
    if is_second:
        to_second(model)
    if checkpoints:
        checkpoint_activations(model)
    policy = Policy(model, pad_id=0)
    critic = ValueHead(32, policy.device) if algorithm.critic is not None else None
    if critic is not None and is_second:
        critic = to_second(critic)
    more = {"critic": critic} if critic is not None else {}
    if algorithm.needs.ref_logp:
        more["reference"] = FrozenCopy.of(policy)
    parameters = [*policy.parameters(), *(critic.parameters() if critic is not None else [])]
    one = learner_of(
        policy, torch.optim.AdamW(parameters, lr=1e-2), max_completion_length=24, max_rows=max_rows, **more
    )
    policy.shares_prompts()
    waits = {}
    WAITS.clear()
    drawn = one.annotate(groups(), algorithm)
    if algorithm.critic is not None:
        drawn = [replace(group, returns=torch.ones(group.size, 24)) for group in drawn]
    waits["annotate"] = dict(WAITS)
    read, accumulate_all = one._read, one._accumulate_all

    def begin(*given):
        WAITS.clear()
        return accumulate_all(*given)

    def end(*given):
        waits.setdefault("micro-batches", dict(WAITS))
        return read(*given)

    one._accumulate_all, one._read = begin, end
    report = one.step(drawn, algorithm, 1)
    weights = [p.detach().cpu() for p in model.parameters()]
    return torch.cat([x.float().flatten() for x in weights]), {k: m.value for k, m in report.metrics.items()}, waits


def decoded(is_second, way):
    """Completions on static buffers, and what waited while a row was decoded and while rows came and went."""
    model = writer() if way in WAYS else build(way)
    options = (
        {"dtype": "float32", "max_rows": 9, "cuda_graphs": False} if is_second else {"dtype": "float32", "max_rows": 9}
    )
    sampler = NativeSampler(to_second(model) if is_second else model, tiny_tokenizer(), **options)
    sampler.is_static = True
    WAITS.clear()
    steps, run = [], GraphScheduler._step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphScheduler, "_step", lambda own, *given: steps.append(1) or run(own, *given))
        most = 40 if way in WAYS else 24
        found = collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=most, seed=7, **WAYS.get(way, {})))
    return ids_of(found), finishes_of(found), logprobs_of(found), dict(WAITS), len(steps)


def drawn_as(is_second, *, environment=None, **options):
    """Ids and log-probabilities of what an engine writes on static buffers, and their mean gap to a plain forward in float32."""
    model = to_second(writer()) if is_second else writer()
    graphs = {"cuda_graphs": False} if is_second else {}
    sampler = NativeSampler(model, tiny_tokenizer(), environment=environment, max_rows=9, **graphs, **options)
    sampler.is_static = True
    found = collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=20, seed=7))
    gaps = [
        (completion.logprobs - expected).abs()
        for group in found
        for completion, expected in zip(
            group.completions, plain_logprobs(writer(), group, SamplingParams()), strict=True
        )
    ]
    return ids_of(found), logprobs_of(found), float(torch.cat(gaps).mean())


def answering(turns):
    """An environment that answers a completion once."""
    return [" ok " if sum(t.token_ids) % 2 and len(t.token_ids) < 30 else None for t in turns]


def assessed(is_second):
    """Rewards of an evaluation, greedy and drawn."""
    model = to_second(writer()) if is_second else writer()
    graphs = {"cuda_graphs": False} if is_second else {}
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", **graphs)
    scorer = Scorer.of(lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids])
    prompts = [Prompt(uid=str(i), token_ids=tuple(ids), text="") for i, ids in enumerate(PROMPTS)]
    found = assess(sampler, scorer, prompts, max_tokens=20, num_samples=2, seed=3)
    return [list(found.greedy), [list(row) for row in found.sampled]]


def scored(is_second):
    """Scores of a reward model."""
    model = tiny_reward_model()
    reward = ModelReward.of(to_second(model) if is_second else model, tiny_tokenizer())
    WAITS.clear()
    scores = reward(["2 + 2 =", "Tom has"], [" 4", " 3 apples"])
    return scores.tolist(), dict(WAITS)


def moved_reference(is_second, alpha):
    """A reference's weights after the policy has moved it."""
    model = tiny_model(seed=1)
    policy = Policy(to_second(model) if is_second else model, pad_id=0)
    reference = FrozenCopy.of(policy, follows=True)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5)
    WAITS.clear()
    reference.mix(policy, alpha)
    waits = dict(WAITS)
    return torch.cat([weight.cpu().flatten() for weight in reference.weights().values()]), waits


def balanced():
    """What waits while the tokens of experts are counted, and their loss is computed by the loads of a step."""
    packed = share_rows(rows_of(groups()), torch.device("second"))
    loads = torch.ones(3, device="second")
    WAITS.clear()
    repeats_in(packed)
    Balance(loads, loads[:2]).loss(torch.ones(3, dtype=torch.float64))
    return dict(WAITS)


def without_float64(cpu):
    """A learner's step and a rollout on a device that has no float64, beside what a CPU decoded; what is wrong with it."""
    second_device.FLOAT64["refused"] = True
    WITHOUT_FLOAT64.add(second_device.NAME)
    gaps = {}
    for name in (
        "shared prompts",
    ):  # a part that picks tokens by rank may pick others where sums are rounded otherwise
        options = LEARNERS.get(name, {})
        (weights, _, _), (own, _, _) = (learned(is_second, **options) for is_second in (False, True))
        gaps[name] = float((weights - own).norm() / weights.norm())
    second = decoded(True, "plain")
    return {"weights": gaps, "same": cpu[:2] == second[:2], "logprobs": float((cpu[2] - second[2]).abs().max())}


def rules():
    """Errors and waits that the device itself has to show."""
    x = torch.ones(3, device="second")
    found = {}
    try:
        x + torch.ones(3)
    except RuntimeError as error:
        found["mixed"] = str(error)
    found["one number"] = (x + torch.tensor(1.0)).cpu().tolist()
    for name, work in {
        "item": lambda: x.sum().item(),
        "tolist": lambda: x.tolist(),
        "bool": lambda: bool(x.sum() > 0),
        "cpu": lambda: x.cpu(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "from the host": lambda: torch.ones(3).to("second"),
        "free": lambda: torch.ones(3).to("second", non_blocking=True) * 2,
    }.items():
        WAITS.clear()
        work()
        found[name] = sum(WAITS.values())
    return found


def main():
    warnings.simplefilter("ignore")
    second_device.register()
    found = {"learner": {}, "decode": {}, "precision": {}, "reference": []}
    with SecondDevice():
        found["rules"] = rules()
        for name in KINDS if sys.argv[1] == "quick" else LEARNERS:
            (weights, metrics, _), (own, numbers, waits) = (
                learned(is_second, **LEARNERS[name]) for is_second in (False, True)
            )
            gaps = {key: abs(value - metrics[key]) for key, value in numbers.items() if value == value}
            found["learner"][name] = {
                "weights": float((weights - own).norm() / weights.norm()),
                "metrics": gaps,
                "same": sorted(metrics) == sorted(numbers),
                "waits": waits,
            }
        for dtype in ("bfloat16",) if sys.argv[1] == "quick" else ("bfloat16", "float16"):
            found["precision"][dtype] = [drawn_as(on, dtype=dtype)[2] for on in (False, True)]
        cpu, second = (drawn_as(on, dtype="float32", environment=answering) for on in (False, True))
        found["tools"] = {"same": cpu[0] == second[0], "logprobs": float((cpu[1] - second[1]).abs().max())}
        found["assessed"] = [assessed(False), assessed(True)]
        found["balanced"] = balanced()
        found["scored"] = [scored(False), scored(True)]
        for alpha in (0.25, 1.0):
            (kept, _), (own, waits) = (moved_reference(on, alpha) for on in (False, True))
            found["reference"].append({"gap": float((kept - own).abs().max()), "waits": waits})
        cpu = {}
        for way in ("plain", "rich") if sys.argv[1] == "quick" else (*WAYS, *STATES):
            cpu[way], second = decoded(False, way), decoded(True, way)
            found["decode"][way] = {
                "same": cpu[way][:2] == second[:2],
                "logprobs": float((cpu[way][2] - second[2]).abs().max()),
                "tokens": second[2].numel(),
                "waits": second[3],
                "steps": second[4],
            }
        found["without float64"] = without_float64(cpu["plain"])
    sys.stdout.write(json.dumps(found) + "\n")
