"""The worker's side of its connection to the hub: receives and sends messages. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from baton.errors import DeadlineExceeded, Fault, WeightsFault
from baton.swarm.messages import SILENT_HEARTBEATS, FromHub, FromWorker, Malformed, decode_from_hub, encode
from baton.swarm.worker.session import ConnectionLost

SEND_DEADLINE_S = 30.0
FAULT_DEADLINE_S = 10.0
"""Maximum seconds for the hub to read a Fault and to close the connection."""
LOST = (ConnectionLost, WeightsFault, DeadlineExceeded, aiohttp.ClientError, OSError)
"""Errors after which the worker reconnects."""


class HubConnection:
    """One WebSocket to the hub."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._outgoing: asyncio.Queue[FromWorker] = asyncio.Queue()

    def send(self, message: FromWorker) -> None:
        self._outgoing.put_nowait(message)

    async def receive(self, deadline_s: float) -> FromHub:
        """Return the hub's next message. Raises ConnectionLost if the connection has ended, the message is invalid, or
        no message arrives within `deadline_s` seconds."""
        # wait in slices, as in `swarm/hub/worker_connection.py`: a pause of this process counts as one slice
        for _ in range(SILENT_HEARTBEATS):
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s / SILENT_HEARTBEATS):  # wait_for may swallow a cancellation
                    message = await self._socket.receive()
                    break
        else:
            raise ConnectionLost(f"the hub has sent no message for {deadline_s:.0f} s")
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise ConnectionLost(f"the hub closed the connection ({message.type.name.lower()})")
        try:
            return decode_from_hub(message.data)
        except Malformed as error:
            raise ConnectionLost(f"the hub sent an invalid message: {error}") from error

    async def send_all(self) -> None:
        """Send queued messages until cancelled. A Fault is the last message of a worker. Raises ConnectionLost if the
        hub does not close the connection after a Fault."""
        while True:
            message = await self._outgoing.get()
            async with asyncio.timeout(SEND_DEADLINE_S):
                await self._socket.send_bytes(encode(message))
            if isinstance(message, Fault):
                # The hub closes the connection when it has read the Fault. If this side closed the connection while
                # messages of the hub are unread, the connection would be reset, which can discard the Fault.
                await asyncio.sleep(FAULT_DEADLINE_S)
                raise ConnectionLost(message.text)

    async def drain(self) -> None:
        """Wait until all messages are sent, the connection is closed, or the deadline has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_DEADLINE_S):
                while not (self._outgoing.empty() or self._socket.closed):
                    await asyncio.sleep(0.01)
        # the queue becomes empty before the last frame is written to the socket
        await asyncio.sleep(0.05)
