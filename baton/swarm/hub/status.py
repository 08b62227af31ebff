"""The status of a hub, for `baton status`, which requests it over HTTP, and for Prometheus."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from ssl import SSLContext

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.clock import call_within
from baton.errors import UserError

SILENCE_S, DEADLINE_S = 10.0, 60.0
"""Maximum seconds without a byte, and maximum seconds for the whole request."""
MAX_BYTES = 16 * 1024 * 1024


class WorkerStatus(msgspec.Struct, frozen=True):
    """The status of one worker."""

    name: str
    worker_class: str
    address: str
    state: str
    """State: `serving`, `fetching`, `waiting` (for its first version) or `cut off` (not connected)."""
    version: int | None
    slots: int
    leases: int
    tokens_per_s: float
    decoded_tokens: int
    fetched_bytes: int
    fault: str
    """Error of the last fetch; empty if the fetch succeeded."""
    is_trusted: bool
    checked: int
    """Number of the worker's trajectories that were scored again."""


class QuarantineStatus(msgspec.Struct, frozen=True):
    """The status of a quarantined worker."""

    name: str
    reason: str
    trained_steps: tuple[int, ...]
    """Train steps that trained on the worker's trajectories, according to a record of the last `REMEMBERED_TRAINED`
    trajectories."""
    num_trained: int
    """Number of the worker's trajectories that were trained on."""
    num_revoked: int
    """Number of the worker's finished trajectories that were not trained on and are generated again."""


class HubStatus(msgspec.Struct, frozen=True):
    """The status of a run and its workers."""

    run: str
    lineage: str
    version: int | None
    """Number of the latest published version; None before the first version."""
    versions: tuple[int, ...]
    """Numbers of the retained versions."""
    step: int
    """Number of completed train steps."""
    workers: tuple[WorkerStatus, ...]
    tasks: int
    """Number of tasks: requested trajectories that are neither finished nor aborted."""
    waiting: int
    """Number of tasks without a lease."""
    wasted_tokens: Mapping[str, int]
    """Cause → number of discarded tokens."""
    staleness: Mapping[str, float]
    """Staleness in versions → share of the last batch's tokens that have this staleness."""
    publication: Mapping[str, float]
    """The last published version: its size in bytes, its density (fraction of elements that differ from the previous
    version), and the seconds that publishing took."""
    bytes_out: Mapping[str, int]
    """Route → number of bytes sent."""
    provisioning: str
    """Result of the provisioning rule (`provisioning.py`) as a sentence."""
    rule: Mapping[str, float]
    """Quantities of the provisioning rule, by name."""
    quarantine: tuple[QuarantineStatus, ...]
    denied: int
    """Number of requests that were refused because of their access token, its role, or a quarantine."""
    malformed: int
    """Number of connections ended because of an invalid message."""
    loop_delay_s: float
    """Maximum delay of the hub's event loop, in seconds."""
    notes: tuple[str, ...] = ()
    not_inspected: int = 0
    """Number of trajectories that were selected to be scored again, but could not be scored completely."""


def fetch_status(base: str, token: str, tls: SSLContext | None) -> HubStatus:
    """Return the status of the hub at the URL `base`, which `check_url` has checked. Raises UserError if the hub
    refuses the request or no hub answers, and DeadlineExceeded if the answer takes longer than `DEADLINE_S`."""
    return call_within(DEADLINE_S, f"the hub at {base}", partial(_fetch, base, token, tls))


def _fetch(base: str, token: str, tls: SSLContext | None) -> HubStatus:
    request = urllib.request.Request(f"{base}/status", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_S, context=tls) as response:
            return msgspec.json.decode(response.read(MAX_BYTES), type=HubStatus)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode("utf-8", "replace")
        raise UserError(f"the hub at {base} answers {error.code}: {said} (baton token create --role admin)") from error
    except OSError as error:
        raise UserError(f"no hub answers at {base}: {getattr(error, 'reason', error)}") from error
    except (HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{base} does not answer with the status of a hub ({error}): check that a hub of this version runs there"
        ) from error


@dataclass(frozen=True, slots=True)
class _StatusCollector(Collector):
    status: HubStatus

    def collect(self) -> Iterator[Metric]:
        status = self.status
        yield _gauge("version", "Latest published version", -1 if status.version is None else status.version)
        yield _gauge("step", "Completed train steps", status.step)
        yield _gauge("tasks", "Trajectories that are neither finished nor aborted", status.tasks)
        yield _gauge("tasks_waiting", "Trajectories without a lease", status.waiting)
        states = Counter(worker.state for worker in status.workers)
        yield _gauge("workers", "Workers by state", states, "state")
        workers = {worker.name: worker for worker in status.workers}
        speeds = {name: worker.tokens_per_s for name, worker in workers.items()}
        yield _gauge("worker_tokens_per_second", "Decoded tokens per second", speeds, "worker")
        yield _gauge("worker_leases", "Leases held", {name: w.leases for name, w in workers.items()}, "worker")
        versions = {name: -1 if w.version is None else w.version for name, w in workers.items()}
        yield _gauge("worker_version", "Version served", versions, "worker")
        yield _gauge("wasted_tokens", "Discarded tokens", status.wasted_tokens, "cause")
        yield _gauge("staleness_share", "Share of the last batch's tokens", status.staleness, "versions")
        yield _gauge("bytes_out", "Bytes sent", status.bytes_out, "route")
        published = "Bytes, density and seconds of the last published version"
        yield _gauge("publication", published, status.publication, "what")
        yield _gauge("provisioning", "Quantities of the provisioning rule", status.rule, "what")
        yield _gauge("quarantined", "Workers in quarantine", len(status.quarantine))
        yield _gauge("denied", "Refused requests: no valid token, another role, or a quarantine", status.denied)
        yield _gauge("malformed", "Connections ended because of an invalid message", status.malformed)
        yield _gauge("not_inspected", "Trajectories that could not be scored again", status.not_inspected)
        yield _gauge("loop_delay_seconds", "Maximum delay of the hub's event loop", status.loop_delay_s)


def prometheus(status: HubStatus) -> str:
    """Return a status in Prometheus' text format."""
    return generate_latest(_StatusCollector(status)).decode()


def _gauge(name: str, meaning: str, samples: Mapping[str, float] | float, label: str = "") -> Metric:
    """Return a Prometheus gauge. `samples`: one value or, with `label`, a mapping from label values to values."""
    if not isinstance(samples, Mapping):
        return GaugeMetricFamily(f"baton_{name}", meaning, value=samples)
    gauge = GaugeMetricFamily(f"baton_{name}", meaning, labels=[label])
    for value, sample in samples.items():
        gauge.add_metric([value], sample)
    return gauge
