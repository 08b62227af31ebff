"""`EvalRollout`: generates responses to a list of prompts under one version, for evaluations.

It leases all trajectories at once, and yields each one when it finishes, so scoring overlaps with generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.errors import EngineFault
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.types import FromPort, Retry, SamplingParams, Trajectory, WorkLost, WorkRevoked


class EvalGroup(msgspec.Struct, frozen=True):
    """A request for `group_size` responses to one prompt."""

    group_id: int
    prompt_ids: tuple[int, ...]
    group_size: int


class EvalRollout:
    """Generates trajectories on a worker that has no other leases at the same time."""

    def __init__(self, worker: WorkerClient) -> None:
        self.worker = worker

    def rollout(
        self,
        requests: Sequence[EvalGroup],
        sampling: SamplingParams,
        *,
        noise_seed: int,
        version: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Trajectory]:
        """Generate the requested trajectories under exactly `version`, and yield each one when it finishes.

        on_tokens: called with the number of new tokens of each report. Raises UserError for a prompt that leaves no
        room for a response, EngineFault if the worker does not serve the version or ends a trajectory early,
        DeadlineExceeded if the worker makes no progress, and Stopped.
        """
        for request in requests:  # check every prompt before the first lease is sent
            self.worker.check_room(request.group_id, request.prompt_ids)
        growing: dict[int, Trajectory] = {}

        def lease(trajectory: Trajectory) -> None:
            growing[self.worker.lease(trajectory, SeededSampling(sampling, noise_seed), version)] = trajectory

        for request in requests:
            for sample_index in range(request.group_size):
                lease(Trajectory(request.group_id, sample_index, request.prompt_ids))
        self.worker.begin_wait()
        while growing:
            self.worker.stop.check()
            for message in self.worker.receive(1.0, len(growing), (t.name for t in growing.values())):
                if isinstance(message, WorkRevoked) and message.noise_seed == noise_seed:
                    key = (message.group_id, message.sample_index)
                    for lease_id in [i for i, t in growing.items() if (t.group_id, t.sample_index) == key]:
                        lease(Trajectory(*key, growing.pop(lease_id).prompt_ids))
                finished = self._on_report(message, growing, on_tokens)
                if finished is not None:
                    yield finished

    def _on_report(
        self, message: FromPort, growing: dict[int, Trajectory], on_tokens: Callable[[int], None] | None
    ) -> Trajectory | None:
        if isinstance(message, WorkLost | WorkRevoked):
            return None  # the caller has handled revocations of this evaluation; the others concern training
        trajectory = growing.get(message.lease_id)
        if trajectory is None:
            return None  # the lease has ended: the message was repeated or arrived late
        if isinstance(message, Retry):
            raise EngineFault(
                f"{self.worker.name} serves version {message.has_version} and refused trajectory {trajectory.name} "
                "of another version; look for errors in the log of the worker"
            )
        if message.token_offset != trajectory.num_tokens:
            return None  # a repeated report, whose tokens have been appended already
        grown = trajectory.extended(message.segments, message.finish_reason)
        if on_tokens is not None:
            on_tokens(grown.num_tokens - trajectory.num_tokens)
        if grown.finish_reason is None:
            if message.is_aborted:
                raise EngineFault(f"{self.worker.name} aborted trajectory {trajectory.name} without a request")
            growing[message.lease_id] = grown
            return None
        del growing[message.lease_id]
        return grown
