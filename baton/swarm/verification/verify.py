"""Decides from rescored tokens whether a worker's tokens agree with the policy and with the keyed noise.

    claim ──rescoring──▶ Rescored ──judge (tolerance of the worker's class)──▶ VerificationResult ──▶ policy.py

The hub assigns prompts and noise, so a reported token can be wrong in two ways. Its logprob may not be the logprob
under the weights, or the keyed draw may not select the token. Both errors are measured as differences in nats; for a
correct worker, both are rounding errors. The distribution of these rounding errors depends on the worker's class and is
estimated from trusted workers. A single token slightly beyond a tolerance has no consequence. A token that rounding
cannot explain leads to quarantine.

Differences are multiplied by min(1, temperature): sampling at a lower temperature divides the logits, and therefore
their rounding errors, by the temperature.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import msgspec
import numpy as np

from baton.rollout.engine import OWN_NOISE
from baton.rollout.rescoring import Rescored

HEADROOM = 1.5
"""Ratio of a calibrated tolerance to the observed quantile."""
SUSPECT_CHANCE, BAD_CHANCE = 1e-3, 1e-7
"""Upper bounds on the probability that a correct trajectory is classified as suspect or bad because of its number of
tokens beyond a tolerance."""
_MAX_FACTOR = 10.0
"""Maximum ratio between a calibrated tolerance and the default of its dtype, in both directions."""
_FLOAT32_ROUNDING = 1e-6
"""Difference in nats between logprobs in float32 that rounding alone can cause."""
_TYPICAL_QUANTILE = 0.8
"""Quantile of the differences of correct workers that gives `Tolerance.typical`, before the headroom."""


class WorkerClass(msgspec.Struct, frozen=True):
    """The properties of a worker that determine its rounding."""

    device: str
    """Full name of the processor or GPU, not just "cpu", because its kernels determine the order of sums."""
    dtype: str
    """Dtype of weights and KV cache."""
    engine: str
    """Kind of engine. For the kinds in `OWN_NOISE`, only logprobs are compared."""

    @property
    def noise(self) -> str | None:
        """Kind in `WorkerJoined`: equal for workers that generate the same tokens from the same noise; None for engines
        with noise of their own."""
        return None if self.engine in OWN_NOISE else str(self)

    def __str__(self) -> str:
        return f"{self.engine} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences between a correct worker's tokens and their rescoring. Differences of logprobs are in
    nats."""

    logprob: float
    """|behavior − rescored logprob| that the share `beyond` of a correct worker's tokens exceeds."""
    draw_gap: float
    """Distance of a token from the token that its draw selects, which the share `beyond` exceeds."""
    typical: float = math.inf
    """|behavior − rescored logprob| that less than the share `often` of a correct worker's tokens exceeds. Infinite
    until a class is calibrated, which disables the test, because the value depends on the exact order of sums."""
    beyond: float = 0.002
    """Share of a correct worker's tokens that may exceed `logprob`, and that may exceed `draw_gap`."""
    often: float = 0.4
    """Share of a correct worker's tokens that may exceed `typical`."""
    wild: float = 5.0
    """Multiple of a tolerance beyond which rounding cannot explain a token."""
    judges_draws: bool = True
    """True if the keyed noise must select the sampled tokens. Greedy tokens must be the likeliest in any case."""
    tail: float = 1e-9
    """Minimum tail mass (`Rescored.tail_masses`) of a token that the draw does not exactly select. A correct worker's
    token is below this minimum with probability `tail`."""


DEFAULTS = {
    "float32": Tolerance(logprob=2e-4, draw_gap=4e-4),
    "bfloat16": Tolerance(logprob=0.25, draw_gap=0.5),
    "float16": Tolerance(logprob=0.03, draw_gap=0.06),
}
"""Tolerances before calibration, by dtype; any other dtype uses bfloat16's."""


class CheckOutcome(StrEnum):
    """The result of a check."""

    HONEST = "honest"
    SUSPECT = "suspect"
    """Unlikely for a correct worker, but possible. More of its trajectories are checked."""
    BAD = "bad"


