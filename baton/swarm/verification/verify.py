"""Whether a worker's tokens are those that the policy and the keyed noise decide: from numbers to a verdict.

    claim ──rescoring──▶ Rescored ──judge (tolerance of the worker's class)──▶ VerificationResult ──▶ inspector.py

The hub gives out prompts and noise, so a reported token can be wrong in two ways: its logprob is not what the weights
say, or the keyed draw does not select it. Both are differences in nats, and both are as large as rounding makes them
where the worker is honest. What rounding makes of them depends on the worker's class, and is learned from trusted
workers. One token by a hair's breadth convicts nobody; one that no rounding explains does.

All differences are taken at temperature 1 or above: below it, rounding of logits is scaled up by 1 / temperature, and
so are the tolerances.
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
from baton.rollout.rescored import Rescored

HEADROOM = 1.5
"""A calibrated tolerance is this many times what was seen."""
SUSPECT_CHANCE, BAD_CHANCE = 1e-3, 1e-7
"""An honest trajectory is called so with at most this probability, by the number of tokens beyond the tolerance."""
_MAX_FACTOR = 10.0
"""Between a calibrated tolerance and the default of its dtype."""
_FLOAT32_ROUNDING = 1e-6
"""Nats: below this, logprobs in float32 differ for no reason at all."""
_TYPICAL_QUANTILE = 0.8
"""Honest tokens that are no farther off than `Tolerance.typical`, before its headroom."""


class WorkerClass(msgspec.Struct, frozen=True):
    """What decides how a worker rounds."""

    device: str
    """The processor's or GPU's own name, not just "cpu": its kernels decide the order of sums."""
    dtype: str
    """Of weights and KV cache."""
    engine: str
    """The kind: of those in `OWN_NOISE` only logprobs are compared."""

    @property
    def noise(self) -> str | None:
        """Equal for workers that make the same tokens from the same noise; None for engines with noise of their own."""
        return None if self.engine in OWN_NOISE else str(self)

    def __str__(self) -> str:
        return f"{self.engine} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an honest worker's tokens may be from their rescoring."""

    logprob: float
    """Nats: |behavior − rescored logprob| of one token, exceeded by the share `beyond` of honest tokens."""
    draw_gap: float
    """Nats, likewise."""
    typical: float = math.inf
    """Nats: |behavior − rescored logprob| of one token, exceeded by fewer than the share `often` of honest tokens.
    Infinite, and so no test, until a class is calibrated: this one depends on the very order of sums."""
    beyond: float = 0.002
    """Share of an honest worker's tokens that may lie beyond each."""
    often: float = 0.4
    """Share that may lie beyond what is typical."""
    wild: float = 5.0
    """Times a token's tolerance: what no rounding explains."""
    judges_draws: bool = True
    """Whether sampled tokens must be what the keyed noise selects. Greedy ones must be the likeliest in any case."""
    tail: float = 1e-9
    """A token that the draw does not select exactly, and that with all likelier-by-nothing ones had less than this
    probability, was not drawn: an honest worker reports one in 1 / tail tokens."""


DEFAULTS = {
    "float32": Tolerance(logprob=2e-4, draw_gap=4e-4),
    "bfloat16": Tolerance(logprob=0.25, draw_gap=0.5),
    "float16": Tolerance(logprob=0.03, draw_gap=0.06),
}
"""Before calibration, by dtype; any other is treated as bfloat16."""


class CheckOutcome(StrEnum):
    """What a check finds."""

    HONEST = "honest"
    SUSPECT = "suspect"
    """Unlikely for an honest worker, not impossible: look closer."""
    BAD = "bad"


Test = Literal["logprob", "draw", "unlikely", "typical", "report"]
"""Which test decided. unlikely: a token that hardly ever comes, and not by its draw. typical: too many tokens that are
off by more than most of an honest worker's, though none by much: other weights, nearly the same."""


