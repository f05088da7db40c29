"""`covey serve --learn`: the options of learning from feedback, and the endpoint that does it."""

from contextlib import closing
from pathlib import Path
from typing import Any

from covey.cli.flags import Flag
from covey.cli.verb import Args
from covey.errors import ConfigError

FLAGS = (
    Flag(name="learn", help="Learn from scores of the answers: POST /v1/feedback, or covey feedback ID SCORE.", type=bool, default=False, group="learning"),
    Flag(name="fixed_set", help="Prompts that measure what must not get worse: a file, a folder or a hub id, optionally with :split; demo for the demo's. Never trained on.", group="learning"),
    Flag(name="reward", help="Built-in name or import path that scores answers to the fixed set; may be repeated.", type="list[str]", default=[], group="learning"),
    Flag(name="tolerance", help="Mean reward on the fixed set that a promotion may risk; 0: it must certainly be better.", type=float, default=0.02, group="learning"),
    Flag(name="scores_per_candidate", help="Scored answers that a candidate is trained on.", type=int, default=128, group="learning"),
    Flag(name="learn_folder", help="Where scores and versions are kept; learning/ in the folder of the model when left out.", group="learning"),
    Flag(name="learning_rate", help="Learning rate of the adapter.", type=float, default=2e-4, group="learning"),
    Flag(name="per_device_train_batch_size", help="Scored answers of an optimizer step.", type=int, default=32, group="learning", is_common=False),
    Flag(name="beta", help="Weight of the KL to the served version.", type=float, default=0.01, group="learning", is_common=False),
    Flag(name="lora_r", help="Rank of the adapter.", type=int, default=16, group="learning", is_common=False),
    Flag(name="max_feedback_hours", help="Age of an answer from which on its score comes too late.", type=float, default=24.0, group="learning", is_common=False),
    Flag(name="fixed_set_prompts", help="Use only the first N rows of the fixed set.", type=int, group="learning", is_common=False),
    Flag(name="fixed_set_samples", help="Answers drawn to each prompt of the fixed set.", type=int, default=4, group="learning", is_common=False),
    Flag(name="learn_users", help="Learn an adapter for each user (the field user of requests) of that user's scores alone, served as MODEL@USER.", type=bool, default=False, group="learning"),
    Flag(name="max_users", help="Users who may have an adapter.", type=int, default=64, group="learning", is_common=False),
)  # fmt: skip


def refuse_alone(options: Args) -> None:
    """Raise ConfigError for options of learning without `--learn`, and for options that contradict it."""
    if not options["learn"]:
        for flag in FLAGS:
            if options[flag.name] != flag.default:
                raise ConfigError(f"{flag.spelled} belongs to --learn; give both, or leave it out.")
        return
    for name in ("fixed_set", "reward"):
        if not options[name]:
            raise ConfigError(f"--learn needs --{name.replace('_', '-')}: what a new version may not lose.")
    if options["adapter"]:
        raise ConfigError("--learn makes adapters of its own; leave --adapter out, or merge it first (covey merge).")


def settings_of(options: Args) -> Any:
    """Settings of learning. Raises ConfigError or DataError before a model is loaded."""
    from covey.cli.checkpoints import model_folder
    from covey.data import load
    from covey.feedback.settings import Settings
    from covey.rewards import Scorer

    rows = load(options["fixed_set"], limit=options["fixed_set_prompts"])
    with closing(Scorer.of(list(options["reward"]))) as scorer:
        scorer.check(rows.column_names)
    return Settings(
        folder=_folder(options),
        model=str(model_folder(options["model"])),
        fixed_rows=tuple(rows),
        rewards=tuple(options["reward"]),
        tolerance=options["tolerance"],
        scores_per_candidate=options["scores_per_candidate"],
        batch_size=options["per_device_train_batch_size"],
        learning_rate=options["learning_rate"],
        beta=options["beta"],
        lora_r=options["lora_r"],
        max_age_seconds=3600 * options["max_feedback_hours"],
        max_tokens=options["max_output_tokens"] or 256,
        num_samples=options["fixed_set_samples"],
        users=options["learn_users"],
        max_users=options["max_users"],
        dtype=options["dtype"],
        trust_remote_code=bool(options["trust_remote_code"]),
        use_cpu=bool(options["use_cpu"]),
    )


def _folder(options: Args) -> Path:
    if options["learn_folder"]:
        return Path(options["learn_folder"]).expanduser()
    parent = Path(options["model"]).expanduser()
    if not parent.is_dir():
        raise ConfigError(f"{options['model']} is no folder to keep versions in; give --learn-folder FOLDER.")
    return parent / "learning"
