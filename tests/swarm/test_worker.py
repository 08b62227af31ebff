"""A worker by itself: what it does when nobody is there."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.errors import DeadlineExceeded
from baton.swarm.worker import SwarmWorker, WorkerOptions

pytestmark = pytest.mark.timing


def test_a_worker_that_finds_no_hub_gives_up_when_its_patience_ends_and_says_which_hub() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes the port meanwhile
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        said: list[str] = []
        options = WorkerOptions(url, "token", patience_s=1.0, say=said.append)

        async def run() -> None:
            async with asyncio.timeout(30):
                await SwarmWorker(options, lambda *_: pytest.fail("there is nothing to build an engine for")).run()

        with pytest.raises(DeadlineExceeded, match=f"no hub at {url}"):
            asyncio.run(run())
    assert said, "it tried more than once, and said so"
