"""Converts a batch to training samples, and computes metrics that need no model. Only this module of the trainer reads
`Group`.

A sample is one path of an episode; a single-turn episode has one path. Numbers of a whole episode, such as the reward,
are computed here, because the paths of an episode may be in different microbatches and on different ranks. Shapes: a
path has L tokens after its prompt; the policy wrote P of them.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from baton.errors import EngineFault, UserError
from baton.trainer.advantages import ESTIMATORS, FloatArray, Outcome, Turns, normalized, overlong_penalty
from baton.trainer.algorithm import AlgorithmSettings
from baton.types import Batch, FinishReason, Group, ScoredTrajectory, TokenColumn, Trajectory, id_column


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One path of an episode that contributes to the loss."""

    group_id: int
    name: str
    """Name `group/sample` of the episode."""
    token_ids: Sequence[int]
    """[prompt + L] Ids of the prompt's tokens and of the tokens after it."""
    prompt_length: int
    is_policy: Sequence[int]
    """[L] 1 if the policy wrote the token, otherwise 0."""
    is_trained: Sequence[int]
    """[L] 1 if the token gets a gradient: the policy wrote the token, the version that sampled it is not too old, and
    `is_filtered` is False. Otherwise 0."""
    behavior_logprobs: Sequence[float]
    """[L] Behavior logprob of each token."""
    policy_versions: Sequence[int]
    """[L] Number of the version that sampled each token."""
    reward: float
    """Reward of the whole episode. With `turns`, `reward` does not include the rewards of the turns."""
    path: int = 0
    """Index of the path in its episode."""
    episode_tokens: int = 0
    """Number of tokens that get a gradient, over all paths of the episode."""
    turns: Turns | None = None
    """Turns of the whole episode with their rewards; None without `algorithm.turn_rewards`."""
    is_filtered: bool = False
    """True if `overlong_filter` excludes the episode, so that no token gets a gradient."""
    routing: tuple[bytes, ...] = ()
    """[L] experts that the engine reported for each token: empty bytes for a token without a report, an empty tuple for
    a path without reports."""
    kept: tuple[bytes, ...] = ()
    """[P] sampling mask of each token of the policy: the token ids that sampling kept. Empty if none were reported."""
    advantages: FloatArray | None = None
    """[P] Advantage of each token of the policy; None until they are computed."""

    @property
    def key(self) -> tuple[str, int]:
        """Key that identifies the path within the batch: episode name and path index."""
        return self.name, self.path

    @property
    def num_policy(self) -> int:
        """Number of tokens that the policy wrote, P."""
        return sum(self.is_policy)

    @property
    def num_trained(self) -> int:
        return sum(self.is_trained)

    @property
    def has_advantage(self) -> bool:
        """Return whether any advantage is nonzero; True if advantages are not computed yet."""
        return self.advantages is None or bool(self.advantages.any())


