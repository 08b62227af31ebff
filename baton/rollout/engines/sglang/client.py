"""`SglangClient`: sends requests to an SGLang server. `ask_servers`: asks servers for their properties before a run.

| task              | consumes         | produces                         | waits for       | unblocked by             |
|-------------------|------------------|----------------------------------|-----------------|--------------------------|
| loop: per request | /generate stream | `GeneratedTokens`, `RequestLost` | the server      | events, end, timeout     |
| loop: the ender   | keys to abort    | /abort_request                   | the streams     | the end of each stream   |

**A request has ended when its stream has ended.** All generated tokens arrive before the end of the stream, so no token
is lost or attributed to the next version. An abort has no effect if it reaches the server before the request does.
Aborts are therefore repeated until the stream ends. Before new weights are loaded, aborts are repeated until no stream
is open and the server reports a load of zero.

All request ids have the same length, because SGLang aborts every request whose id begins with the given id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp

from baton.errors import DeadlineExceeded, EngineFault
from baton.rollout.engines.client import START_TIMEOUT_S, EngineClient, EngineRequest, RequestLost
from baton.rollout.engines.sglang import wire

logger = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.1
"""Seconds between two aborts of the same request, and between two queries of the server's load."""
_CLOSE_S = 5.0
_LONGEST_ANSWER = 1 << 20
"""Maximum bytes of a response that is not a stream."""


def _session(key: str | None, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)  # no limit: one stream per slot is open
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)


