"""What runs inside vLLM's own worker processes: weights are taken from a file in memory, in place.

vLLM adds this class to its worker (`worker_extension_cls`). Imported there, where nothing else of Baton is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open


class TakesWeights:
    """Loads published tensors into the running model."""

    model_runner: Any
    """The worker's own."""

    def take_weights(self, path: str) -> int:
        """Copy the tensors of a safetensors file into the model; return how many were taken.

        Each rank reads the whole file and keeps its shard. vLLM fuses, casts and lays out the weights anew.
        """
        taken = 0

        def tensors() -> Iterator[tuple[str, Any]]:
            nonlocal taken
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    taken += 1
                    yield name, file.get_tensor(name)

        self.model_runner.reload_weights(weights_iterator=tensors())
        return taken
