"""How direct transfers reach an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DirectTransfer:
    """How versions are transferred from the trainer's memory to an engine."""

    backend: Literal["gloo", "nccl", "ipc"]
    """`gloo`: from host memory to host memory. `nccl`: from GPU to GPU. `ipc`: between processes on the same GPU."""
    is_sparse: bool = False
    """Whether an engine that has the previous version receives only the elements that changed."""
    gpu: int | None = None
    """Index of the trainer's GPU among the visible GPUs; None on a CPU."""
    source: Any = None
    """The ranks that send the tensors (`RemoteSource`); None if the trainer is in this process."""
    versions: Any = None
    """The object that sends each version to all replicas of a run (`DirectVersions`); None if the run has one
    engine."""
    host: str = "127.0.0.1"
    """Address at which the engines reach the trainer."""
    is_remote: bool = False
    """True if another process, not the engine's own, sends the versions and calls the transfer methods of vLLM's
    workers."""
    replica: str = "the vLLM engine"
    """Name of the engine in transfers and messages."""
