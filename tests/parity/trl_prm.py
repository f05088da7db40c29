"""TRL's process-reward training on a tiny model, written down for `tests/rewards/test_process_reward.py`.

    .venv-trl/bin/pip install --target prm --no-deps trl==1.13.0   # the last TRL that has PRMTrainer
    PYTHONPATH=prm .venv-trl/bin/python tests/parity/trl_prm.py FOLDER tests/rewards/trl_prm.json

FOLDER holds the classifier, its tokenizer and `steps.jsonl`: what `save_for_trl(FOLDER)` of that test file writes. All rows are one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast


def main(folder: Path, out: Path) -> None:
    import trl
    from trl.experimental.prm import PRMConfig, PRMTrainer

    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    args = PRMConfig(
        str(folder / "out"), use_cpu=True, per_device_train_batch_size=len(rows), max_length=None, report_to="none"
    )
    trainer = PRMTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    encoded = trainer.train_dataset
    found = {
        "source": f"TRL {trl.__version__}",
        "rows": rows,
        "input_ids": list(encoded["input_ids"]),
        "labels": list(encoded["labels"]),
        "loss": loss.item(),
        "gradient_of_head": model.score.weight.grad.tolist(),
        "gradient_norms": {name: weight.grad.norm().item() for name, weight in model.named_parameters()},
    }
    out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
