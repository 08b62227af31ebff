"""Decode steps as CUDA graphs: one launch in place of the hundreds of small ones that a step's Python makes.

A graph belongs to one width and one number of scanned positions, the fixed shapes that decode has anyway
(`network.py`). It is captured when a shape is first met, on the inputs of that step, and compared there with the step
itself: the same bits, or that shape goes on without a graph. Inputs lie in memory of the graph's own; what it returns
is overwritten by the next step. Graphs end when the memory they read is given back (`release`).
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
"""Steps before a capture: kernels are chosen and workspaces made in the first."""


Captured = Callable[[Tensor, Tensor], Tensor]
"""(ids [W], positions [W]) → logits [W, V], which the next run overwrites: a step that can be run on other inputs."""
Capture = Callable[[Step, Tensor, Tensor, int], Captured]


class GraphedSteps:
    """A step, by graphs where they give the same bits."""

    def __init__(self, step: Step, make_capture: Callable[[], Capture]) -> None:
        self._step, self._make_capture = step, make_capture
        self._capture = make_capture()
        self._captured: dict[tuple[int, int], Captured | None] = {}
        """By width and scanned positions; None where the step itself has to do."""

    def __call__(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        """Do a decode step."""
        shape = (len(ids_W), kv_length)
        if shape not in self._captured:
            logits_WV = self._step(ids_W, position_W, kv_length).clone()
            self._captured[shape] = self._proven(ids_W, position_W, kv_length, logits_WV)
            return logits_WV
        captured = self._captured[shape]
        return self._step(ids_W, position_W, kv_length) if captured is None else captured(ids_W, position_W)

    def release(self) -> None:
        """Forget all graphs, with their memory."""
        self._captured.clear()
        self._capture = self._make_capture()  # with another pool: the old one ends with its last graph

    def _proven(self, ids_W: Tensor, position_W: Tensor, kv_length: int, expected_WV: Tensor) -> Captured | None:
        """Capture a step; None where that fails or gives other bits. Running it again writes the same keys again."""
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
    """Captures steps on a CUDA device; all its graphs share one pool of memory, since they run one after another."""

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
