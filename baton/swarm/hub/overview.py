"""Collects the status of a hub."""

from __future__ import annotations

from collections.abc import Mapping

from baton.swarm.hub.hub import Hub
from baton.swarm.hub.peers import Peer
from baton.swarm.hub.status import HubStatus, QuarantineStatus, WorkerStatus
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.publication import Publication
from baton.swarm.verification.policy import QuarantineRecord


class HubOverview:
    """Source of `baton status`. Runs in the hub's thread."""

    def __init__(self, hub: Hub, publication: Publication, progress: TrainingProgress, lineage: str) -> None:
        self._hub, self._publication, self._progress, self._lineage = hub, publication, progress, lineage

    def status(self) -> HubStatus:
        """Return the current status."""
        hub, progress, last = self._hub, self._progress, self._publication.last
        table, counters, rule = hub.broker.table, hub.counters, progress.provisioning(hub.broker.pace)
        published = {} if last is None else {"bytes": last.bytes, "density": last.density, "seconds": last.seconds}
        numbers = {
            "trajectories_per_s": rule.trajectories_per_s,
            "broadcast_s": rule.broadcast_s,
            "needed_per_s": rule.needed_per_s,
            "slack_s": rule.slack_s,
            "idle_share": rule.idle_share,
        }
        return HubStatus(
            run=hub.welcome.run,
            lineage=self._lineage,
            version=max(hub.versions, default=None),
            versions=tuple(sorted(hub.versions)),
            step=progress.step,
            workers=tuple(self._of_worker(peer) for peer in hub.peers.values()),
            tasks=table.num_tasks,
            waiting=table.num_waiting,
            wasted_tokens=dict(table.wasted),
            staleness=progress.staleness,
            publication=_known(published),
            bytes_out={**counters.by_route, "total": counters.bytes_out},
            provisioning=rule.sentence(),
            rule=_known(numbers),
            quarantine=tuple(_of_conviction(c) for c in hub.access.quarantine.quarantine_records),
            denied=hub.access.denied,
            malformed=counters.malformed,
            loop_delay_s=counters.loop_delay_s,
            notes=tuple(a.fault for a in hub.access.authenticators if a.fault),
            not_inspected=hub.verifier.verification_policy.num_unchecked,
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
            leases=self._hub.broker.num_leases(peer.number),
            tokens_per_s=peer.tokens_per_s(),
            decoded_tokens=beat.stats.decoded_tokens,
            fetched_bytes=beat.fetched_bytes,
            fault=beat.fault,
            is_trusted=peer.grant.is_trusted,
            checked=self._hub.verifier.counters.by_worker.get(peer.worker, 0),
        )


def _of_conviction(quarantine_record: QuarantineRecord) -> QuarantineStatus:
    return QuarantineStatus(
        quarantine_record.shown,
        quarantine_record.verdict.reason,
        tuple(sorted({step for _, step in quarantine_record.trained})),
        quarantine_record.num_trained,
        len(quarantine_record.requeue),
    )


def _known(values: Mapping[str, float | int | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
