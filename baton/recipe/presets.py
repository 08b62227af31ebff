"""List the algorithm presets with their papers, for `baton algorithms`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from baton.errors import UserError, nearest
from baton.trainer.algorithm import PRESETS, AlgorithmSettings


class Algorithm(msgspec.Struct, frozen=True):
    """An algorithm preset as `baton algorithms` prints it."""

    name: str
    paper: str
    """arXiv id of the paper."""
    idea: str
    updates: str
    """Optimiser updates per batch in the paper."""
    sets: dict[str, Any]
    """Keys of [algorithm] whose values differ from the defaults, with these values."""
    rollout: dict[str, Any]
    """Keys of [rollout] that the preset sets, with their values."""
    all: dict[str, Any]
    """All keys of [algorithm], with their values under this preset."""


def list_algorithms(name: str | None = None) -> list[Algorithm]:
    """Return all presets, or only the preset with this name. Raises UserError for an unknown name."""
    if name is not None and name not in PRESETS:
        hint = nearest(name, PRESETS, f"there are {', '.join(PRESETS)}")
        raise UserError(f"there is no algorithm {name!r}; {hint}")
    return [
        Algorithm(name=each, all=AlgorithmSettings(name=each).model_dump(mode="json"), **asdict(preset))
        for each, preset in PRESETS.items()
        if name in (None, each)
    ]
