"""Code that runs in vLLM's processes: it loads weights in place from a file in memory, and kills the process when its
parent exits.

vLLM adds `WeightsLoader` to the base classes of its worker (`worker_extension_cls`). This module imports no other
module of Baton.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open

_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
"""Name of the logger that reports the layers which a reload did not update."""


class EndWithParent(str):
    """Value in vLLM's `additional_config`, which vLLM sends to its core and workers. A process that is spawned with
    this value kills itself when its parent exits or is killed, even while the process loads the model.

    Otherwise a core whose client was killed would keep running and keep its memory. The value is a string, because vLLM
    writes its configuration as JSON. Workers that Ray starts do not use this value: Ray ends them when the core ends.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_end_with, (os.getpid(),)) if get_spawning_popen() is not None else (EndWithParent, ())


def _end_with(parent: int) -> EndWithParent:
    """Start the thread that kills this process when `parent` ends. Called by unpickling, before vLLM's code runs."""
    Thread(target=_wait_for_end, args=(parent,), name="baton", daemon=True).start()
    return EndWithParent()


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


class WeightsLoader:
    """Loads published tensors into the running model."""

    model_runner: Any
    """Attribute of vLLM's worker."""
    reload_weights: Any
    """Method of vLLM's worker."""

    def take_weights(self, path: str) -> int:
        """Copy the tensors of a safetensors file into the model; return their number. Each rank keeps its shard. vLLM
        fuses, casts and repacks the weights. Raises RuntimeError if a layer was not updated."""
        taken = 0

        def tensors() -> Iterator[tuple[str, Any]]:
            nonlocal taken
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    taken += 1
                    yield name, file.get_tensor(name)

        with checked_reload(self.model_runner.get_model()):
            self.reload_weights(weights_iterator=tensors())
        return taken

    def held_bytes(self) -> int:
        """Return the device memory that torch has reserved in this process, without the parts that sleep has freed.
        Return 0 on a CPU."""
        if not torch.cuda.is_available():
            return 0
        from vllm.device_allocator import get_mem_allocator_instance

        known = get_mem_allocator_instance().pointer_to_data.values()
        return int(torch.cuda.memory_reserved() - sum(each.handle[1] for each in known if each.is_asleep))


@contextmanager
def checked_reload(model: Any) -> Iterator[None]:
    """Check that the reload of a whole model in this context updates every layer, and repack the weights that vLLM does
    not repack. On a CPU, vLLM 0.32 does not update the packed copy of a head that is tied to the embedding, so this
    function packs the head again. Raises RuntimeError if any other layer was not updated."""
    logger, missed = logging.getLogger(_RELOAD), _Missed()
    level = logger.level
    logger.setLevel(logging.WARNING)  # VLLM_LOGGING_LEVEL may hide warnings
    logger.addFilter(missed)
    try:
        if not logger.isEnabledFor(logging.WARNING):
            raise RuntimeError("logging is disabled, so a layer that is not updated would not be noticed")
        yield
    finally:
        logger.removeFilter(missed)
        logger.setLevel(level)
    tied = _tied(model)
    # layers without a weight in the file: tied layers, and layers without parameters
    bare = [module for module in model.modules() if not any(p is not None for p in module._parameters.values())]
    without_weights = {type(module).__name__ for module in (*tied, *bare)}
    left = [name for name in missed.layers if name not in without_weights]
    if left:
        raise RuntimeError(f"vLLM did not update the weights of the layers {', '.join(left)}")
    for module in tied:
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _tied(model: Any) -> list[Any]:
    """Return the layers that share a weight with another layer."""
    sharing: defaultdict[int, list[Any]] = defaultdict(list)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            sharing[weight.data_ptr()].append(module)
    return [module for modules in sharing.values() if len(modules) > 1 for module in modules]


class _Missed(logging.Filter):
    """A log filter that collects the layers reported as not loaded, and drops the records."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        layer, mark, _ = record.getMessage().partition(": Failed to load weights")
        if mark:
            self.layers.append(layer)
        return not mark
