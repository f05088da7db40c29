"""Warnings for values far from published ones: one sentence with its source. Never an error: the user may know better."""

from collections.abc import Iterator
from dataclasses import dataclass

SMALL_MODEL = 100_000_000
"""Below this many parameters the learning rates that papers found for billions say little."""
HIGH_FOR_SMALL = 3e-3
"""Learning rate above which a model of that size is lost too."""


@dataclass(frozen=True)
class Advice:
    """One remark on one option."""

    option: str
    said: str
    source: str

    def __str__(self) -> str:
        return f"{self.said} ({self.source})"


def advise(
    *,
    learning_rate: float | None = None,
    num_generations: int | None = None,
    beta: float | None = None,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    loss_type: str | None = None,
    importance_sampling_level: str = "token",
    scale_rewards: str | bool = "group",
    temperature: float | None = None,
    num_iterations: int | None = None,
    entropy_coef: float | None = None,
    is_lora: bool = False,
    num_parameters: int | None = None,
    optimizer: str = "adamw",
    teaches_itself: bool = False,
) -> list[Advice]:
    """Remarks on options by TRL's names; None is skipped. `num_parameters` of the model keeps advice for large models
    away from small ones, `optimizer` by its name advice for optimizers that scale their steps, as AdamW, away from plain SGD.
    `teaches_itself`: the policy that reads its group's best completion teaches, and no reward does.
    Values in the known range give an empty list.
    """
    remarks: list[Advice] = []
    if learning_rate is not None and _is_plain(optimizer):
        remarks += _rate_of_plain_descent(learning_rate)
    elif learning_rate is not None:
        is_small = num_parameters is not None and num_parameters < SMALL_MODEL
        remarks += (
            _rate_of_a_small_model(learning_rate, is_lora) if is_small else _learning_rate(learning_rate, is_lora)
        )
    if num_generations is not None:
        remarks += _group_size(num_generations, scale_rewards)
    if beta is not None:
        remarks += _beta(beta)
    if epsilon is not None:
        high = epsilon if epsilon_high is None else epsilon_high
        remarks += _cispo(high) if loss_type == "cispo" else _clip(epsilon, high, importance_sampling_level, loss_type)
    if temperature is not None and temperature < 0.6:
        sentence = f"temperature={temperature:g} makes completions of a prompt alike, so that most groups are tied; 1.0 is usual."
        remarks.append(Advice("temperature", sentence, "TRL's default is 1.0; so is verl's"))
    if entropy_coef is not None:
        remarks += _entropy(entropy_coef)
    if num_iterations is not None and num_iterations > 4:
        sentence = f"num_iterations={num_iterations} trains on each completion far off-policy; 1 to 4 are usual."
        remarks.append(
            Advice(
                "num_iterations",
                sentence,
                "DeepSeekMath 2024, section 4.2: a single update following each exploration stage",
            )
        )
    if teaches_itself:
        sentence = (
            "The only teacher is the policy itself that reads its group's best completion, and no reward corrects it: a policy that "
            "cannot use this text unlearns the task. Give it teacher=MODEL or feedback=COLUMN."
        )
        remarks.append(Advice("teacher", sentence, "Covey's shipped model falls from 53% to 17% by iw_opd without one"))
    return remarks


def _learning_rate(value: float, is_lora: bool) -> Iterator[Advice]:
    if is_lora and value < 3e-6:
        sentence = f"learning_rate={value:g} is low for LoRA: it learns best at about ten times the rate of full training, 1e-5 to 2e-4."
        yield Advice("learning_rate", sentence, "Schulman et al. 2025, 'LoRA Without Regret'")
    if is_lora and value > 1e-3:
        sentence = f"learning_rate={value:g} is high even for LoRA; 1e-5 to 2e-4 are usual in reinforcement learning."
        yield Advice("learning_rate", sentence, "Schulman et al. 2025, 'LoRA Without Regret'")
    if not is_lora and value > 1e-5:
        sentence = (
            f"learning_rate={value:g} is high for training all weights, where reinforcement learning uses 1e-6 to 3e-6."
        )
        yield Advice("learning_rate", sentence, "DeepSeekMath 2024 and DAPO 2025 use 1e-6, DeepSeek-R1 2025 3e-6")
    if not is_lora and value < 1e-7:
        sentence = (
            f"learning_rate={value:g} is so low that hardly anything moves; reinforcement learning uses 1e-6 to 3e-6."
        )
        yield Advice("learning_rate", sentence, "DeepSeekMath 2024 and DAPO 2025 use 1e-6")


