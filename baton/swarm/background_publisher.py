"""Publishes versions in the background, announces each version to the workers, and removes versions that no worker
needs.

controller's thread           publisher's thread                 hub's thread
  publish ───────────────────▶ the version's file ── call ──────▶ announce to the run's workers on this machine
                              chunks, manifest ──── call ──────▶ announce to all
                              collect ◀───────────────────────── versions that workers serve or may request

Storing a keyframe's whole encoding takes longer than storing its delta. A separate thread stores the whole encoding, so
the next version does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.records.trace import Tracer, TraceWriter
from baton.swarm.hub.hub import Hub
from baton.swarm.messages import Want
from baton.swarm.serial_executor import SerialExecutor
from baton.types import PolicyVersion
from baton.weights.publisher import PublishedVersion, Publisher
from baton.weights.store import Store


@dataclass(frozen=True, slots=True)
class VersionRetention:
    """Determines which versions are kept even if no worker serves them."""

    fetchable: int
    """Number of the latest versions that workers may fetch."""
    stored: int
    """Minimum number of the latest versions that stay in the store."""
    pinned: tuple[PolicyVersion, ...] = ()
    """Versions that are never removed, such as the base model of adapters."""


class BackgroundPublisher:
    """Publishes the versions of one run."""

    def __init__(
        self,
        hub: Hub,
        publisher: Publisher,
        store: Store,
        retention: VersionRetention,
        shared: str = "",
        tracer: Tracer | None = None,
    ) -> None:
        """`shared`: directory in which workers on this machine find the files of versions; empty if none. `tracer`:
        receives a span for each publication."""
        self._hub, self._publisher, self._store = hub, publisher, store
        self._retention, self._shared, self._tracer = retention, shared, tracer or TraceWriter()
        self._executor = SerialExecutor("publisher")
        self._keyframes = SerialExecutor("keyframe")
        self._keyframe: Future[None] | None = None
        """Future of the task that stores the last keyframe's whole encoding; set only by the publisher's thread."""
        self._futures: deque[Future[None]] = deque()
        self._was_collected = True
        """False if old versions could not be removed, which the user has been told."""
        self.last: PublishedVersion | None = None
        """The version that was published last; None before the first publication."""

    def publish(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Publish a version in the background, and announce it to the workers when it is complete."""
        self._futures.append(self._executor.submit(self._publish, tensors, version, time.monotonic()))

    def check(self) -> None:
        """If a background task has failed, raise its error."""
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()

    def close(self) -> None:
        """End the publisher's threads. May be called twice."""
        self._executor.close()
        self._keyframes.close()

    def _publish(self, tensors: Mapping[str, Any], version: PolicyVersion, since_s: float) -> None:
        def when_shared(mapped: Mapping[str, Any]) -> None:
            self._hub.members.verifier.published(version, mapped)
            if self._shared:
                self._hub.call(lambda: self._announce(version, since_s, True))

        def when_stored() -> None:
            self._hub.call(lambda: self._announce(version, since_s, False))

        begin_s = time.monotonic()
        self.last = self._publisher.publish(
            tensors, version, when_shared=when_shared, when_stored=when_stored, later=self._store_keyframe
        )
        end_s = time.monotonic()
        self._tracer.span("publish", "hub", 0, begin_s, end_s, version=version.number, bytes=self.last.bytes)
        self._hub.call(self._remove_unused)

    def _store_keyframe(self, action: Callable[[], None]) -> None:
        """Run `action` in the keyframe thread, or in this thread if the keyframe thread is still busy."""
        if self._keyframe is not None and not self._keyframe.done():
            action()
            return
        self._keyframe = self._keyframes.submit(action)
        self._futures.append(self._keyframe)

    def _announce(self, version: PolicyVersion, since_s: float, only_near: bool) -> None:
        self._hub.members.broker.pace.announced[version.number] = since_s
        self._hub.members.announce(Want(version, shared=self._shared), only_near=only_near)

    def _remove_unused(self) -> None:
        """Remove the versions that neither `VersionRetention` nor a worker needs. Called in the hub's thread."""
        members, retention = self._hub.members, self._retention
        kept = [members.versions[number] for number in sorted(members.versions)[-retention.fetchable :]]
        beats = [peer.heartbeat for peer in members.peers.values()]
        held = [beat.serves for beat in beats if beat.serves is not None]
        fetched = [members.versions[beat.fetching] for beat in beats if beat.fetching in members.versions]
        live = [*kept, *held, *fetched, *retention.pinned]
        members.versions = {number: v for number, v in members.versions.items() if v in live}
        self._futures.append(self._executor.submit(self._collect, live))

    def _collect(self, live: list[PolicyVersion]) -> None:
        # The chunks of a whole encoding have no manifest until all chunks are stored, so `collect` would remove them.
        if self._keyframe is not None and not self._keyframe.done():
            return
        try:
            self._store.collect(live, keep=self._retention.stored)
            self._was_collected = True
        except (BatonError, OSError) as error:  # the versions that workers need are there, so the run continues
            if self._was_collected:
                self._hub.members.say(
                    f"warning: old versions cannot be removed from {self._store.name} ({error}); the run tries again "
                    "after each version"
                )
            self._was_collected = False
