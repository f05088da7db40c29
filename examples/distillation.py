"""Distillation: a student learns its teacher's distribution on its own completions. No reward is paid, only measured.

    python examples/distillation.py --smoke      # seconds on one core; without --smoke 40 steps each; --seed 1: another seed

A real model: `STUDENT = "Qwen/Qwen2.5-0.5B-Instruct"`, and in place of the first run `teacher = "Qwen/Qwen2.5-7B-Instruct"`.
Expect: the student's share of right answers rises to its teacher's, though nothing told it which answers are right
(docs/distillation.md has the figures of three seeds).
"""

from tiny import problems, smoke_and_seed

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg

STUDENT = "demo"

smoke, seed = smoke_and_seed(__doc__)


def trained(output_dir, algorithm):
    """The folder of the student's model after a run by this algorithm; prints its share of right answers on held-out problems."""
    trainer = GRPOTrainer(
        model=STUDENT,
        reward_funcs="math",
        algorithm=algorithm,
        args=GRPOConfig(
            output_dir=output_dir,
            max_steps=12 if smoke else 40,
            seed=seed,
            num_generations=8,
            num_generations_eval=1,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            max_completion_length=32,
            learning_rate=1e-3 if smoke else 4e-4,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=problems(),
        eval_dataset=problems(200, "test"),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    print(f"{output_dir}: {before:.1%} before, {trainer.evaluate()['eval_reward']:.1%} after")
    trainer.save_model(f"{output_dir}/model")
    return f"{output_dir}/model"


teacher = trained("runs/teacher", alg.dapo())
distill = alg.distill(teacher, divergence="reverse_kl")
trained(
    "runs/student", alg.dapo().replace(objective=alg.zero, regularizers=(distill,))
)  # alg.dapo() alone: reward and teacher
