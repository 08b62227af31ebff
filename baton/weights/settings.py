"""The recipe section for publishing policy versions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from baton.errors import UserError
from baton.policy.settings import DTypeChoice, DTypeName
from baton.settings import Settings


class WeightsSettings(Settings):
    """[weights] Publication of policy versions."""

    transport: Literal["store", "direct", "sparse"] = "store"
    """How a version is sent to the engines. `store`: as files, on this machine or in `weights.store`. `direct`: from
    the trainer's memory into the engine's memory, without files; requires engines of kind `vllm` that the run itself
    starts. On a CPU, `direct` uses gloo. On GPUs, `direct` uses vLLM's own transfer engines; this code has never been
    run. `sparse`: like `direct`, but an engine receives only the elements that differ from the version that it serves.
    With `sparse`, the trainer keeps a copy of the served version. `sparse` is refused for models with experts, and for
    quantised engines."""
    dtype: DTypeChoice = "auto"
    """Dtype of published weights: "float32", "bfloat16", or "auto" for the engine's dtype. Weights are rounded to this
    dtype once, before their digest is computed. All engines load the rounded weights, including an engine in the
    trainer's process."""
    keyframe_every: int = Field(default=10, ge=1)
    """Number of versions from one keyframe to the next. A keyframe is published as a whole, in addition to its delta.
    Any other version is published as a delta to the previous version. If this delta is longer than half of the version,
    the version is published as a whole too."""
    chunk_mb: float = Field(default=16.0, ge=2**-10, le=64.0)
    """Maximum size of a chunk in MiB. A chunk is fetched and verified as one unit."""
    store: str | None = None
    """Storage of chunks and manifests: a directory, or the URL of a bucket in fsspec's form ("s3://…"). Two runs must
    not use the same storage. The default is the run's directory."""
    files: str | None = None
    """Directory for the files of versions, from which processes on this machine map the weights. The directory must
    exist. Its file system needs space for three versions. In a swarm, it also needs space for the versions with which
    the hub verifies workers' tokens. The default is the run's directory. "/dev/shm" keeps the files in memory."""
    keep: int = Field(default=20, ge=1)
    """Number of recent versions that are retained. An older version is deleted when no worker has or needs it."""

    def published_in(self, engine_dtype: DTypeChoice) -> DTypeName:
        """Return the dtype of published versions: `dtype` or, if `dtype` is "auto", the dtype in which engines compute
        (`engine_dtype`). The result must not be "auto"."""
        found = engine_dtype if self.dtype == "auto" else self.dtype
        assert found != "auto", "the start of a run replaces the dtype auto"
        return found

    def files_in(self, run: Path) -> Path:
        """Return the directory for the files of versions. Raises UserError if the directory does not exist."""
        directory = run if self.files is None else Path(self.files)
        if not directory.is_dir():
            raise UserError(f"weights.files: {directory} is not a directory; create it, or remove the key")
        return directory

    @property
    def chunk_bytes(self) -> int:
        return int(self.chunk_mb * 2**20)
