"""Decode steps as CUDA graphs: one launch replaces the hundreds of kernel launches of a step.

A graph belongs to one width and one number of scanned positions, the fixed shapes of decode (`network.py`). It is
captured at the first use of a shape, on the inputs of that step, and its result is compared with the step's own: a
shape whose bits differ runs without a graph. The graph owns its input buffers, and the next step overwrites its output.
`release` must be called before the memory that graphs read is freed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.errors import first_line

logger = logging.getLogger(__name__)
Step = Callable[[Tensor, Tensor, int], Tensor]
"""(ids [W], positions [W], scanned positions) → logits [W, V]."""
_WARM_UPS = 2
"""Steps before a capture: the first one selects kernels and allocates workspaces, which a capture cannot do."""


Captured = Callable[[Tensor, Tensor], Tensor]
"""A captured step: (ids [W], positions [W]) → logits [W, V], which the next run overwrites."""
Capture = Callable[[Step, Tensor, Tensor, int], Captured]


class GraphedSteps:
    """A `Step` that uses graphs for the shapes in which they compute identical bits."""

    def __init__(self, step: Step, make_capture: Callable[[], Capture]) -> None:
        self._step, self._make_capture = step, make_capture
        self._capture = make_capture()
        self._captured: dict[tuple[int, int], Captured | None] = {}
        """By (width, scanned positions); None for a shape that runs without a graph."""

    def __call__(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        """Run a decode step; capture it at the first use of its shape."""
        shape = (len(ids_W), kv_length)
        if shape not in self._captured:
            logits_WV = self._step(ids_W, position_W, kv_length).clone()
            self._captured[shape] = self._proven(ids_W, position_W, kv_length, logits_WV)
            return logits_WV
        captured = self._captured[shape]
        return self._step(ids_W, position_W, kv_length) if captured is None else captured(ids_W, position_W)

    def release(self) -> None:
        """Free all graphs and their memory."""
        self._captured.clear()
        self._capture = self._make_capture()  # a new pool: the old one is freed with its last graph

    def _proven(self, ids_W: Tensor, position_W: Tensor, kv_length: int, expected_WV: Tensor) -> Captured | None:
        """Capture a step; return None if that fails or its bits differ.

        The capture runs the step again, which is harmless: it writes the same keys and values to the same positions.
        """
        what = f"decode of {len(ids_W)} rows over {kv_length} positions goes without a CUDA graph"
        try:
            captured = self._capture(self._step, ids_W, position_W, kv_length)
            same = torch.equal(captured(ids_W, position_W), expected_WV)
        except RuntimeError as error:
            logger.warning("%s: %s", what, first_line(error))
            return None
        if not same:
            logger.warning("%s: its bits differ", what)
        return captured if same else None


class CudaCapture:
    """Captures steps on a CUDA device. Its graphs share one memory pool, since they never run concurrently."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Step, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Captured:
        ids, positions = ids_W.clone(), position_W.clone()
        stream = torch.cuda.Stream(ids.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step(ids, positions, kv_length)
        torch.cuda.current_stream(ids.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool):
            logits = step(ids, positions, kv_length)
        self._pool = graph.pool()

        def run(ids_W: Tensor, position_W: Tensor) -> Tensor:
            with torch.inference_mode():
                ids.copy_(ids_W)
                positions.copy_(position_W)
            graph.replay()
            return logits

        return run
