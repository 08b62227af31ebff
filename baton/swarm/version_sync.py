"""Decides which version a worker fetches and serves. Receives events and returns commands.

    VersionWanted ─▶ Fetch ──Fetched (verified)──▶ Activate ──Activated──▶ served
                ▲            │
                └─ Retry ◀── FetchFailed: wait, longer each time, and retry while the version is wanted

The wanted version is a state, not a sequence of commands. An announcement that is repeated, late, out of order or
received during a fetch therefore has no wrong effect, and no failure is permanent. The old version serves until the new
version is complete and verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec

from baton.clock import retry_wait_s
from baton.types import PolicyVersion

# ---- events ----------------------------------------------------------------------------------------------------------


class VersionWanted(msgspec.Struct, frozen=True, tag="Wanted", gc=False):
    """The hub announces the version to serve."""

    at_s: float
    version: PolicyVersion


class Fetched(msgspec.Struct, frozen=True, tag="Fetched", gc=False):
    """All bytes have arrived, and every tensor matches its digest."""

    at_s: float
    version: PolicyVersion


class FetchFailed(msgspec.Struct, frozen=True, tag="FetchFailed", gc=False):
    """A version was not available, or did not match its digest."""

    at_s: float
    version: PolicyVersion
    cause: str


class Activated(msgspec.Struct, frozen=True, tag="Activated", gc=False):
    """The engine serves the version."""

    at_s: float
    version: PolicyVersion


class TimerFired(msgspec.Struct, frozen=True, tag="Woken", gc=False):
    """A timer of `SetTimer` has expired."""

    at_s: float


Event = VersionWanted | Fetched | FetchFailed | Activated | TimerFired

# ---- commands --------------------------------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True, tag="Fetch", gc=False):
    """Fetch and verify a version while the old version serves."""

    version: PolicyVersion


class Activate(msgspec.Struct, frozen=True, tag="Activate", gc=False):
    """Switch the engine to the fetched version."""

    version: PolicyVersion


class SetTimer(msgspec.Struct, frozen=True, tag="WakeAt", gc=False):
    """Send `TimerFired` at this time."""

    at_s: float


Command = Fetch | Activate | SetTimer


@dataclass(frozen=True, slots=True)
class VersionSyncRules:
    """Delays between retries, in seconds."""

    first_wait_s: float = 0.5
    """Delay after the first failure."""
    longest_wait_s: float = 30.0


class VersionSync:
    """Decides which version a worker fetches and activates."""

    def __init__(self, rules: VersionSyncRules | None = None) -> None:
        self.rules = rules or VersionSyncRules()
        self.have: PolicyVersion | None = None
        """The version that the engine serves."""
        self.want: PolicyVersion | None = None
        self.fetching: PolicyVersion | None = None
        self.activating: PolicyVersion | None = None
        self.failures = 0
        """Number of consecutive failures."""
        self.last_cause = ""
        self._retry_s: float | None = None

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the resulting commands in order."""
        match event:
            case VersionWanted(version=version):
                self._wanted(version)
            case Fetched(version=version):
                if version == self.fetching:  # otherwise the fetch was abandoned
                    self.fetching, self.failures, self.last_cause = None, 0, ""
                    if self._is_useful(version):
                        self.activating = version
                        return [Activate(version)]
            case FetchFailed(at_s=at_s, version=version, cause=cause):
                if version == self.fetching:
                    self.fetching, self.last_cause = None, cause
                    if version == self.want:  # otherwise a newer version is fetched at once
                        self.failures += 1
                        first_s, longest_s = self.rules.first_wait_s, self.rules.longest_wait_s
                        wait_s = retry_wait_s(self.failures, first_s=first_s, longest_s=longest_s)
                        self._retry_s = at_s + wait_s
                        return [SetTimer(self._retry_s)]
            case Activated(version=version):
                if version == self.activating:
                    self.have, self.activating = version, None
            case TimerFired(at_s=at_s):
                if self._retry_s is not None and at_s >= self._retry_s:
                    self._retry_s = None
            case _:
                assert_never(event)
        return self._fetch_wanted()

    def _wanted(self, version: PolicyVersion) -> None:
        """Set the wanted version. A later number replaces an earlier one of the same lineage; a version of another
        lineage always replaces the wanted version."""
        known = self.want
        if known is not None and known.lineage == version.lineage and version.number <= known.number:
            return
        self.want, self.failures, self._retry_s = version, 0, None

    def _is_useful(self, version: PolicyVersion) -> bool:
        """Return whether to activate a fetched version. It must be newer than the served version, but need not be the
        newest."""
        have, want = self.have, self.want
        assert want is not None, "a version was fetched that was not wanted"
        is_newer = have is None or have.lineage != version.lineage or have.number < version.number
        return version.lineage == want.lineage and is_newer

    def _fetch_wanted(self) -> list[Command]:
        """Fetch the wanted version unless a fetch or a delay is running. A running fetch is not cancelled, so frequent
        publications cannot prevent progress."""
        idle = self.fetching is None and self.activating is None and self._retry_s is None
        if not idle or self.want is None or self.want == self.have:
            return []
        self.fetching = self.want
        return [Fetch(self.want)]
