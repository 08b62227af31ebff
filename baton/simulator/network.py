"""The network between hub and workers: messages, latencies and faults.

The messages are those of `swarm/messages.py`, with counted tokens. In runs with faults, messages are encoded and
decoded.

Without faults, messages arrive in order. During a `partition` or a `storm`, messages may be delayed, reordered,
repeated or lost, and fetches may fail. The loss of a message also cuts the connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton.simulator.clock import VirtualClock
from baton.simulator.counted_tokens import counted
from baton.simulator.faults import FaultSettings
from baton.swarm.hub.peers import Outgoing
from baton.swarm.messages import Ack, FromHub, HeartbeatAck, encode


@dataclass(frozen=True, slots=True)
class MessageFault:
    """The effect of network faults on one message."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_doubled: bool = False
    is_late: bool = False
    """Whether the message arrives after messages that were sent later."""


@dataclass(slots=True, eq=False)
class SimulatedConnection:
    """One direction of a worker's connection: to the hub or from the hub."""

    clock: VirtualClock
    link_s: float
    take: Callable[[Any], None]
    """Function that receives each message that arrives."""
    lose: Callable[[], None]
    """Function that cuts the connection."""
    draw_fault: Callable[[], MessageFault] | None = None
    """Function that draws the fault of each sent message; None if the run has no faults."""
    decode: Callable[[bytes], Any] | None = None
    """Function that decodes the messages of this direction; None if they are not encoded."""
    connection: int = 0
    """Sequence number of the connection. Messages of an earlier connection are discarded."""
    last_s: float = 0.0
    """Arrival time of the last message that was sent in order."""
    arrived_s: float = 0.0
    """Time at which the last message arrived; before the first message, time at which the connection began."""
    due_s: float = math.inf
    """Time of the next check whether messages still arrive; infinite before the first call to `watch`."""
    silence_s: Callable[[], float] = field(init=False)
    on_silence: Callable[[], None] = field(init=False)

    def send(self, message: Any) -> None:
        now_s = self.clock.now_s
        if self.draw_fault is None:
            self.clock.at(now_s + self.link_s, self._arrive, self.connection, message)
            return
        if self.decode is not None:
            message = counted(self.decode(encode(message)))
        fault = self.draw_fault()
        if fault.is_lost:
            self.clock.at(now_s, self.lose)
            return
        at_s = now_s + self.link_s + fault.delay_s
        if not fault.is_late:
            at_s = self.last_s = max(at_s, self.last_s)
        self.clock.at(at_s, self._arrive, self.connection, message)
        if fault.is_doubled:
            self.clock.at(at_s + self.link_s, self._arrive, self.connection, message)

    def watch(self, silence_s: Callable[[], float], on_silence: Callable[[], None]) -> None:
        """Begin a connection. Call `on_silence` whenever no message has arrived for `silence_s()` seconds."""
        self.arrived_s, self.due_s, self.silence_s, self.on_silence = self.clock.now_s, math.inf, silence_s, on_silence
        self._expect()

    def _expect(self) -> None:
        """Schedule a check for the time by which a message must arrive, unless an earlier check is scheduled."""
        at_s = max(self.clock.now_s, self.arrived_s + self.silence_s())
        if at_s < self.due_s:
            self.due_s = at_s
            self.clock.at(at_s, self._check, self.connection, at_s)

    def _check(self, connection: int, due_s: float) -> None:
        if (connection, due_s) != (self.connection, self.due_s):
            return
        self.due_s, now_s = math.inf, self.clock.now_s
        if now_s >= self.arrived_s + self.silence_s():
            self.arrived_s = now_s
            self.on_silence()
        if connection == self.connection:
            self._expect()

    def cut(self) -> None:
        """Drop all messages that have been sent but have not arrived."""
        self.connection += 1

    def _arrive(self, connection: int, message: Any) -> None:
        if connection == self.connection:
            self.arrived_s = self.clock.now_s
            self.take(message)
            if self.due_s < math.inf and connection == self.connection:
                self._expect()  # the message may have shortened `silence_s`


class SimulatedOutgoing(Outgoing):
    """The hub's end of one connection of a worker."""

    def __init__(self, down: SimulatedConnection) -> None:
        self._down, self._connection = down, down.connection

    def put(self, message: FromHub) -> bool:
        down = self._down
        # without faults no message is lost, so two messages are simplified for speed: Ack arrives at once, and
        # HeartbeatAck, which only shows that the hub is alive, is not sent
        if down.draw_fault is not None or not isinstance(message, Ack | HeartbeatAck):
            down.send(message)
        elif isinstance(message, Ack):
            down.take(message)
        return True

    def close(self) -> None:
        down = self._down
        down.clock.at(max(down.last_s, down.clock.now_s + down.link_s), self._cut)

    def _cut(self) -> None:
        if self._down.connection == self._connection:
            self._down.lose()


class NetworkFaults:
    """The partitions and storms of a run."""

    def __init__(self, faults: Sequence[FaultSettings], clock: VirtualClock, random: Random) -> None:
        self._faults = [fault for fault in faults if fault.kind in ("partition", "storm")]
        self._clock, self._random = clock, random

    def is_apart(self, worker: str) -> bool:
        return any(fault.kind == "partition" for fault in self._active(worker))

    def fetch_fault(self, worker: str) -> str:
        """Return the reason why a fetch that ends now has failed, or an empty string if it has succeeded."""
        for fault in self._active(worker):
            if fault.kind == "partition":
                return "the store cannot be reached"
            if fault.corrupt and self._random.random() < fault.corrupt:
                return "the digest of a chunk does not match"
        return ""

    def _active(self, worker: str) -> list[FaultSettings]:
        now_s = self._clock.now_s
        return [f for f in self._faults if f.at_s <= now_s < f.at_s + f.for_s and f.worker in ("", worker)]

    def message_fault(self, worker: str) -> MessageFault:
        """Draw the effect of the current faults on a message from or to a worker."""
        draw, delay_s = self._random.random, 0.0
        is_lost = is_doubled = is_late = False
        for fault in self._active(worker):
            if fault.kind == "partition":
                delay_s = max(delay_s, fault.at_s + fault.for_s - self._clock.now_s)
            if fault.delay_s:
                delay_s += draw() * fault.delay_s
            is_lost |= bool(fault.loss) and draw() < fault.loss
            is_doubled |= bool(fault.duplicate) and draw() < fault.duplicate
            if fault.reorder and draw() < fault.reorder:
                is_late, delay_s = True, delay_s + draw()
        return MessageFault(delay_s, is_lost, is_doubled, is_late)
