"""`VllmWorkers`: the workers on one machine, other than the first, of a vLLM engine that spans several machines.

    first machine                                    each further machine
    VllmEngine ─▶ core of vLLM ─┬─▶ workers          VllmWorkers ─▶ workers
                                └── calls over ZeroMQ ─────────────────▲
                     workers of all machines: one group of torch.distributed

vLLM 0.32 calls such an engine a multi-node engine of the executor `mp` (`nnodes`, `node_rank`). The command `vllm serve
--headless` does the same as `VllmWorkers`. All machines must have the same arguments, except `node_rank`.
"""

from __future__ import annotations

from typing import Any

from baton.errors import EngineFault, first_line
from baton.rollout.engines.vllm.client import refusal, set_up_environment
from baton.rollout.engines.vllm.stopped import StopDetector


class VllmWorkers:
    """Workers that the core on the first machine calls. The workers end with this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments`: of `AsyncEngineArgs`. Waits, with no deadline of its own, for the workers of all machines.
        Raises UserError if vLLM refuses the arguments, and EngineFault if a worker fails."""
        set_up_environment()
        from vllm import AsyncEngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise refusal(error) from error
        try:
            self._executor: Any = MultiprocExecutor(config)
        except Exception as error:  # vLLM raises Exception itself
            raise EngineFault(f"workers of vLLM did not start: {first_line(error)} (vLLM's output is above)") from error
        self._detector = StopDetector(worker.proc.pid for worker in self._executor.workers)

    def check(self) -> None:
        """Raise EngineFault if a worker has exited, or if a signal has stopped it."""
        if self._executor.is_failed:
            raise EngineFault("a worker of vLLM has exited; its output above shows the reason")
        self._detector.check()
