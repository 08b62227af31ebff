"""Records refused requests, failed worker connections, and lifted quarantines in a JSON lines file of bounded size."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

import msgspec

from baton.swarm.auth import Clock, Denied

logger = logging.getLogger(__name__)

_SECRET = re.compile(r"[A-Za-z0-9_-]{40,}")
"""Pattern of the random part of an access token: at least 40 letters, digits, `_` or `-`."""
_MAX_FIELD_CHARACTERS = 160
_WINDOW_S = 60.0


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event in the audit log."""

    at: float
    """Time of the event in Unix seconds, UTC."""
    event: str
    """Name of the event, for example `denied`, `malformed` or `unquarantined`. `suppressed` counts omitted lines."""
    status: int
    """HTTP status of the response. For an error on a WebSocket, it is the HTTP status that corresponds to the error. 0:
    no HTTP status corresponds to the event."""
    reason: str = ""
    peer: str = ""
    """Network address of the process that sent the request."""
    route: str = ""
    """Path of the request, without the query. If a user has lifted a quarantine, it is the command that the user
    ran."""
    token: str = ""
    """Name of the sender's access token; empty if the token is not known. If a user has lifted a quarantine, it is the
    name that the user gave."""
    count: int = 0
    """In a `suppressed` line, the number of omitted lines."""


class AuditLog:
    """Writes the audit log. If the next line would make the file longer than `max_bytes`, the file is first renamed to
    `NAME.1`. An earlier `NAME.1` is overwritten. Only one thread may use an `AuditLog`.

    Refusals (status ≥ 400) and other events have separate budgets of lines per minute, so that many refusals do not
    displace other events. Lines beyond a budget and lines that cannot be written are omitted and counted. No error is
    raised.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = 8 << 20, max_lines_per_minute: int = 120, clock: Clock = time.time
    ) -> None:
        self.path, self._max_bytes, self._max_lines, self._clock = path, max_bytes, max_lines_per_minute, clock
        self._window = clock()
        self._written = {True: 0, False: 0}
        """Number of lines written in this minute: key True for refusals, key False for other events."""
        self.num_suppressed = 0
        """Number of lines omitted since the last `suppressed` line."""

    def denied(self, denied: Denied, peer: str, route: str) -> None:
        self.record("denied", denied.status, denied.reason, peer, route, denied.name)

    def record(self, event: str, status: int, reason: str, peer: str, route: str, token: str | None = None) -> None:
        """Write one line, unless the budget of the current minute is used up. Parts of the texts that match `_SECRET`
        are replaced by `…`. The line is not flushed to disk."""
        now = self._clock()
        if not 0 <= now - self._window < _WINDOW_S:  # also when the clock was set back
            self._window, self._written = now, {True: 0, False: 0}
            self._write_num_suppressed(now)
        is_refusal = status >= 400
        if self._written[is_refusal] >= self._max_lines:
            self.num_suppressed += 1
            return
        self._written[is_refusal] += 1
        texts = (_without_secrets(text) for text in (event, reason, peer, route.partition("?")[0], token or ""))
        event, reason, peer, route, name = texts
        if not self._write(AuditLine(now, event, status, reason, peer, route, name)):
            self.num_suppressed += 1

    def close(self) -> None:
        """Write a line `suppressed` if lines were omitted since the last such line."""
        self._write_num_suppressed(self._clock())

    def _write_num_suppressed(self, now: float) -> None:
        if self.num_suppressed and self._write(AuditLine(now, "suppressed", 0, count=self.num_suppressed)):
            self.num_suppressed = 0

    def _write(self, line: AuditLine) -> bool:
        data = msgspec.json.encode(line) + b"\n"
        try:
            if self.path.exists() and self.path.stat().st_size + len(data) > self._max_bytes:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                is_whole = os.write(handle, data) == len(data)
            finally:
                os.close(handle)
        except OSError as error:
            logger.error("cannot write audit lines to %s: %s", self.path, error.strerror)
            return False
        return is_whole


def _without_secrets(text: str) -> str:
    safe = text.encode("utf-8", "backslashreplace").decode()  # text decoded from a socket may have lone surrogates
    safe = _SECRET.sub("…", safe)
    return safe if len(safe) <= _MAX_FIELD_CHARACTERS else safe[: _MAX_FIELD_CHARACTERS - 1] + "…"
