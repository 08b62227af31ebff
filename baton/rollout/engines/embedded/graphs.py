"""Decode steps as CUDA graphs: one launch replaces hundreds of kernel launches per step.

Each graph belongs to one shape: a width and a number of scanned positions (`network.py`). At the first use of a shape
the step runs without a graph, a graph is captured with the same inputs, and the logits of both are compared. A shape
runs without a graph if any bit differs. A graph owns its input buffers, and the next run of the graph overwrites the
logits. Call `release` before freeing memory that graphs read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.errors import first_line

logger = logging.getLogger(__name__)
Step = Callable[[Tensor, Tensor, int], Tensor]
"""(ids [W], positions [W], scanned positions) → logits [W, V]."""
_WARM_UPS = 2
"""Number of steps before a capture, to select kernels and allocate workspaces, which a capture cannot do."""


Captured = Callable[[Tensor, Tensor], Tensor]
"""A captured step: (ids [W], positions [W]) → logits [W, V]. The next run overwrites the logits."""
Capture = Callable[[Step, Tensor, Tensor, int], Captured]


class GraphedSteps:
    """A `Step` that uses a graph for each shape in which the graph computes bit-identical logits."""

    def __init__(self, step: Step, make_capture: Callable[[], Capture]) -> None:
        self._step, self._make_capture = step, make_capture
        self._capture = make_capture()
        self._captured: dict[tuple[int, int], Captured | None] = {}
        """Captured step by (width, scanned positions); None for a shape that runs without a graph."""

    def __call__(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        """Run a decode step. If its shape is used for the first time, capture a graph."""
        shape = (len(ids_W), kv_length)
        if shape not in self._captured:
            logits_WV = self._step(ids_W, position_W, kv_length).clone()
            self._captured[shape] = self._proven(ids_W, position_W, kv_length, logits_WV)
            return logits_WV
        captured = self._captured[shape]
        return self._step(ids_W, position_W, kv_length) if captured is None else captured(ids_W, position_W)

    def release(self) -> None:
        self._captured.clear()
        self._capture = self._make_capture()  # with a new memory pool: torch frees the old one with its last graph

    def _proven(self, ids_W: Tensor, position_W: Tensor, kv_length: int, expected_WV: Tensor) -> Captured | None:
        """Capture a step. Return None if the capture fails, or if any bit of the captured step's logits differs from
        `expected_WV`.

        The capture repeats the step, which writes the same keys and values to the same positions again. Its logits are
        overwritten between two runs, so a capture that recorded nothing cannot pass with the logits of an earlier run.
        """
        what = f"decode steps of {len(ids_W)} rows over {kv_length} positions run without a CUDA graph"
        try:
            captured = self._capture(self._step, ids_W, position_W, kv_length)
            with torch.inference_mode():
                captured(ids_W, position_W).fill_(math.nan)
                same = torch.equal(captured(ids_W, position_W), expected_WV)
        except RuntimeError as error:
            logger.warning("%s: %s", what, first_line(error))
            return None
        if not same:
            logger.warning("%s: its logits are not bit-identical", what)
        return captured if same else None


class CudaCapture:
    """Captures steps on a CUDA device. All graphs share one memory pool, because they never run concurrently."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Step, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Captured:
        ids, positions = ids_W.clone(), position_W.clone()
        graph = torch.cuda.CUDAGraph()
        # A capture records the current device only, so an engine on another one would record an empty graph.
        with torch.cuda.device(ids.device), torch.inference_mode():
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    step(ids, positions, kv_length)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                logits = step(ids, positions, kv_length)
        self._pool = graph.pool()

        def run(ids_W: Tensor, position_W: Tensor) -> Tensor:
            with torch.inference_mode():
                ids.copy_(ids_W)
                positions.copy_(position_W)
            graph.replay()
            return logits

        return run
