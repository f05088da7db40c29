"""The script that made the shipped model: `python -m covey.demo.make_model --out DIR`, about ten minutes on two cores.

A tokenizer and a small Qwen2 are trained from nothing on worked answers to the task's training problems. The teacher
misreads most kinds of problems more often than not (it adds where it should subtract, or stops after the first step), so the
model calculates well, writes the answer's form, and is right only some of the time, which leaves GRPO room to improve it.
"""

import argparse
import logging
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.demo.task import TEMPLATES, Problem, draw, worked

logger = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISREAD = {"+": "-", "-": "+", "*": "+", "+-": "+", "-+": "-", "*+": "*", "*-": "*"}
"""Operation that the teacher uses instead."""
OFTEN, SELDOM = 0.62, 0.2
TRUSTED = frozenset({0, 3, 6, 8, 10})
"""Templates that the teacher misreads seldom; the others it misreads often."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(args.out, args.steps, args.seed)


def make(out: Path, steps: int, seed: int) -> None:
    """Train and write the model folder."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = make_tokenizer(rng)
    model = make_model(tokenizer)
    logger.info("%d tokens, %.2fM parameters", len(tokenizer), sum(p.numel() for p in model.parameters()) / 1e6)
    train(model, tokenizer, steps, rng)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tokenizer(rng: random.Random) -> Any:
    """Byte-level BPE on the problems' own words; every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for problem in (draw(rng) for _ in range(4000)) for text in (problem.question, worked(problem))]
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\nsystem\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_model(tokenizer: Any) -> Any:
    """A Qwen2 of about a million parameters; four layers, since Python's time a layer bounds decoding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,  # rotary: longer prompts than those of training run, if not well
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def train(model: Any, tokenizer: Any, steps: int, rng: random.Random) -> None:
    """Next-token training on the worked answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
    started = time.perf_counter()
    for step in range(steps):
        ids, labels = batch(tokenizer, rng)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            logger.info("step %d  loss %.4f  %.0f s", step, loss.item(), time.perf_counter() - started)


def batch(tokenizer: Any, rng: random.Random, size: int = 64) -> tuple[Tensor, Tensor]:
    """Token ids and labels [B, S], right-padded; the loss is on the answers only."""
    pairs: list[tuple[list[int], list[int]]] = []
    while len(pairs) < size:
        problem = draw(rng)
        if problem.split == "train":
            pairs.append(encoded(tokenizer, problem, teacher_answer(problem, rng)))
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), -100)
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def encoded(tokenizer: Any, problem: Problem, answer: str) -> tuple[list[int], list[int]]:
    messages = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]


def teacher_answer(problem: Problem, rng: random.Random) -> str:
    """The teacher's answer: worked, with the wrong operations as often as the teacher misreads this kind of problem."""
    share = SELDOM if problem.template in TRUSTED else OFTEN
    return worked(problem, MISREAD[TEMPLATES[problem.template][0]] if rng.random() < share else None)


if __name__ == "__main__":
    main()
