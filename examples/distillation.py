"""Distillation: a student learns its teacher's distribution on its own completions. No reward is paid, only measured.

    python examples/distillation.py --smoke      # seconds on one core; without --smoke 100 steps each

A real model: `STUDENT = "Qwen/Qwen2.5-0.5B-Instruct"`, and in place of the first run `teacher = "Qwen/Qwen2.5-7B-Instruct"`.
Expect: the student's share of right answers rises to its teacher's, though nothing told it which answers are right.
"""

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg

STUDENT = "demo"

smoke = is_smoke(__doc__)


def trained(output_dir, algorithm):
    """The folder of the student's model after a run by this algorithm."""
    trainer = GRPOTrainer(
        model=STUDENT,
        reward_funcs="math",
        algorithm=algorithm,
        args=GRPOConfig(
            output_dir=output_dir,
            max_steps=12 if smoke else 100,
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=32,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=problems(),
    )
    trainer.train()
    trainer.save_model(f"{output_dir}/model")
    return f"{output_dir}/model"


teacher = trained("runs/teacher", alg.dapo())
distill = alg.distill(teacher, divergence="reverse_kl")
trained(
    "runs/student", alg.dapo().replace(objective=alg.zero, regularizers=(distill,))
)  # alg.dapo() alone: reward and teacher
