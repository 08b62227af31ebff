"""What every client of an engine's program leaves behind: nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from baton.rollout.engines.client import EngineClient, EngineRequest


class Client(EngineClient):
    """A client without a program."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__("the program", answer_timeout_s=60.0, close_s=60.0)
        self.fails = fails

    def end(self, keys: Sequence[str]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    async def _stop(self) -> None:
        self.loop, self.thread = asyncio.get_running_loop(), threading.current_thread()
        if self.fails:
            raise ConnectionError("the program has exited")

    async def _generate(self, request: EngineRequest) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_client_has_no_thread_and_no_event_loop(fails: bool) -> None:
    client = Client(fails=fails)
    client.close()
    client.close()
    assert not client.thread.is_alive()
    assert client.loop.is_closed(), "its selector and its two sockets stay open"
