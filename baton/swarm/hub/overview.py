"""Collects the status of a hub."""

from __future__ import annotations

from collections.abc import Mapping

from baton.swarm.background_publisher import BackgroundPublisher
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.peers import Peer
from baton.swarm.hub.status import HubStatus, QuarantineStatus, WorkerStatus
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.verification.policy import QuarantineRecord


class HubOverview:
    """Collects the values that `baton status` shows. Runs in the hub's thread."""

    def __init__(self, hub: Hub, publication: BackgroundPublisher, progress: TrainingProgress, lineage: str) -> None:
        self._access, self._members = hub.access, hub.members
        self._publication, self._progress, self._lineage = publication, progress, lineage

    def status(self) -> HubStatus:
        members, progress, last = self._members, self._progress, self._publication.last
        table, counters = members.broker.table, members.counters
        rule = progress.provisioning(members.broker.pace)
        published = {} if last is None else {"bytes": last.bytes, "density": last.density, "seconds": last.seconds}
        numbers = {
            "trajectories_per_s": rule.trajectories_per_s,
            "broadcast_s": members.broker.pace.broadcast_s,
            "needed_per_s": rule.needed_per_s,
            "slack_s": rule.slack_s,
            "idle_share": rule.idle_share,
        }
        return HubStatus(
            run=members.welcome.run,
            lineage=self._lineage,
            version=max(members.versions, default=None),
            versions=tuple(sorted(members.versions)),
            step=progress.step,
            workers=tuple(self._of_worker(peer) for peer in members.peers.values()),
            tasks=table.num_tasks,
            waiting=table.num_waiting,
            wasted_tokens=dict(table.wasted),
            staleness=progress.staleness,
            publication=_known(published),
            bytes_out={**counters.by_route, "total": counters.bytes_out},
            provisioning=rule.sentence(),
            rule=_known(numbers),
            quarantine=tuple(_of_record(c) for c in self._access.quarantine.records),
            denied=self._access.denied,
            malformed=counters.malformed,
            loop_delay_s=counters.loop_delay_s,
            notes=tuple(a.fault for a in self._access.authenticators if a.fault),
            not_inspected=members.verifier.verification_policy.num_unchecked,
        )

    def _of_worker(self, peer: Peer) -> WorkerStatus:
        beat = peer.heartbeat
        state = "serving" if peer.served is not None else "waiting"
        if not peer.is_connected:
            state = "cut off"
        elif beat.fetching is not None:
            state = "fetching"
        return WorkerStatus(
            name=peer.name,
            worker_class=str(peer.worker_class),
            address=peer.address,
            state=state,
            version=peer.served,
            slots=peer.hello.slots,
            leases=self._members.broker.num_leases(peer.number),
            tokens_per_s=peer.tokens_per_s(),
            decoded_tokens=beat.stats.decoded_tokens,
            fetched_bytes=beat.fetched_bytes,
            fault=beat.fault,
            is_trusted=peer.grant.is_trusted,
            checked=self._members.verifier.num_checked[peer.worker],
        )


def _of_record(record: QuarantineRecord) -> QuarantineStatus:
    return QuarantineStatus(
        record.shown,
        record.verdict.reason,
        tuple(sorted({step for _, step in record.trained})),
        record.num_trained,
        len(record.requeue),
    )


def _known(values: Mapping[str, float | int | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
