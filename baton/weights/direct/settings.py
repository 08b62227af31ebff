"""How direct transfers reach an engine."""

from __future__ import annotations

from typing import Literal

DirectBackend = Literal["gloo", "nccl", "ipc", "sparse_gloo", "sparse_nccl"]
"""`gloo`: from host memory to host memory. `nccl`: from GPU to GPU. `ipc`: between processes on the same GPU.
`sparse_…`: an engine that has the previous version receives only the elements that changed."""
