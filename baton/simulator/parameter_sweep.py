"""Simulates a run under many settings. The result is a table of all settings, and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product

import msgspec

from baton.errors import UserError
from baton.rollout.settings import RolloutSettings
from baton.simulator.clock import NoProgress
from baton.simulator.input_sources import SettingSource, SimulationOptions, read_overrides
from baton.simulator.result import Result, summarise
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions

MOST_POINTS = 400
MAX_MASKED = 0.1
"""Maximum share of a batch's tokens that a recommended setting may mask as stale."""
CLOSE = 0.02
"""Throughputs count as equal if their relative difference is below this value. Of settings with equal throughput, the
setting with the least staleness is recommended."""


class SweepAxis(msgspec.Struct, frozen=True):
    """A key of [rollout] and the values to simulate."""

    key: str
    values: tuple[str, ...]


class SweepPoint(msgspec.Struct, frozen=True):
    """One combination of values and its result."""

    values: dict[str, str]
    result: Result | None
    why_not: str = ""
    """Reason why the combination was not simulated; empty if it was simulated."""


class ParameterSweep(msgspec.Struct, frozen=True):
    """Results of all combinations, and the recommended combination."""

    axes: tuple[SweepAxis, ...]
    points: tuple[SweepPoint, ...]
    recommended: int | None
    """Index of the recommended point; None if no point is recommended."""
    why: str


def read_axes(texts: Iterable[str]) -> tuple[SweepAxis, ...]:
    """Parse texts of the form `key=a,b,c`. Raises UserError for an invalid text and for too many combinations."""
    axes = list[SweepAxis]()
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("rollout.")
        found = tuple(value.strip() for value in values.split(",") if value.strip())
        if not equals or not found:
            raise UserError(f"--sweep {text!r}: allowed is key=value,value,… such as max_staleness=0,1,2,4")
        if key not in RolloutSettings.model_fields:
            raise UserError(
                f"--sweep {text!r}: unknown key {key!r}; allowed are {', '.join(RolloutSettings.model_fields)}"
            )
        if key in {axis.key for axis in axes}:
            raise UserError(f"--sweep {text!r}: got {key} twice; give all its values once, as {key}=value,value,…")
        axes.append(SweepAxis(key, found))
    if not axes:
        raise UserError("--sweep needs at least one key=value,value,…")
    total = math.prod(len(axis.values) for axis in axes)
    if total > MOST_POINTS:
        raise UserError(f"--sweep: got {total} combinations of values, allowed are at most {MOST_POINTS}")
    return tuple(axes)


def sweep(
    source: SettingSource, simulation_options: SimulationOptions, axes: Sequence[SweepAxis], options: RunOptions
) -> ParameterSweep:
    """Simulate every combination of values. Raises UserError if every combination fails for the same reason."""
    points = []
    for values in product(*(axis.values for axis in axes)):
        chosen = {axis.key: value for axis, value in zip(axes, values, strict=True)}
        points.append(_point(source, simulation_options, chosen, options))
    reasons = {point.why_not for point in points}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise UserError(f"no combination of values can be simulated: {reason}")
    place, why = recommend(points)
    return ParameterSweep(tuple(axes), tuple(points), place, why)


def _point(
    source: SettingSource, simulation_options: SimulationOptions, chosen: dict[str, str], options: RunOptions
) -> SweepPoint:
    overrides = [f"rollout.{key}={value}" for key, value in chosen.items()]
    given = {key.removeprefix("rollout.") for key in read_overrides(simulation_options.overrides)} | set(chosen)
    if "overprovision" in chosen and "mode" not in given:
        overrides.append("rollout.mode=partial")
    try:
        setting = source.setting(simulation_options.also(overrides))
        return SweepPoint(chosen, summarise(setting, simulate(setting, options)))
    except (UserError, NoProgress) as error:
        return SweepPoint(chosen, None, str(error).splitlines()[0])


def recommend(points: Sequence[SweepPoint]) -> tuple[int | None, str]:
    """Return the index of the recommended point, and the reason for the recommendation.

    Points that mask more than MAX_MASKED of their tokens are excluded, unless every point exceeds this share. Of the
    remaining points that have almost the highest throughput (see `CLOSE`), the point with the least staleness is
    recommended.
    """
    run = [(place, point.result) for place, point in enumerate(points) if point.result is not None]
    if not run:
        return None, "no combination of values can be simulated"
    useful = [(place, result) for place, result in run if result.masked_share <= MAX_MASKED]
    note = ""
    if not useful:
        useful, note = run, f"; every setting masks more than {MAX_MASKED:.0%} of its tokens"
    best = max(result.trained_tokens_per_s for _, result in useful)
    near = [(place, result) for place, result in useful if result.trained_tokens_per_s >= (1 - CLOSE) * best]
    place, result = min(near, key=lambda one: (one[1].mean_staleness, -one[1].trained_tokens_per_s))
    why = (
        f"{result.trained_tokens_per_s:,.0f} trained tokens/s, within {CLOSE:.0%} of the fastest, at the least "
        f"staleness ({result.mean_staleness:.2f} versions on average){note}"
    )
    return place, why
