"""Results of evaluations: accuracy and pass@k with 95 % intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class Interval(msgspec.Struct, frozen=True):
    """A share with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Evaluation(msgspec.Struct, frozen=True):
    """The result of one task with one sampling temperature."""

    task: str
    num_prompts: int
    samples: int
    temperature: float
    """0 is greedy."""
    accuracy: Interval | None
    """avg@k: share of correct responses; None if no response has a reward."""
    pass_at_k: Interval | None
    """Share of prompts with at least one correct response among k; equals accuracy for k = 1."""
    mean_length_tokens: float
    clip_ratio: float
    """Share of responses that were cut at the maximum length."""
    unjudged: int = 0
    """Responses without a reward, because scoring failed; accuracy and pass@k do not count them."""

    @property
    def way(self) -> str:
        """How the responses were sampled, in words."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"


def shown_share(share: Interval | None) -> str:
    """Return an interval as text for the user."""
    return "not scored" if share is None else str(share)


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Return the metrics of one evaluation by name."""
    if result.temperature == 0:
        return {} if result.accuracy is None else {f"eval/{result.task}/greedy": result.accuracy.value}
    values = {f"eval/{result.task}/response_length": result.mean_length_tokens}
    if result.unjudged:
        values[f"eval/{result.task}/unjudged"] = result.unjudged
    if result.accuracy is not None:
        values[f"eval/{result.task}/avg@{result.samples}"] = result.accuracy.value
    if result.pass_at_k is not None and result.samples > 1:
        values[f"eval/{result.task}/pass@{result.samples}"] = result.pass_at_k.value
    return values


def share_interval(outcomes: Sequence[Sequence[bool]]) -> Interval:
    """Return the share of true outcomes, [prompts][samples], with its 95 % interval.

    One sample per prompt: Wilson's score interval. Several: the samples of a prompt are not independent, so prompts are
    resampled (2000 seeded bootstrap draws, percentiles).
    """
    shares = [sum(row) / len(row) for row in outcomes]
    count = len(shares)
    mean = sum(shares) / count
    if all(len(row) == 1 for row in outcomes):
        centre = (mean + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        half = Z_95 / (1 + Z_95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z_95**2 / (4 * count**2))
        return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))
    dice = random.Random(0)
    draws = sorted(sum(dice.choices(shares, k=count)) / count for _ in range(2000))
    return Interval(mean, draws[49], draws[1949])
