"""One optimiser update: the losses and gradients of a minibatch's microbatches, then the step of the optimiser."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from baton.errors import Suspect, TrainingDiverged
from baton.policy.logprobs import TokenScores
from baton.trainer.alarms import RowMismatch, excessive_mismatch
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.corrections import CORRECTIONS, BehaviorDistance, CorrectionShape, correction_shape, row_distances
from baton.trainer.critic import Critic, value_loss, value_sums
from baton.trainer.forward import Passes
from baton.trainer.losses import OBJECTIVES, LossInputs, LossShape, aggregate, divisor, k3, kl, log_ratio
from baton.trainer.microbatches import MicroBatch, MiniBatch, PreparedMicroBatch, sums_elsewhere
from baton.trainer.optimizer import clip_gradients, make_optimizer, optimizer_tensors
from baton.trainer.samples import TrainingSample
from baton.trainer.settings import TrainerSettings
from baton.trainer.step_metrics import TokenSums, Totals

CRITIC_LR_RATIO = 10.0
"""Default learning rate of a separate critic, as a multiple of the policy's."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A set of parameters and their optimiser: the parameters of the policy, or of a separate critic."""

    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    lr: float
    """Peak learning rate."""

    def moments(self, omitted: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the optimiser's state by name (`optimizer_tensors`), without the state of the `omitted` parameters."""
        return optimizer_tensors(self.optimizer, {n: p for n, p in self.parameters.items() if n not in omitted})


def make_learners(
    model: PreTrainedModel, critic: Critic | None, settings: TrainerSettings, algorithm: AlgorithmSettings
) -> list[Learner]:
    """Return the learner of the policy and, if there is a separate critic, the learner of the critic. If the critic
    shares the policy's layers, the policy's learner trains the critic's head."""
    policy = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [(policy, settings.lr)]
    if critic is not None:
        named = {f"critic.{name}": p for name, p in critic.named_parameters()}
        if critic.trunk is None:
            policy |= named
        else:
            groups.append((named, algorithm.critic_lr or CRITIC_LR_RATIO * settings.lr))
    return [
        Learner(
            parameters,
            make_optimizer(
                parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, name=settings.optimizer
            ),
            lr,
        )
        for parameters, lr in groups
    ]


@dataclass(slots=True)
class Update:
    """Performs the updates of one train step."""

    passes: Passes
    learners: Sequence[Learner]
    totals: Totals
    step: int
    longest: int
    """Maximum length of an episode in policy tokens."""
    has_agreed: bool = False  # whether engine and trainer have agreed in an earlier step of this process
    compared: list[tuple[MicroBatch, list[list[float]]]] = field(default_factory=list)
    """Microbatches whose logprobs were compared with the engine's before the weights changed, each with its
    `row_distances`."""
    trouble: str | None = None
    """Description of the first number that is not finite, or of an excessive mismatch; None if there is none. The error
    is raised only after all passes: a rank that stopped earlier would block the other ranks in a collective."""

    def compare(self, prepared: Sequence[Sequence[PreparedMicroBatch]]) -> None:
        """Compare engine and trainer over all minibatches of a step with several updates. Raises TrainingDiverged,
        before the first update, if the mismatch exceeds its error limit."""
        for each in (one for part in prepared for one in part):
            if (proximal := each.fixed.proximal_logprobs) is not None:
                is_current = each.micro.policy_versions == self.step - 1
                rows = row_distances(each.micro.loss_inputs(proximal), is_current, has_start=True)
                self.compared.append((each.micro, rows.tolist()))
        self._raise_if_diverged()

    def run(self, part: MiniBatch, prepared: Sequence[PreparedMicroBatch]) -> None:
        """Perform one update. Raises TrainingDiverged, before the weights change, if loss or gradient of any rank is
        not finite, or if the mismatch of engine and trainer exceeds its error limit."""
        algorithm, critic, parallel = self.passes.algorithm, self.passes.critic, self.passes.parallel
        at_start = (each.micro.loss_inputs(p) for each in prepared if (p := each.fixed.proximal_logprobs) is not None)
        divided_by = divisor(part.num_episodes, part.num_trained_tokens, algorithm.aggregation, self.longest)
        shape = LossShape(algorithm.clip_low, algorithm.clip_high, algorithm.aggregation, divided_by)
        correction = correction_shape(algorithm, at_start, parallel.all_of)
        elsewhere = self._elsewhere(part, prepared, shape, correction)
        for learner in self.learners:
            learner.optimizer.zero_grad(set_to_none=True)
        policy_sum = value_sum = 0.0
        num_backward = sum(each.micro.has_gradient for each in prepared)  # microbatches with gradient come first

        def forward(place: int, arrived: torch.Tensor | None) -> torch.Tensor:
            nonlocal policy_sum, value_sum
            each = prepared[place]
            with torch.set_grad_enabled(each.micro.has_gradient), self.passes.replayed(each.fixed.routing):
                scores = self.passes.output(each.micro.inputs, arrived, is_update=True)
                if not isinstance(scores, TokenScores):
                    return scores
                loss, value = self._policy_loss(each, scores, shape, correction, elsewhere[place])
                policy_sum += value
                if critic is not None:
                    of_values = self._value_loss(each, scores) / max(1, part.num_trained_tokens)
                    value_sum += self._checked(of_values.item(), "the value loss", each.micro.rows)
                    loss = loss + of_values * (algorithm.value_coef if critic.trunk is None else 1.0)
            return loss

        def backward(place: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            parallel.before_backward(is_last=place == num_backward - 1)
            with self.passes.replayed(prepared[place].fixed.routing):
                output.backward(gradient)  # type: ignore[no-untyped-call]

        shapes = [self.passes.hidden_shape(each.micro.inputs) for each in prepared]
        parallel.pipeline.run(shapes, num_backward, forward, backward)
        parallel.after_backward()
        self._step_optimizers(part, has_gradient=num_backward > 0)
        self.totals.losses.append(policy_sum)
        if critic is not None:
            self.totals.value_losses.append(value_sum)

    @torch.no_grad()
    def _elsewhere(
        self, part: MiniBatch, prepared: Sequence[PreparedMicroBatch], shape: LossShape, correction: CorrectionShape
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return `LossInputs.elsewhere` of each microbatch: sums over the other paths of each row's episode. If the
        algorithm compares whole episodes and an episode has several paths, forward passes compute the sums. Otherwise
        the mappings are empty."""
        algorithm = self.passes.algorithm
        found: Sequence[Mapping[str, torch.Tensor]] = [{} for _ in prepared]
        if not prepared or not algorithm.compares_episodes or not any(row.path for row in part.rows):
            return found
        inputs = []
        for one in prepared:
            with self.passes.replayed(one.fixed.routing):
                scores = self.passes.scores(one.micro.inputs, is_update=True)
            if scores is not None:
                inputs.append(one.micro.loss_inputs(scores.logprobs, one.fixed.proximal_logprobs))
        if not self.passes.parallel.pipeline.is_last:
            return found
        for _ in range(2):  # 1: the correction's sums; 2: GSPO's sums, without the tokens that the correction drops
            own = []
            for each, others in zip(inputs, found, strict=True):
                row_sums = replace(each, elsewhere=others, own_sums={})
                anchor = CORRECTIONS[algorithm.correction](row_sums, correction)
                OBJECTIVES[algorithm.objective](row_sums, anchor, shape)
                own.append(row_sums.own_sums)
            found = sums_elsewhere(part.rows, [one.micro for one in prepared], own, self.passes.parallel)
        return found

    def _policy_loss(
        self,
        each: PreparedMicroBatch,
        scores: TokenScores,
        shape: LossShape,
        correction: CorrectionShape,
        elsewhere: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, float]:
        """Return a microbatch's share of the loss, including KL term and entropy bonus, as a tensor and as a number."""
        algorithm, micro = self.passes.algorithm, each.micro
        assert scores.entropy is not None
        inputs = micro.loss_inputs(scores.logprobs, each.fixed.proximal_logprobs, elsewhere)
        anchor = CORRECTIONS[algorithm.correction](inputs, correction)
        # Without proximal logprobs, only the first update compares engine and trainer at equal weights.
        has_start = each.fixed.proximal_logprobs is not None or not self.totals.grad_norms
        is_current = (micro.policy_versions == self.step - 1) & has_start
        found = OBJECTIVES[algorithm.objective](inputs, anchor, shape)
        loss, reference_kl = found.loss, None
        if each.fixed.reference_logprobs is not None:
            reference_kl = kl(scores.logprobs, each.fixed.reference_logprobs, micro.mask, algorithm.kl_estimator)
            if algorithm.has_loss_kl:
                nats = aggregate(reference_kl.nats, inputs, shape.aggregation)
                loss = loss + algorithm.kl_coef * nats / shape.divisor
        if algorithm.entropy_coef:
            bonus = aggregate(scores.entropy, inputs, shape.aggregation) / shape.divisor
            loss = loss - algorithm.entropy_coef * bonus
        with torch.no_grad():
            none = torch.zeros_like(loss)
            sums = TokenSums(
                loss=loss,
                tokens=micro.mask.sum(),
                entropy=torch.where(micro.mask, scores.entropy, 0.0).sum(),
                clipped=found.is_clipped.sum(),
                # For KL(anchor ‖ current), `k3` needs x = log π_anchor − log π_θ, which is −`log_ratio`.
                moved=k3(-log_ratio(inputs.logprobs, anchor.logprobs, micro.mask)).sum(),
                weight=anchor.weights.sum(),
                cut=anchor.is_cut.sum(),
                reference_kl=none if reference_kl is None else reference_kl.nats.sum(),
                clamped_kl=none if reference_kl is None else reference_kl.is_clamped.sum(),
            )
        num_tokens = micro.num_tokens - micro.inputs.num_repeated
        # An idle microbatch (filler for a rank with fewer rows) counts too, because a forward pass computes its tokens.
        packed = micro.inputs.packed
        num_places = (micro.inputs if packed is None else packed).input_ids.numel()
        rows = row_distances(inputs, is_current, has_start=has_start)
        value, of_rows = self.totals.add(sums, rows, num_tokens=num_tokens, num_places=num_places)
        is_compared = algorithm.num_updates > 1 and each.fixed.proximal_logprobs is not None  # by `compare`
        if not self.totals.grad_norms and not is_compared:
            self.compared.append((micro, of_rows))
        return loss, self._checked(value, "the loss", micro.rows, inputs)

    def _value_loss(self, each: PreparedMicroBatch, scores: TokenScores) -> torch.Tensor:
        old, returns, mask = each.fixed.values, each.returns, each.micro.mask
        assert old is not None
        assert returns is not None
        values = self.passes.values(each.micro.inputs, scores)
        loss, is_clipped = value_loss(values, old, returns, mask, self.passes.algorithm.value_clip)
        self.totals.add_values(value_sums(is_clipped, old, returns, mask))
        return loss

    def _step_optimizers(self, part: MiniBatch, *, has_gradient: bool) -> None:
        """Clip the gradients and step the optimisers, unless the update has diverged."""
        norms, parallel = [], self.passes.parallel
        for learner in self.learners:
            if not has_gradient:
                for parameter in learner.parameters.values():
                    parameter.grad = torch.zeros_like(parameter)  # the optimiser still steps, so its moments decay
            limit = self.passes.settings.max_grad_norm
            norms.append(clip_gradients(learner.parameters, limit, parallel.total_norm, parallel.repeated))
            if parallel.pipeline.is_last:  # other stages have the same norm, but no loss
                self._checked(norms[-1], "the gradient's norm", part.rows)
        self._raise_if_diverged()
        self.totals.grad_norms.append(norms[0])
        if len(norms) > 1:
            self.totals.value_grad_norms.append(norms[1])
        for learner in self.learners:
            learner.optimizer.step()

    def _raise_if_diverged(self) -> None:
        text = excessive_mismatch(self._mismatches(), self.passes.settings, has_agreed=self.has_agreed)
        if self.trouble is None and text is not None:
            self.trouble = f"train step {self.step}: {text}"
        if trouble := self.passes.parallel.agreed(self.trouble):
            raise TrainingDiverged(trouble)

    def _mismatches(self) -> list[RowMismatch]:
        """Return the mismatches of the compared rows of all ranks, because the limits are for the whole batch."""
        numbers: list[float] = []
        for micro, distances in self.compared:
            for row, (*of_row, place) in zip(micro.rows, distances, strict=False):
                found = BehaviorDistance(*of_row)
                if found.current:
                    name, token = map(int, row.name.split("/")), int(place) + micro.inputs.first - row.prompt_length
                    numbers += [*name, row.path, token, found.current, found.mismatch, found.max_diff]
        self.compared.clear()
        rows = torch.cat(self.passes.parallel.all_of(torch.tensor(numbers, dtype=torch.float64))).view(-1, 7).tolist()
        return [
            (Suspect(f"{int(group)}/{int(sample)}", int(path), int(token)), current, mismatch, max_diff)
            for group, sample, path, token, current, mismatch, max_diff in rows
        ]

    def _checked(
        self, value: float, what: str, rows: Sequence[TrainingSample], inputs: LossInputs | None = None
    ) -> float:
        """Return `value`. If `value` is not finite and `trouble` is None, describe `value` in `trouble`."""
        if math.isfinite(value) or self.trouble is not None:
            return value
        groups = ", ".join(map(str, sorted({row.group_id for row in rows})))
        culprits = ""
        if inputs is not None:
            is_odd = (inputs.mask & ~torch.isfinite(inputs.logprobs)).any(-1).tolist()
            names = [row.name for row, odd in zip(rows, is_odd, strict=False) if odd]
            culprits = (
                f"; the policy's log-probabilities of trajectory {', '.join(names)} are not finite" if names else ""
            )
        self.trouble = f"train step {self.step}: {what} is {value} over groups {groups}{culprits}"
        return value
