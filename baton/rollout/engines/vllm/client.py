"""vLLM's asynchronous engine behind calls that wait: it lives in an event loop in a thread of its own.

| task / thread      | consumes           | produces        | waits for          | unblocked by            |
|--------------------|--------------------|-----------------|--------------------|-------------------------|
| caller's thread    | the inbox          | requests, calls | tokens, an answer  | the loop, its deadline  |
| loop: one per row  | vLLM's stream      | `Grown`, `Lost` | vLLM               | tokens, cancel, death   |
| vLLM's own tasks   | the core's socket  | streams         | the core           | see vLLM                |

The core and its workers are processes that vLLM starts: `EngineCore`, and one more per device where there are several.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from pydantic import ValidationError

from baton.clock import in_thread
from baton.errors import BatonError, DeadlineExceeded, EngineFault, UserError
from baton.policy.tokenizer import first_line

T = TypeVar("T")
_CLOSE_S = 20.0
"""In which the core's processes are asked, then told, to end."""
_HEARTBEAT_S = 0.5
"""Between two looks at whether the core lives, while it is waited for."""


@dataclass(frozen=True, slots=True)
class Request:
    """One row to be grown."""

    key: str
    """Never used twice."""
    token_ids: tuple[int, ...]
    """[prompt + L] all ids so far."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    stop_token_ids: tuple[int, ...]
    cache_salt: str
    """Prefixes are shared by requests of one salt only."""


@dataclass(frozen=True, slots=True)
class Grown:
    """New tokens of a request, in order."""

    key: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None
    """vLLM's reason to end, where this is the end."""
    prefilled: int
    """Prompt tokens that were computed for it, said with its first tokens."""
    by_weights: Mapping[str, int] | None = None
    """At the end: vLLM's own account of how many tokens came of which weights, by their labels."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A request that vLLM gave up."""

    key: str
    error: Exception


class VllmLine:
    """One AsyncLLM: started, asked, and ended from one thread."""

    def __init__(self, arguments: dict[str, Any], *, start_timeout_s: float, answer_timeout_s: float) -> None:
        """Start vLLM. Raises UserError for a model or shape that it refuses, EngineFault when it does not come up."""
        self._answer_timeout_s = answer_timeout_s
        self._inbox: SimpleQueue[Grown | Lost] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """In the loop's thread."""
        self._llm: Any = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        set_up_environment()
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(start_timeout_s)))
        try:
            self._call(self._start(arguments), start_timeout_s, "to start")
        except BaseException:
            self.close()
            raise

    def begin(self, requests: Sequence[Request]) -> None:
        """Have rows grown; their tokens come by `take`."""
        self._loop.call_soon_threadsafe(self._begin, list(requests))

    def end(self, keys: Sequence[str]) -> None:
        """Have vLLM let go of requests. What it has sent of them may still come by `take`."""
        self._loop.call_soon_threadsafe(self._end, list(keys))

    def take(self, timeout_s: float) -> list[Grown | Lost]:
        """Return what has come in, waiting at most `timeout_s` for the first. Raises EngineFault when vLLM is dead."""
        found: list[Grown | Lost] = []
        with contextlib.suppress(Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        if not found:
            self.check()
        return found

    def pause(self) -> None:
        """Hold all requests where they are. After this `take` has every token that was made, and none is."""
        self._call(self._pause(), self._answer_timeout_s, "to pause")

    def resume(self) -> None:
        """Go on with all requests."""
        self._call(self._llm.resume_generation(), self._answer_timeout_s, "to go on")

    def load(self, path: str, label: str) -> int:
        """Have all workers take the tensors of a file; return how many each took. Between `pause` and `resume`."""
        return self._call(self._load(path, label), self._answer_timeout_s, "to take new weights")

    def check(self) -> None:
        """Raise EngineFault when the core is dead."""
        if self._llm is not None and self._llm.errored:
            raise self._dead(self._llm.dead_error)

    def close(self) -> None:
        """End the core's processes and the loop. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self, arguments: dict[str, Any]) -> None:
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
        self._end(list(self._tasks))
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the end of the core as a fault
            await in_thread(llm.shutdown, 5.0)

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            self._tasks[request.key] = self._loop.create_task(self._grow(request))

    def _end(self, keys: list[str]) -> None:
        for key in keys:
            task = self._tasks.pop(key, None)
            if task is not None:
                task.cancel()

    async def _grow(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # what ends a trajectory is said in stop_token_ids
            logprobs=0,  # of the sampled token alone
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
                grown = Grown(request.key, tuple(one.token_ids), logprobs, one.finish_reason, computed, account)
                self._inbox.put(grown)
        except asyncio.CancelledError:
            if self._llm is not None:  # it aborts by itself, unless it was still taking the request in
                with contextlib.suppress(Exception):
                    await self._llm.abort(request.key)
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller's thread must hear of it
            self._inbox.put(Lost(request.key, error))
        finally:
            self._tasks.pop(request.key, None)

    async def _pause(self) -> None:
        """vLLM answers when nothing is under way in it; its last tokens may still be on their way through this loop."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        seen = -1
        while seen != (seen := self._inbox.qsize()):
            await asyncio.sleep(0.01)

    async def _load(self, path: str, label: str) -> int:
        taken = await self._llm.collective_rpc("take_weights", args=(path,))
        await self._llm.update_weight_version(label)
        assert len(set(taken)) == 1, f"vLLM's workers took {taken} tensors of one file"
        return int(taken[0])

    # ---- in the caller's thread --------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Have something done in the loop. Raises DeadlineExceeded, and EngineFault when the core dies meanwhile."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(_HEARTBEAT_S)
            except FutureTimeout as error:
                if future.done():
                    raise EngineFault(f"vLLM was asked {what} and ran out of its own time") from error
                self.check()
                if time.monotonic() > deadline_s:
                    future.cancel()
                    raise DeadlineExceeded(f"vLLM was asked {what} and did not in {timeout_s:.0f} s") from error
            except BatonError:
                raise
            except Exception as error:
                self.check()
                raise EngineFault(f"vLLM was asked {what}: {type(error).__name__}: {first_line(error)}") from error

    def _dead(self, error: BaseException) -> EngineFault:
        return EngineFault(
            f"the core of the vLLM engine has ended ({type(error).__name__}); nothing finished is lost, and its own "
            "last words are above"
        )


def set_up_environment() -> None:
    """Tell vLLM, before it is imported, what it only takes from the environment; what the user has set stays.

    It sends nothing to anybody, asks nobody for models, and starts its processes anew: this one has threads.
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
    """What vLLM means: its settings are pydantic's, whose first line only counts the errors."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).splitlines()[0]
    return first_line(error)
