"""An SGLang server behind calls that wait: its streams are read by an event loop in a thread of its own.

| task / thread      | consumes         | produces        | waits for           | unblocked by                   |
|--------------------|------------------|-----------------|---------------------|--------------------------------|
| caller's thread    | the inbox        | requests, calls | tokens, an answer   | the loop, its deadline         |
| loop: one per row  | a /generate      | `Grown`, `Lost` | the server          | events, its end, answer_timeout|
| loop: the ender    | rows to be ended | /abort_request  | their streams' ends | the ends; it asks until then   |

**A row has ended when its stream has.** What the server made until then comes before the end, however late, so that
nothing made is lost or stamped with the next version. An abort may reach the server before the request that it means,
which then runs on: so it is asked again until the stream ends. Before new weights it is asked until no stream is open
and the server says that its load is zero.

Request ids all have one length: SGLang aborts every request whose id begins with the one it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import aiohttp

from baton.errors import DeadlineExceeded, EngineFault
from baton.rollout.engines.sglang.wire import (
    LOADS,
    MODEL_INFO,
    SERVER_INFO,
    Event,
    Server,
    abort_body,
    events,
    generate_body,
    load_of,
    read_json,
    read_server,
)

T = TypeVar("T")
_ASK_AGAIN_S = 0.1
"""Between two aborts of what has not ended, and two looks at the load."""
_CLOSE_S = 5.0
_LONGEST_ANSWER = 1 << 20
"""Bytes of an answer that is no stream."""
_LACKS = object()
"""Said in the stead of a server that does not know a path."""


@dataclass(frozen=True, slots=True)
class Request:
    """One row to be grown."""

    key: int
    """Never used twice."""
    token_ids: tuple[int, ...]
    """[prompt + L] all ids so far."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grown:
    """New tokens of a request, in order, and whether they are its last."""

    key: int
    event: Event


@dataclass(frozen=True, slots=True)
class Lost:
    """A request that the server gave up, or whose stream was cut."""

    key: int
    error: str


