"""The controller's side of a trainer whose ranks run in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import RLock
from typing import Any, Literal, TypeVar

from baton.errors import BatonError, Fault, RankLost, TrainingDiverged, WeightsFault
from baton.files import atomic_directory
from baton.trainer.parallel import messages
from baton.trainer.trainer import PublishedWeights, Trainer
from baton.types import Batch, PolicyVersion
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.remote import RemoteTensors
from baton.weights.direct.stream import BUCKET_BYTES

Answer = TypeVar("Answer")
REQUEST_TIMEOUT_S = 1800.0
"""Timeout in seconds of a request to the ranks (start, step, publication, checkpoint), after which all ranks are
ended."""


class RankedTrainer(Trainer):
    """Trains a model sharded over ranks. Every request ends within `timeout_s` with an answer or an error. RankLost
    means that all ranks were ended."""

    def __init__(self, ranks: messages.Ranks, setup: messages.TrainerSetup, timeout_s: float) -> None:
        """Connect the ranks and construct their trainers. Raises UserError for invalid settings, and RankLost."""
        self._ranks, self._timeout_s, self._version = ranks, timeout_s, setup.version
        self._lock = RLock()
        """Allows one request at a time, because threads of direct transfers also make requests."""
        self._unclosed: list[str] = []
        """Communicators of rank 0 to close before the next request."""
        self._lock_s = 0.0
        """Maximum seconds that a direct transfer waits for the lock, for example during a train step."""
        self._end: BatonError | OSError | None = None
        """The error that ended the ranks."""
        self.backend: Literal["gloo", "nccl"] | None = None
        """How direct transfers send tensors; None if versions are published through a file."""
        self.bucket_bytes = BUCKET_BYTES
        self._peak_bytes: int | None = None
        """Largest `DeviceMemory.peak_bytes` since the last call to `take_peak_bytes`."""
        try:
            store = self._ask(messages.Listen(), messages.Listening)[0]
            self._ask(messages.RankSetup(setup, store.host, store.port, timeout_s), messages.Ready)
        except BaseException:
            ranks.close()
            raise

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step on all ranks. Raises the errors of `Trainer.step`, and RankLost."""
        answers = self._ask(messages.TrainStep(batch), messages.Stepped)
        self._version = answers[0].version
        return next(answer.metrics for answer in answers if answer.metrics)  # the last pipeline stage has them

    def sleep(self) -> None:
        """Move the tensors of all ranks to the host. `publish`, `save` and `restore` also work during sleep, and use
        the device for one tensor at a time."""
        self._turn(is_awake=False)

    def wake_up(self) -> None:
        self._turn(is_awake=True)

    @property
    def held_bytes(self) -> int:
        """Device memory of weights, gradients and moments in bytes, on the rank that uses most."""
        return self._turn(is_awake=None)

    def take_peak_bytes(self) -> int | None:
        """Return the peak of device memory since the last call, on the rank that used most; None on a CPU."""
        self._turn(is_awake=None)
        peak, self._peak_bytes = self._peak_bytes, None
        return peak

    def _turn(self, *, is_awake: bool | None) -> int:
        answers = self._ask(messages.UseDevice(is_awake), messages.DeviceMemory)
        peaks = [each.peak_bytes for each in answers if each.peak_bytes is not None]
        self._peak_bytes = max((*peaks, self._peak_bytes or 0)) if peaks else self._peak_bytes
        return max(answer.held_bytes for answer in answers)

    def publish(self) -> PublishedWeights:
        """Return the current weights, or the adapter alone, mapped from the file that the first rank has written. If
        `backend` is set, return only a description of the weights (`RemoteTensors`); the ranks can send these weights
        until the next step."""
        if self.backend is not None:
            said = self._ask(messages.Describe(self.bucket_bytes), messages.Described)[0]
            self._version = said.version
            return PublishedWeights(said.version, RemoteTensors(said.tensors, said.bucket_bytes))
        answer = self._ask(messages.Publish(), messages.Published)[0]
        self._version = answer.version
        return PublishedWeights.of_file(self._version, self._ranks.bring(answer.path), answer.digests)

    def connect_replica(self, name: str, world_size: int, rules: DirectRules) -> dict[str, Any]:
        assert self.backend is not None, "set `backend` first"
        self._lock_s = rules.connect_s
        return self._sending(messages.ConnectReplica(name, world_size, self.backend, rules))

    def send_bucket(self, name: str, index: int, place: Mapping[str, Any]) -> dict[str, Any]:
        return self._sending(messages.SendBucket(name, index, dict(place)))

    def close_replica(self, name: str) -> None:
        """Close a communicator after the running request, such as a train step. If that request takes longer than
        `connect_s`, return before the communicator is closed; the next request then closes it first."""
        self._unclosed.append(name)
        if self._end is None and self._lock.acquire(timeout=self._lock_s):
            try:
                self._close_replicas()
            finally:
                self._lock.release()

    def _close_replicas(self) -> None:
        while self._unclosed:
            self._ask(messages.CloseReplica(self._unclosed.pop()), messages.Ready)

    def check(self) -> None:
        if self._end is not None:
            raise self._end

    def _sending(self, message: messages.ConnectReplica | messages.SendBucket) -> dict[str, Any]:
        answer = self._ask(message, messages.Sending, self._lock_s)[0]
        if answer.error:
            raise WeightsFault(f"rank 0 of the trainer cannot send weights: {answer.error}")
        return answer.info

    def save(self, directory: Path) -> None:
        with atomic_directory(directory) as unfinished:
            self._version = self._ask(messages.Save(str(unfinished)), messages.Ready)[0].version

    def restore(self, directory: Path) -> None:
        self._version = self._ask(messages.Restore(str(directory.absolute())), messages.Ready)[0].version

    def close(self) -> None:
        self._end = self._end or RankLost("the trainer's ranks were closed")
        self._ranks.close()

    def _ask(self, message: messages.ToRank, kind: type[Answer], lock_s: float | None = None) -> list[Answer]:
        """`lock_s`: maximum seconds to wait until another thread's request has ended. The default is `timeout_s`, which
        is the maximum duration of a request."""
        lock_s = self._timeout_s if lock_s is None else lock_s
        if not self._lock.acquire(timeout=lock_s):
            raise WeightsFault(f"the trainer's ranks were busy with another request for {lock_s:g} s")
        try:
            self.check()
            self._close_replicas()
            answers = self._ranks.ask(message, self._timeout_s)
        except (BatonError, OSError) as lost:
            self._end = self._end or lost
            raise
        finally:
            self._lock.release()
        error = messages.error_of(dict(enumerate(answers)))
        if error is not None:
            if not (isinstance(error, TrainingDiverged) and all(isinstance(answer, Fault) for answer in answers)):
                self._end = error
                self.close()  # if only some ranks failed, the states of the ranks differ
            raise error
        found: list[Answer] = [answer for answer in answers if isinstance(answer, kind)]
        assert len(found) == len(answers), f"ranks answered {message.__class__.__name__} with {answers}"
        return found
