"""A network in userland: TCP through a proxy that delays, slows down, cuts and swallows, each direction by itself.

Needs no permission, so it runs everywhere; what the kernel does (loss, reordering) it does not. `Meddler` is a proxy
that understands HTTP and changes what a source of weights answers.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PIECE_BYTES = 16 * 1024
START_DEADLINE_S = 10.0


@dataclass(slots=True)
class Shape:
    """One direction; may be changed while it runs."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Uniform, on top of the delay; nothing overtakes."""
    bytes_per_s: float = float("inf")
    """Of all connections together, as on one line."""


class _Served:
    """An asyncio server in a thread of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = self._do(self._listen())

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._host}:{self.port}"

    def close(self) -> None:
        """End."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_DEADLINE_S)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._taken, self._host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class ShapingProxy(_Served):
    """Forwards to one port of its own host."""

    def __init__(
        self,
        target_port: int,
        *,
        up: Shape | None = None,
        down: Shape | None = None,
        seed: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        """up: from the worker to the hub. seed: of the jitter."""
        self.target_port = target_port
        self.up, self.down = up or Shape(), down or Shape()
        self.bytes_up = self.bytes_down = 0
        self.is_cut, self.hole = False, ""
        self._dice = random.Random(seed)
        self._free_s = {"up": 0.0, "down": 0.0}
        """When the line is through with what it has been given."""
        self._pairs: set[_Pair] = set()
        super().__init__(host)

    def cut(self) -> None:
        """End every connection with a reset, and refuse new ones until `mend`."""
        self.is_cut = True
        self._do(self._reset())

    def swallow(self, way: str = "both") -> None:
        """Forward nothing more of the present connections, ever, and tell nobody; new ones hang too until `mend`.

        way: only `up`, from the worker to the hub, only `down`, or both.
        """
        self.hole = way
        self._do(self._deafen())

    def mend(self) -> None:
        """Let new connections through again."""
        self.is_cut, self.hole = False, ""

    async def _reset(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    async def _deafen(self) -> None:
        for pair in self._pairs:
            pair.hole = self.hole

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            _reset(writer)
            return
        there, back = await asyncio.open_connection(self._host, self.target_port)
        pair = _Pair(writer, back, hole=self.hole)
        self._pairs.add(pair)
        ways = [
            asyncio.create_task(self._carry(reader, back, pair, "up")),
            asyncio.create_task(self._carry(there, writer, pair, "down")),
        ]
        try:
            await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()
            self._pairs.discard(pair)
            back.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair, way: str) -> None:
        """Read, let time pass, write; what is under way is bounded by the line's delay times its rate."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        delivery = asyncio.create_task(self._deliver(waiting, writer, pair, way))
        try:
            while data := await reader.read(PIECE_BYTES):
                shape = self.up if way == "up" else self.down
                now_s = self._loop.time()
                free_s = self._free_s[way] = max(now_s, self._free_s[way]) + len(data) / shape.bytes_per_s
                await waiting.put((free_s + shape.delay_s + shape.jitter_s * self._dice.random(), data))
            await waiting.put((0.0, b""))
            await delivery
        finally:
            delivery.cancel()

    async def _deliver(
        self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, pair: _Pair, way: str
    ) -> None:
        while True:
            at_s, data = await waiting.get()
            await asyncio.sleep(max(0.0, at_s - self._loop.time()))
            if pair.hole in (way, "both"):
                continue
            if not data:
                with suppress(OSError):
                    writer.write_eof()
                return
            if way == "up":
                self.bytes_up += len(data)
            else:
                self.bytes_down += len(data)
            writer.write(data)
            await writer.drain()


@dataclass(eq=False, slots=True)
class _Pair:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    hole: str = ""

    def reset(self) -> None:
        _reset(self.near)
        _reset(self.far)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Hang up as a broken line does: no goodbye, and what was under way is gone."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


Tamper = Callable[[str, bytes], bytes | None]
"""(path, body) → the body to answer with, or None for 404."""


@dataclass(slots=True)
class Meddling:
    """What a meddler does at present."""

    tamper: Tamper | None = None
    truncate: bool = False
    """Bodies end in the middle, with the connection."""
    touched: list[str] = field(default_factory=list)
    """Paths whose answers it changed."""


class Meddler(_Served):
    """Forwards HTTP to one port, and changes the answers under a path; WebSockets pass unchanged."""

    def __init__(self, target_port: int, prefix: str = "/weights/chunk/") -> None:
        self.target_port, self.prefix = target_port, prefix
        self.meddling = Meddling()
        super().__init__()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                back.write(head)
                if b"upgrade: websocket" in head.lower():
                    await asyncio.wait(
                        [asyncio.create_task(_pipe(reader, back)), asyncio.create_task(_pipe(there, writer))],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    return
                answer = await there.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-l"))
                body = await there.readexactly(length)
                await self._answer(path, answer, body, writer)
        finally:
            back.close()

    async def _answer(self, path: str, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        now, given = self.meddling, body
        if path.startswith(self.prefix) and (now.tamper or now.truncate):
            now.touched.append(path)
            if now.truncate:
                writer.write(head + body[: len(body) // 2])
                await writer.drain()
                raise ConnectionResetError
            assert now.tamper is not None
            changed = now.tamper(path, body)
            if changed is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            given = changed
        old = f"Content-Length: {len(body)}".encode()
        assert old in head
        writer.write(head.replace(old, f"Content-Length: {len(given)}".encode()) + given)
        await writer.drain()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
