"""The hub's side of a worker's connection: receives and sends frames, and closes the connection within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import ClientConnectionError, WSMsgType, web

from baton.swarm.hub.peers import FrameQueue
from baton.swarm.hub.session import ReceiveTimeout
from baton.swarm.messages import SILENT_HEARTBEATS, FromWorker, Malformed, decode_from_worker

SEND_DEADLINE_S = 60.0
CLOSE_S = 2.0
"""Maximum seconds to send the queued frames when the connection ends."""


class WorkerConnection:
    """One WebSocket to a worker."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        outgoing: FrameQueue,
        on_sent: Callable[[int], None],
        delay_s: Callable[[], float],
    ) -> None:
        """`on_sent`: called with the size in bytes of each sent frame. `delay_s`: returns the seconds by which the last
        received frame must be delayed."""
        self._socket, self._transport = socket, transport
        self._outgoing, self._on_sent, self._delay_s = outgoing, on_sent, delay_s

    async def hold(self, conversation: Coroutine[Any, Any, None]) -> None:
        """Send queued frames until the coroutine `conversation` or the queue ends; then close the connection. If the
        worker closes the connection first, `conversation` still reads the messages that have arrived, because the last
        message may be a Fault. The server cancels this call when the connection is lost."""
        sender, reader = asyncio.create_task(self._send_all()), asyncio.create_task(conversation)
        try:
            await asyncio.wait({sender, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._transport is None or self._transport.is_closing():
                await asyncio.wait({reader}, timeout=CLOSE_S)
            reader.cancel()
            self._outgoing.close()
            await asyncio.wait({sender, reader}, timeout=CLOSE_S)
            sender.cancel()
            await asyncio.gather(sender, reader, return_exceptions=True)
            await self._close_socket()

    async def _close_socket(self) -> None:
        try:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.close()
        finally:
            if self._transport is not None and _unsent_bytes(self._transport):
                self._transport.abort()  # the peer does not read

    async def read_unless_silent(self, timeout_s: float) -> FromWorker | None:
        """Return the worker's next message, or None when the connection has ended. Raises Malformed if the message is
        invalid, and ReceiveTimeout if no message arrives within `timeout_s` seconds.

        The wait consists of `SILENT_HEARTBEATS` shorter waits. If this process is paused, only one of them times out,
        and the next one reads the messages that arrived during the pause.
        """
        for _ in range(SILENT_HEARTBEATS):
            with suppress(TimeoutError):
                return await self._read(timeout_s / SILENT_HEARTBEATS)
        raise ReceiveTimeout(f"silent for {timeout_s:.3g} s")

    async def _read(self, deadline_s: float) -> FromWorker | None:
        async with asyncio.timeout(deadline_s):  # wait_for may swallow a cancellation
            frame = await self._socket.receive()
        await asyncio.sleep(self._delay_s())  # rate limit: the hub reads no frame from the connection during this time
        if frame.type is WSMsgType.TEXT:
            raise Malformed("a text frame instead of a binary message")
        if frame.type is WSMsgType.ERROR and not isinstance(frame.data, OSError | ClientConnectionError):
            raise Malformed(f"not a message: {frame.data}")  # for example, too long
        return decode_from_worker(frame.data) if frame.type is WSMsgType.BINARY else None

    async def _send_all(self) -> None:
        while (frame := await self._outgoing.take()) is not None:
            async with asyncio.timeout(SEND_DEADLINE_S):
                await self._socket.send_bytes(frame)
            self._on_sent(len(frame))


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the number of unsent bytes. Return 0 for a closed TLS transport, because `get_write_buffer_size` then
    raises AttributeError."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0
