"""Advantage estimators, per trajectory or per token, as pure functions of numbers. Needs no torch.

To add an estimator, write a function with `Estimator`'s signature and list it in `ESTIMATORS`. An estimator receives
all outcomes of a batch. Groups are identified by id, not by position.
Shape: P policy tokens of one trajectory. Tokens of the environment are not actions and are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EPSILON = 1e-6
"""Constant added to a standard deviation. GRPO does not specify its value; most implementations use this one."""

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The input of an estimator: one scored trajectory."""

    group_id: int
    name: str
    """group/sample, for messages."""
    reward: float
    """Reward of the whole trajectory, given at its last policy token."""
    num_tokens: int
    """Number of policy tokens, P."""
    token_rewards: FloatArray | None = None
    """[P] rewards in addition to `reward`, such as a KL penalty; None means zeros."""
    values: FloatArray | None = None
    """[P] values that a critic gives before each token."""

    @property
    def total(self) -> float:
        """The sum of all rewards."""
        return self.reward if self.token_rewards is None else self.reward + float(self.token_rewards.sum())


@dataclass(frozen=True, slots=True)
class AdvantageShape:
    """The parameters of an estimator."""

    gamma: float = 1.0
    gae_lambda: float = 0.95


Estimator = Callable[[Sequence[Outcome], AdvantageShape], list[FloatArray]]
"""Outcomes → [P] advantages of each, in the same order."""


def group_std(outcomes: Sequence[Outcome], shape: AdvantageShape) -> list[FloatArray]:
    """GRPO: A_i = (R_i − mean R) / (std R + ε) within a group, std with G − 1 (arXiv 2402.03300, section 4.1.2).

    A group of equal rewards gives exactly zero.
    """
    return _within_groups(outcomes, _standardised)


def group_mean(outcomes: Sequence[Outcome], shape: AdvantageShape) -> list[FloatArray]:
    """Dr.GRPO: A_i = R_i − mean R within a group (arXiv 2503.20783, section 3.2)."""
    return _within_groups(outcomes, _centred)


def leave_one_out(outcomes: Sequence[Outcome], shape: AdvantageShape) -> list[FloatArray]:
    """RLOO: A_i = R_i − mean of the others' R (arXiv 2402.14740, section 3.3), which is G/(G−1) (R_i − mean R)."""
    return _within_groups(outcomes, lambda rewards: _centred(rewards) * (len(rewards) / (len(rewards) - 1)))


def return_to_go(outcomes: Sequence[Outcome], shape: AdvantageShape) -> list[FloatArray]:
    """REINFORCE++ before its normalisation: A_t = Σ_{k ≥ t} γ^(k−t) r_k (arXiv 2501.03262)."""
    return [_discounted(_rewards(outcome), shape.gamma) for outcome in outcomes]


def gae(outcomes: Sequence[Outcome], shape: AdvantageShape) -> list[FloatArray]:
    """GAE: A_t = Σ_{k ≥ t} (γλ)^(k−t) δ_k with δ_t = r_t + γ V_{t+1} − V_t (arXiv 1506.02438, equation 16).

    The value after the last policy token is 0, even if the trajectory was cut at the maximum length.
    """
    found = []
    for outcome in outcomes:
        assert outcome.values is not None, f"trajectory {outcome.name} has no values, and gae needs a critic"
        following = np.append(outcome.values[1:], 0.0)
        delta = _rewards(outcome) + shape.gamma * following - outcome.values
        found.append(_discounted(delta, shape.gamma * shape.gae_lambda))
    return found


def normalized(advantages: Sequence[FloatArray]) -> list[FloatArray]:
    """Normalise advantages to mean 0 and standard deviation 1 over all tokens of the batch (REINFORCE++, PPO).

    The standard deviation has divisor N, unlike in `group_std`. If all advantages are equal, all become exactly zero.
    """
    everything = np.concatenate(advantages) if advantages else np.zeros(0)
    if not len(everything) or everything.min() == everything.max():
        return [np.zeros_like(values) for values in advantages]
    mean, std = float(everything.mean()), float(everything.std())
    return [(values - mean) / (std + EPSILON) for values in advantages]


def overlong_penalty(length: int, longest: int, frac: float, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    The result is 0 up to a length of (1 − `frac`) × `longest` and then falls linearly to −`penalty` at `longest`.
    `length` counts the tokens of the whole response, over all resumes.
    """
    zone = frac * longest
    return -penalty * min(1.0, max(0.0, (length - (longest - zone)) / zone)) if zone else 0.0


def _within_groups(outcomes: Sequence[Outcome], compare: Callable[[FloatArray], FloatArray]) -> list[FloatArray]:
    places: dict[int, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        places.setdefault(outcome.group_id, []).append(place)
    found: list[FloatArray] = [np.zeros(outcome.num_tokens) for outcome in outcomes]
    for group_id, members in places.items():
        assert len(members) >= 2, f"group {group_id} has one scored trajectory: `training_samples` must drop it"
        for place, advantage in zip(members, compare(np.array([outcomes[m].total for m in members])), strict=True):
            found[place] += advantage
    return found


def _centred(values: FloatArray) -> FloatArray:
    if values.min() == values.max():
        return np.zeros_like(values)  # the rounded mean of equal numbers may differ from them
    with np.errstate(invalid="ignore"):  # an infinite reward gives NaN, which stops the train step
        return values - math.fsum(values) / len(values)


def _standardised(values: FloatArray) -> FloatArray:
    centred = _centred(values)
    return centred / (math.sqrt(math.fsum(centred**2) / (len(values) - 1)) + EPSILON)


def _rewards(outcome: Outcome) -> FloatArray:
    found = np.zeros(outcome.num_tokens) if outcome.token_rewards is None else outcome.token_rewards.copy()
    found[-1:] += outcome.reward
    return found


def _discounted(values: FloatArray, factor: float) -> FloatArray:
    """Return Σ_{k ≥ t} factor^(k−t) values_k for each t."""
    found: FloatArray = np.empty(len(values))
    running = 0.0
    for place in range(len(values) - 1, -1, -1):
        running = found[place] = values[place] + factor * running
    return found


ESTIMATORS: Mapping[str, Estimator] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "return_to_go": return_to_go,
    "gae": gae,
}
"""Value of `algorithm.advantage` → function."""
