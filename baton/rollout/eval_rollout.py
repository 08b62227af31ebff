"""Generates responses to a list of prompts under one version, for evaluations. All are leased at once.

Each trajectory is yielded when it finishes, so that scoring overlaps with generation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.errors import EngineFault
from baton.rollout.engine import check_room
from baton.rollout.stall import StallWatch
from baton.rollout.transport import WorkerTransport
from baton.stop import StopRequest
from baton.types import FromPort, Lease, Retry, SamplingParams, Trajectory, WorkLost, WorkRevoked


class EvalGroup(msgspec.Struct, frozen=True):
    """One prompt with `group_size` trajectories to generate."""

    group_id: int
    prompt_ids: tuple[int, ...]
    group_size: int


class EvalRollout:
    """Generates trajectories on a worker that has no other leases meanwhile."""

    def __init__(
        self,
        port: WorkerTransport,
        stall_timeout_s: float = 300.0,
        *,
        max_context_tokens: int | None = None,
        lease_ids: Iterator[int] | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """max_context_tokens: of the worker; prompts that leave no room are refused before any lease is sent.

        lease_ids: shared by all that lease to this worker. stop: a stop request ends every wait.
        """
        self._port, self.stop = port, stop or StopRequest()
        self._max_context_tokens = max_context_tokens
        self._watch = StallWatch(port, stall_timeout_s)
        self._lease_ids = lease_ids if lease_ids is not None else itertools.count()

    def rollout(
        self,
        requests: Sequence[EvalGroup],
        sampling: SamplingParams,
        *,
        noise_seed: int,
        version: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Trajectory]:
        """Yield each trajectory of the requests when it finishes, all under exactly `version`.

        on_tokens: receives the token count of each report. Raises EngineFault when the worker breaks the protocol or
        does not serve the version, DeadlineExceeded when the worker makes no progress for `stall_timeout_s`, UserError
        for a prompt that leaves no room for a response, and Stopped.
        """
        self._check_room(requests)
        growing: dict[int, Trajectory] = {}

        def begin(trajectory: Trajectory) -> None:
            lease_id = next(self._lease_ids)
            growing[lease_id] = trajectory
            self._port.send(Lease(lease_id, trajectory, sampling, noise_seed, version))

        for request in requests:
            for sample_index in range(request.group_size):
                begin(Trajectory(request.group_id, sample_index, request.prompt_ids))
        self._watch.reset()
        while growing:
            self.stop.check()
            messages = self._port.receive(timeout_s=1.0)
            self._watch.check(messages, len(growing), (t.name for t in growing.values()))
            for message in messages:
                if isinstance(message, WorkRevoked) and message.noise_seed == noise_seed:
                    key = (message.group_id, message.sample_index)
                    for lease_id in [i for i, t in growing.items() if (t.group_id, t.sample_index) == key]:
                        begin(Trajectory(*key, growing.pop(lease_id).prompt_ids))
                finished = self._on_report(message, growing, on_tokens)
                if finished is not None:
                    yield finished

    def _check_room(self, requests: Sequence[EvalGroup]) -> None:
        longest = max(requests, key=lambda r: len(r.prompt_ids), default=None)
        if longest is not None:
            check_room(longest.group_id, longest.prompt_ids, self._max_context_tokens)

    def _on_report(
        self, message: FromPort, growing: dict[int, Trajectory], on_tokens: Callable[[int], None] | None
    ) -> Trajectory | None:
        if isinstance(message, WorkLost | WorkRevoked):
            return None  # concerns training, whose rollouts are aborted meanwhile, or was handled by the caller
        trajectory = growing.get(message.lease_id)
        if trajectory is None:
            return None  # a late message of a lease that has ended
        if isinstance(message, Retry):
            raise EngineFault(
                f"{self._port.name} serves version {message.has_version} and refused trajectory {trajectory.name}"
            )
        if message.token_offset != trajectory.num_tokens:
            return None  # a repeated report
        grown = trajectory.extended(message.segments, message.finish_reason)
        if on_tokens is not None:
            on_tokens(grown.num_tokens - trajectory.num_tokens)
        if grown.finish_reason is None:
            if message.is_aborted:
                raise EngineFault(f"{self._port.name} aborted trajectory {trajectory.name}, which nobody asked for")
            growing[message.lease_id] = grown
            return None
        del growing[message.lease_id]
        return grown
