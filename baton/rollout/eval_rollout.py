"""`EvalRollout`: generates responses to a list of prompts under one version, for evaluations.

All trajectories are leased at once, and each is yielded when it finishes, so scoring overlaps with generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.errors import EngineFault
from baton.rollout.episodes import BeginAgain, Continued, EpisodePlayer, EpisodeSetup, path_seeds
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.types import (
    Abort,
    FromPort,
    Prompt,
    Retry,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
    WorkLost,
    WorkRevoked,
)

LONG_WAIT_S = 1.0


class EvalGroup(msgspec.Struct, frozen=True):
    """A request for `group_size` responses to one prompt."""

    group_id: int
    prompt_ids: tuple[int, ...]
    group_size: int
    prompt: Prompt | None = None
    """The prompt; required only for multi-turn tasks."""


class EvalRollout:
    """Generates trajectories on a worker that has no other leases at the same time."""

    def __init__(self, worker: WorkerClient, episodes: EpisodeSetup | None = None) -> None:
        """`episodes`: setup of multi-turn episodes; None without multi-turn tasks."""
        self.worker, self._episodes = worker, episodes

    def rollout(
        self, requests: Sequence[EvalGroup], sampling: SamplingParams, *, noise_seed: int, version: int
    ) -> Iterator[Trajectory | ScoredTrajectory]:
        """Generate the requested trajectories under exactly `version`, and yield each trajectory when it finishes.

        A multi-turn episode is yielded with the reward that its environment gave. Raises UserError if a prompt leaves
        no room for a response, DeadlineExceeded if the worker makes no progress, EnvironmentFault if too many
        environments fail, and Stopped on a stop request. Raises EngineFault if the worker serves another version,
        aborts a trajectory, or refuses too many leases in a row.
        """
        for request in requests:  # check every prompt before the first lease is sent
            self.worker.check_room(request.group_id, request.prompt_ids)
        seeded = SeededSampling(sampling, noise_seed)
        player = EpisodePlayer(self._episodes, seeded)
        leases = _EvalLeases(self.worker, requests, seeded, version, player)
        self.worker.begin_wait()
        while leases.growing or player.num_acting:
            self.worker.stop.check()
            if leases.growing:
                beside = player.sockets if player.num_acting else None
                names = (t.name for t in leases.growing.values())
                for message in self.worker.receive(LONG_WAIT_S, len(leases.growing), names, beside):
                    yield from leases.on_message(message)
            if player.num_acting:
                yield from leases.collect(0.0 if leases.growing else LONG_WAIT_S)


class _EvalLeases:
    """The leases of one evaluation, and its multi-turn episodes."""

    def __init__(
        self,
        worker: WorkerClient,
        requests: Sequence[EvalGroup],
        sampling: SeededSampling,
        version: int,
        player: EpisodePlayer,
    ) -> None:
        self._worker, self._sampling, self._version, self._player = worker, sampling, version, player
        self._requests = {request.group_id: request for request in requests}
        self._prompts = {r.group_id: r.prompt for r in requests if r.prompt and player.plays(r.prompt)}
        """Prompts of multi-turn tasks by group id."""
        self.growing: dict[int, Trajectory] = {}
        """Leased trajectories by lease id."""
        self._num_trajectories = sum(request.group_size for request in requests)
        for request in requests:
            for sample_index in range(request.group_size):
                self._lease(Trajectory(request.group_id, sample_index, request.prompt_ids))

    def on_message(self, message: FromPort) -> Iterator[Trajectory | ScoredTrajectory]:
        if isinstance(message, WorkLost):
            return  # the message concerns training
        if isinstance(message, WorkRevoked):
            self._revoke(message)
            return
        trajectory = self.growing.get(message.lease_id)
        if trajectory is None:
            return  # a late message of a lease that has ended
        if isinstance(message, Retry):
            if message.has_version == self._version:  # a replica with this lease has failed; another one serves
                self._worker.on_refused(trajectory, message, self._num_trajectories)
                del self.growing[message.lease_id]
                self._lease(trajectory)
                return
            raise EngineFault(
                f"{self._worker.name} serves version {message.has_version} and refused trajectory {trajectory.name} "
                "of another version; look for errors in the log of the worker"
            )
        if message.token_offset != trajectory.num_tokens:
            return  # a repeated report
        self._worker.on_accepted()
        prompt = self._prompts.get(trajectory.group_id)
        grown = trajectory.extended(message.segments, None if prompt else message.finish_reason)
        if message.finish_reason is None:
            if message.is_aborted:
                raise EngineFault(f"{self._worker.name} aborted trajectory {trajectory.name} without a request")
            self.growing[message.lease_id] = grown
            return
        del self.growing[message.lease_id]
        if prompt is None:
            yield grown
            return
        over = self._player.end_turn(prompt, grown, message.finish_reason)
        if over is not None:
            yield over

    def collect(self, timeout_s: float) -> Iterator[ScoredTrajectory]:
        """Lease the next turns of episodes whose environment has answered; yield the finished episodes."""
        for answer in self._player.collect(timeout_s):
            match answer:
                case ScoredTrajectory():
                    yield answer
                case Continued(trajectory=trajectory):
                    self._lease(trajectory)
                case BeginAgain(group_id=group_id, sample_index=index):
                    self._begin_again(group_id, index)

    def _revoke(self, revoked: WorkRevoked) -> None:
        key = (revoked.group_id, revoked.sample_index)
        if revoked.noise_seed not in path_seeds(self._sampling.noise_seed, self._player.num_paths(key)):
            self._worker.set_aside.append(revoked)
            return
        leases = [i for i, t in self.growing.items() if (t.group_id, t.sample_index) == key]
        for lease_id in leases:
            # abort the lease even if it belongs to another path: the whole episode begins again
            self._worker.transport.send(Abort(lease_id))
            del self.growing[lease_id]
        if leases or self._player.is_acting(key):
            self._begin_again(*key)

    def _begin_again(self, group_id: int, sample_index: int) -> None:
        trajectory = Trajectory(group_id, sample_index, self._requests[group_id].prompt_ids)
        if (prompt := self._prompts.get(group_id)) is not None:
            self._player.begin_again(prompt, trajectory)
        self._lease(trajectory)

    def _lease(self, trajectory: Trajectory) -> None:
        sampling = self._sampling
        if (prompt := self._prompts.get(trajectory.group_id)) is not None:
            sampling = self._player.sampling(prompt, trajectory)
        self.growing[self._worker.lease(trajectory, sampling, self._version)] = trajectory
