"""The connected workers of a hub (identity, connection and last heartbeat of each), and its relays."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from baton.clock import Clock
from baton.rollout.engine import EngineStats
from baton.swarm.auth import AccessGrant
from baton.swarm.listen import is_loopback
from baton.swarm.messages import FromHub, Heartbeat, Hello, encode

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Maximum number of unsent bytes for one worker. A worker whose messages would exceed this limit is disconnected."""
FRAME_OVERHEAD = 128
"""Bytes of memory that a queued frame takes in addition to its content."""
RATE_WINDOW_S = 30.0
FORGET_AFTER_S = 90.0
"""A relay's URL is no longer sent to workers if the relay has not announced itself for this number of seconds."""
MAX_RELAYS = 256


class Outgoing(Protocol):
    """Interface that sends messages to one worker, implemented by a connection's queue and by the simulated network."""

    def put(self, message: FromHub) -> bool:
        """Queue a message. Return False if the queue is full."""

    def close(self) -> None:
        """End the connection after the queued messages are sent."""


@dataclass(slots=True)
class FrameQueue(Outgoing):
    """A bounded queue of frames for one worker."""

    frames: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    num_bytes: int = 0
    """Bytes of memory that the queued frames take, including `FRAME_OVERHEAD` for each frame."""

    def put(self, message: FromHub) -> bool:
        frame = encode(message)
        if self.num_bytes + len(frame) + FRAME_OVERHEAD > MAX_UNSENT_BYTES:
            return False
        self.num_bytes += len(frame) + FRAME_OVERHEAD
        self.frames.put_nowait(frame)
        return True

    def close(self) -> None:
        self.frames.put_nowait(None)

    async def take(self) -> bytes | None:
        """Wait for the next frame and return it. Return None after `close`."""
        frame = await self.frames.get()
        if frame is not None:
            self.num_bytes -= len(frame) + FRAME_OVERHEAD
        return frame


@dataclass(slots=True)
class Peer:
    """A worker that has joined. A worker that reconnects keeps its `Peer` object."""

    number: int
    grant: AccessGrant
    hello: Hello
    address: str
    outgoing: Outgoing | None
    """The current connection; None while the worker is not connected."""
    worker: str
    """Id of the worker, from `identity.WorkerKeys`."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    served: int | None = None
    """Number of the version that the worker serves. None if it serves no version, or a version that this hub process
    has not published."""
    is_limited: bool = False
    """Whether the hub has told the user that the worker returns too many leases; the message is printed only once."""
    rates: deque[tuple[float, int]] = field(default_factory=deque)
    """(time in seconds, value of the engine's token counter) at each of the last heartbeats."""

    @property
    def name(self) -> str:
        """Name shown to users: the name of the worker's access token, and the worker's number."""
        return f"{self.grant.name}#{self.number}"

    @property
    def is_near(self) -> bool:
        """Whether the run itself has started this worker on the hub's machine."""
        return self.grant.is_own and is_loopback(self.address)

    @property
    def is_connected(self) -> bool:
        return self.outgoing is not None

    @property
    def stats(self) -> EngineStats:
        return self.heartbeat.stats

    def beat(self, heartbeat: Heartbeat, now_s: float) -> None:
        self.heartbeat = heartbeat
        self.rates.append((now_s, heartbeat.stats.decoded_tokens))
        while len(self.rates) > 2 and now_s - self.rates[0][0] > RATE_WINDOW_S:
            self.rates.popleft()

    def tokens_per_s(self) -> float:
        """Return the decoded tokens per second over the last `RATE_WINDOW_S` seconds."""
        if len(self.rates) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self.rates[0], self.rates[-1]
        return max(0, last - first) / max(1e-9, last_s - first_s)


class RelayList:
    """The relays that have announced themselves to the hub."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def announce(self, url: str) -> bool:
        """Record an announcement. Return True if the relay is new and was added. A new relay is not added if there are
        already `MAX_RELAYS` relays."""
        is_new = url not in self.urls()
        if is_new and len(self._seen) >= MAX_RELAYS:
            return False
        self._seen[url] = self._clock()
        return is_new

    def urls(self) -> tuple[str, ...]:
        """Return the URLs of the relays that have announced themselves within the last `FORGET_AFTER_S` seconds."""
        now_s = self._clock()
        self._seen = {url: at_s for url, at_s in self._seen.items() if now_s - at_s <= FORGET_AFTER_S}
        return tuple(self._seen)
