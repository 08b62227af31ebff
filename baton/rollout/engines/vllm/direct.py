"""The sender's side of direct transfers to vLLM: calls to vLLM's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

import torch

from baton.errors import WeightsFault
from baton.types import PolicyVersion
from baton.weights.direct.gloo import GlooTransport
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.remote import RemoteTransport
from baton.weights.direct.sender import DirectSender
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.vllm_transport import VllmTransport

_ATTEMPTS = 3
"""Maximum attempts to load a version, each with its own deadlines, after which the engine counts as failed."""


def arguments_of(direct: DirectTransfer | None) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for direct transfers, or for transfers by file if `direct` is None."""
    if direct is None:
        return {"worker_extension_cls": "baton.rollout.engines.vllm.worker.WeightsLoader"}
    if direct.backend == "ipc":
        # vLLM needs this variable to send memory handles to its child processes
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    worker = "sparse.SparseWorker" if direct.is_sparse else "transfer.DirectWorker"
    return {
        "worker_extension_cls": f"baton.rollout.engines.vllm.{worker}",
        "weight_transfer_config": {"backend": f"baton_{direct.backend}"},
    }


class DirectVersions:
    """Implements `Versions`: sends versions to the replicas of a run, to each replica over a separate communicator."""

    def __init__(self, direct: DirectTransfer, timeout_s: float) -> None:
        """`timeout_s`: deadline of each phase of a transfer."""
        self.rules = DirectRules(timeout_s, timeout_s, timeout_s, timeout_s)
        self.sender = DirectSender(_transport(direct).connect, time.monotonic, self.rules, is_sparse=direct.is_sparse)
        self.source, self._sent_bytes = direct.source, 0
        self.prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda tensors: tensors
        """Converts a published version to tensors under the names of the model's files. Set by the engines."""
        self.offered = (PolicyVersion("", -1), PolicyVersion("load", 0))
        """The version passed to the last call to `offer`, and a unique name for this call. `sender` knows the version
        by this name, because the same version may be offered twice."""

    def offer(self, tensors: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        """Begin to send a version. Return the version's tensors under the names of the model's files. Raises
        EngineFault if the tensors do not fit the model."""
        whole = self.prepare(tensors)
        self.offered = version, PolicyVersion("load", self.offered[1].number + 1)
        self.sender.offer(whole, self.offered[1])
        return whole

    def withdraw(self) -> None:
        self.sender.withdraw()

    def metrics(self) -> dict[str, float]:
        """Return the bytes of the versions that were sent completely since the last call."""
        before, self._sent_bytes = self._sent_bytes, self.sender.sent_bytes
        return {"perf/weights_sent_bytes": float(self._sent_bytes - before)}

    def close(self) -> None:
        self.sender.close()


class DirectLoad:
    """Loads versions by direct transfers into an engine. Implements `ReplicaLink`."""

    def __init__(self, client: Any, direct: DirectTransfer, world_size: int, *, timeout_s: float) -> None:
        """`client`: a `VllmClient`, or a `RemoteReplica`. `timeout_s`: deadline of each phase of a transfer. It has no
        effect if the replicas of a run share `direct.versions`, which has its own deadlines."""
        self._versions, self.is_shared = direct.versions or DirectVersions(direct, timeout_s), bool(direct.versions)
        self._client, self._replica, self.world_size = client, direct.replica, world_size
        self.may_start = Event()
        """This event is set while the engine is paused for a load. A transfer starts only while the event is set."""
        self._versions.sender.join(self._replica, self)

    def call(self, method: str, info: Any, timeout_s: float) -> None:
        if method == "start_weight_update" and not self.may_start.wait(timeout_s):
            raise WeightsFault(f"the engine was not paused for a new version within {timeout_s:.0f} s")
        self._client.call_workers(method, info, timeout_s)

    def load(self, tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
        """Load a whole version, whose tensors are named as in a model file, into the paused engine. Raises BatonError
        if the load fails; the caller must then leave the engine paused. If replicas share `direct.versions`, the caller
        must first offer the version to `direct.versions`. Raises WeightsFault if a newer version has been offered
        meanwhile."""
        sender = self._versions.sender
        if not self.is_shared:
            self._versions.offer(tensors, version)
        offered, sent = self._versions.offered
        if offered != version:
            raise WeightsFault(f"version {offered.number} has replaced version {version.number}")
        self.may_start.set()
        try:
            sender.wait(self._replica, sent, _ATTEMPTS * 4 * self._versions.rules.stall_s, check=self._check)
        finally:
            self.may_start.clear()
            if not self.is_shared:
                self._versions.withdraw()
        # the transfer of a newer version may have started just before may_start was cleared
        if sender.served(self._replica) != sent:
            raise WeightsFault(f"a newer version has replaced version {version.number}")

    def _check(self) -> None:
        self._client.check()
        if self._versions.source is not None:
            self._versions.source.check()

    def metrics(self) -> dict[str, float]:
        return self._versions.metrics()

    def close(self) -> None:
        if self.is_shared:
            self._versions.sender.leave(self._replica)
        else:
            self._versions.close()


def _transport(direct: DirectTransfer) -> RemoteTransport | GlooTransport | VllmTransport:
    if direct.source is not None:
        return RemoteTransport(direct.source)
    return GlooTransport(direct.host) if direct.backend == "gloo" else VllmTransport(direct, direct.host)
