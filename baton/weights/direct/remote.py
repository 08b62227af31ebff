"""Direct transfers from a trainer whose ranks run outside the process that controls the replicas.

    control process: DirectSender ─▶ RemoteTransport ── connect, send bucket ──▶ rank 0: Outlet ═ tensors ═▶ replica
                        └──────────── calls of the replica's methods ──────────────────────────────────▶ replica

The ranks gather one bucket at a time, so no process holds a whole version. The control process decides everything
(`protocol.py`), and calls the methods of a replica with the arguments that rank 0 returns. Rank 0 uses the same
communicators as a trainer of a single process. Rank 0 cannot call the methods of a replica, so `_Recorder` records
these calls, rank 0 returns the records, and the control process makes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from baton.clock import begin, time_left
from baton.errors import WeightsFault, first_line
from baton.types import PolicyVersion
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.stream import Bucket, label


class RemoteSource(Protocol):
    """The ranks of a trainer, as seen by the process that controls the replicas. All methods may be called from any
    thread, and raise BatonError."""

    def connect_replica(self, name: str, world_size: int, rules: DirectRules) -> dict[str, Any]:
        """Begin to build the communicator `name` on rank 0. Return the replica's `init_info`."""

    def send_bucket(self, name: str, index: int, place: Mapping[str, Any]) -> dict[str, Any]:
        """Gather a bucket of the current weights, and begin to send it. Return the replica's `update_info`."""

    def close_replica(self, name: str) -> None:
        """Abort a communicator. Idempotent."""

    def check(self) -> None:
        """Raise the ranks' error if the ranks have failed."""


class RemoteTensors(dict[str, torch.Tensor]):
    """A version whose tensors are in the memory of the trainer's ranks. The values of this mapping are tensors on the
    meta device, which have only a shape and a dtype."""

    def __init__(self, specs: Mapping[str, tuple[str, tuple[int, ...]]], bucket_bytes: tuple[int, ...]) -> None:
        """`specs`: name → dtype and shape, as rank 0 reports them. `bucket_bytes`: size of each bucket that the ranks
        send, in bytes."""
        for name, (dtype, shape) in specs.items():
            self[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self.bucket_bytes = bucket_bytes


class RemoteVersion:
    """A version as a sequence of buckets, each of which the ranks gather when it is sent."""

    def __init__(self, tensors: RemoteTensors, version: PolicyVersion) -> None:
        place = {"count": len(tensors.bucket_bytes), "version": label(version), "base": None}
        self._buckets = tuple(
            Bucket((), {"bucket": {"index": index, **place}}, size) for index, size in enumerate(tensors.bucket_bytes)
        )

    def buckets(self, base: PolicyVersion | None = None) -> tuple[Bucket, ...]:
        return self._buckets


class RemoteTransport:
    """Builds communicators between rank 0 of a trainer and replicas."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source

    def connect(self, link: Any, name: str, rules: DirectRules) -> RemoteCommunicator:
        info = self._source.connect_replica(name, link.world_size, rules)
        try:
            link.call("init_weight_transfer_engine", info, rules.connect_s)
        except BaseException:
            self._source.close_replica(name)
            raise
        return RemoteCommunicator(self._source, link, name, rules)


@dataclass(frozen=True, slots=True)
class RemoteCommunicator:
    """Sends the buckets of a `RemoteVersion` from rank 0 to a replica."""

    source: RemoteSource
    link: Any
    name: str
    rules: DirectRules

    def send(self, buckets: Any, progressed: Any) -> None:
        for bucket in buckets:
            place = bucket.info["bucket"]
            info = self.source.send_bucket(self.name, place["index"], place)
            self.link.call("update_weights", info, self.rules.stall_s)
            progressed()

    def close(self) -> None:
        self.source.close_replica(self.name)


# ---- on rank 0 -------------------------------------------------------------------------------------------------------


class _Recorder:
    """The `ReplicaLink` of a communicator on rank 0. It only records calls to the replica; the control process makes
    these calls."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def call(self, method: str, info: Any, timeout_s: float) -> None:
        self.calls.put(info)

    def take(self, future: Future[Any], timeout_s: float) -> dict[str, Any]:
        """Wait until the thread of `future` records its next call, and return the argument of this call. Raises
        WeightsFault if the thread fails."""
        left_s = time_left(timeout_s)
        while (left := left_s()) > 0:
            try:
                return self.calls.get(timeout=min(left, 0.05))
            except Empty:
                if future.done() and (error := future.exception()) is not None:
                    raise WeightsFault(f"rank 0 cannot send weights: {first_line(error)}") from error
        raise WeightsFault(f"rank 0 did not describe a transfer of weights within {timeout_s:.0f} s")


class Outlet:
    """Sends buckets from rank 0. Each communicator is built, and each bucket sent, in a thread of its own."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[_Recorder, Future[Any], DirectRules]] = {}
        self._sending: dict[str, Future[Any]] = {}

    def open(self, transport: Any, name: str, world_size: int, rules: DirectRules) -> dict[str, Any]:
        """Begin to build a communicator; return the replica's `init_info`. `transport`: for example a
        `GlooTransport`."""
        link = _Recorder(world_size)
        group = begin(partial(transport.connect, link, name, rules))
        self._open[name] = link, group, rules
        try:
            return link.take(group, rules.connect_s)
        except WeightsFault:
            self.close(name)  # the control process does not know this communicator, so it will not close it
            raise

    def send(self, name: str, bucket: Bucket) -> dict[str, Any]:
        """Begin to send a bucket; return the replica's `update_info`. Raises WeightsFault if an earlier bucket was not
        sent."""
        if name not in self._open:
            raise WeightsFault(f"the communicator {name} was closed")
        link, group, rules = self._open[name]
        before = self._sending.get(name)
        if before is not None:
            before.result(rules.stall_s)  # the replica has loaded this bucket

        def send() -> None:
            group.result(rules.connect_s).send([bucket], lambda: None)

        self._sending[name] = begin(send)
        return link.take(self._sending[name], rules.stall_s)

    def close(self, name: str) -> None:
        """Abort a communicator, even if it is still being built."""
        self._sending.pop(name, None)
        if name in self._open:
            _, group, _ = self._open.pop(name)
            group.add_done_callback(_close_built)


def _close_built(group: Future[Any]) -> None:
    if group.exception() is None:
        begin(group.result(0.0).close)
