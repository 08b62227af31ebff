"""A swarm worker in virtual time: the session code of a live worker, with a simulated engine and a simulated
connection. The engine continues while the connection is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.records.trace import ASIDE, Tracer
from baton.rollout.engine import EngineStats
from baton.simulator.clock import VirtualClock
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.network import SimulatedConnection
from baton.swarm import version_sync as vs
from baton.swarm.messages import Dropped, FromHub, Leaving, RunOver, Welcome
from baton.swarm.verification.verify import WorkerClass
from baton.swarm.worker.session import Command, ConnectionLost, Prepare, WorkerSession
from baton.types import Abort, Lease, PolicyVersion


class WorkerHost(Protocol):
    """The interface through which a simulated worker calls the hub and the network."""

    def try_connect(self, worker: SimWorker) -> bool:
        """Connect a worker to the hub. Return whether it is connected."""

    def fetches(self, worker: SimWorker, version: PolicyVersion) -> str:
        """Return the reason why the fetch of a version has failed, or an empty string if it has succeeded."""

    def cut(self, worker: SimWorker) -> None:
        """Called when the worker's connection is cut."""

    def lost(self, num_tokens: int) -> None:
        """Called when a worker ends, with the number of tokens that are lost with the worker."""


class SimWorker:
    """One worker process, from its start to its end."""

    def __init__(
        self, setting: Setting, spec: EngineSpec, clock: VirtualClock, host: WorkerHost, tracer: Tracer | None
    ) -> None:
        assert setting.swarm is not None, "the setting has no swarm"
        self.spec = spec
        self.is_up = self.is_connected = False
        self.up: SimulatedConnection
        """Messages to the hub."""
        self.down: SimulatedConnection
        """Messages from the hub."""
        self.session = WorkerSession()
        self.engine = SimEngine(
            clock,
            spec,
            lambda reports: self._run_commands(self.session.reported(reports)),
            report_every_s=setting.swarm.report_every_s,
            shares_prefill=setting.shares_prefill,
            tracer=tracer,
        )
        self.slowness = 1.0
        self.is_frozen = False
        self._swarm, self._clock, self._host, self._tracer = setting.swarm, clock, host, tracer
        self._resumes = setting.rules.on_new_version == "resume"
        self._unread: list[FromHub] = []
        """Messages that have arrived while the worker was frozen."""
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
        self._host.lost(self.engine.unreported() + self.session.num_unconfirmed)
        self.engine.abandon()
        self._disconnect()

    def leave(self) -> None:
        """Report all tokens, send `Leaving`, and end the process. The hub then closes the connection."""
        if not (self.is_up and self.is_connected) or self.is_frozen:
            self.die()
            return
        self.engine.flush()
        self.up.send(Leaving())
        self.is_up = False
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
            unread, self._unread = self._unread, []
            for message in unread:
                self.on_message(message)
            self._begin_beats(0.0)

    def cut(self) -> None:
        """Cut the connection, and reconnect after a wait."""
        if not self.is_connected:
            return
        self._disconnect()
        if self.is_up:
            self._connect_later()

    def on_silence(self) -> None:
        """Called when the hub has sent no message for `WorkerSession.silence_s` seconds."""
        if not self.is_frozen:
            self.cut()

    def _disconnect(self) -> None:
        self.is_connected = False
        self._unread.clear()
        self.up.cut()
        self.down.cut()
        self._host.cut(self)

    def _connect_later(self) -> None:
        self._clock.after(self.session.lost(self._clock.now_s), self._connect)

    def _connect(self) -> None:
        if not self.is_up or self.is_connected:
            return
        if self.is_frozen:
            self._clock.after(1.0, self._connect)
            return
        self.is_connected = self._host.try_connect(self)
        if not self.is_connected:
            self._connect_later()

    def _begin_beats(self, wait_s: float) -> None:
        self._beats += 1
        self._clock.after(wait_s, self._beat, self._beats)

    def _beat(self, beats: int) -> None:
        if beats != self._beats or not self.session.is_ready or self.is_frozen:
            return
        self.session.stats = EngineStats(decoded_tokens=self.engine.decoded())
        self._run_commands((self.session.heartbeat(),))
        self._clock.after(self._swarm.heartbeat_s, self._beat, beats)

    # ---- messages from the hub ---------------------------------------------------------------------------------------

    def on_message(self, message: FromHub) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            self._unread.append(message)
            return
        # ignore messages that a storm repeated or reordered: a connection begins with exactly one Welcome
        if isinstance(message, Welcome) == self.session.is_welcomed:
            return
        try:
            commands = self.session.receive(message, self._clock.now_s)
        except ConnectionLost:
            self.cut()
            return
        self._run_commands(commands)

    def _run_commands(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Lease():
                    if command.lease_id not in self.engine.leases:
                        self.engine.submit(command)
                case Abort(lease_id=lease):
                    self.engine.abort(lease)
                case Dropped(lease_id=lease):
                    self.engine.drop(lease)
                case Prepare(is_new_hub=is_new_hub):
                    for lease in self.engine.leases if is_new_hub else ():
                        self.engine.drop(lease)
                    own_class = WorkerClass("simulated", "float32", self.spec.kind)
                    self._run_commands(self.session.ready(own_class, self.spec.slots))
                    self._begin_beats(self._swarm.heartbeat_s)
                case vs.Fetch(version=version):
                    self._fetching_s = self._clock.now_s
                    self._clock.after(self._swarm.fetch_s * self.slowness, self._fetched, version)
                case vs.Activate(version=version):
                    self.engine.switch(version.number, resumes=self._resumes)
                    self._clock.after(0.0, self._activated, version)
                case vs.SetTimer(at_s=at_s):
                    self._clock.at(at_s, self._consider, vs.TimerFired(at_s))
                case RunOver():
                    raise AssertionError("a simulated hub does not end its run")
                case _:
                    if self.is_connected and not self.is_frozen:
                        self.up.send(command)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def _consider(self, event: vs.Event) -> None:
        if self.is_up:
            self._run_commands(self.session.handle(event))

    def _fetched(self, version: PolicyVersion) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            self._clock.after(1.0, self._fetched, version)
            return
        now_s = self._clock.now_s
        cause = self._host.fetches(self, version)
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
        self.session.stats = EngineStats(decoded_tokens=self.engine.decoded())
        self._consider(vs.Activated(self._clock.now_s, version))
