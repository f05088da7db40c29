"""How far a run has gone from its start is measured on what the start policy wrote, and a resumed run has the same start."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from covey.monitor import policy_drift
from covey.types import Completion, Group, Prompt
from faults.small_runs import lines, trainer
from kit import tiny_model

RUN = {"max_steps": 4, "lr_scheduler_type": "constant", "save_steps": 2}


@torch.no_grad()
def log_likelihoods(model: torch.nn.Module, one: policy_drift.Anchor) -> torch.Tensor:
    """[all tokens], by a plain forward of each completion."""
    found = []
    for group in one.groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
            logp = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            count = completion.num_tokens
            found.append(logp[-count:].gather(-1, completion.token_ids[:, None])[:, 0])
    return torch.cat(found)


def test_kl_start_is_k3_between_the_start_policy_and_the_one_of_now_on_the_first_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_drift, "EVERY", 2)
    model = tiny_model("qwen2")
    start = copy.deepcopy(model)
    one = trainer(tmp_path / "run", model=model, **RUN)
    one.train()
    kept = one._running.session.monitor.anchor
    assert sum(len(group.completions) for group in kept.groups) == 8, "all of the first rollout; sixteen at most"
    moved = log_likelihoods(one.model, kept) - log_likelihoods(start, kept)
    by_hand = (moved.exp() - 1 - moved).mean().item()
    written = {line["step"]: line.get("kl_start") for line in lines(tmp_path / "run")}
    assert written[4] == pytest.approx(by_hand, abs=1e-5)
    assert written[4] > 0.01, "the tiny model moves far at this learning rate"
    assert [step for step, value in written.items() if value is not None] == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("has_adapter", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_resumed_run_measures_from_the_same_start_to_the_bit(tmp_path, monkeypatch, has_adapter):
    monkeypatch.setattr(policy_drift, "EVERY", 1)
    peft = None
    if has_adapter:
        peft = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer(tmp_path / "whole", peft_config=peft, **RUN).train()
    trainer(tmp_path / "parts", peft_config=peft, **(RUN | {"max_steps": 2})).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *given, **more: None)
        trainer(tmp_path / "parts", peft_config=peft, **RUN).train(resume_from_checkpoint=True)
    values = [[line["kl_start"] for line in lines(tmp_path / name)] for name in ("whole", "parts")]
    assert len(values[0]) == 4
    assert values[0] == values[1]


def test_only_tokens_that_the_policy_wrote_are_measured():
    """Answers of tools, and the rest of an agent's prompt, stand in a completion with mask False."""
    model, ids = tiny_model(), torch.tensor([5, 6, 7, 8])
    mask = torch.tensor([True, False, False, True])
    drawn = [Completion(token_ids=ids, text="", finish="stop", mask=m) for m in (mask, torch.zeros_like(mask))]
    group = Group(prompt=Prompt(uid="0:0", token_ids=(3, 4)), completions=tuple(drawn))

    @torch.no_grad()
    def annotate(groups, algorithm):
        logp = model(input_ids=torch.tensor([[3, 4, *ids.tolist()]])).logits[0, 1:-1].log_softmax(-1)
        old = logp.gather(-1, ids[:, None])[:, 0]
        return [replace(g, completions=tuple(replace(done, old_logp=old) for done in g.completions)) for g in groups]

    one = policy_drift.Anchor(annotate)
    one.begin([group])
    [before] = one.groups[0].completions  # of the other the policy wrote nothing
    model.lm_head.weight.data *= 1.5
    moved = (annotate([group], None)[0].completions[0].old_logp - before.old_logp)[mask]
    assert one(1)["kl_start"].value == pytest.approx((moved.expm1() - moved).mean().item(), rel=1e-6)
