"""The swarm as a `WorkerTransport`: to the runner it is one worker whose places come and go.

    runner's thread                       hub's thread                  publisher's thread
      send ────────── call ──────────────▶ desk ─▶ workers
      receive ◀────── queue ◀───────────── desk
      load_weights ─────────────────────────────────────────────────────▶ chunks, manifest
                                           announce ◀─── call ────────────┘ the version is whole

`load_weights` returns at once: leases of a version wait until a worker serves it. What fails in another thread is
raised by the next `receive`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from baton.console import say
from baton.rollout.engine import EngineStats
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.peers import Peer
from baton.swarm.messages import Want
from baton.swarm.provisioning import Provisioning
from baton.swarm.serial_executor import SerialExecutor
from baton.swarm.throughput import ThroughputTracker
from baton.types import Abort, FromHub, FromPort, Group, Lease, PolicyVersion
from baton.weights.publish import PublishedVersion, Publisher
from baton.weights.store import Store

_NAMED = 6
"""Workers that a message names."""
FIRST_WORD_S = 30.0
"""Without a worker after which people are told."""


class Checks(Protocol):
    """Who scores again what workers hand in."""

    def published(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        """A version to score by."""
        ...

    def consumed(self, step: int, trajectories: Sequence[tuple[int, int]]) -> None:
        """(group id, sample index) of the trajectories in a batch."""
        ...

    def close(self) -> None:
        """End."""
        ...


@dataclass(frozen=True, slots=True)
class SwarmTransportParts:
    """What a swarm's port works with."""

    hub: Hub
    publisher: Publisher
    store: Store
    shared: str
    """Directory in shared memory for this machine's workers; empty for none."""
    look_after: Callable[[], None]
    """Looks after the workers that this run has started."""
    dismiss: Callable[[], None]
    """Ends them."""
    clear: Callable[[], None]
    """Removes what was only for this process."""
    checks: Checks | None
    publish_every: int
    trajectories_per_step: int
    keep_versions: int
    """Published versions that stay fetchable and scorable."""
    keep_stored: int
    """Latest versions that stay in the store whatever the workers hold."""
    pinned: tuple[PolicyVersion, ...]
    """Versions that stay whatever happens: the base model of adapters."""
    inbox: SimpleQueue[FromPort]
    pace: ThroughputTracker
    absence_s: float = 0.0
    """Seconds that there may be no worker at all."""
    say: Callable[[str], None] = say


