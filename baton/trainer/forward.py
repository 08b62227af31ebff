"""The forward passes of a train step.

Dimensions in the shape comments:

    B   rows of a microbatch
    S   positions of a padded row (prompt and response)
    K   S − `first`: positions of a row after the shortest prompt
    T   tokens of all rows, without padding
    N   tokens of all rows that the policy wrote
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from baton.errors import EngineFault
from baton.policy.adapters import without_adapters
from baton.policy.head import RequestedScores
from baton.policy.load import torch_dtype
from baton.policy.logprobs import TokenScores, compute_in, hidden_states, packed_scores, padded_scores
from baton.policy.memory import sent
from baton.policy.packing import PackedTokens, packed_hidden_states
from baton.policy.routing import Routing, RoutingReplay
from baton.policy.sampling_masks import decoded
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.critic import Critic
from baton.trainer.parallel.group import SingleRank
from baton.trainer.samples import TrainingSample
from baton.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The tokens of a microbatch, as a forward pass needs them. Rows are padded on the right."""

    rows: tuple[TrainingSample, ...]
    """The rows with tokens. There may be fewer than B, because B includes the empty rows that `pad` adds."""
    input_ids: torch.Tensor
    """[B, S] int64"""
    first: int
    """First position whose logprob is computed: the length of the shortest prompt. K = S − `first`."""
    policy_mask: torch.Tensor
    """[B, K] bool: True at every token that the policy wrote, including tokens that are not trained on."""
    policy_places: torch.Tensor
    """[N] indices of the policy's tokens in a flattened [B, K] tensor."""
    shares: tuple[int, ...] = ()
    """Number of rows that share each prompt. These rows are consecutive, and the pass computes their prompt once. Empty
    if each row computes its own prompt."""
    packed: PackedTokens | None = None
    """The rows without padding, with the policy's tokens to score; None in a padded pass."""

    @property
    def num_repeated(self) -> int:
        """Number of prompt tokens that the pass skips, because an earlier row has the same prompt."""
        firsts = accumulate(self.shares, initial=0)
        return sum(self.rows[i].prompt_length * (size - 1) for i, size in zip(firsts, self.shares, strict=False))

    def reported_experts(self) -> tuple[list[bytes], list[int], int]:
        """Return (experts, positions, number of positions of the pass). experts: the experts that the engine reported
        for each response token. positions: the flattened position at which the forward pass must select these experts.
        It is the position of the preceding token, whose hidden state gives the token's logits. A padded pass does not
        compute the last column of `input_ids`."""
        found: list[bytes] = []
        places: list[int] = []
        start, packed = 0, self.packed
        for row in self.rows:
            found += row.routing
            first = start + row.prompt_length - 1
            places += range(first, first + len(row.routing))
            start += self.input_ids.shape[1] - 1 if packed is None else len(row.token_ids)
        return found, places, (self.input_ids[:, 1:] if packed is None else packed.input_ids).numel()

    def sampling_masks(self, vocabulary: int) -> torch.Tensor | None:
        """Return the sampling masks of the tokens to score, or None if the engine reported none.

        A mask lists the token ids that sampling kept, padded with −1. The shape is int32 [B, K, ids], or [N, ids] in a
        packed pass. In a padded pass, the masks of tokens that the policy did not write contain only −1.

        Raises EngineFault if some tokens of the policy have a mask and others have none.
        """
        kept = [mask for row in self.rows for mask in row.kept]
        if not kept:
            return None
        shape, size = self.policy_mask.shape, len(self.policy_places)
        if len(kept) != size or not all(kept):
            raise EngineFault(f"the engine reported sampling masks for {sum(map(bool, kept))} of {size} tokens")
        ids = sent(decoded(kept, vocabulary), self.policy_mask.device)
        if self.packed is not None:
            return ids
        return ids.new_full((shape.numel(), ids.shape[1]), -1).index_copy_(0, self.policy_places, ids).view(*shape, -1)