class SglangLine:
    """One server: asked from one thread."""

    def __init__(
        self, url: str, *, key: str | None, longest_event: int, start_timeout_s: float, answer_timeout_s: float
    ) -> None:
        """Connect. longest_event: bytes. Raises DeadlineExceeded naming the server when it does not come up."""
        self.name = f"the SGLang server at {url}"
        self._url, self._longest_event = url.rstrip("/"), longest_event
        self._answer_timeout_s = answer_timeout_s
        self._session_name = secrets.token_hex(4)
        self._inbox: SimpleQueue[Grown | Lost] = SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending: set[int] = set()
        self._server = Server()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="sglang", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(key, start_timeout_s), start_timeout_s + _CLOSE_S, "to come up")
        except BaseException:
            self.close()
            raise

    @property
    def max_context_tokens(self) -> int | None:
        """What the server says that a request may have; None where it does not say."""
        return self._server.context_length

    def begin(self, requests: Sequence[Request]) -> None:
        """Have rows grown; their tokens come by `take`."""
        self._loop.call_soon_threadsafe(self._begin, list(requests))

    def end(self, keys: Sequence[int]) -> None:
        """Have the server let go of requests. Each still ends by `take`, with all that was made of it."""
        self._loop.call_soon_threadsafe(self._ending.update, list(keys))

    def take(self, timeout_s: float) -> list[Grown | Lost]:
        """Return what has come in, waiting at most `timeout_s` for the first."""
        found: list[Grown | Lost] = []
        with contextlib.suppress(Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def quiesce(self) -> None:
        """Abort everything until no stream is open and the server's load is zero; `take` then has all that was made."""
        self._call(self._quiesce(), self._answer_timeout_s, "to end all requests")

    def load(self, directory: str, label: str) -> None:
        """Have the server read its weights from a directory and forget every prefix. After `quiesce`.

        Raises EngineFault when it refuses, or says afterwards that it holds another version than `label`.
        """
        self._call(self._load(directory, label), self._answer_timeout_s, "to take new weights")

    def close(self) -> None:
        """Let go of all requests; the server stays. May be called twice."""
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

    async def _start(self, key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # as many streams as there are slots
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._answer_timeout_s),
        )
        deadline_s = self._loop.time() + timeout_s
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(_CLOSE_S)) as answer:
                    if answer.status == 200:
                        break
            if self._loop.time() > deadline_s:
                raise DeadlineExceeded(
                    f"{self.name} was not up within {timeout_s:.0f} s (engine.sglang.start_timeout_s)"
                )
            await asyncio.sleep(_ASK_AGAIN_S)
        self._server = read_server(await self._ask_either(SERVER_INFO))
        self._ender = self._loop.create_task(self._keep_ending())

    async def _stop(self) -> None:
        if hasattr(self, "_ender"):
            self._ender.cancel()
            for key in list(self._tasks):
                with contextlib.suppress(EngineFault):
                    await self._ask("POST", "/abort_request", abort_body(self._rid(key)))
        for task in list(self._tasks.values()):
            task.cancel()
        if hasattr(self, "_http"):
            await self._http.close()

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            self._tasks[request.key] = self._loop.create_task(self._grow(request))

    def _rid(self, key: int) -> str:
        return f"{self._session_name}-{key:012x}"

    async def _grow(self, request: Request) -> None:
        body = generate_body(
            self._rid(request.key),
            request.token_ids,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            stop_token_ids=request.stop_token_ids,
        )
        said: Grown | Lost | None = None
        try:
            async with self._http.post(f"{self._url}/generate", json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(500)).decode(errors="replace")
                    raise EngineFault(f"HTTP {answer.status}: {text}")
                stream = events(answer.content, self._longest_event, is_incremental=self._server.is_incremental)
                async for event in stream:
                    said = Grown(request.key, event)
                    self._inbox.put(said)
                    if event.finish is not None:
                        break
            if not isinstance(said, Grown) or said.event.finish is None:
                raise EngineFault("its stream ended in the middle")
        except TimeoutError:
            text = f"not a word in {self._answer_timeout_s:.0f} s (engine.sglang.answer_timeout_s)"
            self._inbox.put(Lost(request.key, text))
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller's thread must hear of it
            self._inbox.put(Lost(request.key, f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(request.key, None)
            self._ending.discard(request.key)

    async def _keep_ending(self) -> None:
        """Ask for every row that is to end, again and again, until its stream has ended."""
        while True:
            for key in list(self._ending & self._tasks.keys()):
                with contextlib.suppress(EngineFault):  # a dead server shows in the streams
                    await self._ask("POST", "/abort_request", abort_body(self._rid(key)))
            self._ending &= self._tasks.keys()
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _quiesce(self) -> None:
        while True:
            await self._ask("POST", "/abort_request", abort_body(None))
            if not self._tasks and load_of(await self._ask_either(LOADS)) == 0:
                return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _load(self, directory: str, label: str) -> None:
        body = {"model_path": directory, "load_format": "safetensors", "weight_version": label}
        answer = await self._ask("POST", "/update_weights_from_disk", body)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineFault(f"{self.name} did not take the weights in {directory}: {answer}")
        await self._ask("POST", "/flush_cache", is_json=False)
        info = await self._ask_either(MODEL_INFO)
        holds = info.get("weight_version") if isinstance(info, dict) else None
        if holds != label:
            raise EngineFault(f"{self.name} was given weights {label} and says that it holds {holds}")

    async def _ask_either(self, paths: Sequence[str]) -> Any:
        """Ask at the first of several names that the server knows."""
        *others, last = paths
        for path in others:
            answer = await self._ask("GET", path, may_lack=True)
            if answer is not _LACKS:
                return answer
        return await self._ask("GET", last)

    async def _ask(
        self, method: str, path: str, body: Any = None, *, is_json: bool = True, may_lack: bool = False
    ) -> Any:
        """One small call. Raises EngineFault for any answer but 200, for one too long, and for none."""
        what = f"{self.name}: {method} {path}"
        try:
            async with self._http.request(method, self._url + path, json=body, allow_redirects=False) as answer:
                if may_lack and answer.status == 404:
                    return _LACKS
                if answer.status != 200:
                    said = (await answer.content.read(500)).decode(errors="replace").strip()
                    raise EngineFault(f"{what}: HTTP {answer.status}: {said}")
                return await read_json(answer.content, _LONGEST_ANSWER) if is_json else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineFault(f"{what}: {type(error).__name__}: {error}") from error

    # ---- in the caller's thread --------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Have something done in the loop. Raises DeadlineExceeded naming the server."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded(f"{self.name} was asked {what} and did not in {timeout_s:.0f} s") from error
