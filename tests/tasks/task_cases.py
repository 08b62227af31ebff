"""Tasks that several test files open."""

from __future__ import annotations

from typing import Any

from baton.tasks.stream import AnswerSettings, TaskMixture, TaskSettings

FOUR: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "countdown": {"min_numbers": 3, "max_numbers": 3, "max_value": 9, "max_target": 30, "min_target": 10},
    "knights_knaves": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
}
"""The four tasks of the recipes, so small that problems repeat."""


def mixture(*names: str, form: str = "compact") -> TaskMixture:
    """A mixture of some of `FOUR`."""
    settings = [TaskSettings(name=name, params=FOUR[name], form=form) for name in names]  # type: ignore[arg-type]
    return TaskMixture(settings, AnswerSettings())
