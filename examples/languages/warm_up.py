"""A model that reads three languages: the one that ships with Covey, taught German and Chinese questions in minutes.

`python warm_up.py FOLDER [STEPS]`. As when the shipped model was made, the teacher misreads most kinds of problems more often than not, so
the model answers in form and is right some of the time: what rewards can mend. Its tokenizer has every byte, so it can read any text.
"""

import random
import sys

import torch
from task import LANGUAGES, drawn, in_language
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.demo import model_path
from covey.demo.make_model import taught


def warm_up(folder: str, steps: int = 400) -> str:
    """Next-token training on answers, 24 questions a step; returns `folder`."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        problems = drawn("train", 24, seed=step + 1)
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": in_language(one, rng.choices(LANGUAGES, [1, 2, 2])[0])}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for one in problems
        ]
        texts = [
            f"{prompt}{taught(one, rng)}{tokenizer.eos_token}" for prompt, one in zip(prompts, problems, strict=True)
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for line, prompt in zip(labels, prompts, strict=True):
            line[: len(tokenizer(prompt).input_ids)] = -100
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"warm-up {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    warm_up(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 400)
