"""A body that arrives too slowly ends, however long it is; a slow but steady one arrives. The clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3
from yarl import URL

from baton.errors import DeadlineExceeded, WeightsFault
from baton.swarm.transfer import HttpSource, get_bounded
from baton.types import PolicyVersion
from baton.weights.chunk_fetcher import ChunkFetcher, FetchStats
from baton.weights.manifest import Chunk

STEP_S = 10.0
"""Seconds between two pieces, below the 30 s after which a silent connection fails."""
STEADY = 110_000
"""Bytes in `STEP_S` at 11,000 bytes/s; the slowest rate is 10,000."""


async def received(sizes: Sequence[int]) -> int:
    """Number of bytes that arrive from a server that sends pieces of these sizes, one in each `STEP_S`."""
    loop, late_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    loop.time = lambda: real() + late_s  # type: ignore[method-assign]

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal late_s
        response = web.StreamResponse()
        await response.prepare(request)
        for size in sizes:
            await response.write(bytes(size))
            await asyncio.sleep(0.02)  # the client, in the same loop, reads
            late_s += STEP_S
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as http:
            url = URL(f"http://127.0.0.1:{runner.addresses[0][1]}/")
            return len(await get_bounded(http, url, {}, 2**24))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("first", [1, 2**22])
def test_a_trickle_of_bytes_ends_after_a_minute_also_after_a_fast_beginning(first: int) -> None:
    with pytest.raises(DeadlineExceeded, match="at last at less than 10,000 bytes/s"):
        asyncio.run(received([first, *[1] * 200]))


def test_a_slow_but_steady_body_arrives_whole() -> None:
    assert asyncio.run(received([STEADY] * 20)) == 20 * STEADY


async def chunk_after(fault: int) -> bytes:
    """A chunk from a hub that first answers with this status; 0: it closes the connection within the body."""
    body, num_asked = b"a chunk", 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return web.Response(body=body)
        if fault:
            return web.Response(status=fault)
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[:1])
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_get("/weights/chunk/{digest}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            source = HttpSource(http, asyncio.get_running_loop(), url, "token")
            fetcher = ChunkFetcher(
                [source], FetchStats(PolicyVersion("run", 1)), avoided=set(), timeouts={}, deadline_s=60.0
            )
            return await asyncio.to_thread(fetcher.chunk, Chunk(blake3(body).hexdigest(), len(body)))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("fault", [0, 429, 503])
def test_a_chunk_is_asked_for_again_after_a_closed_connection_or_a_busy_hub(fault: int) -> None:
    assert asyncio.run(chunk_after(fault)) == b"a chunk"


@pytest.mark.parametrize("fault", [401, 404, 502])
def test_a_chunk_is_not_asked_for_again_after_a_refusal(fault: int) -> None:
    with pytest.raises(WeightsFault, match=f"answered {fault}"):
        asyncio.run(chunk_after(fault))
