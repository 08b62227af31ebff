"""How direct transfers reach an engine."""

from __future__ import annotations

from typing import Literal

DirectBackend = Literal["gloo", "nccl", "ipc"]
"""`gloo`: from host memory to host memory. `nccl`: from GPU to GPU. `ipc`: between processes on the same GPU."""
