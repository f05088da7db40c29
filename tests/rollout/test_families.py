"""The most used families, with published vocabularies, contexts, windows and layers: they train, and write what `generate` writes."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from families import FAMILIES, row_of
from plain_sampling import collect

from covey import GRPOConfig, GRPOTrainer
from covey.rollout import SamplingParams, TransformersSampler, choose_sampler
from kit import tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
QUICK = ("Llama 3",)
SLOW = ("DeepSeek V3",)
"""Latent attention. Others are nightly; what is special in their layers has tests of its own."""


def tier(name):
    if name in QUICK:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.nightly)


EACH = [tier(name) for name in FAMILIES]


@pytest.mark.parametrize("name", EACH)
def test_the_page_says_how_a_family_runs(name):
    """`python tests/rollout/families.py` prints the table."""
    assert row_of(name, FAMILIES[name].build()) in PAGE.read_text().splitlines()


def test_the_page_has_every_family():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and " | native" in line]
    named = {line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.count(" | ") == 6}
    assert lines
    assert named - {"family"} == set(FAMILIES)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
def test_greedy_completions_of_a_family_equal_generate(name):
    """A short prompt, and one that leaves the window where there is one of at most 5,000 tokens."""
    family = FAMILIES[name]
    model = family.build()
    sampler = choose_sampler(model, tiny_tokenizer(), dtype="float32")
    prompts = [[5, 6, 7, 8, 9], [11]]
    if family.window is not None and family.window < min(5000, family.context - 20):
        prompts.append([5 + i * 7 % 300 for i in range(family.window + 7)])
    steps = 6 if isinstance(sampler, TransformersSampler) else 12
    for group in collect(sampler, prompts, 1, SamplingParams(max_tokens=steps, temperature=0)):
        ids = torch.tensor([group.prompt.token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps)
        assert group.completions[0].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
def test_a_family_is_trained_for_two_steps(name, tmp_path):
    model = FAMILIES[name].build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_generations=4, learning_rate=1e-2,
        per_device_train_batch_size=4, max_completion_length=6, max_steps=2, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "What is 12 + 30?"]}),
        args=args,
    )
    assert trainer.train().global_step == 2
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert len(norms) == 2
    assert all(0 < norm < float("inf") for norm in norms)
    after = list(model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