Test = Literal["logprob", "draw", "unlikely", "typical", "report"]
"""The decisive test. unlikely: a token of very low probability that its draw does not select. typical: too many tokens
differ slightly, as under slightly different weights."""


class VerificationResult(msgspec.Struct, frozen=True):
    """The result on one trajectory or on several together, with the numbers behind it."""

    outcome: CheckOutcome
    reason: str
    """Reason as a sentence; empty if the outcome is honest."""
    test: Test | None = None
    num_tokens: int = 0
    beyond_logprob: int = 0
    """Number of tokens whose logprob difference exceeds `Tolerance.logprob`."""
    beyond_draw: int = 0
    """Number of tokens whose draw gap exceeds `Tolerance.draw_gap`."""
    beyond_typical: int = 0
    """Number of tokens whose logprob difference exceeds `Tolerance.typical`."""
    worst_place: int | None = None
    """Position of the decisive token after the prompt; None if no single token is decisive."""


def judge(
    scores: Sequence[Rescored], tolerance: Tolerance, *, first: int = 0, end: int | None = None
) -> VerificationResult:
    """Check one trajectory by its rescored tokens of all versions together.

    first, end: check only the token positions first … end − 1, if other workers generated the other tokens.
    """
    num_tokens = beyond_logprob = beyond_draw = beyond_typical = 0
    for rescored in scores:
        scale = _scale(rescored.temperature)
        for i, place in enumerate(rescored.places):
            if place < first or (end is not None and place >= end):
                continue
            difference = scale * abs(rescored.behavior_logprobs[i] - rescored.logprobs[i])
            gap = scale * _gap(rescored, i, judges_draws=tolerance.judges_draws)
            if found := _wild_token(rescored, i, difference, gap, tolerance):
                return found
            num_tokens += 1
            beyond_logprob += difference > tolerance.logprob
            beyond_draw += gap > tolerance.draw_gap
            beyond_typical += difference > tolerance.typical
    name = scores[0].name if scores else "nothing"
    return _decided(f"trajectory {name}", num_tokens, beyond_logprob, beyond_draw, beyond_typical, tolerance)


def pooled(verdicts: Iterable[VerificationResult], tolerance: Tolerance) -> VerificationResult:
    """Check several trajectories of one worker together: small differences that are not significant in one trajectory
    add up."""
    found = list(verdicts)
    return _decided(
        f"{len(found)} trajectories together",
        sum(v.num_tokens for v in found),
        sum(v.beyond_logprob for v in found),
        sum(v.beyond_draw for v in found),
        sum(v.beyond_typical for v in found),
        tolerance,
    )


def violation(sentence: str) -> VerificationResult:
    """Return the result on a report that violates a rule of `checks.py`."""
    return VerificationResult(CheckOutcome.BAD, sentence, "report")


def _gap(rescored: Rescored, i: int, *, judges_draws: bool) -> float:
    """Return a token's draw gap; 0 for a sampled token with noise that only the worker knows."""
    return rescored.draw_gaps[i] if judges_draws or not rescored.temperature else 0.0


def _scale(temperature: float) -> float:
    return min(1.0, temperature) if temperature else 1.0


def _wild_token(
    rescored: Rescored, i: int, difference: float, gap: float, tolerance: Tolerance
) -> VerificationResult | None:
    """Return the result on a token that rounding cannot explain, or None. NaN exceeds every tolerance."""
    where = f"trajectory {rescored.name}: token {rescored.places[i]} (id {rescored.token_ids[i]}) under version "
    where += str(rescored.version)
    test: Test
    # `not … <=` rather than `>`, so that NaN fails
    if not difference <= tolerance.wild * tolerance.logprob:
        test = "logprob"
        said = (
            f"was reported with the logprob {rescored.behavior_logprobs[i]:.6g}, but has {rescored.logprobs[i]:.6g}; "
            f"tolerance {tolerance.logprob:.2g}"
        )
    elif not gap <= tolerance.wild * tolerance.draw_gap:
        test = "draw"
        said = f"is {gap:.3g} nats away from the token that its draw selects; tolerance {tolerance.draw_gap:.2g}"
    elif rescored.draw_gaps[i] > 0 and rescored.tail_masses[i] < tolerance.tail:
        test = "unlikely"
        said = (
            f"is not the token that its draw selects, and a token this unlikely is drawn once in "
            f"{1 / max(rescored.tail_masses[i], 1e-30):.1g} times"
        )
    else:
        return None
    return VerificationResult(CheckOutcome.BAD, f"{where} {said}", test, 1, worst_place=rescored.places[i])