class SglangClient(EngineClient):
    """A client of one server. One thread calls all public methods."""

    def __init__(self, url: str, *, key: str | None, longest_event: int, answer_timeout_s: float) -> None:
        """Connect to the server. `longest_event`: maximum bytes of an event of a stream. Raises DeadlineExceeded if the
        server does not respond within START_TIMEOUT_S."""
        super().__init__(f"the SGLang server at {url}", answer_timeout_s=answer_timeout_s, close_s=_CLOSE_S)
        self._url, self._longest_event = url.rstrip("/"), longest_event
        self._ending: set[str] = set()
        self.server = wire.ServerInfo()
        """Properties of the server."""
        self._start_with(self._connect(key), START_TIMEOUT_S + _CLOSE_S)

    def end(self, keys: Sequence[str]) -> None:
        """Abort requests. `take` still returns all tokens of these requests, and a last message per request."""
        self._loop.call_soon_threadsafe(self._ending.update, list(keys))

    def pause(self) -> None:
        """Abort all requests and wait until no stream is open and the server's load is zero."""
        self._call(self._quiesce(), self._answer_timeout_s, "to end all requests")

    def resume(self) -> None:
        """Do nothing, because `pause` has aborted all requests, so no request is paused."""

    def load(self, directory: str, label: str) -> None:
        """Make the server load weights from a directory and flush its prefix cache. Call `pause` first. Raises
        EngineFault if the server refuses, or if it reports another version than `label` after the load."""
        self._call(self._load_weights(directory, label), self._answer_timeout_s, "to load new weights")

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    async def _connect(self, key: str | None) -> None:
        self._http = _session(key, aiohttp.ClientTimeout(total=None, sock_read=self._answer_timeout_s))
        deadline_s, status, has_warned = self._loop.time() + START_TIMEOUT_S, 0, False
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(_CLOSE_S)) as answer:
                    status = answer.status
            if status == 200:
                break
            last = f"; its last answer to /health was HTTP {status}" if status else ""
            if not has_warned:
                has_warned = True
                logger.warning("%s is not ready: waiting up to %.0f s for it%s", self.name, START_TIMEOUT_S, last)
            if self._loop.time() > deadline_s:
                raise DeadlineExceeded(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s{last}")
            await asyncio.sleep(_ASK_AGAIN_S)
        self.server = wire.read_server(await self._ask("GET", *wire.SERVER_INFO))
        self._ender = self._loop.create_task(self._keep_ending())

    async def _stop(self) -> None:
        if hasattr(self, "_ender"):
            self._ender.cancel()
            for key in list(self._tasks):
                with contextlib.suppress(EngineFault):
                    await self._ask("POST", "/abort_request", body=wire.abort_body(key))
        for task in list(self._tasks.values()):
            task.cancel()
        if hasattr(self, "_http"):
            await self._http.close()

    async def _generate(self, request: EngineRequest) -> None:
        finish = None
        try:
            async with self._http.post(
                self._url + "/generate", json=wire.generate_body(request), allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(500)).decode(errors="replace")
                    raise EngineFault(f"HTTP {answer.status}: {text}")
                is_incremental = self.server.is_incremental
                async for said in wire.events(request.key, answer.content, self._longest_event, is_incremental):
                    self._inbox.put(said)
                    finish = said.finish
                    if finish is not None:
                        break
            if finish is None:
                raise EngineFault("the stream ended before the request was finished")
        except TimeoutError:
            text = f"the server sent nothing for {self._answer_timeout_s:.0f} s (engine.sglang.answer_timeout_s)"
            self._inbox.put(RequestLost(request.key, text))
        finally:
            self._ending.discard(request.key)

    async def _keep_ending(self) -> None:
        """Repeat the abort of each request in `_ending` until its stream has ended."""
        while True:
            for key in list(self._ending & self._tasks.keys()):
                with contextlib.suppress(EngineFault):  # if the server has exited, the streams fail as well
                    await self._ask("POST", "/abort_request", body=wire.abort_body(key))
            self._ending.intersection_update(self._tasks)  # in place, because `end` may hold a reference
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _quiesce(self) -> None:
        while True:
            await self._ask("POST", "/abort_request", body=wire.abort_body(None))
            if not self._tasks and wire.load_of(await self._ask("GET", *wire.LOADS)) == 0:
                return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _load_weights(self, directory: str, label: str) -> None:
        body = {"model_path": directory, "load_format": "safetensors", "weight_version": label}
        answer = await self._ask("POST", "/update_weights_from_disk", body=body)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineFault(f"{self.name} did not load the weights in {directory}: {answer}")
        await self._ask("POST", "/flush_cache", is_json=False)
        info = await self._ask("GET", *wire.MODEL_INFO)
        holds = info.get("weight_version") if isinstance(info, dict) else None
        if holds != label:
            raise EngineFault(f"{self.name} was sent weights {label} and reports that it serves {holds}")

    async def _ask(self, method: str, *paths: str, body: Any = None, is_json: bool = True) -> Any:
        """Send one request that is not a stream, and return the response. The request goes to the first of `paths` that
        the server has: it answers 404 for others. Raises EngineFault if no response arrives, or if the response is too
        long or its status is not 200."""
        for path in paths:
            what = f"{self.name}: {method} {path}"
            try:
                async with self._http.request(method, self._url + path, json=body, allow_redirects=False) as answer:
                    if answer.status == 404 and path != paths[-1]:
                        continue
                    if answer.status != 200:
                        said = (await answer.content.read(500)).decode(errors="replace").strip()
                        raise EngineFault(f"{what}: HTTP {answer.status}: {said}")
                    return await wire.read_json(answer.content, _LONGEST_ANSWER) if is_json else None
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise EngineFault(f"{what}: {type(error).__name__}: {error}") from error
        raise AssertionError("no path was given")


def ask_servers(urls: Sequence[str], *, key: str | None, timeout_s: float) -> list[wire.ServerInfo | str]:
    """Return the properties of each server, or why it did not report them in `timeout_s`. `key`: API key."""

    async def ask_all() -> list[wire.ServerInfo | str]:
        async with _session(key, aiohttp.ClientTimeout(total=timeout_s)) as session:
            return await asyncio.gather(*(_ask_server(session, url.rstrip("/"), timeout_s) for url in urls))

    return asyncio.run(ask_all())


async def _ask_server(session: aiohttp.ClientSession, url: str, timeout_s: float) -> wire.ServerInfo | str:
    status = 0
    try:
        for path in wire.SERVER_INFO:
            async with session.get(url + path, allow_redirects=False) as answer:
                status = answer.status
                if status == 200:
                    return wire.read_server(await wire.read_json(answer.content, _LONGEST_ANSWER))
    except TimeoutError:
        return f"no answer in {timeout_s:.0f} s"
    except (aiohttp.ClientError, EngineFault, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"HTTP {status}"
