"""Teachers of a run, in this process or served, and its supervised term."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.adapters import adapter_options, has_adapter
from covey.algorithms import SFT, Algorithm, Distill, TeacherRole, keep
from covey.algorithms.teachers import is_address, is_policy
from covey.config.combinations import expect_together
from covey.data.checks import row_at
from covey.data.examples import encode_example, load_examples
from covey.data.hints import hints_of, with_hint
from covey.data.prompts import to_prompt
from covey.errors import ConfigError
from covey.learner import AdapterCopy, FrozenCopy, NoReference, Policy, Reference, ServedTeacher, Supervised, Teacher
from covey.learner.served_teacher import AnyTeacher
from covey.learner.supervised import supervised_policy
from covey.learner.teacher import Following, Member, Teachers
from covey.learner.teacher_tokenizers import Tokenizers, alignment_of_model, alignment_of_server, expect_same_tokens
from covey.models import load_model, reads_media, rope_factors, take_factors
from covey.models.merging.adapters import weights_on_same_base
from covey.process.sharding import Shards, shard_like
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.runs.weights import model_folder
from covey.types import Completion, Prompt

logger = logging.getLogger(__name__)

MOST_BYTES = 2**26
"""Size limit of an answer: some 100,000 tokens with their top 20 each."""


def served_teacher(
    address: str,
    model: str,
    part: Distill | None,
    policy: Policy,
    tokenizers: Tokenizers,
    teacher: Callable[..., ServedTeacher],
) -> ServedTeacher:
    """The teacher behind an address. Raises ConfigError where it cannot teach this policy, ServerError where it does not answer."""
    role = tokenizers.role
    if policy.temperature != 1.0:
        raise ConfigError(
            f"The teacher {address} tells log-probabilities of temperature 1, and the policy samples at "
            f"{policy.temperature:g}; set temperature=1, or load the teacher here (a folder or a hub id)."
        )
    expect_together("served teacher", reads_media(policy.model) and "media")
    endpoint = Endpoint(
        url=address,
        model=model,
        key_env=role.key_env,
        request_seconds=role.request_seconds,
        called="teacher",
        most_bytes=MOST_BYTES,
    )
    top_k = 1 if part is None or part.top_k is None else part.top_k
    distance = None if part is None else part.distance_to_likeliest
    alignment, theirs = alignment_of_server(model, tokenizers)
    served = teacher(
        endpoint,
        top_k,
        distance,
        alignment=alignment,
        overlap_k=part and part.overlap_k,
        skips=role.when_lost == "skip",
    )
    expect_same_tokens(served, theirs)
    return served


def without_teaching(algorithm: Algorithm) -> Algorithm:
    """The algorithm without terms that need a second model or data, for estimates."""
    apart = tuple(part for part in algorithm.regularizers if not isinstance(part, (Distill, SFT)))
    return replace(algorithm, regularizers=apart)


@dataclass(frozen=True, eq=False)
class Maker:
    """Maker of the teachers of a run, from their role and what the algorithm's parts read of them."""

    role: TeacherRole
    part: Distill | None
    """The distillation term; None: log-probabilities alone."""
    policy: Policy
    tokenizer: Any
    template: Mapping[str, Any]
    tokenizers: Tokenizers
    past: FrozenCopy | None = None
    """Copy of the policy for a teacher that is its past, where it was made before. None: such a teacher makes its own."""
    shard: Callable[[torch.nn.Module], Shards] | None = None
    """Splits a teacher over the processes, as the policy is. None: every process holds it whole."""

    def prompts(self) -> dict[str, Any]:
        """`hints` and `hinted` of a teacher."""
        role = self.role
        hints = None if role.feedback is None else partial(hints_of, feedback=role.feedback, threshold=role.threshold)
        return {
            "hints": hints,
            "hinted": partial(with_hint, template=role.template, tokenizer=self.tokenizer, options=self.template),
        }

    def of_policy(self, reference: Reference, rule: Any, algorithm: Algorithm) -> Teacher:
        """The policy as its own teacher: of now, or of its own past."""
        teacher = replace(self.policy, auxiliary_coefficient=0.0).tried()
        if rule is None:
            return self._made(teacher, needs_hint=True)
        if is_reference(rule, algorithm) and isinstance(reference, (FrozenCopy, AdapterCopy)):
            following = Following(reference, rule, is_constant=True)
        elif has_adapter(self.policy.model):
            following = Following(AdapterCopy.of(self.policy), rule)
        else:
            following = Following(self.past or FrozenCopy.of(self.policy, follows=rule is not keep), rule)
        copy = following.copy
        if isinstance(copy, AdapterCopy):
            self._expect_plain_head()
        weights = teacher if isinstance(copy, AdapterCopy) else replace(copy.policy, auxiliary_coefficient=0.0).tried()
        return self._made(weights, needs_hint=True, following=following)

    def _expect_plain_head(self) -> None:
        is_adapted = any(parameter.requires_grad for parameter in self.policy.output_layer().parameters())
        expect_together("teaching adapter", is_adapted and "LoRA on the output layer")

    def of_model(self, source: Any) -> Teacher:
        """Another model, loaded here. Raises ConfigError for another vocabulary, ModelError where it cannot be loaded."""
        policy = self.policy
        if isinstance(source, (str, Path)) and (adapter := weights_on_same_base(policy.model, source)) is not None:
            names = dict(policy.model.named_parameters())
            copy = AdapterCopy(policy, {name: shard_like(value, names[name]) for name, value in adapter.items()})
            self._expect_plain_head()
            teacher = replace(policy, auxiliary_coefficient=0.0).tried()
            return self._made(teacher, following=Following(copy, keep, is_constant=True))
        if isinstance(source, (str, Path)) and adapter_options(source) is not None and has_adapter(policy.model):
            logger.warning(
                "The teacher %s is an adapter of another base, form or larger rank than the policy's: its base is loaded once more.",
                source,
            )
        kwargs = {"dtype": self.role.dtype} if isinstance(source, (str, Path)) else {}
        model = load_model(source, kwargs, trust_remote_code=self.tokenizers.trust_remote_code)
        if model is policy.model:
            raise ConfigError(
                "The teacher is the very model that is trained; give another one, or 'policy' with feedback."
            )
        if rope_factors(model) and rope_factors(policy.model) == "long":  # it reads the policy's rows
            take_factors(model, "long")
        alignment = alignment_of_model(model, policy, self.tokenizers)
        if not hasattr(model, "hf_device_map"):
            model = model.to(policy.device)
        model = model.eval().requires_grad_(False)
        is_narrow = model.dtype != torch.float32 and policy.compute_dtype is None
        if is_narrow and next(policy.model.parameters()).dtype == torch.float32:
            logger.warning(
                "The teacher computes in %s, as it is stored, and the policy in float32: divergences are some 3%% off; "
                "distill(..., dtype='float32') is exact and takes twice the memory.",
                str(model.dtype).removeprefix("torch."),
            )
        weights = replace(
            policy, model=model, auxiliary_coefficient=0.0, offloads=False, shards=None, embeds_media=None
        )
        weights = weights if self.shard is None else weights.sharded(self.shard)
        return self._made(weights, alignment=alignment)

    def _made(self, weights: Policy, **options: Any) -> Teacher:
        part = self.part
        return Teacher(
            weights,
            None if part is None else part.distance,
            entropy_sensitivity=0.0 if part is None else part.entropy_sensitivity,
            overlap_k=None if part is None else part.overlap_k,
            **self.prompts(),
            **options,
        )


