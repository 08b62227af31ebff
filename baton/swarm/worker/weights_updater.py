"""Fetches and verifies versions for a worker, while the engine serves the old version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.clock import in_thread
from baton.swarm import version_sync as vs
from baton.swarm.messages import Want
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.sources import WeightsSource
from baton.weights.version_files import VersionFiles

FETCH_DEADLINE_S = 3600.0


class WeightsUpdater:
    """Executes commands of `VersionSync` in the event loop. Fetches run in a thread."""

    def __init__(
        self,
        source: Callable[[str | None], WeightsSource],
        near: Sequence[WeightsSource],
        on_event: Callable[[vs.Event], None],
        say: Callable[[str], None],
    ) -> None:
        """`source`: function that returns the source of weights at a relay's URL or, for None, at the hub. `near`:
        sources that are tried first."""
        self._source, self._near = source, tuple(near)
        self._fetcher = Fetcher([*near, source(None)])
        self._on_event, self._say = on_event, say
        self._fetched: dict[PolicyVersion, Mapping[str, Any]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.fetched_bytes = 0

    async def fetch_tensors(self, version: PolicyVersion) -> Mapping[str, Any]:
        call = partial(self._fetcher.fetch, version, deadline_s=FETCH_DEADLINE_S)
        return await in_thread(call, timeout_s=FETCH_DEADLINE_S + 60.0, who="a source of weights")

    def fetch(self, version: PolicyVersion, want: Want) -> None:
        """Start fetching a version, unless the updater is closed. `want`: the last announcement, with relay URLs."""
        if self._is_closed:  # called by a timer of `VersionSync`, or after the engine's last switch
            return
        task = asyncio.create_task(self._fetch(version, want))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def close(self) -> None:
        """Cancel the running fetches. Threads of cancelled fetches may continue; their results are discarded."""
        self._is_closed = True
        for task in self._fetches:
            task.cancel()
        await asyncio.gather(*self._fetches, return_exceptions=True)

    def take(self, version: PolicyVersion) -> Mapping[str, Any]:
        """Return the tensors of the version that was fetched last."""
        return self._fetched.pop(version)

    async def _fetch(self, version: PolicyVersion, want: Want) -> None:
        self._fetcher.sources = [*self._near, *(self._source(url) for url in (*want.relays, None))]
        self._fetcher.shared = VersionFiles(Path(want.shared)) if want.shared else None
        now = asyncio.get_running_loop().time
        try:
            tensors = await self.fetch_tensors(version)
        except Exception as error:  # noqa: BLE001  # any error leads to a retry
            self._say(f"version {version.number} could not be fetched: {error}")
            event: vs.Event = vs.FetchFailed(now(), version, str(error))
        else:
            self._fetched, event = {version: tensors}, vs.Fetched(now(), version)
        if self._fetcher.last is not None:
            self.fetched_bytes += self._fetcher.last.num_bytes
        self._on_event(event)
