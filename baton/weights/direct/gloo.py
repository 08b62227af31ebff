"""A communicator over gloo between the trainer (rank 0) and the devices of one replica, for tensors in host memory.

On GPUs, the communicators of vLLM's own transfer engines are used instead.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from baton.errors import WeightsFault

_dist: Any = torch.distributed
"""`torch.distributed` as `Any`, because torch does not declare the types of stores and of process-group options."""
_OPEN = "open"
"""Key in the TCP store. Each communicator has such a key, with the communicator's name as its prefix. The sender
deletes the key when it closes the communicator."""


class Rendezvous:
    """The TCP store, in the sender's process, through which the sender and the replicas find each other."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """`host`: the address at which replicas reach this machine."""
        self.host, self._timeout_s = host, timeout_s
        self._store = _dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )

    def announce(self, name: str) -> dict[str, Any]:
        """Announce a communicator; return the address and other values for `join_replica`."""
        _dist.PrefixStore(name, self._store).set(_OPEN, "")
        return {"host": self.host, "port": self._store.port, "name": name, "timeout_s": self._timeout_s}

    def join(self, name: str, world_size: int) -> GlooGroup:
        """Join a communicator as rank 0. Raises RuntimeError if the other ranks do not join in time."""
        return GlooGroup(_dist.PrefixStore(name, self._store), 0, world_size, self.host, self._timeout_s)

    def close(self, name: str) -> None:
        """Withdraw a communicator. If a replica calls `join_replica` later, for example because it was suspended, the
        call fails at once."""
        _dist.PrefixStore(name, self._store).delete_key(_OPEN)


def join_replica(place: Mapping[str, Any], rank: int, world_size: int) -> GlooGroup:
    """Join a communicator as `rank` ≥ 1. `place`: the result of `Rendezvous.announce`. Raises WeightsFault if the
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