def _decided(
    what: str, num_tokens: int, beyond_logprob: int, beyond_draw: int, beyond_typical: int, tolerance: Tolerance
) -> VerificationResult:
    """Return the result from the numbers of tokens beyond each tolerance."""
    numbers = num_tokens, beyond_logprob, beyond_draw, beyond_typical
    tests: tuple[tuple[Test, int, float, str], ...] = (
        ("logprob", beyond_logprob, tolerance.beyond, "have another logprob than reported"),
        ("draw", beyond_draw, tolerance.beyond, "are not the tokens that their draws select"),
        (
            "typical",
            beyond_typical,
            tolerance.often,
            f"have a logprob more than {tolerance.typical:.2g} nats from the reported one",
        ),
    )
    for test, beyond, share, said in tests:
        chance = chance_of_beyond(beyond, num_tokens, share)
        if chance < SUSPECT_CHANCE:
            outcome = CheckOutcome.BAD if chance < BAD_CHANCE else CheckOutcome.SUSPECT
            causes = f"rounding causes this once in {1 / chance:.1g} trajectories"
            reason = f"{what}: {beyond} of {num_tokens} tokens {said}; {causes}"
            return VerificationResult(outcome, reason, test, *numbers)
    return VerificationResult(CheckOutcome.HONEST, "", None, *numbers)


def chance_of_beyond(beyond: int, num_tokens: int, share: float) -> float:
    """Return an upper bound on the probability that at least `beyond` of `num_tokens` tokens exceed a tolerance, each
    with probability `share`.

    This is the Chernoff bound exp(−n · KL(beyond / n ‖ share)); 1 if `beyond` does not exceed the mean.
    """
    if not num_tokens or beyond <= share * num_tokens:
        return 1.0
    seen = beyond / num_tokens
    rest = (1 - seen) * math.log((1 - seen) / (1 - share)) if seen < 1 else 0.0
    return max(math.exp(-num_tokens * (seen * math.log(seen / share) + rest)), 1e-300)


@dataclass(slots=True)
class _Seen:
    """The rescored tokens of trusted workers of one class."""

    differences: list[float] = field(default_factory=list)
    """Uniform sample of |behavior − rescored logprob|, in nats."""
    gaps: list[float] = field(default_factory=list)
    """Draw gaps of the same tokens, in nats."""
    num_tokens: int = 0
    sum_mismatch: float = 0.0
    """Σ e^r − 1 − r with r = rescored − behavior logprob: an estimate of KL(behavior ‖ rescored), never negative."""


