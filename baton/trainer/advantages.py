"""Advantage estimators, per episode or per token: pure functions that do not need torch.

To add an estimator, write a function with `Estimator`'s signature and list it in `ESTIMATORS`. An estimator receives
all outcomes of a batch. Outcomes with equal `group_id` form a group, wherever they are in the batch. Shapes: P is the
number of tokens that the policy wrote in all paths of an episode. T is the number of turns of the episode. Tokens that
the environment wrote are not actions, and get no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.trainer.algorithm import AlgorithmSettings

EPSILON = 1e-6
"""Constant added to standard deviations. The GRPO paper gives no value of this ε; most implementations use 1e-6."""

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of an episode, with a reward for each turn."""

    num_tokens: tuple[int, ...]
    """[T] Number of policy tokens of each turn, at least 1. Their sum is P."""
    rewards: tuple[float, ...]
    """[T] Reward of each turn, given at its last policy token."""
    discount: float
    """Discount factor per turn for the rewards of later turns."""

    @property
    def starts(self) -> IntArray:
        """[T] Index of the first token of each turn among the P tokens."""
        return np.cumsum((0, *self.num_tokens[:-1]))

    @property
    def ends(self) -> IntArray:
        """[T] Index of the last token of each turn among the P tokens."""
        return np.cumsum(self.num_tokens) - 1

    @property
    def total(self) -> float:
        """Discounted sum of the rewards of all turns."""
        return math.fsum(self.discount**turn * reward for turn, reward in enumerate(self.rewards))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The input of an estimator: one scored episode."""

    group_id: int
    name: str
    """Name `group/sample` of the episode, for messages."""
    reward: float
    """Reward of the whole episode, given at the last policy token. If `turns` is set, `reward` does not include the
    rewards of the turns."""
    num_tokens: int
    """Number of policy tokens, P."""
    token_rewards: FloatArray | None = None
    """[P] rewards of single tokens in addition to `reward`, such as a KL penalty; None means zeros."""
    values: FloatArray | None = None
    """[P] critic's value before each token; None without a critic."""
    turns: Turns | None = None
    """Turns that have their own rewards; None if the whole episode has one reward."""

    @property
    def rewards(self) -> FloatArray:
        """[P] Sum of the rewards given at each token."""
        found = np.zeros(self.num_tokens) if self.token_rewards is None else self.token_rewards.copy()
        if self.turns is not None:
            found[self.turns.ends] += self.turns.rewards
        found[-1:] += self.reward
        return found

    @property
    def discounts(self) -> FloatArray:
        """[P] Discount factor from each token to the next: `turns.discount` at a turn's last token, otherwise 1."""
        found = np.ones(self.num_tokens)
        if self.turns is not None:
            found[self.turns.ends] = self.turns.discount
        return found

    @property
    def totals(self) -> FloatArray:
        """[T] Discounted sum of the rewards from the start of each turn to the end of the episode. Without `turns`:
        [1], the sum of all rewards."""
        if self.turns is not None:
            found: FloatArray = _discounted(self.rewards, self.discounts)[self.turns.starts]
            return found
        return np.array([self.reward if self.token_rewards is None else self.reward + float(self.token_rewards.sum())])


Estimator = Callable[[Sequence[Outcome], AlgorithmSettings], list[FloatArray]]
"""Outcomes → the advantages [P] of each outcome, in the same order."""


def group_std(outcomes: Sequence[Outcome], algorithm: AlgorithmSettings) -> list[FloatArray]:
    """GRPO: A_i = (R_i − mean R) / (std R + ε) within a group; std has divisor G − 1 (arXiv 2402.03300, section 4.1.2).

    If all rewards of a group are equal, all advantages are exactly 0. With `algorithm.turn_rewards`, here and in
    `group_mean`, the R_i are the returns of all turns of all episodes in the group. Rewards are thus summed before they
    are normalised, whereas GRPO's process supervision (section 4.1.3) normalises rewards before it sums them.
    """
    return _within_groups(outcomes, _standardised)


def group_mean(outcomes: Sequence[Outcome], algorithm: AlgorithmSettings) -> list[FloatArray]:
    """Dr.GRPO: A_i = R_i − mean R within a group (arXiv 2503.20783, section 3.2)."""
    return _within_groups(outcomes, _centred)


def leave_one_out(outcomes: Sequence[Outcome], algorithm: AlgorithmSettings) -> list[FloatArray]:
    """RLOO: A_i = R_i − mean R of the other episodes of the group (arXiv 2402.14740, section 3.3). With
    `algorithm.turn_rewards`, R_i is the return of a turn, and the mean is over the turns of the group's other
    episodes."""
    return _within_groups(outcomes, _against_others)


