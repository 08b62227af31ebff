"""A fake SGLang server for tests, because SGLang cannot be installed everywhere. Its HTTP interface follows SGLang's
documentation and sources; the embedded engine generates the tokens.

The server reproduces this behaviour:

* `/generate` streams events with all tokens so far, or only with the new tokens (`is_incremental`).
* A request is in the HTTP front end before it reaches the scheduler (`num_delayed`). If an abort arrives in this time,
  it has no effect, and the request continues.
* An abort applies to all requests whose id *starts with* the given id. A running request generates one more token
  before it ends. A waiting request ends with "Abort in waiting queue"; in an incremental stream, its last event repeats
  all its tokens.
* Events are sent with a delay (`event_s`), so tokens may arrive after the answer to the abort.
* While requests are running, the server refuses new weights and does not flush the prefix cache. The label changes with
  the weights.

A test sets faults by name; each fault affects the next request of its kind. In a test in which a request must not end
before its abort arrives, the server waits for the client (`keep_pace`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.sglang.engine import SglangEngine
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Asked:
    """A request that has reached the scheduler."""

    rid: str
    lease_id: int
    prompt_tokens: int
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    entries: list[tuple[float, int, None]] = field(default_factory=list)
    is_aborted: bool = False


class SglangServer:
    """The server, which runs in its own thread. Settings and faults may be changed while it runs."""

    def __init__(
        self, engine: EmbeddedEngine, *, is_incremental: bool = False, key: str | None = None, is_old: bool = False
    ) -> None:
        """is_old: the server uses the names of routes and fields of older SGLang versions."""
        self.engine, self.is_incremental, self.key, self.is_old = engine, is_incremental, key, is_old
        self.is_retracting = False
        """Whether aborted requests behave as if they had returned to the queue before, for lack of memory."""
        self.num_delayed = 0
        """Number of next requests that stay in the front end until an abort has missed them."""
        self.may_generate: Callable[[], bool] = lambda: True
        """While this function returns False, requests wait."""
        self.event_s = 0.0
        self.context_length = 134
        self.shape: dict[str, int] = {}
        """Parallelism that the server reports: tp_size, pp_size."""
        self.label = "default"
        self.faults: list[str] = []
        """Faults of the next requests, in order. For /generate: refuse, break, cut, hang, error, junk, huge, shrink,
        impostor, early. For weights: no_weights, other_label."""
        self.calls: list[str] = []
        """Paths of all requests, in order."""
        self.loaded: list[Path] = []
        self.num_missed_aborts = 0
        """Number of aborts that matched no request."""
        self.begun: list[dict[str, Any]] = []
        """Bodies of the requests to /generate."""
        self._num_made = 0
        self._client: SglangEngine | None = None
        self._max_ahead = 0
        self._asked: dict[int, Asked] = {}
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    @property
    def num_running(self) -> int:
        """Number of requests in the scheduler."""
        return len(self._asked)

    def keep_pace(self, engine: SglangEngine, max_ahead: int = 0) -> None:
        """Pause generation while `engine` has not received more than `max_ahead` of the generated tokens, or is sending
        an abort.

        `engine` must be the only client, and no response may continue after a stop string.
        """
        self._client, self._max_ahead = engine, max_ahead

    def close(self) -> None:
        """Stop the server and close all connections."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> str:
        app = web.Application(middlewares=[self._door])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/get_server_info" if self.is_old else "/server_info", self._server_info),
                web.get("/get_model_info" if self.is_old else "/model_info", self._model_info),
                web.get("/get_load", self._get_load) if self.is_old else web.get("/v1/loads", self._v1_loads),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update),
                web.post("/flush_cache", self._flush),
            ]
        )
        self._controller = web.AppRunner(app, shutdown_timeout=0.1)
        await self._controller.setup()
        site = web.TCPSite(self._controller, "127.0.0.1", 0)
        await site.start()
        self._scheduler = self._loop.create_task(self._schedule())
        host, port = self._controller.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _stop(self) -> None:
        self._scheduler.cancel()
        await self._controller.cleanup()

    @web.middleware
    async def _door(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.calls.append(request.path)
        is_known = self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"
        if not is_known and request.path != "/health":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    def _fault(self, *names: str) -> str | None:
        return self.faults.pop(0) if self.faults and self.faults[0] in names else None

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            for report in self.engine.step() if self._asked and self._may_step() else []:
                assert isinstance(report, Report)
                self._heard(report)
            await asyncio.sleep(0.001)

    def _may_step(self) -> bool:
        if not self.may_generate():
            return False
        if self._client is None or any(asked.is_aborted for asked in self._asked.values()):
            return True
        is_aborting = any(running.is_ending for running in list(self._client.running.values()))
        return not is_aborting and self._num_made <= self._client.stats.decoded_tokens + self._max_ahead

    def _heard(self, report: Report) -> None:
        asked = self._asked[report.lease_id]
        self._num_made += sum(len(segment.token_ids) for segment in report.segments)
        for segment in report.segments:
            asked.entries += [(p, i, None) for p, i in zip(segment.behavior_logprobs, segment.token_ids, strict=True)]
        reason: dict[str, Any] | None = None
        if report.finish_reason is not None:
            reason = {"type": str(report.finish_reason.value)}
        elif report.is_aborted:
            waited = not asked.entries
            reason = {"type": "abort", "message": "Abort in waiting queue" if waited else "Aborted"}
        if report.segments or reason:
            self._say(asked, reason)
        if reason is None and asked.is_aborted:  # the request has generated its one more token
            self.engine.abort(report.lease_id)
        if reason is not None:
            del self._asked[report.lease_id]

    def _say(self, asked: Asked, reason: dict[str, Any] | None) -> None:
        meta = {
            "id": asked.rid,
            "finish_reason": reason,
            "prompt_tokens": asked.prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": len(asked.entries),
            "weight_version": self.label,
            "output_token_logprobs": list(asked.entries),
        }
        asked.events.put_nowait({"text": "", "output_ids": [i for _, i, _ in asked.entries], "meta_info": meta})

    # ---- the front end -----------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = {"context_length": self.context_length, "version": "contract", **self.shape}
        info["stream_output" if self.is_old else "incremental_streaming_output"] = self.is_incremental
        return web.json_response(info)

    async def _model_info(self, request: web.Request) -> web.Response:
        label = "another" if self._fault("other_label") else self.label
        return web.json_response({"model_path": "somewhere", "weight_version": label})

    async def _get_load(self, request: web.Request) -> web.Response:
        count = len(self._asked)
        return web.json_response([{"dp_rank": 0, "num_reqs": count, "num_waiting_reqs": 0, "num_tokens": 0}])

    async def _v1_loads(self, request: web.Request) -> web.Response:
        loads = [{"dp_rank": 0, "num_running_reqs": len(self._asked), "num_waiting_reqs": 0}]
        return web.json_response({"timestamp": 0, "loads": loads})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        hit = [a for a in self._asked.values() if body["abort_all"] or (body["rid"] and a.rid.startswith(body["rid"]))]
        self.num_missed_aborts += not hit
        for asked in hit:
            asked.is_aborted = True
            if not asked.entries:
                self.engine.abort(asked.lease_id)
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._asked or self._fault("no_weights"):
            return web.json_response({"success": False, "message": "Failed to update weights"}, status=400)
        path = Path(body["model_path"])
        assert body["load_format"] == "safetensors"
        assert (path / "config.json").is_file()
        number = self.engine.version.number + 1
        self.engine.load_weights(load_file(path / "model.safetensors"), PolicyVersion("server", number))
        self.label = body["weight_version"]
        self.loaded.append(path)
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n", status=400 if self._asked else 200)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.begun.append(body)
        fault = self._fault("refuse", "break", "cut", "hang", "error", "junk", "huge", "shrink", "impostor", "early")
        if fault in ("refuse", "break"):
            text = {"error": {"message": "The input is longer than the model's context length"}}
            return web.json_response(text, status=400 if fault == "refuse" else 500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.num_delayed:
            self.num_delayed -= 1
            missed = self.num_missed_aborts
            while self.num_missed_aborts == missed:
                await asyncio.sleep(0.001)
        asked = self._arrive(body, early=fault == "early")
        sent = 0
        while True:
            event = await asked.events.get()
            await asyncio.sleep(self.event_s)
            meta = event["meta_info"]
            is_last = meta["finish_reason"] is not None
            await self._happen(fault, event, request, response)
            was_waiting = self.is_retracting and is_last and meta["finish_reason"]["type"] == "abort"
            if self.is_incremental and not was_waiting:
                meta["output_token_logprobs"] = meta["output_token_logprobs"][sent:]
            sent = meta["completion_tokens"]
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if is_last:
                await response.write(b"data: [DONE]\n\n")
                return response

    def _arrive(self, body: dict[str, Any], *, early: bool) -> Asked:
        """Pass a request from the front end to the scheduler."""
        params = body["sampling_params"]
        lease_id = next(self._ids)
        asked = Asked(body["rid"], lease_id, len(body["input_ids"]))
        self._asked[lease_id] = asked
        sampling = SamplingParams(
            min(2, params["max_new_tokens"]) if early else params["max_new_tokens"],
            params["temperature"],
            stop_token_ids=tuple(params["stop_token_ids"]),
        )
        trajectory = Trajectory(lease_id, 0, tuple(body["input_ids"]))
        self.engine.submit(Lease(lease_id, trajectory, sampling, 1, -1, is_exact=False))
        return asked

    async def _happen(
        self, fault: str | None, event: dict[str, Any], request: web.Request, response: web.StreamResponse
    ) -> None:
        count = event["meta_info"]["completion_tokens"]
        if fault is None or count < 3:
            return
        match fault:
            case "cut":
                assert request.transport is not None
                request.transport.abort()
            case "hang":
                await asyncio.sleep(60)
            case "error":
                await response.write(b'data: {"error": {"message": "the scheduler is gone"}}\n\n')
            case "junk":
                await response.write(b'data: {"meta_info": 7}\n\n')
            case "huge":
                await response.write(b"data: " + b"x" * (3 << 20))
            case "shrink":
                event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][:1]
            case "impostor":
                event["meta_info"]["weight_version"] = "another"
