"""One trainer rank: answers messages that any transport delivers."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch._C._distributed_c10d import TCPStore

from baton.errors import BatonError, fault_of, first_line
from baton.policy.load import torch_device
from baton.policy.tensors import dtype_name
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import load_tokenizer
from baton.trainer.factory import make_trainer
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.parallel import messages
from baton.trainer.parallel.group import RankGroup
from baton.trainer.settings import TrainerSettings
from baton.trainer.trainer import new_version_path
from baton.trainer.version_stream import VersionStream
from baton.weights.direct.gloo import GlooTransport
from baton.weights.direct.remote import Outlet
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.stream import whole_bucket
from baton.weights.direct.vllm_transport import VllmTransport


class RankServer:
    """One rank of a trainer. Not thread-safe."""

    def __init__(self, place: messages.RankInfo) -> None:
        self._place = place
        self._trainer: LocalTrainer | None = None
        self._store: TCPStore | None = None
        self._scratch: Path | None = None
        self._stream: VersionStream | None = None
        """The current weights in buckets; None before the first direct transfer."""
        self._described = -1
        """Number of the version that this rank described last."""
        self._outlet = Outlet()
        """Communicators for direct transfers; only on rank 0."""
        if place.interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", place.interface)
        set_up_threads(place.threads)
        # FSDP2 warns of modules that return a view; no code here changes such an output in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # Suppresses torch's warning that a gather over two mesh dimensions takes two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    def handle(self, message: messages.ToRank) -> messages.FromRank:
        """Answer a message. An expected error is answered with a Fault; an unexpected error ends the rank with a
        traceback, and the transport detects the exit. After a failed collective, the rank group cannot continue."""
        try:
            return self._answer(message)
        except (BatonError, OSError, RuntimeError, ValueError, AssertionError, SafetensorError) as error:
            return fault_of(error)

    def close(self) -> None:
        """Leave the process group, and remove the scratch directory if this rank created it. Idempotent."""
        self._trainer = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        if self._scratch is not None and not self._place.scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = None

    def _answer(self, message: messages.ToRank) -> messages.FromRank:
        match message:
            case messages.Listen():
                return self._listen()
            case messages.RankSetup():
                device, setup = self._join_group(message), message.trainer
                set_up_threads(self._place.threads, deterministic=setup.deterministic)
                parallel = RankGroup(device, TrainerSettings.model_validate(setup.trainer))
                self._trainer = make_trainer(setup, load_tokenizer(setup.model_path), parallel)
                return messages.Ready(self._trainer.version)
            case messages.TrainStep(batch=batch):
                metrics = self._trained.step(batch)
                return messages.Stepped(self._trained.version, metrics and {**metrics, **self._trained.peak_memory()})
            case messages.Publish():
                return self._publish()
            case messages.Save(directory=directory):
                self._trained.save(Path(directory))
                return messages.Ready(self._trained.version)
            case messages.Restore(directory=directory):
                self._trained.restore(Path(directory))
                return messages.Ready(self._trained.version)
            case messages.UseDevice(is_awake=is_awake):
                return self._use_device(is_awake)
            case messages.Describe():
                return self._describe(message.bucket_bytes)
            case messages.ConnectReplica():
                return self._sending(lambda: self._connect(message))
            case messages.SendBucket(name=name, index=index, place=where):
                assert self._stream is not None, "a version is described before it is sent"
                if self._trained.version.number != self._described:  # on all ranks
                    return messages.Sending({}, f"a train step has replaced version {self._described}")
                tensors = self._stream.gather(index, is_first=not self._place.rank)
                return self._sending(lambda: self._outlet.send(name, whole_bucket(tensors, where)))
            case messages.CloseReplica(name=name):
                self._outlet.close(name)
                return messages.Ready(self._trained.version)
            case other:
                raise AssertionError(f"{type(other).__name__} is not a request to a running rank")

    @property
    def _trained(self) -> LocalTrainer:
        assert self._trainer is not None, "a rank received another request before its RankSetup"
        return self._trainer

    def _listen(self) -> messages.Listening:
        """Open the rendezvous store on a free port of this host's address."""
        place = self._place
        if place.rank:
            return messages.Listening(place.host, 0)
        listener = socket.create_server((place.host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            place.host,
            port,
            place.size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return messages.Listening(place.host, port)

    def _join_group(self, message: messages.RankSetup) -> torch.device:
        place, timeout = self._place, timedelta(seconds=message.timeout_s)
        device = torch_device(message.trainer.device)
        if device.type == "cuda":
            index = place.rank % torch.cuda.device_count() if place.device_index is None else place.device_index
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        if self._store is None:
            self._store = TCPStore(message.host, message.port, place.size, is_master=False, timeout=timeout)
        # With gloo, collectives time out earlier than the controller's request. The waiting ranks can then answer with
        # a Fault, which shows which rank hangs. NCCL instead ends a process that waits too long, so the timeout with
        # NCCL is longer than that of the request.
        timeout *= 2.0 if device.type == "cuda" else 0.9
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
        return device

    def _use_device(self, is_awake: bool | None) -> messages.DeviceMemory:
        """Sleep if `is_awake` is False, wake up if True, and do neither if None. No collective is needed: the transport
        waits for the answers of all ranks, so all ranks have freed their devices before an engine starts."""
        trainer = self._trained
        peak = trainer.take_peak_bytes()
        if is_awake is not None:
            (trainer.wake_up if is_awake else trainer.sleep)()
        return messages.DeviceMemory(trainer.held_bytes, peak)

    def _describe(self, bucket_bytes: int) -> messages.Described:
        trainer = self._trained
        stream = self._stream = self._stream or trainer.stream(bucket_bytes)
        self._described = trainer.version.number
        if self._place.rank:
            return messages.Described(trainer.version, {}, ())
        tensors = {name: (dtype_name(stream.dtypes[name]), shape) for name, shape in stream.shapes.items()}
        return messages.Described(trainer.version, tensors, stream.bucket_bytes)

    def _connect(self, message: messages.ConnectReplica) -> dict[str, Any]:
        if message.backend == "gloo":
            transport: GlooTransport | VllmTransport = GlooTransport(self._place.host)
        else:
            transport = VllmTransport(DirectTransfer("nccl", gpu=torch.cuda.current_device()), self._place.host)
        return self._outlet.open(transport, message.name, message.world_size, message.rules)

    def _sending(self, begin: Callable[[], dict[str, Any]]) -> messages.Sending:
        """On rank 0, return the result of `begin`. An error is reported in `Sending`, not as a Fault, because the
        trainer is unaffected."""
        if self._place.rank:
            return messages.Sending({})
        try:
            return messages.Sending(begin())
        except Exception as error:  # noqa: BLE001  # of a communicator: sockets, NCCL, vLLM
            return messages.Sending({}, first_line(error))

    def _publish(self) -> messages.Published:
        path = Path()
        if not self._place.rank:
            if self._scratch is None:
                self._scratch = Path(self._place.scratch or tempfile.mkdtemp(prefix="baton-"))
                self._scratch.mkdir(parents=True, exist_ok=True)
            path = new_version_path(self._scratch, self._trained.version)
        version, digests = self._trained.publish_to(path)
        return messages.Published(version, "" if self._place.rank else str(path), digests)
