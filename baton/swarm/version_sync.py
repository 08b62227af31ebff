"""Decides which version a worker fetches and serves. Receives events and returns commands.

    VersionWanted ─▶ Fetch ──Fetched (verified)──▶ Activate ──Activated──▶ served
                ▲            │
                └─ Retry ◀── FetchFailed: wait, longer each time, and retry while the version is wanted

A worker keeps one wanted version, not a queue of announcements. Announcements may therefore be repeated, late or
reordered, or arrive during a fetch, and no failure is permanent. The engine serves the old version until the new
version is complete and verified.
"""

from __future__ import annotations

from functools import partial

import msgspec

from baton.clock import TimedEvent, retry_wait_s
from baton.types import PolicyVersion

# ---- events ----------------------------------------------------------------------------------------------------------


class VersionWanted(TimedEvent, frozen=True, tag="Wanted"):
    """The hub announces the version to serve."""

    version: PolicyVersion


class Fetched(TimedEvent, frozen=True, tag="Fetched"):
    """The fetch of a version is complete: all bytes have arrived and every tensor matches its digest."""

    version: PolicyVersion


class FetchFailed(TimedEvent, frozen=True, tag="FetchFailed"):
    """The fetch of a version has failed: the version was, for example, not available or did not match its digest."""

    version: PolicyVersion
    cause: str


class Activated(TimedEvent, frozen=True, tag="Activated"):
    """The engine serves the version."""

    version: PolicyVersion


class SleepChanged(TimedEvent, frozen=True, tag="Slept"):
    """The engine starts to sleep, which frees the memory of its weights, or is awake again."""

    is_asleep: bool


class TimerFired(TimedEvent, frozen=True, tag="Woken"):
    """A timer that `SetTimer` started has expired."""


Event = VersionWanted | Fetched | FetchFailed | Activated | SleepChanged | TimerFired

# ---- commands --------------------------------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True, tag="Fetch", gc=False):
    """Fetch and verify a version while the engine serves the old version."""

    version: PolicyVersion


class Activate(msgspec.Struct, frozen=True, tag="Activate", gc=False):
    """Switch the engine to a version that has been fetched."""

    version: PolicyVersion


class SetTimer(msgspec.Struct, frozen=True, tag="WakeAt", gc=False):
    """Start a timer that sends `TimerFired` at the time `at_s`."""

    at_s: float


Command = Fetch | Activate | SetTimer


class VersionSync:
    """Decides which version a worker fetches and activates."""

    def __init__(self, *, first_wait_s: float = 0.5, longest_wait_s: float = 30.0) -> None:
        """first_wait_s, longest_wait_s: delay before a retry after the first failed fetch, and maximum delay."""
        self._wait_s = partial(retry_wait_s, first_s=first_wait_s, longest_s=longest_wait_s)
        self.have: PolicyVersion | None = None
        """The version that the engine serves."""
        self.want: PolicyVersion | None = None
        self.fetching: PolicyVersion | None = None
        self.activating: PolicyVersion | None = None
        self.is_asleep = False
        """Whether the engine sleeps. A sleeping engine activates no version. The wanted version is cleared when a sleep
        starts. After the sleep, the engine therefore activates only a version that was announced since then."""
        self.failures = 0
        """Number of consecutive failed fetches."""
        self.last_cause = ""
        self._retry_s: float | None = None

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the resulting commands in order."""
        match event:
            case VersionWanted(version=version):
                self._wanted(version)
            case Fetched(version=version):
                if version == self.fetching:  # otherwise this fetch has been abandoned
                    self.fetching, self.failures, self.last_cause = None, 0, ""
                    if not self.is_asleep and self._is_useful(version):
                        self.activating = version
                        return [Activate(version)]
            case FetchFailed(at_s=at_s, version=version, cause=cause):
                if version == self.fetching:
                    self.fetching, self.last_cause = None, cause
                    if version == self.want:  # otherwise another version is wanted now and is fetched immediately
                        self.failures += 1
                        self._retry_s = at_s + self._wait_s(self.failures)
                        return [SetTimer(self._retry_s)]
            case Activated(version=version):
                if version == self.activating:
                    self.have, self.activating = None if self.is_asleep else version, None
            case SleepChanged(is_asleep=is_asleep):
                self.is_asleep = is_asleep
                if is_asleep:
                    self.have = self.want = None
            case TimerFired(at_s=at_s):
                if self._retry_s is not None and at_s >= self._retry_s:
                    self._retry_s = None
        return self._fetch_wanted()

    def _wanted(self, version: PolicyVersion) -> None:
        """Set the wanted version. Within a lineage, only a higher number replaces the wanted version. A version of
        another lineage always replaces the wanted version."""
        known = self.want
        if known is not None and known.lineage == version.lineage and version.number <= known.number:
            return
        self.want, self.failures, self._retry_s = version, 0, None

    def _is_useful(self, version: PolicyVersion) -> bool:
        """Return whether to activate a fetched version. The version must be of the wanted lineage and newer than the
        served version, but it need not be the wanted version."""
        have, want = self.have, self.want
        is_newer = have is None or have.lineage != version.lineage or have.number < version.number
        return want is not None and version.lineage == want.lineage and is_newer

    def _fetch_wanted(self) -> list[Command]:
        """Fetch the wanted version, unless a fetch, an activation or a delay before a retry is in progress. A fetch is
        never cancelled, so fetches complete even if versions are published faster than a worker can fetch them."""
        idle = self.fetching is None and self.activating is None and self._retry_s is None
        if not idle or self.is_asleep or self.want is None or self.want == self.have:
            return []
        self.fetching = self.want
        return [Fetch(self.want)]
