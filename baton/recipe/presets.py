"""The algorithm presets with their papers, as `baton algorithms` shows them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import msgspec

from baton.errors import UserError
from baton.trainer.algorithm import PRESETS, AlgorithmSettings


class Algorithm(msgspec.Struct, frozen=True):
    """One preset, for people and for scripts."""

    name: str
    paper: str
    """arXiv id."""
    idea: str
    updates: str
    """What its paper says of optimiser updates per batch."""
    sets: dict[str, Any]
    """Keys of [algorithm] whose values are not the defaults."""
    rollout: dict[str, Any]
    """Keys of [rollout] that the preset sets."""
    all: dict[str, Any]
    """Every key of [algorithm]."""


def list_algorithms(name: str | None = None) -> list[Algorithm]:
    """Return the presets, or the one of this name. Raises UserError, naming the nearest, for an unknown one."""
    if name is not None and name not in PRESETS:
        near = get_close_matches(name, list(PRESETS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PRESETS)}"
        raise UserError(f"there is no algorithm {name!r}; {hint}")
    return [
        Algorithm(
            name=each,
            paper=preset.paper,
            idea=preset.idea,
            updates=preset.updates,
            sets=dict(preset.sets),
            rollout=dict(preset.rollout),
            all=AlgorithmSettings(name=each).model_dump(mode="json"),
        )
        for each, preset in PRESETS.items()
        if name in (None, each)
    ]
