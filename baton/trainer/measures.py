"""What can be said of a batch without a model: rewards, lengths and staleness."""

from __future__ import annotations

import statistics

from baton.trainer.advantages import has_equal_rewards, is_comparable, is_trained, overlong_penalty
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.batch import trained_tokens
from baton.types import Batch, FinishReason


def batch_metrics(batch: Batch, algorithm: AlgorithmSettings, *, oldest: int = 0, longest: int = 0) -> dict[str, float]:
    """Return what can be said of a batch without a model: rewards, lengths and staleness.

    Rewards and accuracy are over judged trajectories, and absent where there is none; `reward/std` has divisor N;
    `reward/zero_std_frac` is the share of groups whose rewards are all equal, of those with two or more judged
    members; `judge/groups_lost` counts those with too few to be trained. Lengths count all tokens after the prompt;
    `longest` is the one at which a response is cut.
    """
    members = [member for group in batch.groups for member in group.members]
    judged = [member for member in members if member.judgement.is_judged]
    comparable = [group for group in batch.groups if is_comparable(group)]
    lost = [group for group in batch.groups if not is_comparable(group, algorithm.fewest_judged)]
    lengths = [member.trajectory.num_tokens for member in members]
    by_part: dict[str, list[float]] = {}
    for member in judged:
        for name, value in member.judgement.parts.items():
            by_part.setdefault(name, []).append(value)
    num_cut = sum(member.trajectory.finish_reason is FinishReason.LENGTH for member in members)
    found: dict[str, float] = {"judge/groups_lost": float(len(lost))}
    if judged:
        values = [member.judgement.reward for member in judged]
        found["reward/mean"] = statistics.fmean(values)
        found["reward/std"] = statistics.pstdev(values)
        found["accuracy/mean"] = statistics.fmean(member.judgement.is_correct for member in judged)
    if judged and algorithm.overlong_frac:
        found["reward/overlong/mean"] = statistics.fmean(
            overlong_penalty(m.trajectory.num_tokens, longest, algorithm.overlong_frac, algorithm.overlong_penalty)
            for m in judged
        )
    if comparable:
        found["reward/zero_std_frac"] = statistics.fmean(has_equal_rewards(group) for group in comparable)
    return {
        **found,
        **{f"reward/{name}/mean": statistics.fmean(part) for name, part in sorted(by_part.items())},
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": num_cut / len(members),
        **staleness_metrics(batch, algorithm, oldest),
    }


def staleness_metrics(batch: Batch, algorithm: AlgorithmSettings, oldest: int) -> dict[str, float]:
    """Return how old the tokens are, against version step − 1, and how many are too old to be trained.

    Over policy tokens of trajectories that have a share in the loss: `staleness/mean` and `/max` of those that are
    trained; of all, the share that is trained though not of the trainer's own version (`stale_frac`) and the share
    that is too old (`masked_frac`). Responses that `overlong_filter` leaves out are counted apart.
    """
    ages: list[int] = []
    num_masked = num_filtered = 0
    fewest = algorithm.fewest_judged
    for group in batch.groups:
        for trajectory in (member.trajectory for member in group.members if is_trained(group, member, fewest)):
            if algorithm.overlong_filter and trajectory.finish_reason is FinishReason.LENGTH:
                num_filtered += sum(trajectory.is_policy)
                continue
            trained = trained_tokens(trajectory, oldest)
            versions = [v for v, kept in zip(trajectory.policy_versions, trained, strict=True) if kept]
            ages += [batch.step - 1 - version for version in versions]
            num_masked += sum(trajectory.is_policy) - len(versions)
    num_tokens = max(1, len(ages) + num_masked)
    return {
        "staleness/mean": statistics.fmean(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "staleness/stale_frac": sum(age > 0 for age in ages) / num_tokens,
        "staleness/masked_frac": num_masked / num_tokens,
        "tokens/trained": float(len(ages)),
        "tokens/masked": float(num_masked),
        "tokens/filtered": float(num_filtered),
    }
