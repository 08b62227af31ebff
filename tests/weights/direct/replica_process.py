"""A replica that is a plain process: a dict of tensors instead of a model, with the real communicator and checks."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from threading import Lock
from typing import Any

import torch

from baton.errors import BatonError, DeadlineExceeded, EngineFault, WeightsFault
from baton.types import PolicyVersion
from baton.weights.direct.gloo import join_replica
from baton.weights.direct.stream import NUM_CHANGED, IncomingVersion
from tests.fork_server import start_process

STAGES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Model:
    """What vLLM's worker does with the calls, on a dict."""

    rank = 1

    def __init__(self) -> None:
        self.incoming, self.group = IncomingVersion(), None
        self.tensors: dict[str, torch.Tensor] = {}
        self.is_whole = True
        self.hit: tuple[str, int] | None = None
        """Method at which this process sends itself a signal, and the signal."""

    def call(self, method: str, info: Any) -> Any:
        if self.hit is not None and self.hit[0] == method and (method != "update_weights" or info["bucket"]["index"]):
            number, self.hit = self.hit[1], None
            os.kill(os.getpid(), number)
        return getattr(self, method)(info)

    def signal_at(self, info: tuple[str, int]) -> None:
        self.hit = info

    def abort_transfer(self, info: None) -> None:
        self.incoming.abandon()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.group = join_replica(info, self.rank, info["world_size"])

    def start_weight_update(self, info: None) -> None:
        self.incoming.begin()
        self.received, self.is_whole = 0, False

    def update_weights(self, info: dict[str, Any]) -> None:
        try:
            self.incoming.expect(info["names"], info["bucket"])
            if info["bucket"]["base"] is None and info["bucket"]["index"] == 0:
                self.tensors = {}
            counts = info.get(NUM_CHANGED, [None] * len(info["names"]))
            described = zip(info["names"], info["dtype_names"], info["shapes"], counts, strict=True)
            for name, dtype, shape, count in described:
                tensor = torch.empty(shape if count is None else count, dtype=getattr(torch, dtype))
                if count is not None:
                    self.receive(indices := torch.empty(count, dtype=torch.int32))
                self.receive(tensor)
                if count is not None:  # as vLLM's load_checkpoint_weight_patches
                    values, tensor = tensor, torch.full(shape, float("nan"), dtype=tensor.dtype)
                    tensor.view(-1)[indices.long()] = values
                self.incoming.loaded([(name, tensor)])
                self.tensors[name] = tensor if count is None else tensor.where(~tensor.isnan(), self.tensors[name])
            self.incoming.end_bucket()
        except BaseException:
            self.group.close()
            raise

    def receive(self, tensor: torch.Tensor) -> None:
        self.group.broadcast(tensor)
        self.received += tensor.nbytes

    def finish_weight_update(self, info: None) -> None:
        self.incoming.finish()
        self.is_whole = True

    def bytes_of_last(self, info: None) -> int:
        return self.received

    def served(self, info: None) -> dict[str, list[float]] | None:
        """The tensors, if they are whole."""
        return {name: t.tolist() for name, t in self.tensors.items()} if self.is_whole else None


def await_cause(sender: Any, replica: str, pattern: str, timeout_s: float = 60.0) -> None:
    """Wait until an attempt of a replica has failed for this cause."""
    until_s, cause = time.monotonic() + timeout_s, ""
    while not re.search(pattern, cause):
        assert time.monotonic() < until_s, f"{replica} did not fail: {cause!r}"
        try:
            sender.wait(replica, PolicyVersion("not offered", 0), timeout_s)
        except WeightsFault as error:
            cause = str(error)  # ends with the cause of the last failure


def serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    model = Model()
    while True:
        number, method, info = pipe.recv()
        try:
            pipe.send((number, model.call(method, info), ""))
        except (BatonError, RuntimeError) as error:
            pipe.send((number, None, str(error)))


class ProcessLink:
    """Calls of a replica's process."""

    world_size = 1

    def __init__(self) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self.process = start_process(serve, other)
        other.close()
        self._lock, self._number = Lock(), 0
        self.methods: list[str] = []

    def ask(self, method: str, info: Any, timeout_s: float) -> Any:
        with self._lock:
            self._number += 1
            self.methods.append(method)
            try:
                self._pipe.send((self._number, method, info))
                while self._pipe.poll(timeout_s):
                    number, result, error = self._pipe.recv()
                    if number == self._number:
                        if error:
                            raise EngineFault(error)
                        return result
            except (EOFError, OSError) as error:
                raise EngineFault("the process has ended") from error
        raise DeadlineExceeded(f"no answer to {method} in {timeout_s} s")

    def call(self, method: str, info: Any, timeout_s: float) -> None:
        self.ask(method, info, timeout_s)

    def cont(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.join(60)
