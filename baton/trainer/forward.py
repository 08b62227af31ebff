"""The forward passes of a train step, and the values that they fix before its first update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from baton.policy.adapters import without_adapters
from baton.policy.load import torch_dtype
from baton.policy.logprobs import TokenScores, compute_in, packed_scores, padded_scores
from baton.policy.routing import Routing, RoutingReplay
from baton.trainer.advantages import FloatArray, normalized
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.critic import Critic
from baton.trainer.losses import kl
from baton.trainer.microbatches import MicroBatch, MiniBatch
from baton.trainer.parallel.group import SingleRank
from baton.trainer.samples import TrainingSample, estimate
from baton.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class PreparedMicroBatch:
    """A microbatch and the values that stay fixed during the step's updates. Shapes: [B, K]."""

    micro: MicroBatch
    """The microbatch, including its advantages."""
    proximal_logprobs: torch.Tensor | None = None
    """None if the step has one update, whose logprobs then serve as proximal logprobs."""
    reference_logprobs: torch.Tensor | None = None
    """None without a reference model."""
    values: torch.Tensor | None = None
    """The critic's values at the start of the step; None without a critic."""
    routing: Routing | None = None
    """Experts to replay, which the proximal policy or the engine chose."""
    returns: torch.Tensor | None = None
    """Targets of the critic: advantages before normalisation + values; None without a critic."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The models of a train step and their forward passes."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    """The frozen reference model, or the policy, whose adapters are then disabled for reference passes."""
    critic: Critic | None
    settings: TrainerSettings
    algorithm: AlgorithmSettings
    temperature: float
    replay: RoutingReplay | None
    """Routing replay of the policy's experts; None if disabled."""
    is_packed: bool
    """True if rows are concatenated instead of padded."""
    parallel: SingleRank = field(default_factory=SingleRank)
    """The group of ranks."""

    @property
    def is_shared(self) -> bool:
        """Return whether the critic is a head on the policy."""
        return self.critic is not None and self.critic.trunk is None

    def scores(self, micro: MicroBatch, model: PreTrainedModel | None = None, *, is_update: bool) -> TokenScores:
        """Score a microbatch's tokens: [B, K]. An update includes entropies, a shared critic hidden states."""
        model = self.model if model is None else model
        has_bonus = is_update and self.algorithm.entropy_coef > 0
        wants = {"temperature": self.temperature, "with_entropy": is_update, "entropy_has_gradient": has_bonus}
        if not self.is_packed:
            wants["with_hidden"] = self.is_shared and model is self.model

        def score(whole: PreTrainedModel) -> TokenScores:
            if self.is_packed:
                return packed_scores(whole, *micro.packed(), **wants)  # type: ignore[arg-type]
            return padded_scores(whole, micro.input_ids, first=micro.first, **wants)  # type: ignore[arg-type]

        with compute_in(torch_dtype(self.settings.dtype), self.model.device):
            scores = self.parallel.run(model, score)
            return _unpacked(micro, scores) if self.is_packed else scores

    def values(self, micro: MicroBatch, scores: TokenScores) -> torch.Tensor:
        """Return the critic's values [B, K]. A shared critic reads the hidden states of `scores`."""
        assert self.critic is not None

        def read(critic: Critic) -> torch.Tensor:
            if critic.trunk is None:
                assert scores.hidden is not None
                found: torch.Tensor = critic(scores.hidden)
                return found
            return critic.of_packed(*micro.packed()) if self.is_packed else critic.of_ids(micro.input_ids, micro.first)

        with compute_in(torch_dtype(self.settings.dtype), self.model.device):
            values = self.parallel.run(self.critic, read)
            return _laid(micro, values) if self.is_packed else values

    @torch.no_grad()
    def prepare(self, parts: Sequence[MiniBatch]) -> list[list[PreparedMicroBatch]]:
        """Run the passes before the first update, and estimate the advantages that depend on them."""
        found = [[self._prepared(micro) for micro in part.microbatches] for part in parts]
        if not self.algorithm.needs_model_for_advantages:
            return found
        everything = [prepared for part in found for prepared in part]
        filled = iter(self._with_advantages(everything, [row for part in parts for row in part.rows]))
        return [[next(filled) for _ in part] for part in found]

    def _prepared(self, micro: MicroBatch) -> PreparedMicroBatch:
        algorithm = self.algorithm
        reference = None
        if self.reference is not None:
            with without_adapters(self.reference):
                reference = self.scores(micro, self.reference, is_update=False).logprobs
        given = self._given_routing(micro)
        wants_proximal = (
            algorithm.num_updates > 1 or algorithm.correction == "second_moment" or algorithm.needs_model_for_advantages
        )
        if not wants_proximal:
            return PreparedMicroBatch(micro, reference_logprobs=reference, routing=given)
        with self._replay(given), self._recorded() as chosen:
            scores = self.scores(micro, is_update=False)
        return PreparedMicroBatch(
            micro,
            proximal_logprobs=scores.logprobs,
            reference_logprobs=reference,
            values=None if self.critic is None else self.values(micro, scores),
            routing=given or chosen or None,
        )

    def replayed(self, prepared: PreparedMicroBatch) -> AbstractContextManager[None]:
        """Return a context for an update's forward and backward pass in which routing is replayed."""
        return self._replay(prepared.routing)

    def _replay(self, routing: Routing | None) -> AbstractContextManager[None]:
        return nullcontext() if self.replay is None else self.replay.replayed(routing)

    def _recorded(self) -> AbstractContextManager[Routing]:
        return nullcontext({}) if self.replay is None else self.replay.recorded()

    def _given_routing(self, micro: MicroBatch) -> Routing | None:
        """Return the engine's experts if `moe_replay` is "engine", else None."""
        if self.replay is None or self.settings.moe_replay != "engine":
            return None
        return self.replay.from_engine(*micro.routing(is_packed=self.is_packed))

    def _with_advantages(
        self, everything: Sequence[PreparedMicroBatch], rows: Sequence[TrainingSample]
    ) -> list[PreparedMicroBatch]:
        """Estimate advantages over the rows of all ranks from the models' outputs."""
        algorithm = self.algorithm
        raw = estimate(
            rows,
            algorithm,
            token_rewards=self._of_all(everything, rows, self._penalties) if algorithm.has_reward_kl else None,
            values=self._of_all(everything, rows, _values) if self.critic is not None else None,
        )
        names = [row.name for row in rows]
        unchanged = dict(zip(names, raw, strict=True))
        final = dict(zip(names, normalized(raw), strict=True)) if algorithm.normalize_advantages else unchanged
        filled = []
        for prepared in everything:
            micro = prepared.micro
            if micro.is_idle:
                filled.append(replace(prepared, returns=prepared.values))
                continue
            advantages = micro.spread([final[row.name] for row in micro.rows])
            expected = micro.spread([unchanged[row.name] for row in micro.rows])
            returns = None if prepared.values is None else expected + prepared.values
            filled.append(replace(prepared, micro=replace(micro, advantages=advantages), returns=returns))
        return filled

    def _of_all(
        self,
        everything: Sequence[PreparedMicroBatch],
        rows: Sequence[TrainingSample],
        read: Callable[[PreparedMicroBatch], list[FloatArray]],
    ) -> list[FloatArray]:
        """Return [P] for each of `rows`. Each rank reads its rows, and a sum over ranks combines the values."""
        own = {
            row.name: found
            for prepared in everything
            if not prepared.micro.is_idle
            for row, found in zip(prepared.micro.rows, read(prepared), strict=True)
        }
        flat = np.concatenate([np.zeros(0), *(own.get(row.name, np.zeros(row.num_policy)) for row in rows)])
        ends = np.cumsum([row.num_policy for row in rows])
        return [np.asarray(part) for part in np.split(self.parallel.sums(flat), ends[:-1])] if rows else []

    def _penalties(self, prepared: PreparedMicroBatch) -> list[FloatArray]:
        """Return −kl_coef × KL(proximal ‖ reference) at each policy token: [P] for each row."""
        micro, algorithm = prepared.micro, self.algorithm
        assert prepared.proximal_logprobs is not None
        assert prepared.reference_logprobs is not None
        apart = kl(prepared.proximal_logprobs, prepared.reference_logprobs, micro.policy_mask, algorithm.kl_estimator)
        return micro.gather(-algorithm.kl_coef * apart.nats)


def _values(prepared: PreparedMicroBatch) -> list[FloatArray]:
    """Return the critic's values: [P] for each row."""
    assert prepared.values is not None
    return prepared.micro.gather(prepared.values)


def _unpacked(micro: MicroBatch, scores: TokenScores) -> TokenScores:
    """Scatter scores at the policy's tokens to [B, K]. The hidden states stay [N, H]."""
    entropy = None if scores.entropy is None else _laid(micro, scores.entropy)
    return TokenScores(_laid(micro, scores.logprobs), entropy, scores.hidden)


def _laid(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Scatter [N] values at the policy's tokens to [B, K], 0 at other tokens."""
    return torch.zeros(micro.policy_mask.shape, device=values.device).masked_scatter(micro.policy_mask, values)
