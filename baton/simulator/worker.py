"""A swarm worker in virtual time, with an engine, a connection that the worker opens, and a `VersionSync`.

It behaves like `swarm/worker/worker.py`. The engine continues while the connection is cut, and the worker sends
unacknowledged reports again after it reconnects. If the hub has restarted, the worker drops all leases.
"""

from __future__ import annotations

from typing import Protocol

from baton.clock import retry_wait_s
from baton.records.trace import ASIDE, Tracer
from baton.rollout.engine import EngineStats
from baton.simulator.clock import VirtualClock
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.network import SimulatedConnection
from baton.swarm import version_sync as vs
from baton.swarm.messages import Ack, Admitted, Dropped, Heartbeat, HeartbeatAck, Hello, Leaving, Rejected, Want
from baton.swarm.verification.verify import WorkerClass
from baton.swarm.worker.outbox import Outbox
from baton.types import Abort, FromWorker, Lease, PolicyVersion, Report

WORKER_CLASS = WorkerClass("simulated", "float32", "embedded")
LONGEST_WAIT_S = 30.0
"""Maximum wait before the next attempt to connect."""


class WorkerHost(Protocol):
    """The hub and the network from a worker's point of view."""

    incarnation: int
    """Number of the hub's current incarnation."""

    def connect(self, worker: SimWorker) -> bool:
        """Connect a worker to the hub. Return whether this has succeeded."""

    def fetches(self, worker: SimWorker, version: PolicyVersion) -> str:
        """Return the reason why the fetch of a version has failed, or an empty string if it has succeeded."""

    def cut(self, worker: SimWorker) -> None:
        """Called when the worker's connection is cut."""

    def lost(self, num_tokens: int) -> None:
        """Called when a worker ends, with the number of tokens that are lost because of this."""


