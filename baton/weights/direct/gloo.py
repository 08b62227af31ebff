"""A communicator over gloo between the trainer (rank 0) and the devices of one replica, for tensors in host memory.

On GPUs, the communicators of vLLM's own transfer engines are used instead.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed

from baton.clock import begin
from baton.errors import WeightsFault
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.sender import ReplicaLink
from baton.weights.direct.stream import Bucket

_dist: Any = torch.distributed
"""`torch.distributed` as `Any`, because torch does not declare the types of stores and of process-group options."""
_OPEN = "open"
"""Key in the TCP store. Each communicator has such a key, with the communicator's name as its prefix. The sender
deletes the key when it closes the communicator."""


class GlooTransport:
    """Builds communicators over gloo. vLLM on the replicas must use Baton's transfer engine, `baton_gloo`."""

    def __init__(self, host: str) -> None:
        """`host`: the address at which replicas reach this machine."""
        self._host, self._lock = host, Lock()
        self._store: Any = None
        """The TCP store, in this process, through which sender and replicas find each other."""

    def connect(self, link: ReplicaLink, name: str, rules: DirectRules) -> GlooCommunicator:
        timeout_s, world_size = rules.stall_s, 1 + link.world_size
        with self._lock:
            if self._store is None:
                limit = timedelta(seconds=timeout_s)
                self._store = _dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        store = _dist.PrefixStore(name, self._store)
        store.set(_OPEN, "")
        place = {"host": self._host, "port": self._store.port, "name": name, "timeout_s": timeout_s}
        info = {**place, "world_size": world_size}
        joined = begin(lambda: link.call("init_weight_transfer_engine", info, rules.connect_s))
        try:
            group = GlooGroup(store, 0, world_size, self._host, timeout_s)
            joined.result(rules.connect_s)
        except BaseException:
            store.delete_key(_OPEN)
            raise
        return GlooCommunicator(link, group, timeout_s, store)


@dataclass(frozen=True, slots=True)
class GlooCommunicator:
    """Sends buckets by broadcasts from host memory."""

    link: ReplicaLink
    group: GlooGroup
    stall_s: float
    store: Any
    """The TCP store, with the communicator's name as the prefix of keys."""

    def send(self, buckets: Sequence[Bucket], progressed: Callable[[], None]) -> None:
        for bucket in buckets:
            loaded = begin(partial(self.link.call, "update_weights", dict(bucket.info), self.stall_s))
            for tensor in bucket.tensors:
                if loaded.done():
                    loaded.result(0.0)  # raises the reason why the replica has refused the bucket
                self.group.broadcast(tensor)
            loaded.result(self.stall_s + 1.0)
            progressed()

    def close(self) -> None:
        """Close the connections, and withdraw the communicator. If a replica calls `join_replica` later, for example
        because it was suspended, the call fails at once."""
        self.group.close()
        self.store.delete_key(_OPEN)


def join_replica(place: Mapping[str, Any], rank: int, world_size: int) -> GlooGroup:
    """Join a communicator as `rank` ≥ 1. `place`: the values that `GlooTransport` sends. Raises WeightsFault if the
    sender has closed the communicator, and RuntimeError if the other ranks do not join in time."""
    host, timeout_s = place["host"], place["timeout_s"]
    limit = timedelta(seconds=timeout_s)
    whole = _dist.TCPStore(host, place["port"], is_master=False, wait_for_workers=False, timeout=limit)
    store = _dist.PrefixStore(place["name"], whole)
    if not store.check([_OPEN]):
        raise WeightsFault(f"the communicator {place['name']} was closed before this replica joined")
    return GlooGroup(store, rank, world_size, host, timeout_s)


class GlooGroup:
    """A process group that is independent of torch's default group, and unusable after an error."""

    def __init__(self, store: Any, rank: int, world_size: int, host: str, timeout_s: float) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._timeout = self._limit = timedelta(seconds=timeout_s)
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_own_address(host))]
        self._group: Any = _dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """On rank 0, send a contiguous tensor. On the other ranks, overwrite `tensor` with the received values. Raises
        RuntimeError if a peer fails or the deadline passes."""
        if tensor.numel() == 0:
            return
        options = _dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._limit
        self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait(self._limit)

    def close(self) -> None:
        """Close the connections, so that pending operations of peers fail."""
        self._group = None


def _own_address(host: str) -> str:
    """Return the address from which this machine would send packets to `host`; sends none. By default, gloo uses the
    address of this machine's host name, which may be unreachable for other machines."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
