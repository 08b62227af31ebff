"""`VllmClient`: sends requests to vLLM's asynchronous engine (AsyncLLM).

vLLM starts its core as a process (`EngineCore`), and one more process per device if there are several devices. Tasks of
vLLM in the event loop read the core's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from baton.clock import in_thread
from baton.errors import EngineFault, UserError, first_line
from baton.rollout.engines.client import START_TIMEOUT_S, EngineClient, EngineRequest, GeneratedTokens
from baton.rollout.engines.vllm.stopped import StopDetector

_CLOSE_S = 20.0
"""Seconds for the processes of vLLM to terminate. Within this time, vLLM kills processes that do not terminate."""


class VllmClient(EngineClient):
    """A client of one AsyncLLM. One thread calls all public methods."""

    def __init__(
        self,
        arguments: dict[str, Any],
        *,
        answer_timeout_s: float,
        stream_interval: int = 1,
        reports_routing: bool = False,
    ) -> None:
        """Start vLLM. `stream_interval`: number of tokens after which vLLM sends a request's new tokens.
        `reports_routing`: whether vLLM returns the experts of each token. Raises UserError if vLLM refuses the model or
        the settings, and EngineFault if vLLM fails to start."""
        super().__init__("vLLM", answer_timeout_s=answer_timeout_s, close_s=_CLOSE_S)
        self.stream_interval, self._reports_routing = stream_interval, reports_routing
        self._received: Counter[str] = Counter()
        """Request key → number of tokens put into the inbox. Only the loop's thread accesses this counter."""
        self._llm: Any = None
        self._detector: StopDetector | None = None
        self._adapter: Any = None
        """vLLM's description of the adapter that all requests use; None without an adapter."""
        set_up_environment()
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(START_TIMEOUT_S)))
        self._start_with(self._start_llm(arguments), START_TIMEOUT_S)

    def end(self, keys: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._abort_requests, list(keys))

    def flush(self) -> bool:
        if self.stream_interval > 1:
            self._call(self._flush(), self._answer_timeout_s, "to send its tokens")
        return self.stream_interval > 1

    def pause(self) -> None:
        self._call(self._pause(), self._answer_timeout_s, "to pause")

    def resume(self) -> None:
        self._call(self._llm.resume_generation(), self._answer_timeout_s, "to resume")

    def sleep(self, level: int) -> None:
        """Free the device memory of the KV cache and of the weights. `level`: 1 keeps the weights in host memory, 2
        discards them. vLLM stays paused until KV cache and weights have been allocated again."""
        self._call(self._llm.sleep(level), self._answer_timeout_s, "to sleep")

    def wake_up(self, part: str) -> None:
        """Allocate the device memory of one part: "weights" first, then "kv_cache"."""
        self._call(self._llm.wake_up([part]), self._answer_timeout_s, "to wake up")

    def load(self, path: str, label: str) -> int:
        """Load a file's tensors in all workers; return the number of tensors. Call between `pause` and `resume`."""
        taken = self.call_workers("take_weights", path, self._answer_timeout_s)
        self.set_label(label)
        assert len(set(taken)) == 1, f"the workers of vLLM loaded different numbers of tensors of one file: {taken}"
        return int(taken[0])

    def load_adapter(self, directory: str, label: str) -> None:
        """Load an adapter in PEFT's format in all workers of the replica. The adapter replaces the previous one. Call
        between `pause` and `resume`."""
        self._call(self._load_adapter(directory, label), self._answer_timeout_s, "to load a new adapter")

    def call_workers(self, method: str, info: Any, timeout_s: float) -> list[Any]:
        """Call a method of vLLM's workers from any thread; return the results. `info`: its argument, or None."""
        arguments = () if info is None else (info,)
        return self._call(self._llm.collective_rpc(method, args=arguments), timeout_s, f"in {method}")

    def set_label(self, label: str) -> None:
        """Set the label (vLLM's weight version) of a loaded whole model. Later requests use no adapter."""
        self._call(self._llm.update_weight_version(label), self._answer_timeout_s, "to set the version")
        self._adapter = None

    def check(self) -> None:
        """Raise EngineFault if the core has exited or, after a call to `detect_stops`, if a signal has stopped a
        process of vLLM."""
        if self._llm is not None and self._llm.errored:
            error = type(self._llm.dead_error).__name__
            raise EngineFault(
                f"the core of the vLLM engine has exited ({error}); its output above shows the reason; finished "
                "trajectories are not lost"
            )
        if self._detector is not None:
            self._detector.check()

    def detect_stops(self) -> None:
        """Make `check` detect that a signal has stopped vLLM's core or a worker that the core has started. Call this
        method only if other engines can continue the trajectories of this engine."""
        self._detector = StopDetector(core.pid for core in self._llm.engine_core.resources.engine_manager.processes)

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    async def _start_llm(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise refusal(error) from error
        except RuntimeError as error:
            raise EngineFault(f"vLLM did not start: {first_line(error)} (vLLM's output is above)") from error

    async def _stop(self) -> None:
        self._abort_requests(list(self._tasks))
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # otherwise it would report the exit of the core as an error
            await in_thread(llm.shutdown, 5.0, timeout_s=60.0, who="the shutdown of vLLM")

    def _abort_requests(self, keys: list[str]) -> None:
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()

    async def _generate(self, request: EngineRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # stop_token_ids contains all ids that end a trajectory
            logprobs=0,  # return only the logprob of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **({"stream_interval": self.stream_interval} if self.stream_interval > 1 else {}),
            # the logits of the first token are computed at the position of the last id
            **({"routed_experts_prompt_start": len(request.token_ids) - 1} if self._reports_routing else {}),
        )
        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt)
        prefilled = len(request.token_ids)
        try:
            async for output in self._llm.generate(prompt, params, request.key, lora_request=self._adapter):
                one = output.outputs[0]
                logprobs = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
                computed = prefilled - (output.num_cached_tokens or 0) if prefilled else 0
                prefilled = 0
                spans = getattr(one, "weight_versions", None)
                account = None if spans is None else {span.version: span.end - span.start for span in spans}
                mask = getattr(one, "sampling_mask", None)
                said = GeneratedTokens(
                    request.key,
                    tuple(one.token_ids),
                    logprobs,
                    one.finish_reason,
                    computed,
                    by_weights=account,
                    masks=None if mask is None else mask.token_ids,
                    experts=getattr(one, "routed_experts", None),
                )
                self._inbox.put(said)
                self._received[request.key] += len(one.token_ids)
        except asyncio.CancelledError:
            # when generate() is cancelled, it aborts its request itself, except while it is still adding the request
            if self._llm is not None:
                with contextlib.suppress(Exception):
                    await self._llm.abort(request.key)
            raise
        finally:
            del self._received[request.key]

    async def _pause(self) -> None:
        """Pause vLLM, and wait until all tokens in the queues of this event loop are in the inbox."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        seen = -1
        while seen != (seen := self._inbox.qsize() + self._num_kept()):
            await asyncio.sleep(0.01)
        await self._flush()

    def _num_kept(self) -> int:
        """Return the number of tokens that vLLM has received from its core but not yet sent to Baton."""
        return sum(state.detokenizer.num_output_tokens() - state.sent_tokens_offset for state in self._states())

    async def _flush(self) -> None:
        """Make vLLM send the tokens that it holds back because fewer than `stream_interval` have accumulated, and wait
        until the tokens are in the inbox. vLLM has no call that sends such tokens early: by itself, it sends them only
        with later tokens, or at the end of a request."""
        for state in self._states():
            kept = list(state.detokenizer.output_token_ids[state.sent_tokens_offset :])
            if kept:
                state.stream_interval = 1  # otherwise vLLM would hold them back again
                state.queue.put(state.make_request_output(kept, None, None, None))
                state.stream_interval = self.stream_interval
                state.sent_tokens_offset += len(kept)
        while any(self._received[state.external_req_id] < state.sent_tokens_offset for state in self._states()):
            await asyncio.sleep(0.001)

    def _states(self) -> list[Any]:
        """Return vLLM's states of the requests whose tokens vLLM may hold back."""
        if self.stream_interval == 1:
            return []
        states = self._llm.output_processor.request_states.values()
        return [state for state in states if state.external_req_id in self._tasks]

    async def _load_adapter(self, directory: str, label: str) -> None:
        from vllm.lora.request import LoRARequest

        # load_inplace is set only here: if it were set in a request, vLLM would read the files in every step
        await self._llm.add_lora(LoRARequest("baton", 1, directory, load_inplace=True))
        self._adapter = LoRARequest("baton", 1, directory)
        await self._llm.update_weight_version(label)


def set_up_environment() -> None:
    """Set the environment variables of vLLM that the user has not set. Call before importing vLLM. The variables
    disable usage statistics and downloads, and make vLLM start its processes by spawn, because this process has
    threads."""
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


def refusal(error: Exception) -> UserError:
    """Return the UserError for an error by which vLLM refuses a model or settings, with the error's first line."""
    said = str(error.errors()[0]["msg"]).splitlines()[0] if isinstance(error, ValidationError) else first_line(error)
    return UserError(f"engine.kind: vLLM refuses this model or these settings: {said}")
