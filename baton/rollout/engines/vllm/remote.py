"""A vLLM engine in another process, often on another machine, as a replica of a run (`rollout/replicas.py`).

    run's process                                                      replica's process
    ReplicaTransport ─▶ RemoteReplica ══ leases, begin and end of a load ══▶ ReplicaServer ─▶ VllmEngine
                             └── DirectLoad ══ calls of vLLM's workers ══════════┘                │
    trainer ═════════════════════ tensors over gloo or NCCL ════════════════════════════▶ vLLM's workers

Messages are msgpack. A subclass of `RemoteReplica` starts the process and sends the messages. If the replica spans
several machines, each machine runs such a process; on all machines except the first, the process has `VllmWorkers`
(`client.py`) instead of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from baton.clock import time_left
from baton.errors import BatonError, EngineFault, Fault, fault_of, first_line
from baton.policy.settings import ModelSettings
from baton.rollout.engine import EngineSettings, EngineStats
from baton.rollout.engines.vllm.direct import DirectLoad
from baton.rollout.engines.vllm.engine import VllmEngine, vllm_of_model, vllm_workers_of_model
from baton.rollout.engines.vllm.further import VllmWorkers
from baton.rollout.engines.whole_weights import ModelFiles, Skeleton, WholeWeights
from baton.rollout.processes.protocol import Progress, Start
from baton.types import Abort, FromWorker, Lease, PolicyVersion, plain
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.vllm_transport import free_port

_STEP_S = 0.05
"""Seconds after which a replica answers a `Step` even if it has no reports."""


class Step(msgspec.Struct, frozen=True, tag="Step"):
    """A request to generate, with the leases and aborts since the previous request. The answer is `Progress`."""

    messages: tuple[Lease | Abort, ...]
    flushes: bool = False


class LoadVersion(msgspec.Struct, frozen=True, tag="Load"):
    """Sent twice for each load of a version. The first message has no label and pauses generation; the answer contains
    the label of the new weights. The second message is sent after vLLM's workers have loaded the version; it contains
    this label and resumes generation."""

    version: PolicyVersion
    label: str = ""


class CallWorkers(msgspec.Struct, frozen=True, tag="CallWorkers"):
    """Request to call a method of all vLLM workers, or, without a method, to check that vLLM's core runs. On all
    machines of a replica except the first, only the check is possible."""

    method: str = ""
    info: Any = None
    timeout_s: float = 0.0


class Done(msgspec.Struct, frozen=True, tag="Done"):
    """Answer to all messages except `Step`."""

    label: str = ""


ToReplica = Start | Step | LoadVersion | CallWorkers
FromReplica = Progress | Done | Fault
Answer = TypeVar("Answer", Progress, Done)

encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
CHECK = encode(CallWorkers())
_decode = msgspec.msgpack.Decoder[ToReplica](ToReplica).decode
_decode_answer = msgspec.msgpack.Decoder[FromReplica](FromReplica).decode


class ReplicaServer:
    """Answers messages in the replica's process. `CallWorkers` may arrive in parallel with other messages."""

    _engine: VllmEngine
    _workers: VllmWorkers | None = None
    """Replaces the engine on all machines of a replica except the first."""

    def free_port(self, host: str) -> int:
        """Return a free port at an address of this machine, for connections between the processes of a replica."""
        return free_port(host)

    def handle(self, message: bytes, port: int = 0) -> bytes:
        """`port`: a free port on the first machine (`free_port`) if `message` is the `Start` of a replica that spans
        several machines; otherwise 0."""
        try:
            decoded = _decode(message)
            if port and isinstance(decoded, Start):
                decoded.settings["vllm"]["arguments"]["master_port"] = port
            return encode(self._respond(decoded))
        except Exception as error:  # noqa: BLE001  # raised in the run's process
            return encode(fault_of(error))

    def _respond(self, message: ToReplica) -> FromReplica:
        match message:
            case Start(settings=settings) if settings["vllm"]["arguments"].get("node_rank"):
                self._workers = self.build_workers(message)
            case Start():
                self._engine = self.build(message)
            case Step():
                return self._step(message)
            case LoadVersion(version=version, label=""):
                return Done(self._engine.begin_load(version))
            case LoadVersion(version=version, label=label):
                self._engine.client.set_label(label)
                self._engine.end_load(version, label)
            case CallWorkers(method=""):
                (self._workers or self._engine.client).check()
            case CallWorkers(method=method, info=info, timeout_s=timeout_s):
                self._engine.client.call_workers(method, info, timeout_s)
        return Done()

    def build(self, start: Start) -> VllmEngine:
        """Start vLLM. Raises the errors of `vllm_of_model`."""
        engine = vllm_of_model(start.model(), start.engine_settings(), start.version, direct=_direct(start))
        engine.client.detect_stops()
        return engine

    def build_workers(self, start: Start) -> VllmWorkers:
        """Start the workers of a further machine. Raises the errors of `vllm_workers_of_model`."""
        return vllm_workers_of_model(start.model(), start.engine_settings(), _direct(start))

    def _step(self, message: Step) -> Progress:
        engine, left_s = self._engine, time_left(_STEP_S)
        for each in message.messages:
            if isinstance(each, Lease):
                engine.submit(each)
            else:
                engine.abort(each.lease_id)
        reports = engine.flush() if message.flushes else engine.step()
        while not reports and left_s() > 0:
            reports = engine.step()
        return Progress(tuple(reports), engine.stats)


