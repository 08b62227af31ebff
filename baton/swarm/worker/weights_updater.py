"""Updates a worker's weights: fetches and verifies the wanted version while the old version serves, then switches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.clock import in_thread
from baton.swarm import version_sync as vs
from baton.swarm.messages import Want
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.shared import SharedMemory
from baton.weights.sources import WeightsSource

FETCH_DEADLINE_S = 3600.0


class WeightsUpdater:
    """Executes the commands of `VersionSync` in the event loop. Fetches run in a thread."""

    def __init__(
        self,
        source: Callable[[str | None], WeightsSource],
        near: Sequence[WeightsSource],
        activate: Callable[[PolicyVersion, Mapping[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """source: returns the source for a relay's URL, or the hub's source for None. near: sources that are tried
        first.

        activate: starts the engine's switch to a version. `activated` must be called after the switch.
        """
        self._source, self._near = source, tuple(near)
        self._fetcher = Fetcher([*near, source(None)])
        self._activate, self._say = activate, say
        self._sync = vs.VersionSync()
        self._shared = ""
        self._relays: tuple[str, ...] = ()
        self._fetched: dict[PolicyVersion, Mapping[str, Any]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self.fetched_bytes = 0

    @property
    def have(self) -> PolicyVersion | None:
        """Version that the engine serves; None before the first."""
        return self._sync.have

    @property
    def fetching(self) -> int | None:
        """Number of the version that is being fetched; None if no fetch is running."""
        return None if self._sync.fetching is None else self._sync.fetching.number

    @property
    def fault(self) -> str:
        """Error of the last fetch; empty if the fetch succeeded."""
        return self._sync.last_cause

    async def fetch_base(self, version: PolicyVersion) -> Mapping[str, Any]:
        """Fetch and return the tensors of the base model of published adapters."""
        return await self._fetched_of(version)

    async def _fetched_of(self, version: PolicyVersion) -> Mapping[str, Any]:
        call = partial(self._fetcher.fetch, version, deadline_s=FETCH_DEADLINE_S)
        return await in_thread(call, timeout_s=FETCH_DEADLINE_S + 60.0, who="a source of weights")

    def want(self, want: Want) -> None:
        """Handle an announcement of the hub."""
        self._shared, self._relays = want.shared, want.relays
        self._handle(vs.VersionWanted(time.monotonic(), want.version))

    def activated(self, version: PolicyVersion) -> None:
        """Handle the end of a switch: the engine now serves this version."""
        self._handle(vs.Activated(time.monotonic(), version))

    def _handle(self, event: vs.Event) -> None:
        for command in self._sync.handle(event):
            match command:
                case vs.Fetch(version=version):
                    task = asyncio.create_task(self._fetch(version))
                    self._fetches.add(task)
                    task.add_done_callback(self._fetches.discard)
                case vs.Activate(version=version):
                    self._activate(version, self._fetched.pop(version))
                case vs.SetTimer(at_s=at_s):
                    delay_s = max(0.0, at_s - time.monotonic())
                    wake = asyncio.get_running_loop().call_later
                    wake(delay_s, lambda: self._handle(vs.TimerFired(time.monotonic())))

    async def _fetch(self, version: PolicyVersion) -> None:
        self._fetcher.sources = [*self._near, *(self._source(url) for url in (*self._relays, None))]
        self._fetcher.shared = SharedMemory(Path(self._shared)) if self._shared else None
        try:
            tensors = await self._fetched_of(version)
        except Exception as error:  # noqa: BLE001  # any error leads to a retry
            self._say(f"version {version.number} could not be fetched: {error}")
            self._handle(vs.FetchFailed(time.monotonic(), version, str(error)))
            return
        finally:
            if self._fetcher.last is not None:
                self.fetched_bytes += self._fetcher.last.num_bytes
        self._fetched = {version: tensors}
        self._handle(vs.Fetched(time.monotonic(), version))
