"""A worker by itself: what it does when nobody is there."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.errors import DeadlineExceeded
from baton.swarm.worker.worker import SwarmWorker, WorkerOptions

pytestmark = pytest.mark.timing


class HandClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until a test advances it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def test_a_worker_that_finds_no_hub_gives_up_when_its_patience_ends_and_says_which_hub() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes the port meanwhile
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            loop.call_soon(setattr, loop, "now_s", loop.now_s + 60.0)  # while it waits before it tries again

        options = WorkerOptions(url, "token", reconnect_timeout_s=100.0, say=say)
        worker = SwarmWorker(options, lambda *_: pytest.fail("there is nothing to build an engine for"))
        loop = HandClock()
        with (
            pytest.raises(DeadlineExceeded, match=f"no hub has answered at {url} for 120 s"),
            asyncio.Runner(loop_factory=lambda: loop) as controller,
        ):
            controller.run(worker.run())
    assert len(said) == 2, "after 0 and 60 s it tries again, and says so"
