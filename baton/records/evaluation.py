"""Results of evaluations: accuracy and pass@k with 95 % intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

Z_95 = 1.959964
"""Half the width of the 95 % interval of a normal distribution, in standard deviations."""


class Interval(msgspec.Struct, frozen=True):
    """A share (fraction between 0 and 1) with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Evaluation(msgspec.Struct, frozen=True):
    """The evaluation result of one task at one sampling temperature."""

    task: str
    num_prompts: int
    samples: int
    """Number of responses per prompt (k). For the combined task `all`: 1 if its tasks have different numbers."""
    temperature: float
    """Sampling temperature; 0 means greedy decoding."""
    accuracy: Interval | None
    """Share of responses that are correct (avg@k); None if no response has a reward."""
    pass_at_k: Interval | None
    """Share of prompts with at least one correct response among their k responses. For k = 1, this is the accuracy."""
    mean_length_tokens: float
    clip_ratio: float
    """Share of responses that ended at the maximum length."""
    unjudged: int = 0
    """Number of responses whose scoring failed; accuracy and pass@k exclude them."""
    reward: float | None = None
    """Mean reward of the scored responses; None if no response was scored, or if an earlier version of Baton, which did
    not record the reward, wrote the result."""
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    """Name of a reward part → its mean."""
    step: int | None = None
    """Train step after which the evaluation ran; None if it did not run during a training."""

    @property
    def own_reward(self) -> float | None:
        """Mean reward; None if it equals the accuracy or is unknown."""
        is_same = self.accuracy is not None and self.reward == self.accuracy.value
        return None if is_same else self.reward

    @property
    def way(self) -> str:
        """Name of the sampling method, shown to the user."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"


def shown_share(share: Interval | None) -> str:
    """Return the text that shows a share and its interval to the user."""
    return "not scored" if share is None else str(share)


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Return the metrics of one evaluation by name."""
    accuracy = None if result.accuracy is None else result.accuracy.value
    values = {"greedy": accuracy, "greedy_reward": result.reward}
    if result.temperature:
        values = {
            "response_length": result.mean_length_tokens,
            "unjudged": result.unjudged or None,
            f"avg@{result.samples}": accuracy,
            "reward": result.reward,
        }
        if result.reward is not None and len(result.parts) > 1:
            values |= {f"reward/{name}": value for name, value in result.parts.items()}
        if result.pass_at_k is not None and result.samples > 1:
            values[f"pass@{result.samples}"] = result.pass_at_k.value
    return {f"eval/{result.task}/{name}": value for name, value in values.items() if value is not None}


def share_interval(outcomes: Sequence[Sequence[bool]]) -> Interval:
    """Return the share of true outcomes with its 95 % interval. `outcomes`: one sequence per prompt, with one element
    per response.

    With one response per prompt, the interval is Wilson's score interval. Several responses to one prompt are not
    independent, so with several responses per prompt the interval comes from 2000 bootstrap draws with a fixed seed.
    Each draw resamples the prompts. If all outcomes are equal, all draws would be equal too, so Wilson's score interval
    for one response per prompt is used.
    """
    shares = [sum(row) / len(row) for row in outcomes]
    count = len(shares)
    mean = sum(shares) / count
    if all(len(row) == 1 for row in outcomes) or mean in (0.0, 1.0):
        centre = (mean + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        half = Z_95 / (1 + Z_95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z_95**2 / (4 * count**2))
        return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))
    dice = random.Random(0)
    draws = sorted(sum(dice.choices(shares, k=count)) / count for _ in range(2000))
    return Interval(mean, draws[49], draws[1949])  # the 2.5 % and 97.5 % percentiles of 2000 draws
