"""Sends weights to callers in pieces, as fast as each caller reads.

The memory of all downloads together is bounded, and a download without progress is aborted. The number of concurrent
downloads of each access token is limited, so that a slow caller does not block other callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from aiohttp import web

from baton.clock import in_thread
from baton.errors import BatonError
from baton.swarm.hub.listener import reset
from baton.weights.storage import ByteReader

MAX_DOWNLOADS = 256
MAX_DOWNLOADS_PER_TOKEN = 64
QUEUE_S = 20.0
"""Maximum seconds that a request waits for a download slot. After this time, the response is HTTP 503."""
PIECE_BYTES = 2**18
READ_S = 180.0
"""Seconds until a read from a store or cache is abandoned. The limit is longer than the deadlines of a remote store."""
STALL_S = 30.0
"""A connection is reset if its receiver does not accept a piece within this number of seconds."""


class Downloads:
    """The downloads of one process, in one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_DOWNLOADS)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Wait until the caller `key` has a free download slot, and then until the process has one. Hold both slots
        within the context. Raises HTTPServiceUnavailable if the wait exceeds `QUEUE_S` seconds."""
        share = self._shares.setdefault(key, asyncio.Semaphore(MAX_DOWNLOADS_PER_TOKEN))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(QUEUE_S):
                    # the caller's slot first, so that a request that waits for it holds no slot of the process
                    for one in (share, self._places):
                        await held.enter_async_context(one)
            except TimeoutError as error:
                raise web.HTTPServiceUnavailable(text="too many downloads are running: try again") from error
            yield

    async def send(self, request: web.Request, body: ByteReader) -> tuple[web.StreamResponse, int]:
        """Send a body. Return the response and the number of bytes sent. An error resets the connection."""
        response, sent_bytes = web.StreamResponse(), 0
        response.content_type, response.content_length = "application/octet-stream", body.size
        transport = request.transport
        try:
            await response.prepare(request)
            while sent_bytes < body.size:
                size = min(PIECE_BYTES, body.size - sent_bytes)
                piece = await in_thread(body.read, sent_bytes, size, timeout_s=READ_S, who="the store")
                if not piece:
                    raise ConnectionAbortedError("the file became shorter while it was sent")
                async with asyncio.timeout(STALL_S):
                    await response.write(piece)
                sent_bytes += len(piece)
            await response.write_eof()
        except (BatonError, OSError):
            if transport is not None:
                reset(transport)
        return response, sent_bytes
