"""Weights sent to callers: read and sent piece by piece, as fast as the reader takes them.

Memory is bounded over all downloads, a download without progress is cut, and each token has its share of the places:
a caller that takes nothing off its connections holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from aiohttp import web

from baton.clock import in_thread
from baton.errors import BatonError
from baton.swarm.hub.listener import reset
from baton.weights.storage import ByteReader

MAX_DOWNLOADS = 256
MAX_DOWNLOADS_PER_TOKEN = 64
QUEUE_S = 20.0
"""A request that waits longer for a place is asked to come again."""
PIECE_BYTES = 2**18
STALL_S = 30.0
"""A reader that does not take a piece in this time is cut off."""


class Downloads:
    """Those of one process. All in one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_DOWNLOADS)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Wait for one of a token's places. Raises HTTPServiceUnavailable after `QUEUE_S`."""
        share = self._shares.setdefault(key, asyncio.Semaphore(MAX_DOWNLOADS_PER_TOKEN))
        taken: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(QUEUE_S):
                    for one in (share, self._places):  # a token's own first: it may fill that while others are served
                        await one.acquire()
                        taken.append(one)
            except TimeoutError as error:
                raise web.HTTPServiceUnavailable(text="too many downloads just now: try again") from error
            yield
        finally:
            for one in taken:
                one.release()

    async def send(self, request: web.Request, body: ByteReader) -> tuple[web.StreamResponse, int]:
        """Send a body, and return how many bytes of it are sent; a connection that has only a part is cut."""
        response, sent_bytes = web.StreamResponse(), 0
        response.content_type, response.content_length = "application/octet-stream", body.size
        transport = request.transport
        try:
            await response.prepare(request)
            while sent_bytes < body.size:
                size = min(PIECE_BYTES, body.size - sent_bytes)
                piece = await in_thread(body.read, sent_bytes, size)
                if not piece:
                    raise ConnectionAbortedError("what is sent has become shorter")
                async with asyncio.timeout(STALL_S):
                    await response.write(piece)
                sent_bytes += len(piece)
            await response.write_eof()
        except (BatonError, OSError):
            if transport is not None:
                reset(transport)
        return response, sent_bytes
