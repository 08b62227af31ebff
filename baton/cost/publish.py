"""The cost of sending new weights from the trainer's GPUs to the engines."""

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
    """Return the time until engines in each pool have all weights, [..., pools].

    `shares` [..., pools]: share of the weights that each pool trains. `bytes_per_s` [from, to]: bandwidth that a
    publication reaches. `latency_s` [pools]: fixed time of a publication from a pool. The parts are sent one after
    the other over their own links. Engines forward weights while they receive, so the number of engines does not
    matter.
    """
    size = model.params * work.weight_bytes
    return shares @ (size / bytes_per_s) + np.max((shares > 0) * latency_s, axis=-1, keepdims=True)