class SwarmTransport:
    """A `WorkerTransport` over a hub."""

    def __init__(self, parts: SwarmTransportParts) -> None:
        self._parts, self.hub = parts, parts.hub
        self._publishing = SerialExecutor("publisher")
        self._futures: deque[Future[None]] = deque()
        self.last: PublishedVersion | None = None
        """The last publication."""
        self.train_s = 0.0
        self.step = 0
        self.staleness: dict[str, float] = {}
        self._empty_since_s: float | None = None
        self._next_word_s = FIRST_WORD_S

    @property
    def name(self) -> str:
        """Who is connected, and what each is doing."""
        hub = self.hub
        peers = list(hub.peers.values())
        if not peers:
            return f"the swarm at {hub.listen.url(hub.port)}, which no worker has joined,"
        wanted = f"; version {hub.want.version.number} is wanted" if hub.want is not None else ""
        said = ", ".join(f"{peer.name} {_doing(peer)}" for peer in peers[:_NAMED])
        return f"the swarm of {len(peers)} workers ({said}{', …' if len(peers) > _NAMED else ''}{wanted})"

    @property
    def slots(self) -> int:
        """Of the workers that are connected."""
        return self.hub.slots

    @property
    def absence_s(self) -> float:
        return self._parts.absence_s

    def send(self, message: FromHub) -> None:
        broker = self.hub.parts.broker
        match message:
            case Lease():
                self.hub.call(lambda: broker.want(message))
            case Abort(lease_id=lease_id):
                self.hub.call(lambda: broker.abort(lease_id))

    def receive(self, timeout_s: float) -> list[FromPort]:
        self._look_after()
        messages: list[FromPort] = []
        try:
            messages.append(self._parts.inbox.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                messages.append(self._parts.inbox.get_nowait())
        except Empty:
            return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Published in the background, announced when it is whole."""
        self._look_after()
        self._futures.append(self._publishing.submit(self._publish, tensors, version, time.monotonic()))

    def stats(self) -> EngineStats:
        """Sums over all workers, as of their last heartbeats."""
        total: Counter[str] = Counter()
        for peer in list(self.hub.peers.values()):
            for name in EngineStats.__struct_fields__:
                total[name] += getattr(peer.stats, name)
        return EngineStats(**total)

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        self.step = step
        trajectories = [member.trajectory for group in groups for member in group.members]
        ages = Counter(step - 1 - version for t in trajectories for version in t.policy_versions)
        self.staleness = {str(age): num / max(1, ages.total()) for age, num in sorted(ages.items())}
        if self._parts.checks is not None:
            self._parts.checks.consumed(step, [(t.group_id, t.sample_index) for t in trajectories])

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        self.train_s = values.get("time/train", self.train_s)
        rule, last, hub = self.provisioning(), self.last, self.hub
        found: dict[str, float | None] = {
            "swarm/workers": float(sum(peer.is_connected for peer in list(hub.peers.values()))),
            "swarm/slots": float(hub.slots),
            "swarm/broadcast_s": rule.broadcast_s,
            "swarm/trajectories_per_s": rule.trajectories_per_s,
            "swarm/needed_trajectories_per_s": rule.needed_per_s,
            "swarm/slack_s": rule.slack_s,
            "swarm/bytes_out": float(hub.counters.bytes_out),
            "swarm/version_bytes": float(last.bytes) if last is not None else None,
            "swarm/version_density": last.density if last is not None else None,
            "swarm/publish_s": last.seconds if last is not None else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def provisioning(self) -> Provisioning:
        """The provisioning rule as of now."""
        parts, pace = self._parts, self._parts.pace
        return Provisioning(
            parts.publish_every, self.train_s, pace.broadcast_s, parts.trajectories_per_step, pace.per_s()
        )

    def close(self, *, is_over: bool = False) -> None:
        """Hangs up on everybody; this machine's own workers end."""
        self._publishing.close()
        if self._parts.checks is not None:
            self._parts.checks.close()
        self._parts.dismiss()
        self.hub.stop(is_over=is_over)
        self.hub.parts.audit.close()
        self._parts.clear()

    def _look_after(self) -> None:
        """Raise what has failed elsewhere, and start again this machine's workers that have ended."""
        self.hub.check()
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()
        self._parts.look_after()
        self._say_whether_empty()

    def _say_whether_empty(self) -> None:
        """Let people know of a run that waits for workers: after half a minute, then each time after twice as long."""
        now_s = time.monotonic()
        if self.slots:
            if self._next_word_s > FIRST_WORD_S:
                self._parts.say("workers are there again")
            self._empty_since_s, self._next_word_s = None, FIRST_WORD_S
            return
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if (empty_s := now_s - self._empty_since_s) >= self._next_word_s:
            self._next_word_s *= 2
            self._parts.say(f"no worker for {empty_s:.0f} s: {self.name.rstrip(',')}; the run waits (swarm.absence_s)")

    def _publish(self, tensors: Mapping[str, Any], version: PolicyVersion, since_s: float) -> None:
        parts = self._parts
        if parts.checks is not None:
            parts.checks.published(version, tensors)
        self.last = parts.publisher.publish(tensors, version)
        parts.hub.call(lambda: self._announce(version, since_s))
        parts.hub.call(self._let_go)

    def _announce(self, version: PolicyVersion, since_s: float) -> None:
        """In the hub's thread: have it wanted."""
        self._parts.pace.announced[version.number] = since_s
        self.hub.announce(Want(version, shared=self._parts.shared))

    def _let_go(self) -> None:
        """In the hub's thread: let go of versions that nobody has or wants any more."""
        hub, parts = self.hub, self._parts
        kept = [hub.versions[number] for number in sorted(hub.versions)[-parts.keep_versions :]]
        held = [peer.heartbeat.serves for peer in hub.peers.values() if peer.heartbeat.serves is not None]
        live = [*kept, *held, *parts.pinned]
        hub.versions = {number: v for number, v in hub.versions.items() if v in live}
        self._futures.append(self._publishing.submit(self._collect, live))

    def _collect(self, live: list[PolicyVersion]) -> None:
        self._parts.store.collect(live, keep=self._parts.keep_stored)


def _doing(peer: Peer) -> str:
    if not peer.is_connected:
        return "is cut off"
    if peer.heartbeat.fetching is not None:
        return f"fetches {peer.heartbeat.fetching}"
    return "has no version yet" if peer.served is None else f"serves {peer.served}"