def minibatches(
    batch: Batch, algorithm: AlgorithmSettings, *, oldest: int = 0, longest: int = 0
) -> list[list[TrainingSample]]:
    """Return the training samples of each minibatch, with advantages if these need no forward pass. Raises UserError
    for a group with too few members or for fewer groups than minibatches."""
    for group in batch.groups:
        if len(group.members) < algorithm.fewest_judged:
            raise UserError(
                f"group {group.group_id} has {len(group.members)} members, allowed are {algorithm.fewest_judged} or "
                f"more with algorithm.advantage = {algorithm.advantage!r}; raise rollout.group_size"
            )
    parts = [
        training_samples(part, algorithm, oldest=oldest, longest=longest)
        for part in split_evenly(batch.groups, algorithm.num_minibatches)
    ]
    return parts if algorithm.needs_model_for_advantages else with_advantages(parts, algorithm)


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Split groups into `num_parts` consecutive parts of about equal size. Raises UserError if a part would be
    empty."""
    if num_parts > len(groups):
        raise UserError(
            f"algorithm.num_minibatches: got {num_parts}, allowed are at most {len(groups)}, the groups of a batch"
        )
    cuts = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(cuts)]


def training_samples(
    groups: Sequence[Group], algorithm: AlgorithmSettings, *, oldest: int = 0, longest: int = 0
) -> list[TrainingSample]:
    """Return one sample per path of each episode that contributes to the loss, in the order of the batch.

    A token is trained only in the path where the policy sampled it, not in later paths whose prompts contain it. Tokens
    get no gradient if a version below `oldest` sampled them, or if `overlong_filter` excludes their episode. An episode
    without gradient still counts in the loss divisor. An episode gets no sample and does not count in the divisor if it
    has no reward, or if its group has too few scored episodes for the algorithm. `longest`: maximum length of an
    episode in policy tokens. Raises EngineFault for a logprob that is not finite.
    """
    return [
        sample
        for group in groups
        if len(rewards(group)) >= algorithm.fewest_judged
        for member in group.members
        if member.judgement.is_judged
        for sample in _episode(member, algorithm, oldest, longest)
    ]


def _episode(member: ScoredTrajectory, algorithm: AlgorithmSettings, oldest: int, longest: int) -> list[TrainingSample]:
    is_filtered = algorithm.overlong_filter and member.trajectory.finish_reason is FinishReason.LENGTH
    turns = _turns(member) if algorithm.turn_rewards else None
    penalty = overlong_penalty(member.num_policy_tokens, longest, algorithm.overlong_frac, algorithm.overlong_penalty)
    reward = member.judgement.reward - (0.0 if turns is None else turns.total) + penalty
    found = [
        replace(_sample(path, reward, oldest=oldest, is_filtered=is_filtered), path=place, turns=turns)
        for place, path in enumerate(member.paths)
    ]
    num_trained = sum(sample.num_trained for sample in found)
    return [replace(sample, episode_tokens=num_trained) for sample in found]


def _turns(member: ScoredTrajectory) -> Turns | None:
    """Return the turns of an episode, with the reward of each turn; None for a single-turn task. The policy's tokens
    after the last exchange form a turn with reward 0, because the environment did not receive them."""
    if member.episode is None:
        return None
    num_tokens, given = [], []
    for place, path in enumerate(member.paths):
        exchanges = [exchange for exchange in member.episode.exchanges if exchange.path == place]
        bounds = [0, *(exchange.token_offset for exchange in exchanges), path.num_tokens]
        is_policy = path.is_policy
        turn_rewards = [*(exchange.reward for exchange in exchanges), 0.0]
        for (start, end), reward in zip(pairwise(bounds), turn_rewards, strict=True):
            size = sum(is_policy[start:end])
            assert size or not reward, f"a turn of trajectory {path.name} has a reward of {reward} and no token"
            if size:
                num_tokens.append(size)
                given.append(reward)
    return Turns(tuple(num_tokens), tuple(given), member.episode.discount) if num_tokens else None


def _sample(trajectory: Trajectory, reward: float, *, oldest: int, is_filtered: bool) -> TrainingSample:
    assert trajectory.prompt_ids, f"trajectory {trajectory.name} has no prompt, so its first token has no logits"
    logprobs = trajectory.behavior_logprobs
    for place, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise EngineFault(
                f"trajectory {trajectory.name}: the engine reported log-probability {logprob} for token {place} of "
                "the response; training needs finite values"
            )
    is_policy, versions = bytes(trajectory.is_policy), trajectory.policy_versions
    return TrainingSample(
        group_id=trajectory.group_id,
        name=trajectory.name,
        token_ids=id_column((*trajectory.prompt_ids, *trajectory.token_ids)),
        prompt_length=len(trajectory.prompt_ids),
        is_policy=is_policy,
        is_trained=bytes(
            own and version >= oldest and not is_filtered for own, version in zip(is_policy, versions, strict=True)
        ),
        behavior_logprobs=TokenColumn(array("d", logprobs)),
        policy_versions=TokenColumn(array("i", versions)),
        reward=reward,
        is_filtered=is_filtered,
        routing=tuple(trajectory.routing) if any(s.routing for s in trajectory.segments) else (),
        kept=tuple(mask for segment in trajectory.segments for mask in segment.kept),
    )


def estimate(
    samples: Sequence[TrainingSample],
    algorithm: AlgorithmSettings,
    *,
    token_rewards: Sequence[FloatArray] | None = None,
    values: Sequence[FloatArray] | None = None,
) -> list[FloatArray]:
    """Return the [P] advantages of each sample of a whole batch. The estimator receives the paths of an episode
    concatenated in order. `token_rewards` and `values`: one [P] array per sample."""
    places = range(len(samples))
    episodes = [list(paths) for _, paths in groupby(places, key=lambda place: samples[place].name)]

    def joined(by_sample: Sequence[FloatArray] | None, paths: Sequence[int]) -> FloatArray | None:
        return None if by_sample is None else np.concatenate([by_sample[place] for place in paths])

    outcomes = [
        Outcome(
            group_id=samples[paths[0]].group_id,
            name=samples[paths[0]].name,
            reward=samples[paths[0]].reward,
            num_tokens=sum(samples[place].num_policy for place in paths),
            token_rewards=joined(token_rewards, paths),
            values=joined(values, paths),
            turns=samples[paths[0]].turns,
        )
        for paths in episodes
    ]
    found = ESTIMATORS[algorithm.advantage](outcomes, algorithm)
    ends = [np.cumsum([samples[place].num_policy for place in paths]) for paths in episodes]
    return [part for values, cuts in zip(found, ends, strict=True) for part in np.split(values, cuts[:-1])]


def with_advantages(
    parts: Sequence[Sequence[TrainingSample]], algorithm: AlgorithmSettings
) -> list[list[TrainingSample]]:
    """Return the samples of each minibatch with advantages. The algorithm's advantages must not need a forward pass."""
    raw = estimate([sample for part in parts for sample in part], algorithm)
    found = iter(normalized(raw) if algorithm.normalize_advantages else raw)
    return [[replace(sample, advantages=next(found)) for sample in part] for part in parts]


