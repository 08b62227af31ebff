"""Decides from rescored tokens whether a worker's tokens agree with the policy and with the keyed noise.

    claim ──rescoring──▶ Rescored ──judge (tolerance of the worker's class)──▶ VerificationResult ──▶ policy.py

The hub assigns prompts and noise, so a reported token can be wrong in two ways: its logprob may differ from the logprob
under the weights, or the assigned noise may select another token. Both deviations are measured in nats. A correct
worker deviates only by rounding errors. The distribution of rounding errors depends on the worker's class and is
estimated from trusted workers. A single token that slightly exceeds a tolerance has no consequence. A token that
rounding cannot explain leads to quarantine.

Sampling divides the logits, including their rounding errors, by the temperature. Deviations are therefore multiplied by
min(1, temperature).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import msgspec
import numpy as np

from baton.rollout.engine import OWN_NOISE
from baton.rollout.rescoring import Rescored

HEADROOM = 1.5
"""A calibrated bound is the product of this factor and a quantile of the observed values."""
SUSPECT_CHANCE, BAD_CHANCE = 1e-3, 1e-7
"""Suppose that n tokens of a checked trajectory exceed a tolerance. Let p be the probability that n or more tokens of a
correct worker's trajectory exceed it. The result is SUSPECT if an upper bound on p is below the first number, and BAD
if it is below the second number."""
_MAX_FACTOR = 10.0
"""Limits how much a calibrated `Tolerance.logprob` or `Tolerance.draw_gap` may differ from the default for its dtype:
it may be larger or smaller by at most this factor."""
_FLOAT32_ROUNDING = 1e-6
"""Lower bound on a calibrated `Tolerance.typical`, in nats: the rounding error of float32 logprobs."""
_TYPICAL_QUANTILE = 0.8
"""`Tolerance.typical` is the product of `HEADROOM` and this quantile of the logprob differences of correct workers."""


class WorkerClass(msgspec.Struct, frozen=True):
    """The properties of a worker that determine its rounding errors."""

    device: str
    """Full name of the processor or GPU, such as its model number. The device's kernels determine the order of sums."""
    dtype: str
    """Dtype of weights and KV cache."""
    engine: str
    """Kind of engine. For an engine kind in `OWN_NOISE`, only logprobs are compared."""

    @property
    def noise(self) -> str | None:
        """Value of `WorkerJoined.kind`. Workers that generate the same tokens from the same noise have equal values.
        None if the engine uses its own noise."""
        return None if self.engine in OWN_NOISE else str(self)

    def __str__(self) -> str:
        return f"{self.engine} in {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences between reported and rescored values. Logprobs and draw gaps are in nats."""

    logprob: float
    """Bound on |behavior − rescored logprob|. Of a correct worker's tokens, at most the share `beyond` exceeds this
    bound."""
    draw_gap: float
    """Bound on a token's draw gap (`Rescored.draw_gaps`), which is 0 if the keyed noise selects the token. At most the
    share `beyond` of a correct worker's tokens exceeds the bound."""
    typical: float = math.inf
    """Second bound on |behavior − rescored logprob|. Of a correct worker's tokens, the share that exceeds this bound is
    less than `often`. The bound depends on the exact order of sums, so it is infinite (no test) before the
    calibration."""
    beyond: float = 0.002
    """Share of a correct worker's tokens whose deviation may exceed `logprob`. The same share applies to `draw_gap`."""
    often: float = 0.4
    """Share of a correct worker's tokens whose deviation may exceed `typical`."""
    wild: float = 5.0
    """If a token's deviation exceeds this multiple of `logprob` or `draw_gap`, rounding cannot explain it."""
    judges_draws: bool = True
    """True if sampled tokens must be those that the keyed noise selects. Greedy tokens must always be the likeliest
    tokens."""
    tail: float = 1e-9
    """If the noise selects another token, the reported token must have at least this tail mass
    (`Rescored.tail_masses`). The probability that a token of a correct worker has a smaller tail mass is at most this
    number."""


DEFAULTS = {
    "float32": Tolerance(logprob=2e-4, draw_gap=4e-4),
    "bfloat16": Tolerance(logprob=0.25, draw_gap=0.5),
    "float16": Tolerance(logprob=0.03, draw_gap=0.06),
}
"""dtype → tolerances before calibration. Other dtypes use the tolerances of bfloat16."""


class CheckOutcome(StrEnum):
    """The result of a check."""

    HONEST = "honest"
    SUSPECT = "suspect"
    """The result is unlikely, but possible, for a correct worker, so more of the worker's trajectories are checked."""
    BAD = "bad"


Test = Literal["logprob", "draw", "unlikely", "typical", "report"]
"""The test that was decisive. `logprob`, `draw`: a value exceeds `Tolerance.logprob` or `Tolerance.draw_gap` too often
or by too much. `unlikely`: the keyed noise does not select the token, and the token has a very low probability.
`typical`: too many logprobs differ slightly, as under slightly different weights. `report`: the report violates a rule
of `checks.py`."""


