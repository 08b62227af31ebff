"""Warnings about metrics that indicate unsound training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.corrections import BehaviorDistance
from baton.trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

MIN_ESS = 0.5
"""The run warns if the ratio of the effective sample size to the number of trained tokens is below this number."""
MAX_MASKED_FRAC = 0.5
"""The run warns if more than this fraction of the tokens is too old to be trained."""


CAUSE = (
    "engine and trainer compute different logprobs from equal weights; to find the cause, compute both in float32 "
    "(engine.dtype, trainer.dtype)"
)


def excessive_mismatch(found: BehaviorDistance[float], settings: TrainerSettings) -> str | None:
    """Return an error message if the logprobs of engine and trainer differ by more than the error limits in `settings`,
    else None."""
    if not found.current:
        return None
    for key, value, unit, limit in (
        ("mismatch_kl", found.mismatch / found.current, "nats per token", settings.max_mismatch_kl[1]),
        ("logprob_diff", found.max_diff, "nats", settings.max_logprob_diff[1]),
    ):
        if value > limit:
            return (
                f"the {key.replace('_', ' ')} of engine and trainer is {value:.3g} {unit}, above the limit "
                f"trainer.max_{key} = {limit:g}: {CAUSE}, or check that the engine serves the published weights"
            )
    return None


class Alarms:
    """Logs one warning each time a metric crosses its threshold."""

    def __init__(self, algorithm: AlgorithmSettings, settings: TrainerSettings) -> None:
        self._correction, self._settings = algorithm.correction, settings
        self._is_on: set[str] = set()

    def watch(self, metrics: Mapping[str, float]) -> None:
        kl_limit, diff_limit = self._settings.max_mismatch_kl[0], self._settings.max_logprob_diff[0]
        checks: dict[str, tuple[Callable[[float], bool], str]] = {
            "policy/mismatch_kl": (
                lambda value: value > kl_limit,
                f"policy/mismatch_kl is {{:.3g}} nats per token, above {kl_limit:g}: {CAUSE}",
            ),
            "policy/logprob_diff_max": (
                lambda value: value > diff_limit,
                f"policy/logprob_diff_max is {{:.3g}} nats, above {diff_limit:g}: {CAUSE}",
            ),
            "policy/ess": (
                lambda value: value < MIN_ESS,
                f"policy/ess (effective sample size per trained token) is {{:.2f}}, below {MIN_ESS}: the policy "
                "differs too much from the policy that sampled this batch (algorithm.correction = "
                f"{self._correction!r}); lower rollout.max_staleness or the learning rate",
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
