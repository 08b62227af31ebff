"""The seam between the loop and whatever updates the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.types import Batch, PolicyVersion


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """One published version."""

    version: PolicyVersion
    tensors: Mapping[str, Any]
    """Parameter name → tensor, as `state_dict` names them, or an adapter's pairs (`policy/adapters.py`); detached, and
    not changed by later train steps."""


class Trainer(Protocol):
    """Makes version v+1 from version v and a batch."""

    @property
    def version(self) -> PolicyVersion:
        """The weights as they are now."""
        ...

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step, return its metrics by name. Raises TrainingDiverged, leaving the weights as they were."""
        ...

    def publish(self) -> PublishedWeights:
        """Return the current weights for engines to load."""
        ...

    def save(self, directory: Path) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads, with what a resume needs beside it."""
        ...

    def restore(self, directory: Path) -> None:
        """Continue from what `save` wrote. Raises UserError when it does not fit this trainer."""
        ...

    def close(self) -> None:
        """End what was started for this trainer. May be called twice."""
        ...