class VerificationResult(msgspec.Struct, frozen=True):
    """The result for one trajectory, or for several together, with the numbers that determine it."""

    outcome: CheckOutcome
    reason: str
    """Reason for the outcome as a sentence; empty if the outcome is HONEST."""
    test: Test | None = None
    num_tokens: int = 0
    beyond_logprob: int = 0
    """Number of tokens whose logprob difference exceeds `Tolerance.logprob`."""
    beyond_draw: int = 0
    """Number of tokens whose draw gap exceeds `Tolerance.draw_gap`."""
    beyond_typical: int = 0
    """Number of tokens whose logprob difference exceeds `Tolerance.typical`."""
    worst_place: int | None = None
    """Position, counted after the prompt, of the decisive token; None if no single token is decisive."""


def judge(
    scores: Sequence[Rescored], tolerance: Tolerance, *, first: int = 0, end: float = math.inf
) -> VerificationResult:
    """Check one trajectory. `scores`: the rescored tokens of the trajectory, one element per policy version.

    first, end: only the tokens at the positions `first` … `end` − 1 are checked, because other workers generated the
    other tokens.
    """
    num_tokens = beyond_logprob = beyond_draw = beyond_typical = 0
    for rescored, i, difference, gap in _deviations(scores, first, end, judges_draws=tolerance.judges_draws):
        if found := _wild_token(rescored, i, difference, gap, tolerance):
            return found
        num_tokens += 1
        beyond_logprob += difference > tolerance.logprob
        beyond_draw += gap > tolerance.draw_gap
        beyond_typical += difference > tolerance.typical
    name = scores[0].name if scores else "nothing"
    return _decided(f"trajectory {name}", num_tokens, beyond_logprob, beyond_draw, beyond_typical, tolerance)


def pooled(verdicts: Iterable[VerificationResult], tolerance: Tolerance) -> VerificationResult:
    """Check several trajectories of a worker together: with more tokens, smaller differences are significant."""
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
    """Return the result for a report that violates a rule of `checks.py`."""
    return VerificationResult(CheckOutcome.BAD, sentence, "report")


def _deviations(
    scores: Iterable[Rescored], first: int, end: float, *, judges_draws: bool
) -> Iterator[tuple[Rescored, int, float, float]]:
    """Yield (rescored, index of the token, logprob difference, gap) for each token at the positions `first` … `end` −
    1. Difference and gap are scaled by the temperature."""
    for rescored in scores:
        scale = _scale(rescored.temperature)
        for i, place in enumerate(rescored.places):
            if first <= place < end:
                difference = scale * abs(rescored.behavior_logprobs[i] - rescored.logprobs[i])
                yield rescored, i, difference, scale * _gap(rescored, i, judges_draws=judges_draws)


def _gap(rescored: Rescored, i: int, *, judges_draws: bool) -> float:
    """Return the larger of a token's mask gap and draw gap (`Rescored`). If only the worker knows the noise, a sampled
    token has the draw gap 0."""
    of_draw = rescored.draw_gaps[i] if judges_draws or not rescored.temperature else 0.0
    return max(of_draw, rescored.mask_gaps[i]) if rescored.mask_gaps else of_draw


def _scale(temperature: float) -> float:
    return min(1.0, temperature) if temperature else 1.0


