"""Prompts with images."""

from models import picture

from covey.data.prompts import to_prompt


def prompts(processor, kind):
    """One image, two images of different sizes, none."""
    rows = [
        {"prompt": [{"role": "user", "content": "How many?"}], "image": picture(2)},
        {
            "prompt": [{"role": "user", "content": "More in the first?"}],
            "images": [picture(3, (64, 32), 1), picture(1)],
        },
        {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]},
    ]
    return [to_prompt(row, f"0:{i}", f"row {i}", processor.tokenizer, {}, processor) for i, row in enumerate(rows)]
