"""Gathers what a hub shows of itself."""

from __future__ import annotations

from collections.abc import Mapping

from baton.swarm.hub.hub import Hub
from baton.swarm.hub.peers import Peer
from baton.swarm.hub.status import HubStatus, QuarantineStatus, WorkerStatus
from baton.swarm.transport import SwarmTransport
from baton.swarm.verification.policy import QuarantineRecord
from baton.swarm.verification.service import VerificationService


def overview(hub: Hub, port: SwarmTransport, verifier: VerificationService, *, lineage: str) -> HubStatus:
    """Return a hub's status. Called in the hub's thread."""
    table, counters, rule, last = hub.parts.broker.table, hub.counters, port.provisioning(), port.last
    published = {} if last is None else {"bytes": last.bytes, "density": last.density, "seconds": last.seconds}
    numbers = {
        "trajectories_per_s": rule.trajectories_per_s,
        "broadcast_s": rule.broadcast_s,
        "needed_per_s": rule.needed_per_s,
        "slack_s": rule.slack_s,
        "idle_share": rule.idle_share,
    }
    return HubStatus(
        run=hub.parts.welcome.run,
        lineage=lineage,
        version=max(hub.versions, default=None),
        versions=tuple(sorted(hub.versions)),
        step=port.step,
        workers=tuple(_of_worker(hub, peer, verifier) for peer in hub.peers.values()),
        tasks=table.num_tasks,
        waiting=table.num_waiting,
        wasted_tokens=dict(table.wasted),
        staleness=port.staleness,
        publication=_known(published),
        bytes_out={**counters.by_route, "total": counters.bytes_out},
        provisioning=rule.sentence(),
        rule=_known(numbers),
        quarantine=tuple(_of_conviction(c) for c in verifier.quarantine.quarantine_records),
        denied=counters.denied,
        malformed=counters.malformed,
        loop_delay_s=counters.loop_delay_s,
        notes=tuple(a.fault for a in hub.parts.authenticators if a.fault),
        not_inspected=verifier.verification_policy.num_unchecked,
    )


def _of_worker(hub: Hub, peer: Peer, verifier: VerificationService) -> WorkerStatus:
    held = hub.parts.broker.table.workers.get(peer.number)
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
        leases=0 if held is None else len(held.leases),
        tokens_per_s=peer.tokens_per_s(),
        decoded_tokens=beat.stats.decoded_tokens,
        fetched_bytes=beat.fetched_bytes,
        fault=beat.fault,
        is_trusted=peer.grant.is_trusted,
        checked=verifier.counters.by_worker.get(peer.worker, 0),
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
