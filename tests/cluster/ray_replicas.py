"""Replicas whose actors have no vLLM: they receive weights over gloo with the real protocol, into a dict of tensors.
Imported by the processes of Ray, too."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Client as Connection
from multiprocessing.connection import Listener
from pathlib import Path
from threading import Lock, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "weights" / "direct"))

from replica_process import Model

from baton.clock import time_left
from baton.errors import BatonError
from baton.rollout.engine import EngineStats
from baton.rollout.engines.embedded.engine import embedded_engine
from baton.rollout.engines.vllm.remote import ReplicaServer
from baton.rollout.processes.protocol import Start
from baton.types import FinishReason, FromWorker, Lease, PolicyVersion, Report, Segment

LOGPROB = -1.0


class Process(Model):
    """The actor's own process, which sends itself signals."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank = rank

    def pid(self, info: None) -> None:
        Path(os.environ["BATON_TEST_PIDS"], str(os.getpid())).write_text(str(self.rank))

    def signal_at(self, info: list[Any]) -> None:
        """info: a stage, the signal, and optionally the only rank that is meant."""
        if self.rank in (info[2:] or [self.rank]):
            super().signal_at((info[0], info[1]))

    def holds(self, value: float) -> None:
        served = self.served(None)
        assert served is not None
        assert {each for name, tensor in served.items() if name != "same" for each in tensor} == {value}


class Client:
    """The part of `VllmClient` that direct transfers use. On several machines, it calls the workers of all."""

    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        own = arguments or {}
        self.model, self.lock, self.number, self.links = Process(), Lock(), 0, list[Any]()
        if own:
            with Listener((own["master_addr"], own["master_port"])) as listener:
                self.links = [listener.accept() for _ in range(1, own["nnodes"])]

    def call_workers(self, method: str, info: Any, timeout_s: float) -> None:
        with self.lock:
            self.number += 1
            for link in self.links:
                link.send((self.number, method, info))
            self.model.call(method, info)
            for link in self.links:
                number = 0
                while number != self.number:  # answers of calls that have failed here
                    assert link.poll(timeout_s), f"no answer to {method}"
                    number, error = link.recv()
                assert not error, error

    def set_label(self, label: str) -> None:
        assert label

    def check(self) -> None:
        pass


class ValueWorkers:
    """The part of a replica on a further machine: the workers' side of `Client`."""

    def __init__(self, start: Start) -> None:
        own, left_s = start.settings["vllm"]["arguments"], time_left(60.0)
        self.model, link = Process(1 + own["node_rank"]), None
        while link is None:
            try:
                link = Connection((own["master_addr"], own["master_port"]))
            except ConnectionRefusedError:
                assert left_s() > 0
                time.sleep(0.05)
        Thread(target=self.serve, args=(link,), daemon=True).start()

    def serve(self, link: Any) -> None:
        while True:
            number, method, info = link.recv()
            try:
                self.model.call(method, info)
                link.send((number, ""))
            except (AssertionError, BatonError, RuntimeError) as error:
                link.send((number, repr(error)))

    def check(self) -> None:
        pass


class ValueEngine:
    """Its tokens are the values of its weights, so a token shows which weights sampled it."""

    def __init__(self, start: Start) -> None:
        settings = start.engine_settings()
        self.client, self.version, self.slots = Client(settings.vllm.arguments), start.version, settings.slots
        self.leases: dict[int, tuple[Lease, int]] = {}
        self.outbox: list[FromWorker] = []
        self.is_paused = False
        self.num_tokens = 0

    @property
    def stats(self) -> EngineStats:
        return EngineStats(decoded_tokens=self.num_tokens)

    def begin_load(self, version: PolicyVersion) -> str:
        self.is_paused = True
        return f"label of {version.number}"

    def end_load(self, version: PolicyVersion, label: str) -> None:
        assert label == f"label of {version.number}"
        self.version, self.is_paused = version, False

    def submit(self, lease: Lease) -> None:
        assert len(self.leases) < self.slots
        self.leases[lease.lease_id] = lease, lease.trajectory.num_tokens

    def abort(self, lease_id: int) -> None:
        if lease_id in self.leases:
            _, count = self.leases.pop(lease_id)
            self.outbox.append(Report(lease_id, count, (), is_aborted=True))

    def flush(self) -> list[FromWorker]:
        return []

    def step(self) -> list[FromWorker]:
        reports, self.outbox = self.outbox, []
        if self.leases and not self.is_paused:
            served = self.client.model.served(None)
            assert served is not None
            values = {value for name, tensor in served.items() if name != "same" for value in tensor}
            assert len(values) <= 1, "a token of parts of two versions"
            token = int(min(values, default=0))
            for lease_id, (lease, count) in list(self.leases.items()):
                segment = Segment((token,), (LOGPROB,), self.version.number)
                is_over = count + 1 >= lease.sampling.max_new_tokens
                reports.append(Report(lease_id, count, (segment,), FinishReason.LENGTH if is_over else None))
                self.num_tokens += 1
                self.leases[lease_id] = lease, count + 1
                if is_over:
                    del self.leases[lease_id]
        time.sleep(0.01)
        return reports


class ValueServer(ReplicaServer):
    def build(self, start: Start) -> Any:
        return ValueEngine(start)

    def build_workers(self, start: Start) -> Any:
        return ValueWorkers(start)


class ModelEngine:
    """Baton's embedded engine, which receives weights as vLLM's workers do."""

    def __init__(self, start: Start) -> None:
        settings = start.engine_settings()
        assert (start.device, settings.kind) == ("cpu", "vllm")
        self.client, self.outbox = Client(), list[FromWorker]()
        embedded = settings.model_copy(update={"kind": "embedded"})
        self.engine = embedded_engine(start.model(), embedded, start.version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def begin_load(self, version: PolicyVersion) -> str:
        self.outbox += self.engine.flush()
        return str(version.number)

    def end_load(self, version: PolicyVersion, label: str) -> None:
        assert self.client.model.served(None) is not None
        self.engine.load_weights(dict(self.client.model.tensors), version)

    def step(self) -> list[FromWorker]:
        reports, self.outbox = self.outbox, []
        return reports + self.engine.step()


class ModelServer(ReplicaServer):
    def build(self, start: Start) -> Any:
        assert Path(start.model_path).is_absolute()
        return ModelEngine(start)