def _is_plain(optimizer: str) -> bool:
    """True for optimizers whose step is the gradient times the learning rate."""
    return "sgd" in optimizer.lower()


def _rate_of_plain_descent(value: float) -> Iterator[Advice]:
    if value > 10:
        sentence = (
            f"learning_rate={value:g} is high even for SGD, whose steps are the gradient times it; 1e-2 to 1 are usual."
        )
        yield Advice(
            "learning_rate", sentence, "max_grad_norm=1.0 lets such a step move the weights by a norm of that number"
        )


def _rate_of_a_small_model(value: float, is_lora: bool) -> Iterator[Advice]:
    if value > HIGH_FOR_SMALL:
        sentence = (
            f"learning_rate={value:g} is high for a model below 100 million parameters too: an AdamW-like step moves each weight by "
            "about that much. Try 1e-4 to 1e-3."
        )
        yield Advice(
            "learning_rate", sentence, "Covey's shipped model of one million learns at 6e-4 and breaks at 5e-3"
        )
    if value < 1e-5:
        kind = "an adapter on one" if is_lora else "one"
        sentence = (
            f"learning_rate={value:g} is what models of billions of parameters are trained with; {kind} below 100 million hardly "
            "moves at it. Try 1e-4 to 1e-3."
        )
        yield Advice("learning_rate", sentence, "Covey's shipped model of one million learns at 6e-4")


def _group_size(size: int, scale_rewards: str | bool) -> Iterator[Advice]:
    if size == 2 and scale_rewards in ("group", True):
        sentence = (
            "num_generations=2 with scale_rewards='group' gives advantages of +-0.7 however far apart the rewards are."
        )
        yield Advice("num_generations", sentence, "(r - mean) / deviation of two values is always +-1/sqrt(2)")
    elif size < 4:
        sentence = f"num_generations={size} makes a noisy baseline, and many groups tied; 8 to 64 are usual."
        yield Advice("num_generations", sentence, "TRL's default is 8, DAPO 2025 uses 16, DeepSeekMath 2024 64")


def _beta(beta: float) -> Iterator[Advice]:
    if beta > 0.2:
        sentence = (
            f"beta={beta:g} holds the policy close to the reference; 0 to 0.04 are usual where rewards are verifiable."
        )
        yield Advice("beta", sentence, "DAPO 2025 uses 0, DeepSeek-R1 2025 0.001, DeepSeekMath 2024 0.04")


def _entropy(coefficient: float) -> Iterator[Advice]:
    source = "A3C, Mnih et al. 2016, uses 0.01"
    if coefficient < 0:
        sentence = (
            f"entropy_coef={coefficient:g} pays for certainty: completions become alike whatever the reward says; the bonus that "
            "keeps a policy exploring is above 0, 0.001 to 0.01."
        )
        yield Advice("entropy_coef", sentence, source)
    if coefficient > 0.1:
        sentence = f"entropy_coef={coefficient:g} can outweigh the reward, and completions turn to noise; 0.001 to 0.01 are usual."
        yield Advice("entropy_coef", sentence, source)


def _cispo(ceiling: float) -> Iterator[Advice]:
    if ceiling < 1.0:
        sentence = f"With cispo, epsilon_high={ceiling:g} is the ceiling of the ratio itself, so every gradient is scaled down; take 5."
        yield Advice("epsilon_high", sentence, "TRL 1.16's definition; 5.0 in ScaleRL, Khatri et al. 2025")


def _clip(low: float, high: float, level: str, loss_type: str | None) -> Iterator[Advice]:
    if loss_type in ("sapo", "vespo"):
        return
    widest = max(low, high)
    if level == "sequence" and widest > 0.02:
        sentence = (
            f"epsilon={widest:g} hardly ever clips a sequence-level ratio, which is a mean over tokens and stays very near 1; "
            "take epsilon=3e-4, epsilon_high=4e-4."
        )
        yield Advice("epsilon", sentence, "GSPO, Zheng et al. 2025, section 5.1")
    if level == "token" and widest < 0.01:
        sentence = f"epsilon={widest:g} clips nearly every token off-policy; 0.2 is usual for token-level ratios."
        yield Advice("epsilon", sentence, "PPO, Schulman et al. 2017, table 1; DAPO 2025 0.2 and 0.28")
