"""GRPO from prompts to gradients in one file, with torch and transformers only.

    python examples/grpo_in_one_file.py --smoke      # half a minute on one core; without --smoke 100 steps

Read it from top to bottom: it is the algorithm as one writes it on a board (Shao et al. 2024, "DeepSeekMath", section 4.1).
Covey computes the same loss, the same gradients and the same steps (`tests/parity/test_one_file.py`); it adds what a run of days needs.
Expect: the reward rises from about 0.5 to above 0.8. A real model: `--model Qwen/Qwen2.5-0.5B-Instruct`.

Shapes: P prompts, G completions of each, N = P G rows, S tokens of the longest row.
"""

import argparse
import copy
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[1] / "src" / "covey" / "demo" / "model"


@dataclass
class Settings:
    prompts: int = 8
    """P, prompts of a rollout."""
    generations: int = 8
    """G, completions of each prompt."""
    updates: int = 2
    """Optimizer steps on the same completions; from the second on, the ratio differs from 1 and the clip acts."""
    max_tokens: int = 32
    temperature: float = 1.0
    clip: float = 0.2
    beta: float = 0.04
    """Coefficient of the KL to the model at the start."""
    learning_rate: float = 6e-4
    max_grad_norm: float = 1.0


# -- 1. Prompts and a reward that can be checked ----------------------------------------------------------------------


def draw_problem(random_numbers: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    name, friend = random_numbers.sample(["Ada", "Ben", "Eva", "Max", "Noah", "Zoe"], 2)
    things = random_numbers.choice(["books", "coins", "cups", "pens", "stamps"])
    a, b = random_numbers.randint(5, 60), random_numbers.randint(2, 30)
    return f"{name} has {a} {things} and {friend} has {b} {things}. How many {things} do they have together?", str(
        a + b
    )


def reward(completion: str, answer: str) -> float:
    """1 where the completion ends with `#### ` and the right number, else 0."""
    match = re.search(r"####\s*(-?\d+)\s*$", completion.strip())
    return float(match is not None and match[1] == answer)


# -- 2. Rollout: G completions of each prompt -------------------------------------------------------------------------


@torch.no_grad()
def sample(model, tokenizer, prompts: list[list[int]], settings: Settings) -> list[list[list[int]]]:
    """[P][G] completions as token ids, the end-of-sequence token included if one was drawn."""
    model.eval()
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    left_padded = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])  # [P, L]
    is_token = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        left_padded.to(model.device),
        attention_mask=is_token.to(model.device),
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=settings.max_tokens,
        num_return_sequences=settings.generations,
        pad_token_id=pad,
    )  # [N, L + T]
    rows = [until_end(row, tokenizer.eos_token_id) for row in out[:, longest:].tolist()]
    return [rows[start : start + settings.generations] for start in range(0, len(rows), settings.generations)]


def until_end(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


# -- 3. Advantages: how much better than the other completions of the prompt -----------------------------------------


def group_advantages(rewards: Tensor, epsilon: float = 1e-4) -> Tensor:
    """[P, G] -> [P, G]: the group replaces a critic; its mean is the baseline. A group of equal rewards teaches nothing."""
    mean = rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True)  # of a sample: divides by G - 1
    return (rewards - mean) / (deviation + epsilon)


# -- 4. Log-probabilities of the completions' tokens -----------------------------------------------------------------


@dataclass
class Batch:
    """N rows of prompt and completion, padded on the right."""

    tokens: Tensor
    """[N, S]"""
    is_token: Tensor
    """[N, S], 0 for padding."""
    is_completion: Tensor
    """[N, S - 1], 1 where the predicted token belongs to the completion."""
    advantages: Tensor
    """[N, 1]"""

    @staticmethod
    def of(prompts: list[list[int]], completions: list[list[list[int]]], advantages: Tensor, pad: int) -> "Batch":
        pairs = [(prompt, row) for prompt, group in zip(prompts, completions, strict=True) for row in group]
        longest = max(len(prompt) + len(row) for prompt, row in pairs)
        tokens = torch.full((len(pairs), longest), pad)
        is_token, is_completion = torch.zeros(2, len(pairs), longest, dtype=torch.long)
        for n, (prompt, row) in enumerate(pairs):
            end = len(prompt) + len(row)
            tokens[n, :end] = torch.tensor(prompt + row)
            is_token[n, :end] = 1
            is_completion[n, len(prompt) : end] = 1
        return Batch(tokens, is_token, is_completion[:, 1:], advantages.reshape(-1, 1))


def log_probabilities(model, batch: Batch, temperature: float) -> Tensor:
    """[N, S - 1]: log p(token | tokens before it). Position s predicts token s + 1."""
    logits = model(input_ids=batch.tokens, attention_mask=batch.is_token).logits[:, :-1] / temperature
    return logits.log_softmax(dim=-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)


# -- 5. The loss ------------------------------------------------------------------------------------------------------


def grpo_loss(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, batch: Batch, settings: Settings) -> Tensor:
    """The clipped objective with the KL to the reference, a mean over tokens of each completion, then over completions.

    The KL estimate `r - log r - 1`, `r = p_ref / p`, is never negative and has little variance (Schulman 2020).
    """
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.min(ratio * batch.advantages, clipped * batch.advantages)  # [N, S - 1]
    log_r = ref_logp - logp
    kl = log_r.exp() - log_r - 1
    loss = -gain + settings.beta * kl
    mask = batch.is_completion
    return ((loss * mask).sum(dim=1) / mask.sum(dim=1)).mean()


# -- 6. One rollout and its updates ----------------------------------------------------------------------------------


def train_on(model, reference, optimizer, batch: Batch, settings: Settings) -> list[float]:
    """`settings.updates` optimizer steps on one rollout. Returns their losses."""
    with torch.no_grad():
        old_logp = log_probabilities(model, batch, settings.temperature)  # of the policy that wrote the completions
        ref_logp = log_probabilities(reference, batch, settings.temperature)
    losses = []
    for _ in range(settings.updates):
        logp = log_probabilities(model, batch, settings.temperature)
        loss = grpo_loss(logp, old_logp, ref_logp, batch, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(model, tokenizer, settings: Settings, rollouts: int, seed: int = 0) -> list[float]:
    """Prompts, rollout, rewards, advantages, updates; again and again. Returns the mean reward of each rollout."""
    torch.manual_seed(seed)
    random_numbers = random.Random(seed)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    means = []
    for number in range(1, rollouts + 1):
        problems = [draw_problem(random_numbers) for _ in range(settings.prompts)]
        prompts = [encode(tokenizer, question) for question, _ in problems]
        completions = sample(model, tokenizer, prompts, settings)
        rewards = torch.tensor(
            [
                [reward(tokenizer.decode(row, skip_special_tokens=True), answer) for row in group]
                for group, (_, answer) in zip(completions, problems, strict=True)
            ]
        )  # [P, G]
        batch = Batch.of(prompts, completions, group_advantages(rewards), tokenizer.pad_token_id)
        losses = train_on(model, reference, optimizer, batch, settings)
        means.append(rewards.mean().item())
        print(f"rollout {number}: reward {means[-1]:.3f}, losses {', '.join(f'{loss:+.4f}' for loss in losses)}")
    return means


def encode(tokenizer, question: str) -> list[int]:
    """A chat prompt as token ids, up to where the assistant begins to write."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a folder or a hub id")
    parser.add_argument("--smoke", action="store_true", help="a few rollouts, in seconds")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    train(model, tokenizer, Settings(), rollouts=12 if options.smoke else 50)


if __name__ == "__main__":
    main()
