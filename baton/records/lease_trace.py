"""Converts leases (trajectories assigned to engines) and their reports to spans of the trace. In the trace, each lane
of an engine is one of the engine's slots.

The sender of leases calls `on_lease` for each lease and `on_report` for each report. If an engine has more leases than
slots, it runs them in the order of arrival. The span of a waiting lease therefore begins when a slot becomes free. A
lease that never gets a slot has no span. A span counts the policy tokens that were reported for its lease since the
span began.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.records.trace import Tracer
from baton.types import Author, FromWorker, Lease, Retry


@dataclass(slots=True)
class _Held:
    lease: Lease
    actor: str
    lane: int | None = None
    """Lane (slot number) of the lease; None while the lease waits for a slot."""
    begin_s: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)
    """Policy version → number of reported tokens."""


@dataclass(slots=True)
class _Slots:
    count: int
    num_used: int = 0
    freed: list[int] = field(default_factory=list)
    """Heap of the lanes that were occupied and are free again."""
    waiting: dict[int, _Held] = field(default_factory=dict)
    """Leases that wait for a slot, by lease id, oldest first."""

    @property
    def num_busy(self) -> int:
        return self.num_used - len(self.freed)

    def take(self) -> int:
        """Occupy the free lane with the lowest number, and return it."""
        if self.freed:
            return heapq.heappop(self.freed)
        self.num_used += 1
        return self.num_used - 1


class LeaseTrace:
    """Records a span for every lease that gets a slot. Only the thread that sends the leases may call these methods."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self.tracer, self.clock = tracer, clock
        self._held: dict[int, _Held] = {}
        self._slots: dict[str, _Slots] = {}

    def on_lease(self, lease: Lease, actor: str, slots: int) -> None:
        """Start the span of a lease sent to the engine of `actor`, or queue the lease if all slots are busy."""
        held = self._held[lease.lease_id] = _Held(lease, actor)
        of_engine = self._slots.setdefault(actor, _Slots(slots))
        of_engine.waiting[lease.lease_id] = held
        if of_engine.num_busy < of_engine.count:
            self._open_span(held, self.clock())

    def on_report(self, message: FromWorker) -> None:
        """Count the tokens of a report. End the lease if the trajectory is finished, aborted or refused."""
        held = self._held.get(message.lease_id)
        if held is None:
            return
        if isinstance(message, Retry):
            self.ended(message.lease_id, "refused")
            return
        # the engine has assigned a slot to the lease, but the report that freed this slot has not arrived yet
        if message.segments and held.lane is None:
            self._open_span(held, self.clock())
        for segment in message.segments:
            if segment.author is Author.POLICY:
                version = segment.policy_version
                held.tokens[version] = held.tokens.get(version, 0) + len(segment.token_ids)
        if message.finish_reason is not None:
            self.ended(message.lease_id, "finish")
        elif message.is_aborted:
            self.ended(message.lease_id, "abort")

    def ended(self, lease_id: int, how: str) -> None:
        """End a lease's span, even if the worker continues to generate. `how`: value of `ended` in the span. An unknown
        lease is ignored."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        of_engine, now_s = self._slots[held.actor], self.clock()
        if held.lane is None:
            del of_engine.waiting[lease_id]
            return
        if held.tokens or how != "refused":
            self._write_span(held, held.lane, now_s, how)
        heapq.heappush(of_engine.freed, held.lane)
        if of_engine.waiting and of_engine.num_busy < of_engine.count:
            self._open_span(next(iter(of_engine.waiting.values())), now_s)

    def paused(self) -> None:
        """End the spans of all leases that have a slot: engines generate no tokens until `continued` is called."""
        now_s = self.clock()
        for held in self._held.values():
            if held.lane is not None:
                self._write_span(held, held.lane, now_s, "abort")
                held.tokens, held.begin_s = {}, math.inf

    def continued(self) -> None:
        """Start a new span for each lease whose span `paused` has ended."""
        now_s = self.clock()
        for held in self._held.values():
            held.begin_s = min(held.begin_s, now_s)

    def left(self, actor: str) -> None:
        """End all leases of a worker that has disconnected."""
        of_engine = self._slots.get(actor)
        if of_engine is not None:
            for lease_id in [*of_engine.waiting, *(i for i, held in self._held.items() if held.actor == actor)]:
                self.ended(lease_id, "lost")
            del self._slots[actor]

    def _open_span(self, held: _Held, now_s: float) -> None:
        of_engine = self._slots[held.actor]
        del of_engine.waiting[held.lease.lease_id]
        held.lane, held.begin_s = of_engine.take(), now_s

    def _write_span(self, held: _Held, lane: int, now_s: float, how: str) -> None:
        trajectory, tokens = held.lease.trajectory, held.tokens
        facts: dict[str, object] = {} if len(tokens) < 2 else {"versions": {str(v): n for v, n in tokens.items()}}
        self.tracer.span(
            "generate",
            held.actor,
            lane,
            held.begin_s,
            now_s,
            group=trajectory.group_id,
            sample=trajectory.sample_index,
            tokens=sum(tokens.values()),
            version=max(tokens, default=held.lease.version),
            ended=how,
            **facts,
        )