def return_to_go(outcomes: Sequence[Outcome], algorithm: AlgorithmSettings) -> list[FloatArray]:
    """REINFORCE++ without its normalisation of advantages: A_t = Σ_{k ≥ t} γ^(k−t) r_k (arXiv 2501.03262)."""
    return [_discounted(outcome.rewards, algorithm.gamma * outcome.discounts) for outcome in outcomes]


def gae(outcomes: Sequence[Outcome], algorithm: AlgorithmSettings) -> list[FloatArray]:
    """GAE: A_t = Σ_{k ≥ t} (γλ)^(k−t) δ_k with δ_t = r_t + γ V_{t+1} − V_t (arXiv 1506.02438, equation 16).

    The value after the last policy token is 0, even for an episode that was truncated at the maximum length. With
    `algorithm.turn_rewards`, γ at the last token of a turn is multiplied by the discount per turn.
    """
    found = []
    for outcome in outcomes:
        assert outcome.values is not None, f"trajectory {outcome.name} has no values, and gae needs a critic"
        following, gammas = np.append(outcome.values[1:], 0.0), algorithm.gamma * outcome.discounts
        delta = outcome.rewards + gammas * following - outcome.values
        found.append(_discounted(delta, gammas * algorithm.gae_lambda))
    return found


def normalized(advantages: Sequence[FloatArray]) -> list[FloatArray]:
    """Normalise advantages to mean 0 and standard deviation 1 over all N tokens of the batch (REINFORCE++, PPO). The
    variance has the divisor N, whereas `group_std` uses the number of values − 1. If all advantages are equal, the
    results are exactly 0."""
    everything = np.concatenate(advantages) if advantages else np.zeros(0)
    if not len(everything) or everything.min() == everything.max():
        return [np.zeros_like(values) for values in advantages]
    mean, std = float(everything.mean()), float(everything.std())
    return [(values - mean) / (std + EPSILON) for values in advantages]


def overlong_penalty(length: int, longest: int, frac: float, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    The result is 0 up to a length of (1 − `frac`) × `longest` and then falls linearly to −`penalty` at `longest`.
    `length` counts the policy tokens of the whole episode, over all resumes, turns and paths.
    """
    zone = frac * longest
    return -penalty * min(1.0, max(0.0, (length - (longest - zone)) / zone)) if zone else 0.0


def _within_groups(
    outcomes: Sequence[Outcome], compare: Callable[[FloatArray, IntArray], FloatArray]
) -> list[FloatArray]:
    """Compute the advantage of each turn's return within its group, and assign it to all tokens of the turn. An episode
    without turns counts as one turn. `compare` gets the returns of a group and, for each return, the index of the
    episode in the group; it returns one advantage for each return."""
    places: dict[int, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        places.setdefault(outcome.group_id, []).append(place)
    found: list[FloatArray] = [np.zeros(outcome.num_tokens) for outcome in outcomes]
    for group_id, members in places.items():
        assert len(members) >= 2, f"group {group_id} has one scored trajectory: `training_samples` must drop it"
        totals = [outcomes[place].totals for place in members]
        sizes = [len(values) for values in totals]
        advantages = compare(np.concatenate(totals), np.repeat(np.arange(len(members)), sizes))
        for place, values in zip(members, np.split(advantages, np.cumsum(sizes)[:-1]), strict=True):
            turns = outcomes[place].turns
            found[place] += values if turns is None else np.repeat(values, turns.num_tokens)
    return found


def _centred(values: FloatArray, _: IntArray) -> FloatArray:
    if values.min() == values.max():
        return np.zeros_like(values)  # because the rounded mean of equal numbers may differ from these numbers
    with np.errstate(invalid="ignore"):  # an infinite reward gives NaN, which stops the train step
        return values - math.fsum(values) / len(values)


def _standardised(values: FloatArray, members: IntArray) -> FloatArray:
    centred = _centred(values, members)
    return centred / (math.sqrt(math.fsum(centred**2) / (len(values) - 1)) + EPSILON)


def _against_others(values: FloatArray, members: IntArray) -> FloatArray:
    centred = _centred(values, members)
    # The centred returns c = R − mean R of a group sum to 0. The mean of c over the other episodes is therefore
    # −(sum of c over the own episode) / (number of returns of the other episodes). The result is c minus this mean.
    own, sizes = np.bincount(members, centred), np.bincount(members)
    return centred + (own / (len(values) - sizes))[members]


def _discounted(values: FloatArray, factors: FloatArray) -> FloatArray:
    """Return result_t = values_t + factors_t × result_{t+1}, where the result after the last t is 0."""
    found: FloatArray = np.empty(len(values))
    running = 0.0
    for place in range(len(values) - 1, -1, -1):
        running = found[place] = values[place] + factors[place] * running
    return found


ESTIMATORS: Mapping[str, Estimator] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "return_to_go": return_to_go,
    "gae": gae,
}
"""Value of `algorithm.advantage` → function."""