class SimWorker:
    """One worker process, from its start to its end."""

    def __init__(
        self,
        setting: Setting,
        spec: EngineSpec,
        clock: VirtualClock,
        around: WorkerHost,
        *,
        remembers: bool,
        tracer: Tracer | None,
    ) -> None:
        """remembers: whether reports are kept until the hub acknowledges them. Only runs with faults need this."""
        assert setting.swarm is not None, "the setting has no swarm"
        self.spec, self.key = spec, ""
        """`key`: the key that the hub has issued."""
        self.is_up = self.is_connected = False
        self.up: SimulatedConnection
        """Messages to the hub."""
        self.down: SimulatedConnection
        """Messages from the hub."""
        self.have_want = vs.VersionSync(setting.swarm.have_want)
        self.engine = SimEngine(
            clock,
            spec,
            self,
            report_every_s=setting.swarm.report_every_s,
            shares_prefill=setting.shares_prefill,
            tracer=tracer,
        )
        self.slowness = 1.0
        self.is_frozen = False
        self._swarm, self._clock, self._around, self._tracer = setting.swarm, clock, around, tracer
        self._resumes, self._remembers = setting.rules.on_new_version == "resume", remembers
        self._outbox = Outbox()
        self._incarnation = -1
        self._failures = 0
        self._beats = 0
        self._fetching_s = 0.0

    # ---- process and connection --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.is_up = True
        self._connect()

    def die(self) -> None:
        """End the process without sending a message."""
        if not self.is_up:
            return
        self.is_up = False
        self.engine.stop()
        kept = sum(len(segment.token_ids) for report in self._outbox.again() for segment in report.segments)
        self._around.lost(self.engine.unreported() + kept)
        self.engine.abandon()
        self._disconnect()

    def leave(self) -> None:
        """Report all tokens, send `Leaving`, and end the process."""
        if not self.is_up:
            return
        if self.is_connected and not self.is_frozen:
            self.engine.flush()
            self.up.send(Leaving())
        self.is_up = self.is_connected = False
        self._around.lost(self.engine.unreported())
        self.engine.stop()
        self.engine.abandon()

    def freeze(self) -> None:
        """Stop the engine and send nothing, until `thaw`."""
        self.is_frozen = True
        self.engine.stop()

    def thaw(self) -> None:
        if self.is_up and self.is_frozen:
            self.is_frozen = False
            self.engine.go_on()
            self._beat(self._beats)

    def cut(self) -> None:
        """Cut the connection, and reconnect after a wait."""
        if not self.is_connected:
            return
        self._disconnect()
        if self.is_up:
            self._clock.after(self._swarm.reconnect_s, self._connect)

    def _disconnect(self) -> None:
        self.is_connected = False
        self.up.cut()
        self.down.cut()
        self._around.cut(self)

    def _connect(self) -> None:
        if not self.is_up or self.is_connected:
            return
        if self.is_frozen or not self._around.connect(self):
            self._failures += 1
            wait_s = retry_wait_s(self._failures, first_s=self._swarm.reconnect_s, longest_s=LONGEST_WAIT_S)
            self._clock.after(wait_s, self._connect)
            return
        self._failures = 0
        self.is_connected = True
        if self._around.incarnation != self._incarnation:
            self._incarnation = self._around.incarnation
            self._forget_all()
        self._beats += 1
        self.up.send(Hello(self.key, WORKER_CLASS, "", self.spec.slots, self.have_want.have, self._outbox.leases))
        for report in self._outbox.again():
            self.up.send(report)
        self._clock.after(self._swarm.heartbeat_s, self._beat, self._beats)

    def _forget_all(self) -> None:
        for lease in self.engine.leases:
            self.engine.drop(lease)
        self._outbox.clear()

    def _beat(self, beats: int) -> None:
        if beats != self._beats or not self.is_connected or self.is_frozen:
            return
        self._say_beat()
        self._clock.after(self._swarm.heartbeat_s, self._beat, beats)

    def _say_beat(self) -> None:
        if self.is_connected:
            self.up.send(Heartbeat(self.have_want.have, EngineStats(decoded_tokens=self.engine.decoded())))

    # ---- messages from the hub ---------------------------------------------------------------------------------------

    def on_message(self, message: object) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            # a frozen worker reads no message, so the message waits in the socket's buffer
            self._clock.after(1.0, self.on_message, message)
            return
        match message:
            case Lease():
                self._granted(message)
            case Abort(lease_id=lease):
                self.engine.abort(lease)
            case Dropped(lease_id=lease):
                self._outbox.close(lease)
                self.engine.drop(lease)
            case Ack(lease_id=lease, length=length, has_ended=has_ended):
                self._outbox.confirm(lease, length, has_ended=has_ended)
            case Admitted(key=key):
                self.key = key
            case HeartbeatAck() | Rejected():
                pass  # the hub closes the connection after Rejected
            case Want(version=version):
                self._consider(vs.VersionWanted(self._clock.now_s, version))
            case _:
                raise AssertionError(f"unexpected message from the hub: {type(message).__name__}")

    def _granted(self, lease: Lease) -> None:
        if lease.lease_id in self.engine.leases:
            return  # this lease is a duplicate message
        if self._remembers:
            self._outbox.open(lease.lease_id)
        self.engine.submit(lease)

    # ---- reports of the engine ---------------------------------------------------------------------------------------

    def on_reports(self, engine: SimEngine, reports: list[FromWorker]) -> None:
        for message in reports:
            if isinstance(message, Report):
                self._outbox.add(message)
            else:
                self._outbox.close(message.lease_id)
            self._send(message)

    def _send(self, message: FromWorker) -> None:
        if self.is_connected and not self.is_frozen:
            self.up.send(message)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def _consider(self, event: vs.Event) -> None:
        for command in self.have_want.handle(event):
            match command:
                case vs.Fetch(version=version):
                    self._fetching_s = self._clock.now_s
                    self._clock.after(self._swarm.fetch_s * self.slowness, self._fetched, version)
                case vs.Activate(version=version):
                    load_s = self._swarm.activate_s
                    self.engine.switch(version.number, resumes=self._resumes, load_s=load_s)
                    self._clock.after(load_s, self._activated, version)
                case vs.SetTimer(at_s=at_s):
                    self._clock.at(at_s, self._woken)

    def _woken(self) -> None:
        if self.is_up:
            self._consider(vs.TimerFired(self._clock.now_s))

    def _fetched(self, version: PolicyVersion) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            self._clock.after(1.0, self._fetched, version)
            return
        now_s = self._clock.now_s
        cause = self._around.fetches(self, version)
        if self._tracer is not None:
            self._tracer.span("fetch", self.engine.name, ASIDE, self._fetching_s, now_s, version=version.number)
        if cause:
            self._consider(vs.FetchFailed(now_s, version, cause))
        else:
            self._consider(vs.Fetched(now_s, version))

    def _activated(self, version: PolicyVersion) -> None:
        if not self.is_up:
            return
        if self.is_frozen or self.engine.version != version.number:
            self._clock.after(0.01, self._activated, version)  # the engine loads the version after its current step
            return
        self._consider(vs.Activated(self._clock.now_s, version))
        self._say_beat()
