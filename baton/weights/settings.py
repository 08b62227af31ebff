"""[weights] how policy versions travel from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.policy.settings import DTypeName
from baton.settings import Settings

PublishDtype = Literal["auto", "float32", "bfloat16"]


class WeightsSettings(Settings):
    """[weights] how policy versions are published."""

    dtype: PublishDtype = "auto"
    """Dtype in which weights are published and which every engine loads, in the trainer's process or elsewhere: "auto"
    is that of the engine, "float32" or "bfloat16". Rounding happens once, before the version gets its digest."""
    keyframe_every: int = Field(default=10, ge=1)
    """A version in so many can also be had whole, without the one before it; the others as a difference alone."""
    chunk_mb: float = Field(default=16.0, ge=2**-10, le=64.0)
    """Largest chunk, in MiB: what is verified and fetched again as one piece."""
    store: str | None = None
    """Where chunks and manifests lie: a directory, or a bucket by its URL (fsspec: "s3://…"). One run each; without it
    the run's own directory."""
    keep: int = Field(default=20, ge=1)
    """Latest versions that can be had whatever the workers hold; an older one goes once nobody has or wants it."""

    def published_in(self, engine_dtype: DTypeName) -> DTypeName:
        """The dtype that versions are published in, for engines of a dtype."""
        return engine_dtype if self.dtype == "auto" else self.dtype

    @property
    def chunk_bytes(self) -> int:
        """`chunk_mb` in bytes."""
        return int(self.chunk_mb * 2**20)
