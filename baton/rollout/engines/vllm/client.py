"""vLLM's asynchronous engine as an `EngineClient`.

vLLM starts the core and its workers as processes: `EngineCore`, plus one per device where there are several. vLLM's own
tasks in the loop read the core's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from baton.clock import in_thread
from baton.errors import EngineFault, UserError, first_line
from baton.rollout.engines.client import EngineClient, EngineRequest, GeneratedTokens, RequestLost

_CLOSE_S = 20.0
"""Time for the core's processes to terminate, at first by request and then by force."""


class VllmClient(EngineClient):
    """One AsyncLLM, used from one thread."""

    def __init__(self, arguments: dict[str, Any], *, start_timeout_s: float, answer_timeout_s: float) -> None:
        """Start vLLM. Raises UserError for a model or shape that it refuses, EngineFault when it does not start."""
        super().__init__("vLLM", answer_timeout_s=answer_timeout_s, close_s=_CLOSE_S)
        self._llm: Any = None
        set_up_environment()
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(start_timeout_s)))
        self._start_with(self._start_llm(arguments), start_timeout_s, "to start")

    def end(self, keys: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._abort_requests, list(keys))

    def pause(self) -> None:
        """Pause all requests. Afterwards no tokens are generated, and `take` returns all that were."""
        self._call(self._pause(), self._answer_timeout_s, "to pause")

    def resume(self) -> None:
        """Resume all requests."""
        self._call(self._llm.resume_generation(), self._answer_timeout_s, "to go on")

    def load(self, path: str, label: str) -> int:
        """Load the tensors of a file in all workers; return their number. Call between `pause` and `resume`."""
        return self._call(self._load_weights(path, label), self._answer_timeout_s, "to take new weights")

    def check(self) -> None:
        """Raise EngineFault when the core is dead."""
        if self._llm is not None and self._llm.errored:
            error = type(self._llm.dead_error).__name__
            raise EngineFault(
                f"the core of the vLLM engine has ended ({error}); nothing finished is lost, and its own last words "
                "are above"
            )

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    async def _start_llm(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(f"engine.kind: vLLM refuses this model or shape: {_said(error)}") from error
        except RuntimeError as error:
            raise EngineFault(f"vLLM did not start: {first_line(error)} (its own words are above)") from error
        await self._llm.collective_rpc("end_with", args=(os.getpid(),))

    async def _stop(self) -> None:
        self._abort_requests(list(self._tasks))
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the exit of the core as a fault
            await in_thread(llm.shutdown, 5.0)

    def _abort_requests(self, keys: list[str]) -> None:
        for key in keys:
            task = self._tasks.pop(key, None)
            if task is not None:
                task.cancel()

    async def _generate(self, request: EngineRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # stop_token_ids contains all ids that end a trajectory
            logprobs=0,  # only that of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt)
        prefilled = len(request.token_ids)
        try:
            async for output in self._llm.generate(prompt, params, request.key):
                one = output.outputs[0]
                logprobs = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
                computed = prefilled - (output.num_cached_tokens or 0) if prefilled else 0
                prefilled = 0
                spans = getattr(one, "weight_versions", None)
                account = None if spans is None else {span.version: span.end - span.start for span in spans}
                ids, finish = tuple(one.token_ids), one.finish_reason
                self._inbox.put(GeneratedTokens(request.key, ids, logprobs, finish, computed, by_weights=account))
        except asyncio.CancelledError:
            if self._llm is not None:  # generate() aborts when cancelled, except while it still adds the request
                with contextlib.suppress(Exception):
                    await self._llm.abort(request.key)
            raise
        except Exception as error:  # noqa: BLE001  # any failure must reach the caller's thread
            self._inbox.put(RequestLost(request.key, f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(request.key, None)

    async def _pause(self) -> None:
        """Pause vLLM, then wait until its last tokens, which may still be queued in this loop, are in the inbox."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        seen = -1
        while seen != (seen := self._inbox.qsize()):
            await asyncio.sleep(0.01)

    async def _load_weights(self, path: str, label: str) -> int:
        taken = await self._llm.collective_rpc("take_weights", args=(path,))
        await self._llm.update_weight_version(label)
        assert len(set(taken)) == 1, f"vLLM's workers took {taken} tensors of one file"
        return int(taken[0])


def set_up_environment() -> None:
    """Set vLLM's environment variables before its import. Variables that the user has set are kept.

    They disable usage statistics and downloads, and start processes by spawn, because this process has threads.
    """
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _said(error: Exception) -> str:
    """Return the message of vLLM's error. The first line of a pydantic error only counts the errors."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).splitlines()[0]
    return first_line(error)