def is_reference(rule: Any, algorithm: Algorithm) -> bool:
    """True if a teacher that follows the policy by `rule` is the frozen reference of the algorithm, where that has one."""
    return rule is keep and algorithm.reference is keep


def past_rule(algorithm: Algorithm) -> Any:
    """Rule of a teacher that is the policy's past with a copy of the weights of its own; None without such a teacher."""
    role = algorithm.role
    rule = role.rule if role is not None and role.is_policy else None
    return None if is_reference(rule, algorithm) and algorithm.needs.reference else rule


def sizes_of_teachers(role: TeacherRole | None, policy: Any, config_of: Callable[[Any], Any]) -> list[tuple[int, int]]:
    """Parameters of each teacher in this process, and bytes of weights of its own, 16 bits each: 0 for the policy itself.

    `policy`: configuration of the model. `config_of` reads that of a teacher by its name.
    """
    named = [] if role is None else [source for source, _, _ in role.shares()]
    sizes = []
    for source in named:
        if isinstance(source, str) and is_address(source):
            continue
        is_loaded = isinstance(source, str | Path) and not is_policy(source)
        count = _num_parameters(config_of(model_folder(str(source))) if is_loaded else policy)
        sizes.append((count, 2 * count if is_loaded else 0))
    return sizes


def _num_parameters(model_config: Any) -> int:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(model_config).parameters())