class Calibration:
    """Estimates the tolerances of worker classes from the trajectories of trusted workers."""

    def __init__(self, *, max_mismatch_kl: float = 1e-2, min_tokens: int = 4000, sample: int = 20_000) -> None:
        """min_tokens: number of tokens of a class before its tolerance is calibrated. sample: number of values kept per
        class."""
        self._max_mismatch_kl, self._min_tokens, self._sample = max_mismatch_kl, min_tokens, sample
        self._seen: dict[WorkerClass, _Seen] = {}
        self._random = random.Random(0)

    def observe(self, worker_class: WorkerClass, scores: Iterable[Rescored]) -> None:
        """Add the tokens of a trusted worker."""
        seen = self._seen.setdefault(worker_class, _Seen())
        judges_draws = worker_class.engine not in OWN_NOISE
        for rescored in scores:
            scale = _scale(rescored.temperature)
            for i, (behavior, logprob) in enumerate(zip(rescored.behavior_logprobs, rescored.logprobs, strict=True)):
                ratio = logprob - behavior
                seen.sum_mismatch += math.expm1(min(ratio, 50.0)) - ratio
                seen.num_tokens += 1
                self._keep(seen, scale * abs(ratio), scale * _gap(rescored, i, judges_draws=judges_draws))

    def _keep(self, seen: _Seen, difference: float, gap: float) -> None:
        # reservoir sampling: every token so far is in the sample with the same probability
        if len(seen.differences) < self._sample:
            seen.differences.append(difference)
            seen.gaps.append(gap)
        elif (place := self._random.randrange(seen.num_tokens)) < self._sample:
            seen.differences[place], seen.gaps[place] = difference, gap

    def tolerance(self, worker_class: WorkerClass) -> Tolerance:
        """Return a class's tolerance: the default of its dtype until enough tokens are known, afterwards a calibrated
        value within a limited factor of the default.

        The calibrated tolerance is `HEADROOM` times the quantile that all tokens except the share `beyond` do not
        exceed. A draw gap lies between two bounds that rounding may move in opposite directions, so its tolerance is at
        least twice the tolerance of the logprob.
        """
        default = DEFAULTS.get(worker_class.dtype, DEFAULTS["bfloat16"])
        default = replace(default, judges_draws=worker_class.engine not in OWN_NOISE)
        seen = self._seen.get(worker_class)
        if seen is None or seen.num_tokens < self._min_tokens:
            return default
        rarely = 1 - default.beyond
        logprob = _near(HEADROOM * float(np.quantile(seen.differences, rarely)), default.logprob)
        gap = HEADROOM * float(np.quantile(seen.gaps, rarely))
        typical = HEADROOM * float(np.quantile(seen.differences, _TYPICAL_QUANTILE))
        return replace(
            default,
            logprob=logprob,
            draw_gap=_near(max(gap, 2 * logprob), default.draw_gap),
            typical=max(typical, _FLOAT32_ROUNDING),
        )

    def num_tokens(self, worker_class: WorkerClass) -> int:
        """Return the number of tokens observed for a class."""
        return self._seen[worker_class].num_tokens if worker_class in self._seen else 0

    def mismatch_kl(self, worker_class: WorkerClass) -> float | None:
        """Return KL(behavior ‖ rescored) in nats per token at staleness 0; None before the first token."""
        seen = self._seen.get(worker_class)
        return seen.sum_mismatch / seen.num_tokens if seen is not None and seen.num_tokens else None

    def refusal(self, worker_class: WorkerClass) -> str | None:
        """Return why a class is not admitted, or None. A class is refused if its trusted workers' policy differs too
        much from the trained policy."""
        mismatch = self.mismatch_kl(worker_class)
        if mismatch is None or self.num_tokens(worker_class) < self._min_tokens or mismatch <= self._max_mismatch_kl:
            return None
        return (
            f"workers of the class {worker_class} are not admitted: at staleness 0 their mismatch KL is {mismatch:.2g} "
            f"nats per token; allowed is {self._max_mismatch_kl:.2g}"
        )


def unseen_draws(worker_class: WorkerClass, kind: str) -> str | None:
    """Return why untrusted workers of a class are not admitted, or None. They are refused if their engine's draws
    cannot be checked.

    kind: the recipe's engine.kind. A recipe that names such an engine accepts its unchecked draws.
    """
    if worker_class.engine not in OWN_NOISE or worker_class.engine == kind:
        return None
    return (
        f"the draws of the engine {worker_class.engine} cannot be checked: only trusted workers may use it (baton "
        f'token create --role worker --trusted), unless the recipe has engine.kind = "{worker_class.engine}"'
    )


def _near(value: float, default: float) -> float:
    """Limit a value to a factor of the default, so that no outlier or faulty class makes a tolerance useless."""
    return min(max(value, default / _MAX_FACTOR), default * _MAX_FACTOR)