@dataclass(frozen=True, slots=True)
class FixedValues:
    """The values of a microbatch that stay fixed during the updates of a train step. Shapes: [B, K]. On pipeline stages
    before the last one, all logprobs and values are None."""

    proximal_logprobs: torch.Tensor | None
    """None if no proximal logprobs are needed before the first update. A train step with one update then uses the
    logprobs that this update computes; with the correction `bypass`, the loss uses the behavior logprobs instead."""
    reference_logprobs: torch.Tensor | None
    """None without a reference model."""
    values: torch.Tensor | None
    """The critic's values at the start of the step; None without a critic."""
    routing: Routing | None
    """Experts to replay, chosen by the proximal policy or by the engine; None without replay."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The models of a train step and their forward passes."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    """The frozen reference model; None without a KL term. If the policy has adapters and the recipe names no other
    reference, this is the policy itself, whose adapters are disabled in reference passes."""
    critic: Critic | None
    settings: TrainerSettings
    algorithm: AlgorithmSettings
    temperature: float
    replay: RoutingReplay | None
    """Routing replay of the policy's experts; None if disabled."""
    is_packed: bool
    """True if rows are concatenated instead of padded. Rows that share a prompt are always concatenated."""
    can_share: bool = False
    """True if rows may share their prompt (`trainer.share_prompts`)."""
    parallel: SingleRank = field(default_factory=SingleRank)

    def hidden_shape(self, inputs: ModelInputs) -> tuple[int, ...]:
        """Return the shape of the hidden states between two stages: [T, H], or [B, S − 1, H] in a padded pass; empty
        with a single stage."""
        if self.parallel.pipeline.num_stages == 1:
            return ()
        width: int = self.model.config.get_text_config().hidden_size
        if inputs.packed is not None:
            return len(inputs.packed.input_ids), width
        return len(inputs.input_ids), inputs.input_ids.shape[1] - 1, width

    def scores(
        self, inputs: ModelInputs, model: PreTrainedModel | None = None, *, is_update: bool
    ) -> TokenScores | None:
        """Score a microbatch's tokens through all pipeline stages. Return the scores on the last stage, else None."""
        pipeline = self.parallel.pipeline
        output = self.output(inputs, pipeline.receive(self.hidden_shape(inputs)), model, is_update=is_update)
        if isinstance(output, TokenScores):
            return output
        pipeline.send(output)
        return None

    def output(
        self,
        inputs: ModelInputs,
        arrived: torch.Tensor | None,
        model: PreTrainedModel | None = None,
        *,
        is_update: bool,
    ) -> TokenScores | torch.Tensor:
        """Run this stage's forward pass. The last stage returns the scores [B, K] of a microbatch's tokens; the other
        stages return hidden states. With `is_update`, the returned `TokenScores` also has entropies. A shared critic
        reads `TokenScores.hidden` of the policy. `arrived`: output of the previous stage; None on the first stage."""
        model = self.model if model is None else model
        packed = inputs.packed
        wanted = RequestedScores(self.temperature, is_update, is_update and self.algorithm.entropy_coef > 0)

        def compute(whole: PreTrainedModel) -> TokenScores | torch.Tensor:
            if not self.parallel.pipeline.is_last:
                if packed is not None:
                    return packed_hidden_states(whole, packed)
                return hidden_states(whole, inputs.input_ids[:, :-1])
            kept = inputs.sampling_masks(self.model.config.get_text_config().vocab_size)
            if packed is not None:
                return packed_scores(whole, packed, wanted, kept)
            return padded_scores(whole, inputs.input_ids, first=inputs.first, wanted=wanted, kept=kept)

        with compute_in(torch_dtype(self.settings.dtype, self.model.device), self.model.device):
            found = self.parallel.run(model, compute, arrived)
            return _unpacked(inputs, found) if packed is not None and isinstance(found, TokenScores) else found

    def values(self, inputs: ModelInputs, scores: TokenScores) -> torch.Tensor:
        """Return the critic's values [B, K], the value before each token. A shared critic reads the hidden states of
        `scores`; a separate critic computes its own."""
        assert self.critic is not None
        packed = inputs.packed

        def read(critic: Critic) -> torch.Tensor:
            if critic.trunk is None:
                assert scores.hidden is not None
                hidden = scores.hidden
            elif packed is not None:
                hidden = packed_hidden_states(critic.trunk, packed)[packed.before]
            else:
                hidden = hidden_states(critic.trunk, inputs.input_ids[:, :-1])[:, inputs.first - 1 :]
            found: torch.Tensor = critic(hidden)
            return found

        with compute_in(torch_dtype(self.settings.dtype, self.model.device), self.model.device):
            values = self.parallel.run(self.critic, read)
            return values if packed is None else _laid(inputs, values)

    @torch.no_grad()
    def fixed_values(self, inputs: ModelInputs) -> FixedValues:
        """Run the forward passes of a microbatch that precede the first update of the train step."""
        algorithm = self.algorithm
        reference = None
        if self.reference is not None:
            with without_adapters(self.reference):
                scores = self.scores(inputs, self.reference, is_update=False)
                reference = None if scores is None else scores.logprobs
        given = None
        if self.replay is not None and self.settings.moe_replay == "engine":
            given = self.replay.from_engine(*inputs.reported_experts(), self.model.device)
        # With `bypass` the anchor is the behavior policy.
        is_anchor = algorithm.correction != "bypass" or self.settings.moe_replay == "proximal"
        wants_proximal = (
            (algorithm.num_updates > 1 and is_anchor)
            or algorithm.correction == "second_moment"
            or algorithm.needs_model_for_advantages
        )
        if not wants_proximal:
            return FixedValues(None, reference, None, given)
        with self.replayed(given), self._recorded() as chosen:
            scores = self.scores(inputs, is_update=False)
        values = None if self.critic is None or scores is None else self.values(inputs, scores)
        return FixedValues(None if scores is None else scores.logprobs, reference, values, given or chosen or None)

    def replayed(self, routing: Routing | None) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes in which `routing` is replayed."""
        return nullcontext() if self.replay is None else self.replay.replayed(routing)

    def _recorded(self) -> AbstractContextManager[Routing]:
        return nullcontext({}) if self.replay is None else self.replay.recorded()


def _unpacked(inputs: ModelInputs, scores: TokenScores) -> TokenScores:
    """Scatter the scores of the policy's tokens from [N] to [B, K]. Hidden states keep the shape [N, H]."""
    entropy = None if scores.entropy is None else _laid(inputs, scores.entropy)
    return TokenScores(_laid(inputs, scores.logprobs), entropy, scores.hidden)


def _laid(inputs: ModelInputs, values: torch.Tensor) -> torch.Tensor:
    """Scatter the values of the policy's tokens from [N] to [B, K]; other tokens get 0."""
    shape = inputs.policy_mask.shape
    return torch.zeros(shape.numel(), device=values.device).scatter(0, inputs.policy_places, values).view(shape)
