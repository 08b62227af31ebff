"""What it costs to bring new weights from the trainer's GPUs to the engines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.specs.model import ModelSpec
from baton.specs.workload import Workload


def publish_s(
    model: ModelSpec,
    work: Workload,
    shares: NDArray[np.float64],
    bytes_per_s: NDArray[np.float64],
    latency_s: NDArray[np.float64],
) -> Any:
    """Time until engines at each place have all weights, [..., places].

    `shares` [..., places]: of the weights that each place trains; `bytes_per_s` [from, to]: what a publication reaches
    on each link; `latency_s` [places]: what one from there takes whatever its size. Each part crosses its own link, one
    after the other; engines behind the first pass it on while they receive, so their number does not matter.
    """
    size = model.params * work.weight_bytes
    return shares @ (size / bytes_per_s) + np.max((shares > 0) * latency_s, axis=-1, keepdims=True)
