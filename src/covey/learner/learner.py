"""One optimizer step: denominators of the whole step, micro-batches, one update. Memory options never change a gradient."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from covey.algorithms import Algorithm, Needs
from covey.learner.critic import Critic, no_critic
from covey.learner.expert_choices import loads_of_step
from covey.learner.measured import Measured
from covey.learner.micro_batches import MicroBatcher
from covey.learner.optimizer import check_room, clip, options_of
from covey.learner.out_of_memory import BatchLimits
from covey.learner.packing import Row, can_have_gradient, filler, regrouped, rows_of, unscored_row
from covey.learner.policy import Policy
from covey.learner.reference import Reference
from covey.learner.served_teacher import AnyTeacher
from covey.learner.signals import squared_scores
from covey.learner.soundness import expect_rates, expect_sound_training
from covey.learner.supervised import Supervised
from covey.learner.token_batches import Draws, as_drawn, batch_of, moved, totals_of
from covey.learner.token_metrics import FIRST_UPDATE, TokenEntropies, Unread, metrics_of
from covey.learner.update_guard import UpdateGuard
from covey.models.modalities import banned_ids
from covey.process.gradient_buckets import GradientBuckets
from covey.process.interruption import Interruption
from covey.process.ordered_sums import ordered_sums
from covey.process.sharding import is_sharded, total_norm
from covey.process.world import World
from covey.types import Completion, Group, Last, Metric, StepReport, Sum, TokenBatch, Totals, merge_metrics


@dataclass(eq=False)
class Learner:
    """Updates a policy from groups with advantages. Its fields live for the whole run; no field belongs to a step."""

    policy: Policy
    reference: Reference
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    world: World
    max_completion_length: int
    limits: BatchLimits = field(default_factory=BatchLimits)
    """Sizes of micro-batches."""
    max_grad_norm: float = 1.0
    """Gradient clipping threshold; 0: no clipping."""
    mask_truncated: bool = False
    is_off_policy: bool = False
    """True if one rollout serves several optimizer steps, so that old log-probabilities must be computed."""
    disable_dropout: bool = False
    uses_sampler_logp: bool = True
    """False if completions were drawn from a truncated or penalised distribution, which the learner does not compute."""
    samples_here: bool = False
    """True if this process draws completions with the weights that it trains, so that the two differ by rounding alone."""
    expects_stale: bool = False
    """True if completions may come from older weights, so that the sampler's log-probabilities are not the current policy's."""
    overlaps_reduction: bool = True
    """Overlap the gradient all-reduce with the last micro-batch's backward. False if that accumulates a gradient in pieces."""
    scaler: torch.amp.GradScaler | None = None
    """Loss scaling, for float16 only."""
    critic: Critic = field(default_factory=no_critic)
    teacher: AnyTeacher | None = None
    """Teacher model of a distillation."""
    supervised: Supervised | None = None
    """Supervised examples trained on in addition to the rollout."""
    guard: UpdateGuard = field(default_factory=UpdateGuard)
    """Checks loss and gradient norm before each update."""
    before_update: Callable[[], None] = lambda: None
    after_update: Callable[[], None] = lambda: None
    interruption: Interruption = field(default_factory=Interruption)
    """Callback before each micro-batch; its exception ends the step, whose gradients `forget` drops."""
    before_first_update: Callable[[Mapping[str, Metric], int], None] = lambda metrics, version: None
    """Callback before a rollout's first update, with its metrics and the version of the weights; may refuse it by raising."""
    token_entropies: TokenEntropies = field(default_factory=TokenEntropies)
    micro_batcher: MicroBatcher = field(init=False)
    options: list[dict[str, Any]] = field(init=False)
    """Options of the optimizer's groups as it was made (`options_of`)."""

    def __post_init__(self) -> None:
        self.options = options_of(self.optimizer)
        agree = self.world.max if self.policy.is_collective else None
        self.micro_batcher = MicroBatcher(self.limits, self.policy.shares_prompts, agree)

    # -- before the advantages ------------------------------------------------------------------------------------

    @torch.no_grad()
    def annotate(self, groups: Sequence[Group], algorithm: Algorithm) -> list[Group]:
        """Groups with the fields that the algorithm needs from the policy at rollout time: `old_logp`, `ref_logp`, `values`."""
        needs = algorithm.needs.at_rollout(is_off_policy=self.is_off_policy)
        return self.measured(groups, needs) if needs != Needs() else list(groups)

    @torch.no_grad()
    def measured(self, groups: Sequence[Group], needs: Needs) -> list[Group]:
        """Groups with `old_logp`, `ref_logp`, `values` and `squared_score` of the current models, as far as `needs` names them."""
        rows = [unscored_row(group.prompt, drawn, i) for i, group in enumerate(groups) for drawn in group.completions]
        self.policy.model.eval()
        self.limits.left_out.begin()  # no completion may be skipped: advantages need all of them
        with self._abortable(), ordered_sums.on(self.policy.device):
            notes = self.micro_batcher.attempt(lambda: self._notes(self.world.share(rows), needs))
        done = self.world.interleave(notes)
        assert len(done) == len(rows)
        return regrouped(groups, done)

    def _notes(self, rows: Sequence[Row], needs: Needs) -> list[Completion]:
        """Completions of `rows` with the fields that `needs` names."""
        notes = dict[int, Completion]()
        for micro_batch in self.micro_batcher.each(rows, factor=2):
            self.interruption()
            batch = micro_batch or [filler()]
            reads_policy = needs.old_logp or needs.values or needs.squared_score
            old = self.policy.measure(batch) if reads_policy else None
            ref = self.reference.measure(batch) if needs.ref_logp else None
            values = self.critic.values(old, batch) if needs.values and old is not None else None
            scores = (
                None if old is None or not needs.squared_score else squared_scores(self.policy, old.hidden, old.rows)
            )
            logp = old.logp if old is not None and needs.old_logp else None
            ref_logp = None if ref is None else ref.logp
            fields = {"old_logp": logp, "ref_logp": ref_logp, "values": values, "squared_score": scores}
            on_host = {name: None if x is None else x.float().cpu() for name, x in fields.items()}  # [N, T]
            for r, row in enumerate(micro_batch):
                count = row.completion.num_tokens
                cut: dict[str, Any] = {n: None if x is None else x[r, :count].clone() for n, x in on_host.items()}
                notes[id(row)] = replace(row.completion, **cut)
        return [notes[id(row)] for row in rows]

    # -- the update -------------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[Group], algorithm: Algorithm, step: int) -> StepReport:
        """One optimizer step on these groups, of which every process holds all. Returns its report.

        Gradients are those of `algorithm.loss` over all completions of all processes, independent of the micro-batches.
        A step whose loss or gradient is not finite changes no weight and is named in the report's events.
        """
        self.token_entropies.begin(step)
        rows = self.rows(groups)
        mine = self.world.share(rows)
        totals = totals_of(rows, self.max_completion_length)
        examples = [] if self.supervised is None else self.supervised.rows(step)
        self.limits.left_out.begin(completions=rows, sft=examples)
        self.policy.model.train(not self.disable_dropout or self.policy.is_checkpointing)
        trained, evaluated, skipped = list[Row](), list[Row](), list[Row]()
        for row in mine:
            if self.policy.auxiliary_coefficient != 0 or can_have_gradient(row, algorithm):
                trained.append(row)
            else:
                (skipped if self._needs_no_forward(row, algorithm) else evaluated).append(row)
        algorithm = self.prepared(algorithm, (evaluated, trained), totals)
        parts = [{**algorithm.metrics(as_drawn(skipped), totals), "loss": Sum(0.0)}] if skipped else []
        with self._abortable(), ordered_sums.on(self.policy.device):
            with torch.no_grad():  # for their metrics; their gradient is zero
                totals = replace(
                    totals, expert_loads=loads_of_step(self.policy, self.micro_batcher, self.world, trained)
                )
                parts += self.micro_batcher.attempt(lambda: self._evaluate_all(evaluated, algorithm, totals))
            parts += self._gradients(trained, algorithm, totals, examples)
        metrics = self.world.merge(merge_metrics([*parts, self.limits.left_out.end()]))
        if rows and all(row.completion.version == step - 1 for row in rows):
            self.before_first_update(metrics, step - 1)
        metrics.pop(FIRST_UPDATE, None)
        metrics["num_tokens"] = Sum(float(sum(row.num_tokens for row in rows)))
        report = self._update(metrics, step)
        events = (*self.limits.take_events(), *report.events)
        return replace(report, events=events, tokens=self.token_entropies.gathered(self.world, groups))

    @contextmanager
    def _abortable(self) -> Iterator[None]:
        """Context of micro-batches, between which no weight changes, and that a stop signal may abort; if collective, together."""
        with self.policy.weights_of_a_step(), self.interruption.together(in_step=self.policy.is_collective):
            yield

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """Rows of the groups, with the hints of a teacher."""
        hints, places = None if self.teacher is None else self.teacher.hints, banned_ids(self.policy.model)
        return rows_of(groups, mask_truncated=self.mask_truncated, hints=hints, places=places)

    def _needs_no_forward(self, row: Row, algorithm: Algorithm) -> bool:
        """True if the metrics of a completion without gradient follow from its sampled log-probabilities, without a forward pass."""
        drawn = row.completion
        is_fresh = drawn.old_logp is None and drawn.logprobs is not None and not bool(drawn.logprobs.isnan().any())
        asks_more = algorithm.needs.whole_step or algorithm.needs.teacher_logp
        return is_fresh and not self.expects_stale and self.uses_sampler_logp and not asks_more

    @torch.no_grad()
    def loss(self, groups: Sequence[Group], algorithm: Algorithm) -> dict[str, Metric]:
        """Metrics of a step, loss included, without an update; for evaluation."""
        rows = self.rows(groups)
        totals = totals_of(rows, self.max_completion_length)
        self.policy.model.eval()
        self.limits.left_out.begin()
        mine = self.world.share(rows)
        algorithm = self.prepared(algorithm, (mine,), totals)
        parts = self.micro_batcher.attempt(lambda: self._evaluate_all(mine, algorithm, totals))
        metrics = self.world.merge(merge_metrics(parts))
        metrics.pop(FIRST_UPDATE, None)
        return metrics

    def prepared(self, algorithm: Algorithm, parts: Sequence[Sequence[Row]], totals: Totals) -> Algorithm:
        """The algorithm with its statistics of the whole step (quantiles, covariances) filled in.

        They are computed on the same micro-batches as the gradient, so that a threshold equals the value it was taken from, to the bit.
        """
        if not algorithm.needs.whole_step:
            return algorithm

        def look(rows: Sequence[Row]) -> list[TokenBatch]:
            pairs = [(b, self._tokens(b or [filler()], algorithm)[0].detached()) for b in self.micro_batcher.each(rows)]
            return [moved(tokens, "cpu") for batch, tokens in pairs if batch]

        with torch.no_grad():
            seen = self.micro_batcher.attempt(lambda: [batch for rows in parts for batch in look(rows)])
        everywhere = TokenBatch.concat([batch for part in self.world.gather(seen) for batch in part])
        return algorithm.prepare(moved(everywhere, self.policy.device), totals)

    def _evaluate_all(self, rows: Sequence[Row], algorithm: Algorithm, totals: Totals) -> list[dict[str, Metric]]:
        evaluate = lambda batch: self._loss(batch, algorithm, totals)[1] if batch else self._keep_pace(algorithm)
        return [self._read(sums, algorithm, totals) for sums in map(evaluate, self.micro_batcher.each(rows)) if sums]

    def _gradients(
        self, rows: Sequence[Row], algorithm: Algorithm, totals: Totals, examples: Sequence[Row]
    ) -> list[dict[str, Metric]]:
        """Gradients of the step and its supervised examples, summed over processes, and the metrics of this process's micro-batches.

        If memory runs out after the all-reduce has started, every process repeats the step and reduces afterwards.
        """
        for overlaps in (self.overlaps_reduction, False):
            gradients = GradientBuckets(self.world, [p for p in self.trainable() if not is_sharded(p)])

            def undo(gradients: GradientBuckets = gradients) -> None:
                gradients.drop()
                self.forget()

            def work(overlaps: bool = overlaps, gradients: GradientBuckets = gradients) -> list[dict[str, Metric]]:
                first: list[dict[str, Metric]] = []
                if self.supervised is not None:
                    batches = lambda rows: self.micro_batcher.each(self.world.share(rows))
                    first = self.supervised.accumulate(examples, batches, self.interruption, self.backward)
                return first + self._accumulate_all(rows, algorithm, totals, gradients if overlaps else None)

            parts = self.micro_batcher.attempt(work, undo)
            self.interruption.settle()
            if gradients.finish():
                return parts
            self.forget()
        raise AssertionError("an all-reduce that starts after the last micro-batch cannot fail")

    def _accumulate_all(
        self, rows: Sequence[Row], algorithm: Algorithm, totals: Totals, overlapping: GradientBuckets | None
    ) -> list[dict[str, Metric]]:
        if totals.expert_loads is None and self.world.size == 1:  # memory may have run out on one micro-batch
            totals = replace(totals, expert_loads=loads_of_step(self.policy, self.micro_batcher, self.world, rows))
        unread = []
        with self.world.passes():
            for batch in self.micro_batcher.each(rows):
                if overlapping is not None and self.micro_batcher.is_last:
                    self.interruption.settle()
                    overlapping.overlap_next_backward()
                if batch:
                    unread.append(self.accumulate(batch, algorithm, totals))
                else:
                    self._keep_pace(algorithm)
        return [self._read(sums, algorithm, totals) for sums in unread]  # at the end, so that the device never waits

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, and release what its forward switched."""
        if loss.requires_grad:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.policy.release()

    def forget(self) -> None:
        """Drop the gradients of an unfinished step."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, batch: Sequence[Row], algorithm: Algorithm, totals: Totals) -> Unread:
        """Forward and backward of a micro-batch."""
        loss, unread = self._loss(batch, algorithm, totals)
        self.backward(loss)
        return unread

    def _keep_pace(self, algorithm: Algorithm) -> None:
        """A pass with zero gradient, for a sharded model when other processes have more micro-batches: its collectives must match."""
        tokens, measured = self._tokens([filler()], algorithm)
        parts = [tokens.logp, tokens.values, None if measured.balance is None else measured.balance.probability]
        self.backward(0.0 * torch.stack([part.float().sum() for part in parts if part is not None]).sum())

    def _read(self, unread: Unread, algorithm: Algorithm, totals: Totals) -> dict[str, Metric]:
        return metrics_of(unread, algorithm, totals, self.token_entropies)

    def _loss(self, batch: Sequence[Row], algorithm: Algorithm, totals: Totals) -> tuple[Tensor, Unread]:
        """Loss of a micro-batch, and the tensors for its metrics, without synchronization of host and device."""
        tokens, measured = self._tokens(batch, algorithm)
        parts, loss = dict[str, Tensor](), algorithm.loss(tokens, totals)
        if algorithm.critic is not None:
            parts["value_loss"] = algorithm.critic.loss(tokens, totals)
            loss = loss + parts["value_loss"]
        if measured.balance is not None:
            share = len(batch) / totals.sequences if totals.expert_loads is None else 1.0
            parts["aux_loss"] = share * measured.balance.loss(totals.expert_loads)
            loss = loss + self.policy.auxiliary_coefficient * parts["aux_loss"]
        parts |= measured.routing
        parts["loss"] = loss
        return loss, Unread(batch, tokens.detached(), {name: part.detach() for name, part in parts.items()})

    def _tokens(self, batch: Sequence[Row], algorithm: Algorithm) -> tuple[TokenBatch, Measured]:
        """Padded tensors [N, T] of a micro-batch, as all parts of an algorithm see them."""
        against = (
            self.reference.against(algorithm.kl.estimator) if algorithm.kl and algorithm.needs.distribution else None
        )
        self.interruption()
        measured = self.policy.measure(batch, entropy=True, against=against, teacher=self.teacher)
        values = self.critic.values(measured, batch) if algorithm.critic is not None else None
        draws = Draws(self.uses_sampler_logp, self.samples_here, algorithm.needs.observed)
        return batch_of(batch, measured, values, draws), measured

    def _update(self, metrics: dict[str, Metric], step: int) -> StepReport:
        has_gradients = any(p.grad is not None for p in self.trainable())
        scaler = self.scaler if has_gradients else None  # torch's refuses a step without any, such as of tied rewards
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        trained = [self.policy.parameters(), self.critic.parameters()]
        # clipped separately, so that a critic's error never scales the policy's step
        norms = [total_norm([p.grad for p in part if p.grad is not None], self.world) for part in trained]
        norm = norms[0]
        if trained[1]:
            metrics["value_grad_norm"] = Last(norms[1])
        metrics |= {"grad_norm": Last(norm), "learning_rate": Last(float(self.scheduler.get_last_lr()[0]))}
        verdict = self.guard.check(metrics, step, loss_scale=None if self.scaler is None else self.scaler.get_scale())
        if verdict.is_left_out:
            self.optimizer.zero_grad(set_to_none=True)
            if scaler is not None:
                scaler.update()  # halves a loss scale that was too large
            if any(event.kind == "non_finite_step" for event in verdict.events):
                expect_sound_training(
                    self.policy.model, self.critic.parameters(), self.world, f"step {step}", whole=True
                )
            return StepReport(step=step, metrics=metrics, events=verdict.events)
        for part, size, bound in zip(trained, norms, (verdict.max_norm, math.inf), strict=True):
            clip(part, size, min(self.max_grad_norm or math.inf, bound))
        self.before_update()
        expect_rates(self.optimizer, step)
        check_room(self.optimizer)
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        self.after_update()
        expect_sound_training(self.policy.model, self.critic.parameters(), self.world, f"step {step}, after the update")
        if scaler is not None:
            scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(step=step, metrics=metrics, events=verdict.events)

    def follow(self, algorithm: Algorithm, report: StepReport) -> None:
        """Move the reference and a teacher that is the policy of earlier steps, as their rules say after the step of `report`."""
        self.reference.mix(self.policy, alpha=algorithm.reference(report))
        if self.teacher is not None:
            self.teacher.follow(self.policy, report)

    def trainable(self) -> list[torch.nn.Parameter]:
        """The policy's trainable parameters and the critic's."""
        return self.policy.parameters() + self.critic.parameters()
