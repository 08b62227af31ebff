"""Decides what the hub does with each message of one worker connection, and when the connection ends.

    preparing: Heartbeat, Fault ──Hello──▶ member: every other message ──▶ over

`HubSession` uses no socket and no thread, so the live hub and the simulator use the same class. It sends replies to
`Outgoing`.
"""

from __future__ import annotations

from baton.errors import Fault
from baton.swarm.auth import AccessGrant
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.peers import Outgoing, Peer
from baton.swarm.hub.worker_access import Unwanted
from baton.swarm.messages import SILENT_HEARTBEATS, FromWorker, Heartbeat, Hello, Malformed, Rejected

PREPARE_DEADLINE_S = 1800.0
"""Maximum seconds for a worker to fetch a base model and to build its engine."""
PREPARE_SILENCE_S = 120.0
"""Maximum seconds between heartbeats while the worker prepares."""


class ReceiveTimeout(Exception):
    """Raised when no message has arrived in time, perhaps because the worker's network or machine is down."""


class HubSession:
    """One connection. The driver of a session (`Hub` or the simulator) receives the messages and calls every method."""

    def __init__(self, members: Membership, grant: AccessGrant, address: str, outgoing: Outgoing) -> None:
        self.peer: Peer | None = None
        """The worker; None before its Hello."""
        self.grant, self.address = grant, address
        self._members, self._outgoing = members, outgoing
        self._since_s, self._has_ended = members.broker.clock(), False
        outgoing.put(members.welcome)

    @property
    def silence_s(self) -> float:
        """If no message arrives for this number of seconds, the driver calls `fail` with ReceiveTimeout."""
        return PREPARE_SILENCE_S if self.peer is None else SILENT_HEARTBEATS * self._members.welcome.heartbeat_s

    @property
    def is_over(self) -> bool:
        """True if messages are ignored: the session has ended, or the worker is removed or has a newer connection."""
        return self._has_ended or not (self.peer is None or self._is_joined)

    @property
    def _is_joined(self) -> bool:
        peer = self.peer
        return peer is not None and self._members.peers.get(peer.number) is peer and peer.outgoing is self._outgoing

    def receive(self, message: FromWorker) -> None:
        """Handle a message of the worker. The driver passes an error of this method to `fail`."""
        members = self._members
        if self.is_over:
            return
        if self.peer is not None:
            members.on_message(self.peer, message)
            return
        match message:
            case Hello():
                self.peer = members.join(message, self.grant, self.address, self._outgoing)
            case Fault(kind=kind, text=text):
                members.say(f"a worker could not build its engine: {kind}: {text[:500]}")
                self._has_ended = True
            case Heartbeat() if members.broker.clock() - self._since_s < PREPARE_DEADLINE_S:
                pass
            case Heartbeat():
                raise ReceiveTimeout(f"no Hello in {PREPARE_DEADLINE_S:.0f} s")
            case other:
                raise Malformed(f"{type(other).__name__} before Hello")

    def fail(self, error: Exception) -> tuple[str, int]:
        """End the session because of an error. Return the event and the HTTP status for the audit log."""
        self._has_ended = True
        members, peer = self._members, self.peer if self._is_joined else None
        match error:
            case ReceiveTimeout():  # the worker may join again at once
                self._outgoing.put(Rejected(str(error), is_final=False))
                if peer is not None:
                    members.remove(peer.number, str(error))
                return "silent", 0
            case Malformed():
                members.counters.malformed += 1
                cause = f"malformed: {str(error)[:300]}"
                self._outgoing.put(Rejected(cause, is_final=False))
                if peer is not None:
                    members.report_violated(peer.number, cause)
                return "malformed", 400
            case Unwanted():
                self._outgoing.put(Rejected(str(error), is_final=True))
                return "unwanted", 403
            case _:
                if peer is not None:
                    members.remove(peer.number, f"its message cannot be processed: {type(error).__name__}: {error}")
                return "fault", 500

    def close(self, *, is_stopping: bool) -> None:
        """Handle the end of the connection. `is_stopping`: True if the connection ends because the hub stops."""
        if self.peer is not None and self.peer.outgoing is self._outgoing:
            self._members.connection_lost(self.peer, is_stopping=is_stopping)
