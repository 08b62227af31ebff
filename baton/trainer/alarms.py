"""Warnings about metrics that indicate unsound training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from baton.trainer.algorithm import AlgorithmSettings

logger = logging.getLogger(__name__)

MAX_MISMATCH_KL = 0.01
"""Maximum mismatch between engine and trainer at equal weights, in nats per token. Typical values: 1e-9 in float32 on a
CPU, 1e-4 with bfloat16 engines."""
MIN_ESS = 0.5
"""Minimum effective sample size, as a fraction of the trained tokens."""
MAX_MASKED_FRAC = 0.5
"""Maximum fraction of tokens that are too old to be trained."""


class Alarms:
    """Logs one warning each time a metric crosses its threshold."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self._correction = algorithm.correction
        self._is_on: set[str] = set()

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of one train step."""
        checks: dict[str, tuple[Callable[[float], bool], str]] = {
            "policy/mismatch_kl": (
                lambda value: value > MAX_MISMATCH_KL,
                f"policy/mismatch_kl is {{:.3g}} nats per token, above {MAX_MISMATCH_KL}: engine and trainer compute "
                "different logprobs from equal weights; to find the cause, compute both in float32 (engine.dtype, "
                "trainer.dtype)",
            ),
            "policy/ess": (
                lambda value: value < MIN_ESS,
                f"policy/ess is {{:.2f}}, below {MIN_ESS}: the policy is so far from the one that sampled this batch "
                f"that only this fraction of the tokens is effective (algorithm.correction = {self._correction!r}); "
                "lower rollout.max_staleness or the learning rate",
            ),
            "staleness/masked_frac": (
                lambda value: value > MAX_MASKED_FRAC,
                f"staleness/masked_frac is {{:.2f}}, above {MAX_MASKED_FRAC}: most tokens are too old to be trained; "
                "raise rollout.max_staleness or lower rollout.overprovision",
            ),
        }
        for name, (is_bad, sentence) in checks.items():
            value = metrics.get(name)
            if value is None or not is_bad(value):
                self._is_on.discard(name)
            elif name not in self._is_on:
                self._is_on.add(name)
                logger.warning(sentence.format(value))
