"""The interface between the training loop and the trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.types import Batch, PolicyVersion


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A policy version and its tensors."""

    version: PolicyVersion
    tensors: Mapping[str, Any]
    """Name → detached tensor. Names are those of `state_dict`, or for adapters those of their pairs of matrices
    (`policy/adapters.py`). Later train steps do not change these tensors."""

    @classmethod
    def of_file(cls, version: PolicyVersion, path: Path) -> PublishedWeights:
        """Map the tensors of a safetensors file. Mapped memory stays valid when the file is deleted."""
        from safetensors.torch import load_file  # imports torch, which a simulation does not need

        return cls(version, load_file(path))


class Trainer(Protocol):
    """Computes policy version v + 1 from version v and a batch."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the current weights. Its digest is empty until they are published or saved."""
        ...

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step and return its metrics by name. Raises TrainingDiverged before an update whose loss or
        gradient is not finite. After an earlier update of the step, only `restore` may follow."""
        ...

    def publish(self) -> PublishedWeights:
        """Return a copy of the current weights for engines to load."""
        ...

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `AutoModelForCausalLM.from_pretrained` loads, with the state to resume from."""
        ...

    def restore(self, directory: Path) -> None:
        """Load a checkpoint that `save` wrote. Raises UserError if it does not fit this trainer."""
        ...

    def close(self) -> None:
        """Release processes and other resources of this trainer. Idempotent."""
        ...
