"""Warnings about metrics that indicate unsound training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from baton.errors import Suspect
from baton.trainer.algorithm import AlgorithmSettings
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


MAX_SUSPECTS = 20
"""Maximum number of trajectories that an error names; more would not fit into `MAX_TEXT`."""
RowMismatch = tuple[Suspect, float, float, float]
"""(worst token, `current`, `mismatch`, `max_diff`) of a row; the numbers are those of `BehaviorDistance`."""


def excessive_mismatch(rows: Sequence[RowMismatch], settings: TrainerSettings, *, has_agreed: bool) -> str | None:
    """Return an error message if the logprobs of engine and trainer differ by more than the error limits in `settings`,
    else None. The message names the trajectories without which the limits hold (`TrainingDiverged.suspects`). It names
    none if these are all rows and `has_agreed` is False (engine and trainer have not agreed in an earlier step)."""
    if not rows:
        return None
    current, mismatch = sum(row[1] for row in rows), sum(row[2] for row in rows)
    kl_limit, diff_limit = settings.max_mismatch_kl[1], settings.max_logprob_diff[1]
    for key, value, unit, limit in (
        ("mismatch_kl", mismatch / current, "nats per token", kl_limit),
        ("logprob_diff", max(row[3] for row in rows), "nats", diff_limit),
    ):
        if value > limit:
            suspects = []
            # first the rows above `diff_limit`, which are always named, then those whose removal lowers the mean most
            ordered = sorted(rows, key=lambda row: (row[3] <= diff_limit, kl_limit * row[1] - row[2]))
            for worst, own_current, own_mismatch, max_diff in ordered:
                if max_diff > diff_limit or mismatch > kl_limit * current:
                    suspects.append(worst)
                    current, mismatch = current - own_current, mismatch - own_mismatch
            named = has_agreed or len(suspects) < len(rows)
            of = f", because of trajectory {', '.join(map(str, suspects[:MAX_SUSPECTS]))}" if named else ""
            return (
                f"the {key.replace('_', ' ')} of engine and trainer is {value:.3g} {unit}, above the limit "
                f"trainer.max_{key} = {limit:g}{of}: {CAUSE}, or check that the engine serves the published weights"
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
