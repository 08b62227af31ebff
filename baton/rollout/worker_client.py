"""`WorkerClient`: sends leases to one worker, and raises an error if the worker makes no progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.clock import Clock
from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.frames import FrameSocket, ready
from baton.rollout.transport import WorkerTransport
from baton.stop import StopRequest
from baton.types import FromPort, Lease, PolicyVersion, Retry, SamplingParams, Trajectory, WorkRevoked

SHORT_WAIT_S = 0.02
"""Maximum seconds of one wait for worker messages while rewards or the end of a train step are also expected."""
MAX_COUNTED_WAIT_S = 5.0
"""If more than this number of seconds passes between two calls to `receive`, only this number counts as time without
progress, because this process may have been suspended."""
MAX_REFUSALS = 8
"""Maximum number of leases, per slot, that a worker may refuse in a row. One more refusal raises EngineFault. The count
starts again after each accepted report. A worker refuses a lease if it does not serve the version that the lease
requires."""


@dataclass(frozen=True, slots=True)
class SeededSampling:
    """How the trajectories of training, or of one evaluation, are sampled."""

    params: SamplingParams
    noise_seed: int


class WorkerClient:
    """The only sender of leases to a worker, for training and evaluations, so that lease ids are unique."""

    def __init__(
        self,
        transport: WorkerTransport,
        stall_timeout_s: float = 300.0,
        *,
        max_context_tokens: int | None = None,
        stop: StopRequest | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`stall_timeout_s`: maximum time without progress. `max_context_tokens`: maximum context of the worker's
        engine; None disables `check_room`."""
        self.transport, self.clock = transport, clock
        self.stop = stop or StopRequest()
        """A stop request ends every wait for the worker."""
        self.set_aside: list[WorkRevoked] = []
        """Revocations of training trajectories that arrived during an evaluation."""
        self._stall_timeout_s, self._max_context_tokens = stall_timeout_s, max_context_tokens
        self._lease_ids = itertools.count()
        self._num_refused = 0
        self.begin_wait()

    @property
    def name(self) -> str:
        return self.transport.name

    def check_room(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        """Raise UserError for a prompt that leaves no room for a response."""
        if self._max_context_tokens is not None and len(prompt_ids) >= self._max_context_tokens:
            raise UserError(
                f"the prompt of group {group_id} has {len(prompt_ids)} tokens, which leaves no room for a response: "
                f"engine.max_context_tokens is {self._max_context_tokens} for prompt and response together; "
                "increase it, or remove such prompts from the data"
            )

    def lease(self, trajectory: Trajectory, sampling: SeededSampling, version: int, *, is_exact: bool = True) -> int:
        lease_id = next(self._lease_ids)
        self.transport.send(Lease(lease_id, trajectory, sampling.params, sampling.noise_seed, version, is_exact))
        return lease_id

    def on_refused(self, trajectory: Trajectory, retry: Retry, most_leases: int) -> None:
        """Count a refused lease. `most_leases`: largest number of leases that were active at the same time. The maximum
        number of refusals is proportional to this number or to the number of slots, whichever is larger. The number of
        slots alone does not suffice, because a failed worker has no slots but still refuses its leases. Raises
        EngineFault after too many refusals in a row."""
        self._num_refused += 1
        if self._num_refused > MAX_REFUSALS * max(1, self.transport.slots, most_leases):
            raise EngineFault(
                f"{self.name} has refused {self._num_refused} leases in a row, the last one for trajectory "
                f"{trajectory.name}; it serves version {retry.has_version}; look for errors in the log of the engine, "
                "then continue with --resume"
            )

    def on_accepted(self) -> None:
        """Start to count refused leases again, after a report."""
        self._num_refused = 0

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch the worker to a version. Raises Stopped as soon as a stop is requested."""
        with self.stop.interrupting():
            self.transport.load_weights(tensors, version)

    def begin_wait(self) -> None:
        self._stats, self._is_empty = self.transport.stats(), not self.transport.slots
        self._waited_s, self._looked_s = 0.0, self.clock()

    def receive(
        self, timeout_s: float, num_waiting: int, names: Iterable[str], beside: Sequence[FrameSocket] | None = None
    ) -> Sequence[FromPort]:
        """Return the worker's messages; wait at most `timeout_s` for the first one.

        `beside`: sockets of environments; the wait also ends when one of them is readable. If `beside` is empty or the
        transport has no sockets, the wait ends after `SHORT_WAIT_S`. If `beside` is None, no event except a message can
        arrive during the wait, so the wait may last until `timeout_s`.

        Raises DeadlineExceeded after the stall timeout without progress while `num_waiting` trajectories wait. Progress
        is any of three events: a message arrives, a counter of the engine changes, or the number of slots becomes zero
        or stops being zero. `names`: names of the waiting trajectories, read only for the error.
        """
        messages = self._messages(timeout_s, beside)
        is_empty, now_s = not self.transport.slots, self.clock()
        self._waited_s += min(now_s - self._looked_s, MAX_COUNTED_WAIT_S)
        self._looked_s = now_s
        if messages or is_empty != self._is_empty or not num_waiting:
            self._waited_s, self._is_empty = 0.0, is_empty
            return messages
        # the counters are read once per call and not per message, because a swarm adds the counters of all workers
        stats = self.transport.stats()
        if stats != self._stats:
            self._waited_s, self._stats = 0.0, stats
            return messages
        limit_s = max(self._stall_timeout_s, self.transport.no_worker_timeout_s if is_empty else 0.0)
        if self._waited_s > limit_s:
            waiting = ", ".join(itertools.islice(names, 4)) or "none has been leased"
            raise DeadlineExceeded(
                f"{self.name} has made no progress for {limit_s:.0f} s while {num_waiting} trajectories wait for it "
                f"({waiting})"
            )
        return messages

    def _messages(self, timeout_s: float, beside: Sequence[FrameSocket] | None) -> Sequence[FromPort]:
        if beside is None:
            return self.transport.receive(timeout_s)
        if not beside or not (sockets := self.transport.sockets):
            return self.transport.receive(min(timeout_s, SHORT_WAIT_S))
        if messages := self.transport.receive(0.0):
            return messages
        ready((*sockets, *beside), timeout_s)
        return self.transport.receive(0.0)
