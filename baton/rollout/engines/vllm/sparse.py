"""Code that runs in vLLM's worker processes and loads differences of versions in place.

A difference changes single elements of the model's parameters. vLLM's CPU build packs the weight of a linear layer when
the layer is loaded, and deletes the parameter. On a CPU, importing this module before the model is loaded prevents the
packing, so linear layers keep their parameters and use torch's product.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from baton.rollout.engines.vllm.transfer import DirectWorker


class SparseWorker(DirectWorker):
    """`DirectWorker` for versions that are sent as differences."""


def _keep_parameter(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


if importlib.util.find_spec("vllm") is not None and importlib.import_module("vllm.platforms").current_platform.is_cpu():
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    layers.dispatch_cpu_unquantized_gemm = _keep_parameter