class VerificationResult(msgspec.Struct, frozen=True):
    """What the check of one trajectory, or of several together, found, with the numbers it rests on."""

    outcome: CheckOutcome
    reason: str
    """A sentence; empty where it is honest."""
    test: Test | None = None
    num_tokens: int = 0
    beyond_logprob: int = 0
    """Tokens whose logprob is farther off than the tolerance."""
    beyond_draw: int = 0
    """Tokens whose draw gap is."""
    beyond_typical: int = 0
    """Tokens whose logprob is farther off than is typical."""
    worst_place: int | None = None
    """Token position after the prompt, where the verdict rests on one token."""


def judge(
    scores: Sequence[Rescored], tolerance: Tolerance, *, first: int = 0, end: int | None = None
) -> VerificationResult:
    """Judge one trajectory by its rescored tokens, those of all its versions together.

    first, end: only the tokens at places first … end − 1, where other workers have grown the rest.
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
    """Judge several trajectories of one worker together: small differences that one alone does not show add up."""
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
    """Return the verdict on a report that no honest worker sends, see `checks.py`."""
    return VerificationResult(CheckOutcome.BAD, sentence, "report")


def _gap(rescored: Rescored, i: int, *, judges_draws: bool) -> float:
    """How far a token is from what had to come: nothing, where nobody but the worker knows the draw."""
    return rescored.draw_gaps[i] if judges_draws or not rescored.temperature else 0.0


def _scale(temperature: float) -> float:
    return min(1.0, temperature) if temperature else 1.0


def _wild_token(
    rescored: Rescored, i: int, difference: float, gap: float, tolerance: Tolerance
) -> VerificationResult | None:
    """Return the verdict on a token that no rounding explains. What is no number is beyond every tolerance."""
    where = f"trajectory {rescored.name}: token {rescored.places[i]} (id {rescored.token_ids[i]}) under version "
    where += str(rescored.version)
    test: Test
    if not difference <= tolerance.wild * tolerance.logprob:
        test = "logprob"
        said = (
            f"is reported with the logprob {rescored.behavior_logprobs[i]:.6g} and has {rescored.logprobs[i]:.6g}; "
            f"tolerance {tolerance.logprob:.2g}"
        )
    elif not gap <= tolerance.wild * tolerance.draw_gap:
        test = "draw"
        said = f"is {gap:.3g} nats away from what its draw selects; tolerance {tolerance.draw_gap:.2g}"
    elif rescored.draw_gaps[i] > 0 and rescored.tail_masses[i] < tolerance.tail:
        test = "unlikely"
        said = (
            f"is not what its draw selects, and a token as unlikely is drawn once in "
            f"{1 / max(rescored.tail_masses[i], 1e-30):.1g} times"
        )
    else:
        return None
    return VerificationResult(CheckOutcome.BAD, f"{where} {said}", test, 1, worst_place=rescored.places[i])


def _decided(
    what: str, num_tokens: int, beyond_logprob: int, beyond_draw: int, beyond_typical: int, tolerance: Tolerance
) -> VerificationResult:
    """Decide by the numbers of tokens beyond what rounding does to few of them, and to many."""
    numbers = num_tokens, beyond_logprob, beyond_draw, beyond_typical
    tests: tuple[tuple[Test, int, float, str], ...] = (
        ("logprob", beyond_logprob, tolerance.beyond, "have another logprob than reported"),
        ("draw", beyond_draw, tolerance.beyond, "are not what their draws select"),
        ("typical", beyond_typical, tolerance.often, f"have a logprob more than {tolerance.typical:.2g} nats off"),
    )
    for test, beyond, share, said in tests:
        chance = chance_of_beyond(beyond, num_tokens, share)
        if chance < SUSPECT_CHANCE:
            outcome = CheckOutcome.BAD if chance < BAD_CHANCE else CheckOutcome.SUSPECT
            reason = f"{what}: {beyond} of {num_tokens} tokens {said}; by rounding once in {1 / chance:.1g} times"
            return VerificationResult(outcome, reason, test, *numbers)
    return VerificationResult(CheckOutcome.HONEST, "", None, *numbers)


def chance_of_beyond(beyond: int, num_tokens: int, share: float) -> float:
    """Return the probability that at least `beyond` of so many tokens lie beyond a tolerance, each with `share`.

    An upper bound (Chernoff's), and 1 where it is not above the mean: exp(−n · KL(beyond / n ‖ share)).
    """
    if not num_tokens or beyond <= share * num_tokens:
        return 1.0
    seen = beyond / num_tokens
    rest = (1 - seen) * math.log((1 - seen) / (1 - share)) if seen < 1 else 0.0
    return max(math.exp(-num_tokens * (seen * math.log(seen / share) + rest)), 1e-300)


@dataclass(slots=True)
class _Seen:
    """What trusted workers of one class have shown."""

    differences: list[float] = field(default_factory=list)
    """A uniform sample of |behavior − rescored logprob|."""
    gaps: list[float] = field(default_factory=list)
    """Of the same tokens."""
    num_tokens: int = 0
    sum_mismatch: float = 0.0
    """Σ e^r − 1 − r with r = rescored − behavior logprob: an estimate of KL(behavior ‖ rescored), never negative."""


class Calibration:
    """Tolerances of worker classes, learned from workers that are trusted, under the version they were sampled with."""

    def __init__(self, *, max_mismatch_kl: float = 1e-2, min_tokens: int = 4000, sample: int = 20_000) -> None:
        """min_tokens: as many are seen before they replace the default. sample: values kept of each class."""
        self._max_mismatch_kl, self._min_tokens, self._sample = max_mismatch_kl, min_tokens, sample
        self._seen: dict[WorkerClass, _Seen] = {}
        self._random = random.Random(0)

    def observe(self, worker_class: WorkerClass, scores: Iterable[Rescored]) -> None:
        """Take in the tokens of a trusted worker."""
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
        if len(seen.differences) < self._sample:
            seen.differences.append(difference)
            seen.gaps.append(gap)
        elif (place := self._random.randrange(seen.num_tokens)) < self._sample:
            seen.differences[place], seen.gaps[place] = difference, gap

    def tolerance(self, worker_class: WorkerClass) -> Tolerance:
        """Return the class's tolerance: the default of its dtype until enough is known, and within a factor of it.

        Above what all but the share `beyond` of the tokens showed there is half as much headroom again. A draw gap
        is between two bounds that may move against each other, so its tolerance is at least twice the logprob's.
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
        """Tokens seen of a class."""
        return self._seen[worker_class].num_tokens if worker_class in self._seen else 0

    def mismatch_kl(self, worker_class: WorkerClass) -> float | None:
        """KL(behavior ‖ rescored) in nats a token, at staleness 0; None before anything is known."""
        seen = self._seen.get(worker_class)
        return seen.sum_mismatch / seen.num_tokens if seen is not None and seen.num_tokens else None

    def refusal(self, worker_class: WorkerClass) -> str | None:
        """Return why a class is not admitted: even its trusted workers sample from another policy than is trained."""
        mismatch = self.mismatch_kl(worker_class)
        if mismatch is None or self.num_tokens(worker_class) < self._min_tokens or mismatch <= self._max_mismatch_kl:
            return None
        return (
            f"workers of the class {worker_class} are not admitted: at staleness 0 their mismatch KL is {mismatch:.2g} "
            f"nats a token, allowed {self._max_mismatch_kl:.2g}"
        )


def unseen_draws(worker_class: WorkerClass, kind: str) -> str | None:
    """Return why a class is not for strangers: nobody could draw its tokens again, and the run's own kind can be.

    kind: the engine's in the recipe; who names another kind than `embedded` there takes what comes with it.
    """
    if worker_class.engine not in OWN_NOISE or worker_class.engine == kind:
        return None
    return (
        f"what the engine {worker_class.engine} draws cannot be checked: this run takes it from trusted workers (baton "
        f'token create --role worker --trusted), or from all if its recipe says engine.kind = "{worker_class.engine}"'
    )


def _near(value: float, default: float) -> float:
    """Within a factor of the default: neither luck nor a broken class may make a tolerance useless."""
    return min(max(value, default / _MAX_FACTOR), default * _MAX_FACTOR)
