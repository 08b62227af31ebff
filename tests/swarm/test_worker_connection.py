"""The hub reads what a worker sent before its connection was lost, and a worker gives it the time to do so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import WSMessage, WSMsgType

from baton.errors import Fault
from baton.swarm.hub.peers import FrameQueue
from baton.swarm.hub.worker_connection import WorkerConnection
from baton.swarm.messages import encode
from baton.swarm.worker import hub_connection

LAST_WORDS = Fault("EngineFault", "RuntimeError: out of memory")


@pytest.mark.parametrize(("is_lost", "read"), [(True, [LAST_WORDS]), (False, [])])
def test_messages_that_arrived_before_a_lost_connection_are_read(is_lost, read):
    """The server cancels the handler of a lost connection; a handler that the hub itself cancels stops at once."""

    async def play() -> list[Any]:
        arrived = asyncio.Event()
        frames = [WSMessage(WSMsgType.CLOSED, None, None), WSMessage(WSMsgType.BINARY, encode(LAST_WORDS), None)]

        class Socket:
            async def receive(self) -> WSMessage:
                await arrived.wait()
                return frames.pop()

            async def close(self) -> None:
                pass

        transport = SimpleNamespace(is_closing=lambda: is_lost, get_write_buffer_size=lambda: 0)
        connection = WorkerConnection(Socket(), transport, FrameQueue(), lambda size: None, lambda: 0.0)
        heard: list[Any] = []

        async def conversation() -> None:
            while (message := await connection.read_unless_silent(60.0)) is not None:
                heard.append(message)

        handler = asyncio.create_task(connection.hold(conversation()))
        while len(asyncio.all_tasks()) < 4:  # this one, the handler, its reader and its sender
            await asyncio.sleep(0)
        handler.cancel()
        await asyncio.sleep(0)
        arrived.set()
        with pytest.raises(asyncio.CancelledError):
            await handler
        return heard

    async def bounded() -> list[Any]:
        async with asyncio.timeout(60):
            return await play()

    assert asyncio.run(bounded()) == read


def test_after_its_fault_a_worker_leaves_the_closing_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is closed with unread messages is reset, and the hub may then not read the Fault."""
    monkeypatch.setattr(hub_connection, "FAULT_DEADLINE_S", 0.05)
    sent: list[bytes] = []

    class Socket:
        async def send_bytes(self, data: bytes) -> None:
            sent.append(data)

    async def play() -> None:
        connection = hub_connection.HubConnection(Socket())
        connection.send(LAST_WORDS)
        sender = asyncio.create_task(connection.send_all())
        while not sent:
            await asyncio.sleep(0)
        assert not sender.done()  # with it, the worker would close the connection
        async with asyncio.timeout(60):
            with pytest.raises(hub_connection.ConnectionLost, match="out of memory"):
                await sender

    asyncio.run(play())
    assert sent == [encode(LAST_WORDS)]
