"""Collects the status of a hub."""

from __future__ import annotations

from collections.abc import Mapping

from baton.swarm.background_publisher import BackgroundPublisher
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.peers import Peer
from baton.swarm.hub.status import HubStatus, QuarantineStatus, WorkerStatus
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.verification.policy import QuarantineRecord


def hub_status(hub: Hub, publication: BackgroundPublisher, progress: TrainingProgress, lineage: str) -> HubStatus:
    """Return what `baton status` shows. Called in the hub's thread."""
    members, last = hub.members, publication.last
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
    faults = (authenticator.fault for authenticator in hub.access.authenticators if authenticator.fault)
    limits = ((peer.name, members.broker.limit_of(peer.number)) for peer in members.peers.values())
    return HubStatus(
        run=members.welcome.run,
        lineage=lineage,
        version=max(members.versions, default=None),
        versions=tuple(sorted(members.versions)),
        step=progress.step,
        workers=tuple(_of_worker(peer, members) for peer in members.peers.values()),
        tasks=len(table.tasks),
        waiting=sum(task.is_waiting for task in table.tasks.values()),
        wasted_tokens=dict(table.wasted),
        staleness=progress.staleness,
        publication=_known(published),
        bytes_out={**counters.bytes_out, "total": counters.bytes_out.total()},
        provisioning=rule.sentence(),
        rule=_known(numbers),
        quarantine=tuple(_of_record(c) for c in hub.access.quarantine.records),
        denied=hub.access.denied,
        malformed=counters.malformed,
        loop_delay_s=counters.loop_delay_s,
        notes=(*faults, *(f"worker {name}: {limit}" for name, limit in limits if limit)),
        not_inspected=members.verifier.verification_policy.num_unchecked,
    )


def _of_worker(peer: Peer, members: Membership) -> WorkerStatus:
    beat = peer.heartbeat
    state = "serving" if peer.served is not None else "waiting"
    if not peer.is_connected:
        state = "cut off"
    elif beat.fetching is not None:
        state = "fetching"
    return WorkerStatus(
        name=peer.name,
        worker_class=str(peer.hello.worker_class),
        address=peer.address,
        state=state,
        version=peer.served,
        slots=peer.hello.slots,
        leases=members.broker.num_leases(peer.number),
        tokens_per_s=peer.tokens_per_s(),
        decoded_tokens=beat.stats.decoded_tokens,
        fetched_bytes=beat.fetched_bytes,
        fault=beat.fault,
        is_trusted=peer.grant.is_trusted,
        checked=members.verifier.num_checked[peer.worker],
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
