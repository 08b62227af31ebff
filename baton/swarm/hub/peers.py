"""What the hub knows of each worker beside its leases: who it is, how it is reached, what it last said."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from baton.rollout.engine import EngineStats
from baton.swarm.auth import AccessGrant
from baton.swarm.messages import FromHub, Heartbeat, Hello, encode
from baton.swarm.verification.verify import WorkerClass

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A worker that takes nothing off its connection until so much has piled up is hung up on."""
FRAME_OVERHEAD = 128
"""Bytes of memory that a queued frame takes beside its own."""
RATE_WINDOW_S = 30.0


@dataclass(slots=True)
class Outgoing:
    """Frames on their way to one worker, bounded."""

    frames: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    num_bytes: int = 0
    """In memory."""

    def put(self, message: FromHub) -> bool:
        """Queue a message; False where too much waits already."""
        frame = encode(message)
        if self.num_bytes + len(frame) + FRAME_OVERHEAD > MAX_UNSENT_BYTES:
            return False
        self.num_bytes += len(frame) + FRAME_OVERHEAD
        self.frames.put_nowait(frame)
        return True

    def close(self) -> None:
        """The connection ends when what is queued has been sent."""
        self.frames.put_nowait(None)

    async def take(self) -> bytes | None:
        """Wait for the next frame; None at the end."""
        frame = await self.frames.get()
        if frame is not None:
            self.num_bytes -= len(frame) + FRAME_OVERHEAD
        return frame


@dataclass(slots=True)
class Peer:
    """One worker, also through a cut of its connection."""

    number: int
    grant: AccessGrant
    hello: Hello
    address: str
    since_s: float
    outgoing: Outgoing | None
    """None while it is cut off."""
    worker: str = ""
    """Its id: see `identity.WorkerKeys`."""
    key: str = ""
    """What it presents after a cut."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    heard_s: float = 0.0
    served: int | None = None
    """Number of the version it serves, where it is one of this lineage."""
    rates: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, decoded tokens) of its last heartbeats."""

    @property
    def name(self) -> str:
        """For people: that of its token, and its number."""
        return f"{self.grant.name}#{self.number}"

    @property
    def worker_class(self) -> WorkerClass:
        """What decides its numerics."""
        return self.hello.worker_class

    @property
    def is_connected(self) -> bool:
        """Whether it can be spoken to."""
        return self.outgoing is not None

    @property
    def stats(self) -> EngineStats:
        """Its engine's counters."""
        return self.heartbeat.stats

    def beat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take a sign of life."""
        self.heartbeat, self.heard_s = heartbeat, now_s
        self.rates.append((now_s, heartbeat.stats.decoded_tokens))
        while len(self.rates) > 2 and now_s - self.rates[0][0] > RATE_WINDOW_S:
            self.rates.popleft()

    def tokens_per_s(self) -> float:
        """Over the last heartbeats."""
        if len(self.rates) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self.rates[0], self.rates[-1]
        return max(0, last - first) / max(1e-9, last_s - first_s)
