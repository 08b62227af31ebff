"""The interface between the loop over train steps and the trainers.

trainer.start(batch) ──▶ Pending ── wait(timeout_s), while the controller receives reports
                                 └─ result() ──▶ metrics
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.types import Batch, PolicyVersion


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A policy version and its tensors."""

    version: PolicyVersion
    tensors: Mapping[str, Any]
    """Name → detached tensor. The names are those in `state_dict` or, for adapters, the names of their matrices
    (`policy/adapters.py`). Later train steps do not change these tensors."""

    @classmethod
    def of_file(cls, version: PolicyVersion, path: Path, digests: Mapping[str, str]) -> PublishedWeights:
        """Map the tensors of a safetensors file. The file is deleted when the tensors are freed. If a publisher on this
        machine has adopted the file (`VersionFiles.adopt`), its data remains under the publisher's hard link.
        `digests`: name → digest of the tensor, as the writer of the file has computed it."""
        from baton.weights.version_files import TensorsOfFile  # imports torch, which a simulation does not need

        return cls(version, TensorsOfFile(path, digests))


def new_version_path(directory: Path, version: PolicyVersion) -> Path:
    """Return a path at which the weights of a version can be written. Each call returns another path, even for the same
    version."""
    return directory / f"{version.lineage}-{version.number}-{secrets.token_hex(4)}.safetensors"


class Pending(Protocol):
    """A train step that has been started."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of the step. Return whether the step has ended."""

    def result(self) -> dict[str, float]:
        """Wait for the end of the step, and return its metrics by name. Raises the error that ended the step."""

    def close(self) -> None:
        """Wait until the step no longer uses the trainer, even if the step has failed."""


class StepTrainer(Protocol):
    """The part of a trainer that the loop over train steps uses. The simulator has its own implementation."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the current weights. Its digest is empty until the weights are published or saved."""

    def start(self, batch: Batch, *, in_background: bool) -> Pending:
        """Start one train step, which produces the next version. `in_background`: return before the end of the step; if
        False, this method may run the whole step. Raises the errors of the step."""

    def publish(self) -> PublishedWeights:
        """Return a copy of the current weights for engines to load."""


class Trainer(StepTrainer, Protocol):
    """Computes policy version v + 1 from version v and a batch."""

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step and return its metrics by name.

        Raises TrainingDiverged before an update whose loss or gradient is not finite, or if the mismatch of engine and
        trainer exceeds its error limit. Raises UserError for a group that is too small for the algorithm, and
        EngineFault for a logprob that is not finite. If the step failed after its first update, the next call must be
        `restore`.
        """

    def start(self, batch: Batch, *, in_background: bool) -> Pending:
        """Run one train step, in a new thread if `in_background`."""
        return _StartedStep(lambda: self.step(batch), in_background=in_background)

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `AutoModelForCausalLM.from_pretrained` loads, with the state to resume from."""

    def restore(self, directory: Path) -> None:
        """Load a checkpoint that `save` wrote. Raises UserError if the checkpoint does not fit this trainer."""

    def close(self) -> None:
        """Release processes and other resources of this trainer. Idempotent."""


class _StartedStep(Pending):
    """Runs a train step. With `in_background`, the step runs in a new thread, which ends with the step. The OpenMP
    threads that torch starts for this thread then end too."""

    def __init__(self, step: Callable[[], dict[str, float]], *, in_background: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "trainer")
        self._future: Future[dict[str, float]] = Future()
        if in_background:
            self._future = self._executor.submit(step)
        else:
            self._future.set_result(step())

    def wait(self, timeout_s: float) -> bool:
        return bool(wait([self._future], timeout_s).done)

    def result(self) -> dict[str, float]:
        return self._future.result()

    def close(self) -> None:
        self._executor.shutdown()