def rewards(group: Group) -> list[float]:
    """Return the rewards of the scored members, ordered by `sample_index`."""
    return [member.judgement.reward for member in group.members if member.judgement.is_judged]


def batch_metrics(
    batch: Batch, samples: Sequence[TrainingSample], algorithm: AlgorithmSettings, *, longest: int = 0
) -> dict[str, float]:
    """Return the metrics of a batch that need no forward pass: rewards, response lengths, and staleness.

    Rewards and accuracy are means over scored episodes; they are absent if no episode is scored. `reward/std` has
    divisor N. `reward/zero_std_frac` is the fraction of groups with equal rewards, among groups with two or more scored
    members. `judge/groups_lost` counts groups with too few scored members for training. The length of an episode is its
    number of policy tokens. `longest`: maximum length. `samples`: the batch's training samples, for staleness.
    """
    members = [member for group in batch.groups for member in group.members]
    judged = [member for member in members if member.judgement.is_judged]
    comparable = [group for group in batch.groups if len(rewards(group)) >= 2]
    num_lost = sum(len(rewards(group)) < algorithm.fewest_judged for group in batch.groups)
    lengths = [member.num_policy_tokens for member in members]
    by_part: dict[str, list[float]] = {}
    for member in judged:
        for name, value in member.judgement.parts.items():
            by_part.setdefault(name, []).append(value)
    num_cut = sum(member.trajectory.finish_reason is FinishReason.LENGTH for member in members)
    found: dict[str, float] = {"judge/groups_lost": float(num_lost)}
    if judged:
        values = [member.judgement.reward for member in judged]
        found["reward/mean"] = statistics.fmean(values)
        found["reward/std"] = statistics.pstdev(values)
        found["accuracy/mean"] = statistics.fmean(member.judgement.is_correct for member in judged)
    if judged and algorithm.overlong_frac:
        found["reward/overlong/mean"] = statistics.fmean(
            overlong_penalty(m.num_policy_tokens, longest, algorithm.overlong_frac, algorithm.overlong_penalty)
            for m in judged
        )
    if comparable:
        found["reward/zero_std_frac"] = statistics.fmean(len(set(rewards(group))) == 1 for group in comparable)
    return {
        **found,
        **{f"reward/{name}/mean": statistics.fmean(part) for name, part in sorted(by_part.items())},
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": num_cut / len(members),
        **staleness_metrics(samples, version=batch.step - 1),
    }


def staleness_metrics(samples: Sequence[TrainingSample], *, version: int) -> dict[str, float]:
    """Return metrics of token staleness relative to the trainer's `version`, and counts of trained and masked tokens.

    `staleness/mean` and `staleness/max` are over trained tokens. `staleness/stale_frac` is the fraction of policy
    tokens that are trained and were sampled by an older version. `staleness/masked_frac` is the fraction of policy
    tokens that are too old to be trained. Episodes that `overlong_filter` excludes count only in `tokens/filtered`.
    """
    kept = [sample for sample in samples if not sample.is_filtered]
    ages = [
        version - made
        for sample in kept
        for made, trained in zip(sample.policy_versions, sample.is_trained, strict=True)
        if trained
    ]
    num_masked = sum(sample.num_policy for sample in kept) - len(ages)
    num_tokens = max(1, len(ages) + num_masked)
    return {
        "staleness/mean": statistics.fmean(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "staleness/stale_frac": sum(age > 0 for age in ages) / num_tokens,
        "staleness/masked_frac": num_masked / num_tokens,
        "tokens/trained": float(len(ages)),
        "tokens/masked": float(num_masked),
        "tokens/filtered": float(sum(sample.num_policy for sample in samples if sample.is_filtered)),
    }
