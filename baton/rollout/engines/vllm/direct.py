"""The sender's side of direct transfers to vLLM: calls to vLLM's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.rollout.engines.vllm.client import VllmClient
from baton.types import PolicyVersion
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.remote import RemoteTransport
from baton.weights.direct.sender import DirectSender, GlooTransport
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.vllm_transport import VllmTransport

_ATTEMPTS = 3
"""Maximum number of attempts to load a version, each with its own deadlines, before the engine has failed."""


def arguments_of(direct: DirectTransfer | None) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for direct transfers, or for transfers by file if `direct` is None."""
    if direct is None:
        return {"worker_extension_cls": "baton.rollout.engines.vllm.worker.WeightsLoader"}
    if direct.backend == "ipc":
        # needed to send memory handles to the child processes
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    worker = "sparse.SparseWorker" if direct.is_sparse else "transfer.DirectWorker"
    return {
        "worker_extension_cls": f"baton.rollout.engines.vllm.{worker}",
        "weight_transfer_config": {"backend": f"baton_{direct.backend}"},
    }


@dataclass(frozen=True, slots=True)
class VllmLink:
    """Calls methods of the workers of a vLLM engine that this process has started."""

    client: VllmClient
    world_size: int

    def call(self, method: str, info: Any, timeout_s: float) -> None:
        self.client.call_workers(method, info, timeout_s)


class DirectLoad:
    """Loads versions by direct transfers into an engine that the trainer's process has started."""

    def __init__(self, client: VllmClient, direct: DirectTransfer, world_size: int, *, timeout_s: float) -> None:
        """timeout_s: deadline of each phase of a transfer."""
        self._rules = DirectRules(timeout_s, timeout_s, timeout_s, timeout_s)
        self._sender = DirectSender(_transport(direct).connect, time.monotonic, self._rules, is_sparse=direct.is_sparse)
        self._client, self._source, self._num_loads = client, direct.source, 0
        self._sender.join(_ENGINE, VllmLink(client, world_size))

    def load(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load a whole version, named as in a model file, into the paused engine. Raises BatonError if the load fails;
        the caller must then leave the engine paused."""
        self._num_loads += 1
        version = PolicyVersion("load", self._num_loads)
        self._sender.offer(tensors, version)
        try:
            self._sender.wait(_ENGINE, version, _ATTEMPTS * 4 * self._rules.stall_s, check=self._check)
        finally:
            self._sender.withdraw()
        self._client.set_label(label)

    def _check(self) -> None:
        self._client.check()
        if self._source is not None:
            self._source.check()

    @property
    def sent_bytes(self) -> int:
        """Bytes of all versions that were sent completely."""
        return self._sender.sent_bytes

    def close(self) -> None:
        self._sender.close()


_ENGINE = "the vLLM engine"


def _transport(direct: DirectTransfer) -> RemoteTransport | GlooTransport | VllmTransport:
    if direct.source is not None:
        return RemoteTransport(direct.source)
    return GlooTransport("127.0.0.1") if direct.backend == "gloo" else VllmTransport(direct, "127.0.0.1")
