"""What a hub shows of itself: `baton status` and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    worker_class: str
    address: str
    state: str
    """`serving`, `fetching`, `waiting` (for its first version), `cut off`."""
    version: int | None
    slots: int
    leases: int
    tokens_per_s: float
    decoded_tokens: int
    fetched_bytes: int
    fault: str
    """Of its last attempt to fetch."""
    is_trusted: bool
    checked: int
    """Trajectories of it that were scored again."""


class QuarantineStatus(msgspec.Struct, frozen=True):
    """One worker that is not believed any more."""

    name: str
    reason: str
    trained_steps: tuple[int, ...]
    """Train steps whose batches hold trajectories of it."""
    num_trained: int
    """Trajectories in them."""
    num_revoked: int
    """Trajectories that are made again."""


class HubStatus(msgspec.Struct, frozen=True):
    """The whole of it."""

    run: str
    lineage: str
    version: int | None
    """The latest that is published."""
    versions: tuple[int, ...]
    """Those that are kept."""
    step: int
    """Train steps done."""
    workers: tuple[WorkerStatus, ...]
    tasks: int
    """Trajectories wanted."""
    waiting: int
    """… that nobody grows."""
    wasted_tokens: Mapping[str, int]
    """By cause."""
    staleness: Mapping[str, float]
    """Share of the last batch's tokens, by the number of versions they were old."""
    publication: Mapping[str, float]
    """Of the last version: bytes, density, seconds."""
    bytes_out: Mapping[str, int]
    """By route."""
    provisioning: str
    """The provisioning rule in a sentence."""
    rule: Mapping[str, float]
    """… and in numbers."""
    quarantine: tuple[QuarantineStatus, ...]
    denied: int
    """Requests without a valid token."""
    malformed: int
    """Connections ended for what was said on them."""
    loop_delay_s: float
    """The longest that the hub was late by."""
    notes: tuple[str, ...] = ()


def prometheus(status: HubStatus) -> str:
    """Return a status in Prometheus' text format."""
    gauges: list[tuple[str, str, Sequence[tuple[dict[str, str], float]]]] = [
        ("version", "Latest published version", [({}, _number(status.version))]),
        ("step", "Train steps done", [({}, float(status.step))]),
        ("tasks", "Trajectories wanted", [({}, float(status.tasks))]),
        ("tasks_waiting", "Trajectories that nobody grows", [({}, float(status.waiting))]),
        ("workers", "Workers by state", _by_state(status.workers)),
        ("worker_tokens_per_second", "Tokens a second", [({"worker": w.name}, w.tokens_per_s) for w in status.workers]),
        ("worker_leases", "Leases held", [({"worker": w.name}, float(w.leases)) for w in status.workers]),
        (
            "worker_version",
            "Version served",
            [({"worker": w.name}, _number(w.version)) for w in status.workers],
        ),
        (
            "wasted_tokens",
            "Tokens made for nothing",
            [({"cause": c}, float(n)) for c, n in status.wasted_tokens.items()],
        ),
        ("staleness_share", "Share of trained tokens", [({"versions": v}, n) for v, n in status.staleness.items()]),
        ("bytes_out", "Bytes sent", [({"route": r}, float(n)) for r, n in status.bytes_out.items()]),
        ("publication", "Of the last version", [({"what": k}, v) for k, v in status.publication.items()]),
        ("provisioning", "Provisioning rule", [({"what": k}, v) for k, v in status.rule.items()]),
        ("quarantined", "Workers in quarantine", [({}, float(len(status.quarantine)))]),
        ("denied", "Requests without a valid token", [({}, float(status.denied))]),
        ("malformed", "Connections ended for what was said", [({}, float(status.malformed))]),
        ("loop_delay_seconds", "The longest that the hub was late by", [({}, status.loop_delay_s)]),
    ]
    lines = []
    for name, meaning, samples in gauges:
        lines += [f"# HELP baton_{name} {meaning}", f"# TYPE baton_{name} gauge"]
        lines += [f"baton_{name}{_labels(labels)} {value:.17g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _number(version: int | None) -> float:
    return float(-1 if version is None else version)


def _by_state(workers: Sequence[WorkerStatus]) -> list[tuple[dict[str, str], float]]:
    states = [worker.state for worker in workers]
    return [({"state": state}, float(states.count(state))) for state in sorted(set(states))]


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{key}="{quoted(value)}"' for key, value in labels.items()) + "}" if labels else ""
