"""The event log: every event and command as a line of JSON, in order. The same seed gives the same bytes."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import msgspec

from baton.rollout import events as ro
from baton.swarm import lease_events as ev

_encode = msgspec.json.encode


class EventLog:
    """The last lines of the log, and a digest of all lines."""

    def __init__(self, kept: int | None = None) -> None:
        """Keep the last `kept` lines; None keeps all lines."""
        self.lines: deque[bytes] = deque(maxlen=kept)
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def on_event(self, event: ro.Event) -> None:
        self._add(b"> ", event)

    def on_command(self, command: ro.Command) -> None:
        self._add(b"< ", command)

    def settled(self) -> None:
        pass

    def on_lease_event(self, event: ev.Event) -> None:
        self._add(b"hub > ", event)

    def on_lease_command(self, command: ev.Command) -> None:
        self._add(b"hub < ", command)

    def settled_lease(self, event: ev.Event) -> None:
        pass

    def _add(self, mark: bytes, message: msgspec.Struct) -> None:
        line = mark + _encode(message)
        self._digest.update(line)
        self.lines.append(line)
