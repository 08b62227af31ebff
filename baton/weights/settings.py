"""The recipe section for publishing policy versions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.policy.settings import DTypeName
from baton.settings import Settings

PublishDtype = Literal["auto", "float32", "bfloat16"]


class WeightsSettings(Settings):
    """[weights] how policy versions are published."""

    dtype: PublishDtype = "auto"
    """Dtype of published weights, which every engine loads, also in the trainer's process: "float32", "bfloat16", or
    "auto" for the engine's dtype. Weights are rounded once, before the digest of the version is computed."""
    keyframe_every: int = Field(default=10, ge=1)
    """Publish every this many versions also whole, as a keyframe; the others only as a delta to the version before."""
    chunk_mb: float = Field(default=16.0, ge=2**-10, le=64.0)
    """Maximum size of a chunk, MiB. A chunk is verified, and fetched again, as one piece."""
    store: str | None = None
    """Storage of chunks and manifests: a directory, or the URL of a bucket (fsspec: "s3://…"). Each run needs its own;
    the default is the run's directory."""
    keep: int = Field(default=20, ge=1)
    """Recent versions always retained; an older one is deleted once no worker has it or needs it."""

    def published_in(self, engine_dtype: DTypeName) -> DTypeName:
        """Return the dtype of published versions for engines of this dtype."""
        return engine_dtype if self.dtype == "auto" else self.dtype

    @property
    def chunk_bytes(self) -> int:
        """`chunk_mb` in bytes."""
        return int(self.chunk_mb * 2**20)