def build_teacher(
    algorithm: Algorithm,
    policy: Policy,
    tokenizer: Any,
    template: Mapping[str, Any],
    *,
    eos_ids: Sequence[int] = (),
    trust_remote_code: bool = False,
    check_stop: Callable[[], None] = lambda: None,
    reference: Reference | None = None,
    past: FrozenCopy | None = None,
    shard: Callable[[torch.nn.Module], Shards] | None = None,
) -> AnyTeacher | None:
    """The teacher of the algorithm's parts; None where none learns from one.

    Raises ConfigError for two different teachers or another vocabulary, ModelError for a teacher that cannot be loaded,
    ServerError for one that does not answer.
    """
    role = algorithm.role
    if role is None:
        return None
    parts = [part for part in algorithm.regularizers if isinstance(part, Distill)]
    if len(parts) > 1:
        raise ConfigError("The algorithm has several distill terms; one divergence can be learnt from at a time.")
    part = parts[0] if parts else None
    media = reads_media(policy.model)
    tokenizers = Tokenizers(tokenizer, eos_ids, template, role, part is not None, trust_remote_code, media)
    maker = Maker(role, part, policy, tokenizer, template, tokenizers, past, shard)
    if role.is_policy:
        return maker.of_policy(reference or NoReference(), role.rule, algorithm)
    made = partial(ServedTeacher, check_stop=check_stop, **maker.prompts())

    def teacher_at(source: Any, value: str | None) -> Teacher | ServedTeacher:
        if not is_address(source):
            return maker.of_model(model_folder(str(source)) if isinstance(source, str | Path) else source)
        return served_teacher(source, str(role.model_at(source, value)), part, policy, tokenizers, made)

    made_of = [(teacher_at(source, value), share, value) for source, share, value in role.shares()]
    if len(made_of) == 1 and role.by is None:
        return made_of[0][0]
    return Teachers(tuple(Member(*member) for member in made_of), role.by)


def build_supervised(
    algorithm: Algorithm, policy: Policy, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any], seed: int
) -> Supervised | None:
    """The examples of the algorithm's supervised term; None without such a term. Raises ConfigError for two of them."""
    parts = [part for part in algorithm.regularizers if isinstance(part, SFT)]
    if not parts:
        return None
    if len(parts) > 1:
        raise ConfigError(
            "The algorithm has several sft terms; mix their data sets into one ('0.5*a.jsonl + 0.5*b.jsonl')."
        )
    dataset = load_examples(parts[0].dataset)
    example = _encoder(dataset, tokenizer, eos_ids, template)
    example(0)  # raises errors of template and columns before the first rollout
    return Supervised(
        policy=supervised_policy(policy),
        example=example,
        count=len(dataset),
        weight=parts[0].weight,
        batch_size=parts[0].batch_size,
        seed=seed,
    )


def _encoder(
    dataset: Any, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any]
) -> Callable[[int], tuple[Prompt, Completion]]:
    def example(index: int) -> tuple[Prompt, Completion]:
        row, where = row_at(dataset, index), f"row {index} of the examples"
        prompt = to_prompt(row, f"sft:{index}", where, tokenizer, template, features=dataset.features)
        return prompt, encode_example(prompt, prompt.columns["completion"], tokenizer, eos_ids, template)

    return example