def _wild_token(
    rescored: Rescored, i: int, difference: float, gap: float, tolerance: Tolerance
) -> VerificationResult | None:
    """Return a result if rounding cannot explain the token, otherwise None. NaN exceeds every tolerance."""
    where = f"trajectory {rescored.name}: token {rescored.places[i]} (id {rescored.token_ids[i]}) under version "
    where += str(rescored.version)
    test: Test
    # `not … <=` instead of `>`, so that NaN fails the test
    if not difference <= tolerance.wild * tolerance.logprob:
        test = "logprob"
        said = (
            f"was reported with the logprob {rescored.behavior_logprobs[i]:.6g}, but has {rescored.logprobs[i]:.6g}; "
            f"tolerance {tolerance.logprob:.2g}"
        )
    elif not gap <= tolerance.wild * tolerance.draw_gap:
        test = "draw"
        is_of_mask = bool(rescored.mask_gaps) and gap == _scale(rescored.temperature) * rescored.mask_gaps[i]
        what = "sampling mask of top-k and top-p" if is_of_mask else "token that its draw selects"
        said = f"is {gap:.3g} nats away from the {what}; tolerance {tolerance.draw_gap:.2g}"
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

    This is the Chernoff bound exp(−n · KL(beyond / n ‖ share)), or 1 if `beyond` does not exceed the mean n · share.
    """
    if not num_tokens or beyond <= share * num_tokens:
        return 1.0
    seen = beyond / num_tokens
    rest = (1 - seen) * math.log((1 - seen) / (1 - share)) if seen < 1 else 0.0
    return max(math.exp(-num_tokens * (seen * math.log(seen / share) + rest)), 1e-300)


@dataclass(slots=True)
class _Seen:
    """Statistics of the rescored tokens of all trusted workers of one class: a sample of the values, and sums over all
    tokens."""

    differences: list[float] = field(default_factory=list)
    """Values of |behavior − rescored logprob|, in nats, for a uniform sample of the tokens."""
    gaps: list[float] = field(default_factory=list)
    """Draw gaps, in nats, of the tokens of `differences`."""
    num_tokens: int = 0
    sum_mismatch: float = 0.0
    """Σ (e^r − 1 − r) over tokens, with r = rescored − behavior logprob. Divided by the number of tokens, it is an
    estimate of KL(behavior ‖ rescored) that is never negative."""


class Calibration:
    """Estimates the tolerances of worker classes from the trajectories of trusted workers."""

    def __init__(self, *, max_mismatch_kl: float = 1e-2, min_tokens: int = 4000, sample: int = 20_000) -> None:
        """`min_tokens`: observed tokens before a class is calibrated. `sample`: maximum number of values per class."""
        self._max_mismatch_kl, self._min_tokens, self._sample = max_mismatch_kl, min_tokens, sample
        self._seen: dict[WorkerClass, _Seen] = {}
        self._random = random.Random(0)

    def observe(
        self, worker_class: WorkerClass, scores: Iterable[Rescored], *, first: int = 0, end: float = math.inf
    ) -> None:
        """Add the rescored tokens of a trusted worker at the positions `first` … `end` − 1."""
        seen = self._seen.setdefault(worker_class, _Seen())
        judges_draws = worker_class.engine not in OWN_NOISE
        for rescored, i, difference, gap in _deviations(scores, first, end, judges_draws=judges_draws):
            ratio = rescored.logprobs[i] - rescored.behavior_logprobs[i]
            seen.sum_mismatch += math.expm1(min(ratio, 50.0)) - ratio
            seen.num_tokens += 1
            self._keep(seen, difference, gap)

    def _keep(self, seen: _Seen, difference: float, gap: float) -> None:
        # reservoir sampling: every observed token is in the sample with the same probability
        if len(seen.differences) < self._sample:
            seen.differences.append(difference)
            seen.gaps.append(gap)
        elif (place := self._random.randrange(seen.num_tokens)) < self._sample:
            seen.differences[place], seen.gaps[place] = difference, gap

    def tolerance(self, worker_class: WorkerClass) -> Tolerance:
        """Return the tolerance of a class of workers. Until `min_tokens` tokens of the class have been observed, the
        default for the class's dtype is returned.

        Afterwards, `logprob` and `draw_gap` are computed from the observed values: each is the product of `HEADROOM`
        and the (1 − `beyond`) quantile. They differ from the default at most by the factor `_MAX_FACTOR`. A draw gap
        compares two numbers (for greedy decoding, two logits), and rounding may move these in opposite directions.
        Therefore `draw_gap` is at least twice `logprob`.
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
        return self._seen[worker_class].num_tokens if worker_class in self._seen else 0

    def mismatch_kl(self, worker_class: WorkerClass) -> float | None:
        """Return the estimate of KL(behavior ‖ rescored) in nats per token, or None if no token of the class has been
        observed. Both logprobs of a token are of the same policy version, so the staleness is 0."""
        seen = self._seen.get(worker_class)
        return seen.sum_mismatch / seen.num_tokens if seen is not None and seen.num_tokens else None

    def refusal(self, worker_class: WorkerClass) -> str | None:
        """Return the reason why a class of workers is refused, or None if it is accepted. A class is refused if, with
        the same weights, the policy of its trusted workers differs too much from the trainer's policy."""
        mismatch = self.mismatch_kl(worker_class)
        if mismatch is None or self.num_tokens(worker_class) < self._min_tokens or mismatch <= self._max_mismatch_kl:
            return None
        return (
            f"workers of the class {worker_class} are not admitted: at staleness 0 their mismatch KL is {mismatch:.2g} "
            f"nats per token; allowed is {self._max_mismatch_kl:.2g}"
        )


def unseen_draws(worker_class: WorkerClass, kind: str) -> str | None:
    """Return the reason why untrusted workers of a class are refused, or None if they are accepted. Untrusted workers
    are refused if the sampling of their engine cannot be checked.

    `kind`: the recipe's `engine.kind`. Workers with an engine of this kind are accepted even if its sampling cannot be
    checked.
    """
    if worker_class.engine not in OWN_NOISE or worker_class.engine == kind:
        return None
    return (
        f"the draws of the engine {worker_class.engine} cannot be checked: only trusted workers may use it (baton "
        f'token create --role worker --trusted), unless the recipe has engine.kind = "{worker_class.engine}"'
    )


def _near(value: float, default: float) -> float:
    # limited, so that no outlier and no faulty class makes a tolerance useless
    return min(max(value, default / _MAX_FACTOR), default * _MAX_FACTOR)
