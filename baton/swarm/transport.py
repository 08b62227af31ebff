"""The transport between the controller and a swarm. To the controller, the swarm looks like one worker whose number of
slots changes.

    controller's thread                   hub's thread                  publisher's thread
      send ────────── call ──────────────▶ broker ─▶ workers
      receive ◀────── queue ◀───────────── broker
      load_weights ─────────────────────────────────────────────────────▶ background_publisher.py

`load_weights` returns without waiting. Leases that require the new version wait until a worker serves it. If an error
occurs in another thread, the next `receive` or `load_weights` raises it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from queue import Empty
from typing import Any

from baton.clock import run_into
from baton.errors import DeadlineExceeded, Suspect
from baton.rollout.engine import EngineStats
from baton.rollout.episodes import path_seeds
from baton.rollout.transport import WorkerTransport
from baton.swarm.background_publisher import BackgroundPublisher
from baton.swarm.hub.hub import START_DEADLINE_S, Hub
from baton.swarm.hub.peers import Peer
from baton.swarm.lease_broker import Key
from baton.swarm.local_workers import LocalWorkers
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.supervisor import WorkerSupervisor
from baton.swarm.temporary_directories import TemporaryDirectories
from baton.types import Abort, FromHub, FromPort, Group, Lease, PolicyVersion

_NAMED = 6
"""Maximum number of workers whose names a message lists."""
FIRST_MESSAGE_S = 30.0
"""If there is no worker for this number of seconds, the first message about it is printed."""


class SwarmTransport(WorkerTransport):
    """Sends leases and weights to a hub's workers, and receives their reports through a queue."""

    def __init__(
        self,
        hub: Hub,
        publication: BackgroundPublisher,
        progress: TrainingProgress,
        workers: Sequence[LocalWorkers | WorkerSupervisor],
        scratch: TemporaryDirectories,
        no_worker_timeout_s: float = 0.0,
    ) -> None:
        """`workers`: supervisors of the workers that the run has started. `scratch`: directories that `close` removes.
        `no_worker_timeout_s`: maximum number of seconds that a run waits while no worker is connected."""
        self.hub, self._members, self._no_worker_timeout_s = hub, hub.members, no_worker_timeout_s
        self._publication, self._progress = publication, progress
        self._workers, self._scratch = workers, scratch
        self._empty_since_s: float | None = None
        self._next_message_s = FIRST_MESSAGE_S

    @property
    def name(self) -> str:
        """Description of the connected workers and their states, for error messages."""
        hub, members = self.hub, self._members
        peers = list(members.peers.values())
        if not peers:
            return f"the swarm at {hub.listen.url(hub.port)}, which has no workers,"
        wanted = f"; version {members.want.version.number} is wanted" if members.want is not None else ""
        said = ", ".join(f"{peer.name} {_doing(peer)}" for peer in peers[:_NAMED])
        return f"the swarm of {len(peers)} workers ({said}{', …' if len(peers) > _NAMED else ''}{wanted})"

    @property
    def slots(self) -> int:
        return self._members.slots

    @property
    def no_worker_timeout_s(self) -> float:
        return self._no_worker_timeout_s

    def send(self, message: FromHub) -> None:
        hub, members = self.hub, self._members
        match message:
            case Lease():
                hub.call(lambda: members.execute(members.broker.want(message)))
            case Abort(lease_id=lease_id):
                hub.call(lambda: members.execute(members.broker.abort(lease_id)))

    def receive(self, timeout_s: float) -> list[FromPort]:
        self._check_health()
        messages: list[FromPort] = []
        try:
            messages.append(self._members.inbox.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                messages.append(self._members.inbox.get_nowait())
        except Empty:
            return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self._check_health()
        self._publication.publish(tensors, version)

    def stats(self) -> EngineStats:
        """Return the sums, over all workers, of the counters in each worker's last heartbeat."""
        return EngineStats.total(peer.stats for peer in list(self._members.peers.values()))

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        self._progress.consumed(step, groups)
        noise_seed = self._members.verifier.noise_seed
        keys = [
            (seed, path.group_id, path.sample_index)
            for group in groups
            for member in group.members
            for seed, path in zip(path_seeds(noise_seed, len(member.paths)), member.paths, strict=True)
        ]
        self._members.verifier.consumed(step, keys)
        self.hub.call(lambda: self._members.broker.trained(keys))

    def mistrusted(self, suspects: Sequence[Suspect], groups: Sequence[Group], reason: str) -> Set[str]:
        """As in `WorkerTransport`. If an earlier process of the run received a token, the token's author is unknown and
        counts as untrusted. If this author is in fact trusted, its later wrong tokens, whose author is known, end the
        run."""
        paths = [(path, t) for group in groups for member in group.members for path, t in enumerate(member.paths)]
        seeds = path_seeds(self._members.verifier.noise_seed, 1 + max(path for path, _ in paths))
        keys = {(t.name, path): (seeds[path], t.group_id, t.sample_index) for path, t in paths}
        tokens = [(keys[suspect.name, suspect.path], suspect.token) for suspect in suspects]
        found: Future[Set[Key]] = Future()
        self.hub.call(lambda: run_into(found, lambda: self._members.mistrust(tokens, keys.values(), reason)))
        try:
            return {f"{group_id}/{sample_index}" for _, group_id, sample_index in found.result(START_DEADLINE_S)}
        except TimeoutError as error:
            raise DeadlineExceeded(f"the hub did not answer within {START_DEADLINE_S:.0f} s") from error

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        progress, last, members = self._progress, self._publication.last, self._members
        progress.train_s = values.get("time/train", progress.train_s)
        rule = progress.provisioning(members.broker.pace)
        found: dict[str, float | None] = {
            "swarm/workers": float(sum(peer.is_connected for peer in list(members.peers.values()))),
            "swarm/slots": float(members.slots),
            "swarm/broadcast_s": members.broker.pace.broadcast_s,
            "swarm/trajectories_per_s": rule.trajectories_per_s,
            "swarm/needed_trajectories_per_s": rule.needed_per_s,
            "swarm/slack_s": rule.slack_s,
            "swarm/bytes_out": float(members.counters.bytes_out.total()),
            "swarm/version_bytes": float(last.bytes) if last is not None else None,
            "swarm/version_density": last.density if last is not None else None,
            "swarm/publish_s": last.seconds if last is not None else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self, *, is_over: bool = False) -> None:
        """Disconnect all workers, and end those workers that this run started."""
        with ExitStack() as parts:  # the functions are called in reverse order
            parts.callback(self._members.verifier.quarantine.close)
            parts.callback(self._scratch.close)
            parts.callback(self.hub.access.audit.close)
            parts.callback(self.hub.stop, is_over=is_over)
            for workers in self._workers:
                parts.callback(workers.close)
            parts.callback(self._members.verifier.close)
            parts.callback(self._publication.close)

    def _check_health(self) -> None:
        """Raise an error that another thread has recorded. Restart local workers that have ended."""
        self.hub.check()
        self._publication.check()
        for workers in self._workers:
            workers.check_health()
        self._report_no_workers()

    def _report_no_workers(self) -> None:
        """Print a message if the run has had no worker for `FIRST_MESSAGE_S` seconds. Print the message again each time
        this period has doubled."""
        now_s = time.monotonic()
        if self.slots:
            if self._next_message_s > FIRST_MESSAGE_S:
                self._members.say("workers have joined again")
            self._empty_since_s, self._next_message_s = None, FIRST_MESSAGE_S
            return
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if (empty_s := now_s - self._empty_since_s) >= self._next_message_s:
            self._next_message_s *= 2
            self._members.say(
                f"no worker for {empty_s:.0f} s: {self.name.rstrip(',')}; the run waits up to swarm.no_worker_timeout_s"
            )


def _doing(peer: Peer) -> str:
    if not peer.is_connected:
        return "is disconnected"
    if peer.heartbeat.fetching is not None:
        return f"fetches {peer.heartbeat.fetching}"
    return "has no version yet" if peer.served is None else f"serves {peer.served}"
