"""Which version a worker has, which it wants, and what it does about the difference. Events in, commands out.

    VersionWanted ─▶ Fetch ──Fetched (verified)──▶ Activate ──Activated──▶ served
                ▲            │
                └─ Retry ◀── FetchFailed: wait, longer each time, and try again as long as it is wanted

Desired state, not orders: a version that is announced twice, late, out of order or while another is on its way changes
nothing that it should not, and no failure is for ever. The old version serves until the new one is whole and verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec

from baton.clock import retry_wait_s
from baton.types import PolicyVersion

# ---- events ----------------------------------------------------------------------------------------------------------


class VersionWanted(msgspec.Struct, frozen=True, tag="Wanted", gc=False):
    """The hub wants this version served."""

    at_s: float
    version: PolicyVersion


class Fetched(msgspec.Struct, frozen=True, tag="Fetched", gc=False):
    """All bytes are here, and every tensor is what its digest says."""

    at_s: float
    version: PolicyVersion


class FetchFailed(msgspec.Struct, frozen=True, tag="FetchFailed", gc=False):
    """A version could not be had, or was not what its digest says."""

    at_s: float
    version: PolicyVersion
    cause: str


class Activated(msgspec.Struct, frozen=True, tag="Activated", gc=False):
    """The engine serves the version."""

    at_s: float
    version: PolicyVersion


class TimerFired(msgspec.Struct, frozen=True, tag="Woken", gc=False):
    """Time has passed."""

    at_s: float


Event = VersionWanted | Fetched | FetchFailed | Activated | TimerFired

# ---- commands --------------------------------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True, tag="Fetch", gc=False):
    """Get a version, whole and verified, while the old one serves."""

    version: PolicyVersion


class Activate(msgspec.Struct, frozen=True, tag="Activate", gc=False):
    """Switch the engine to what was fetched."""

    version: PolicyVersion


class SetTimer(msgspec.Struct, frozen=True, tag="WakeAt", gc=False):
    """Say `TimerFired` at this time."""

    at_s: float


Command = Fetch | Activate | SetTimer


@dataclass(frozen=True, slots=True)
class VersionSyncRules:
    """Times in seconds."""

    first_wait_s: float = 0.5
    """After the first failure."""
    longest_wait_s: float = 30.0


class VersionSync:
    """The decisions of a worker about its weights."""

    def __init__(self, rules: VersionSyncRules | None = None) -> None:
        self.rules = rules or VersionSyncRules()
        self.have: PolicyVersion | None = None
        """What the engine serves."""
        self.want: PolicyVersion | None = None
        self.fetching: PolicyVersion | None = None
        self.activating: PolicyVersion | None = None
        self.failures = 0
        """In a row."""
        self.last_cause = ""
        self._retry_s: float | None = None

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        match event:
            case VersionWanted(version=version):
                self._wanted(version)
            case Fetched(version=version):
                if version == self.fetching:  # else of an attempt that was given up
                    self.fetching, self.failures, self.last_cause = None, 0, ""
                    if self._is_of_use(version):
                        self.activating = version
                        return [Activate(version)]
            case FetchFailed(at_s=at_s, version=version, cause=cause):
                if version == self.fetching:
                    self.fetching, self.last_cause = None, cause
                    if version == self.want:  # else a newer one is fetched at once
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
        return self._go_on()

    def _wanted(self, version: PolicyVersion) -> None:
        """Later numbers replace earlier ones of their lineage; another lineage replaces whatever there is."""
        known = self.want
        if known is not None and known.lineage == version.lineage and version.number <= known.number:
            return
        self.want, self.failures, self._retry_s = version, 0, None

    def _is_of_use(self, version: PolicyVersion) -> bool:
        """Whether to serve it: it may not be the newest any more, but it is newer than what is served."""
        have, want = self.have, self.want
        assert want is not None, "nothing is fetched that was not wanted"
        is_newer = have is None or have.lineage != version.lineage or have.number < version.number
        return version.lineage == want.lineage and is_newer

    def _go_on(self) -> list[Command]:
        """Fetch what is wanted, one at a time; one that is under way is let finish, so that there is progress."""
        idle = self.fetching is None and self.activating is None and self._retry_s is None
        if not idle or self.want is None or self.want == self.have:
            return []
        self.fetching = self.want
        return [Fetch(self.want)]
