"""The hub's listening socket: how many connections there may be, and how long one may say nothing.

Without a bound, who opens connections and says nothing takes every file descriptor that the hub may have, and needs no
token for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from baton.swarm.listen import Listen

MAX_CONNECTIONS = 4096
FIRST_REQUEST_S = 30.0
"""A connection without a request by then is hung up on."""
KEEP_ALIVE_S = 30.0
"""… and one without another."""


class Door:
    """One listening address. Lives in the hub's thread."""

    def __init__(self) -> None:
        self.turned_away = 0
        """Connections that were too many, or said nothing."""
        self._spoken: set[Any] = set()
        """Connections that have made a request."""
        self._silent: dict[Any, float] = {}
        """Those that have not, since when."""
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def open(self, app: web.Application, listen: Listen) -> int:
        """Listen, and return the port. Raises OSError where the address cannot be had."""
        app.middlewares.append(self._noted)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=1.0
        )
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, listen.host, listen.port, ssl=listen.ssl_context(), backlog=256
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def sweep(self) -> None:
        """Hang up on those who have said nothing for long."""
        now_s, connections = time.monotonic(), self._connections()
        self._spoken.intersection_update(connections)
        self._silent = {one: self._silent.get(one, now_s) for one in connections if one not in self._spoken}
        for connection, since_s in self._silent.items():
            if now_s - since_s > FIRST_REQUEST_S and connection.transport is not None:
                self.turned_away += 1
                connection.transport.abort()

    def _connections(self) -> list[Any]:
        return self._serving().connections

    def _serving(self) -> web.Server:
        server = None if self._runner is None else self._runner.server
        assert server is not None, "the door is closed"
        return server

    def _accept(self) -> asyncio.Protocol:
        """For each connection: who serves it."""
        if len(self._connections()) >= MAX_CONNECTIONS:
            self.turned_away += 1
            return _TurnedAway()
        return self._serving()()

    @web.middleware
    async def _noted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._spoken.add(request.protocol)
        return await handler(request)


class _TurnedAway(asyncio.Protocol):
    """Nobody serves this connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up at once."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