def _direct(start: Start) -> DirectTransfer:
    return DirectTransfer("nccl" if start.device == "cuda" else "gloo", start.is_sparse, is_remote=True)


class RemoteReplica(ABC):
    """An `Engine` in another process, which also forwards calls from `DirectLoad` to its vLLM workers."""

    direct: DirectLoad
    """Exists after `join`."""

    def __init__(self, name: str, start: Start) -> None:
        """`start`: the message that the replica's process receives first."""
        settings = start.engine_settings()
        self.name, self._timeout_s = name, settings.vllm.answer_timeout_s
        self.slots, self.version, self.stats = settings.slots, start.version, EngineStats()
        self._outbox: list[Lease | Abort] = []
        self._world_size = settings.vllm.tensor_parallel * settings.vllm.pipeline_parallel

    @abstractmethod
    def send(self, message: bytes, timeout_s: float) -> bytes:
        """Return the answer to a message. May be called in parallel. Raises EngineFault if the process has ended, and
        DeadlineExceeded after `timeout_s`."""

    def join(self, direct: DirectTransfer) -> None:
        """Begin to receive versions. Call this method after the process has answered `Start`."""
        self.direct = DirectLoad(self, direct, self._world_size, timeout_s=self._timeout_s)

    def submit(self, lease: Lease) -> None:
        self._outbox.append(lease)

    def abort(self, lease_id: int) -> None:
        self._outbox.append(Abort(lease_id))

    def step(self, *, flushes: bool = False) -> list[FromWorker]:
        sent, self._outbox = tuple(self._outbox), []
        answer = self._ask(Step(sent, flushes), Progress)
        self.stats = answer.stats
        return list(answer.messages)

    def flush(self) -> list[FromWorker]:
        return self.step(flushes=True)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Receive a version that was offered (`DirectVersions.offer`). Raises WeightsFault if the transfer fails; vLLM
        then stays paused until a later load succeeds."""
        label = self._ask(LoadVersion(version), Done).label
        self.direct.load(tensors, version)
        self._ask(LoadVersion(version, label), Done)
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Stop receiving versions. Subclasses also end the replica's process."""
        if hasattr(self, "direct"):
            self.direct.close()

    def call_workers(self, method: str, info: Any, timeout_s: float) -> None:
        self._ask(CallWorkers(method, info, timeout_s), Done, timeout_s)

    def check(self) -> None:
        self._ask(CallWorkers(), Done)

    def _ask(self, message: ToReplica, kind: type[Answer], more_s: float = 0.0) -> Answer:
        return self.answer(self.send(encode(message), self._timeout_s + more_s), kind)

    def answer(self, data: bytes, kind: type[Answer]) -> Answer:
        """Decode an answer. Raises the error that a `Fault` reports, and EngineFault for an answer of another type."""
        try:
            answer: FromReplica = _decode_answer(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFault(f"{self.name} sent a malformed answer: {first_line(error)}") from error
        if isinstance(answer, Fault):
            known = answer.error()
            fault = type(known) if isinstance(known, BatonError) else EngineFault
            raise fault(f"{self.name}: {answer.text or answer.kind}")
        if not isinstance(answer, kind):
            raise EngineFault(f"{self.name} sent {type(answer).__name__} instead of {kind.__name__}")
        return answer


def whole_versions(
    model: ModelSettings, settings: EngineSettings, *, on_host: bool
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the function that converts a version of a model to the tensors of a model file, and checks their names and
    shapes (`DirectVersions.prepare`). `on_host`: whether the function moves tensors to host memory."""
    files = ModelFiles(model, settings)
    weights = WholeWeights(Skeleton(files.base_directory(), settings).model, files.read_base)
    weights.on_host = on_host
    return weights.whole
