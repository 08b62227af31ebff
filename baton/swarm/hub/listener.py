"""The listening socket of a hub or a relay. Every connection is counted from accept to close.

| task     | consumes           | produces                        | waits for       | unblocked by                |
|----------|--------------------|---------------------------------|-----------------|-----------------------------|
| acceptor | the backlog        | connections                     | a caller        | the network                 |
| greeter  | one new connection | a served connection, after TLS  | the handshake   | its deadline, an eviction   |
| sweeper  | the clock          | closed connections              | the next second | the clock                   |

`admission.py` decides which connections are kept. The HTTP server gets a connection only after TLS, so it cannot count
connections that never finish the handshake.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from baton.swarm.hub.admission import AUTHENTICATE_S, Admission, ConnectionLimits
from baton.swarm.listen import ListenAddress

KEEP_ALIVE_S = 30.0
"""Seconds until an idle connection with a valid token is closed; other connections close after each response."""
ACCEPTED_AT_ONCE = 4
"""Maximum number of connections accepted before other tasks run. If this number is small, an accepted connection has
time to present a token before newer connections evict it."""
FAILED_ACCEPT_PAUSE_S = 0.1
TLS_GOODBYE_S = 2.0
SWEEP_S = 1.0
MAX_FILES = 65_536
"""Value to which the soft limit on open files is raised, if the hard limit allows it."""
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class HubListener:
    """The sockets and connections of one listening address. Runs in the thread of its event loop."""

    def __init__(self, listen: ListenAddress) -> None:
        self.listen = listen
        self._admission = Admission(ConnectionLimits.of(raised_file_limit()))
        self._connections: dict[int, _Connection] = {}
        """File descriptor → connection. This module identifies every connection by its file descriptor."""
        self._controller: web.AppRunner | None = None
        self._listening: list[socket.socket] = []
        self._acceptors: list[asyncio.Task[None]] = []
        self._greeters: set[asyncio.Task[None]] = set()

    async def open(self, app: web.Application) -> int:
        """Start to listen and return the port. Raises OSError if the address is not available."""
        app.middlewares.append(self._close_strangers)
        self._controller = web.AppRunner(
            app, access_log=None, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=1.0
        )
        await self._controller.setup()
        listen, loop = self.listen, asyncio.get_running_loop()
        tls, port = listen.ssl_context(), listen.port
        found = await loop.getaddrinfo(listen.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in {(family, address): None for family, _, _, _, address in found}:
            one = socket.create_server((address[0], port, *address[2:]), family=family, backlog=256)
            one.setblocking(False)
            port = int(one.getsockname()[1])
            self._listening.append(one)
            self._acceptors.append(loop.create_task(self._accept_all(one, tls)))
        self._acceptors.append(loop.create_task(self._sweep()))
        return port

    async def close(self) -> None:
        for task in self._acceptors:
            task.cancel()
        await asyncio.gather(*self._acceptors, return_exceptions=True)
        for one in self._listening:
            one.close()
        if self._controller is not None:
            await self._controller.cleanup()
        for fd in list(self._connections):
            self._reset_connection(fd)
        if self._greeters:
            await asyncio.wait(self._greeters, timeout=1.0)

    def identify(self, request: web.Request, key: str, *, is_owner: bool = False) -> None:
        """Count a request's connection towards the access token `key`. Raises HTTPServiceUnavailable if the limit of
        all connections with a token, or of connections with this token, is reached."""
        fd = _fd_of(request)
        refusal = None if fd is None else self._admission.identify(fd, key, is_owner=is_owner)
        if refusal is not None:
            raise web.HTTPServiceUnavailable(text=refusal)

    async def _accept_all(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(ACCEPTED_AT_ONCE):
                try:
                    accepted, address = await loop.sock_accept(listening)
                # OSError: the caller has disconnected, or no file descriptor is left in spite of the reserve
                except OSError as error:
                    if error.errno in _NO_FILES and (oldest := self._admission.oldest_stranger()) is not None:
                        self._reset_connection(oldest)
                    await asyncio.sleep(FAILED_ACCEPT_PAUSE_S)
                    break
                connection = _Connection(accepted, self._closed)
                fd = connection.fileno()
                self._connections[fd] = connection
                evicted = self._admission.arrive(fd, str(address[0]), time.monotonic())
                if evicted is not None:
                    self._reset_connection(evicted)
                greeter = loop.create_task(self._greet(connection, tls))
                self._greeters.add(greeter)
                greeter.add_done_callback(self._greeters.discard)
            await asyncio.sleep(0)

    async def _greet(self, connection: _Connection, tls: ssl.SSLContext | None) -> None:
        assert self._controller is not None, "the listener is closed"
        assert self._controller.server is not None, "the listener is closed"
        with suppress(OSError):  # the handshake failed or timed out; asyncio has closed the connection
            connection.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._controller.server,
                connection,
                ssl=tls,
                ssl_handshake_timeout=AUTHENTICATE_S if tls else None,
                ssl_shutdown_timeout=TLS_GOODBYE_S if tls else None,
            )

    def _reset_connection(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None and connection.transport is not None:
            reset(connection.transport)
        elif connection is not None:
            with suppress(OSError):  # the peer has disconnected
                connection.shutdown(socket.SHUT_RDWR)  # the handshake fails, which closes the connection

    def _closed(self, fd: int) -> None:
        self._admission.leave(fd)
        self._connections.pop(fd, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for fd in self._admission.overdue(time.monotonic()):
                self._reset_connection(fd)

    @web.middleware
    async def _close_strangers(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Close a connection without a valid token after each response."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            if error.status in (401, 403) or self._is_stranger(request):
                error.force_close()
            raise
        if self._is_stranger(request):
            response.force_close()
        return response

    def _is_stranger(self, request: web.Request) -> bool:
        fd = _fd_of(request)
        return fd is None or not self._admission.is_known(fd)


class _Connection(socket.socket):
    """An accepted socket that calls `on_close` before its file descriptor becomes free."""

    def __init__(self, accepted: socket.socket, on_close: Callable[[int], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self.setblocking(False)
        self.transport: asyncio.Transport | None = None
        """The connection's transport; None before the end of the TLS handshake."""
        self._on_close = on_close

    def close(self) -> None:
        if self.fileno() >= 0:
            self._on_close(self.fileno())
        super().close()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once, and discard the data that the kernel still buffers for the peer."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def raised_file_limit() -> int:
    """Raise this process's soft limit on open files to the hard limit, at most to `MAX_FILES`; return the soft
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def _fd_of(request: web.Request) -> int | None:
    """Return the file descriptor of a request's connection; None if the connection is closed."""
    found = None if request.transport is None else request.transport.get_extra_info("socket")
    return None if found is None or found.fileno() < 0 else int(found.fileno())
