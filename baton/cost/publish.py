"""Time of weight publication: sending new weights from the trainer's GPUs to the engines."""

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
    """Return the time until the engines of each pool have all weights, [..., pools].

    `shares` [..., pools] is the share of the weights that each pool trains, `bytes_per_s` [from, to] the bandwidth of
    publication, and `latency_s` [pools] the fixed time of a publication from a pool. The parts from different pools are
    sent one after the other. Engines forward weights while they receive them, so the time does not depend on the number
    of engines.
    """
    size = model.params * work.weight_bytes
    return shares @ (size / bytes_per_s) + np.max((shares > 0) * latency_s, axis=-1, keepdims=True)
