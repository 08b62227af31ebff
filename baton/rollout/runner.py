"""Carries out rollouts through a worker port: leases out, reports in, trajectories grown by `extended` alone.

The runner keeps the payloads (trajectories, prompts); who is leased when is a decision, here the synchronous one:
everything at once, in order. Each finished trajectory is handed on at once, so that judging overlaps with generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from pydantic import Field

from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.rollout.port import WorkerPort
from baton.settings import Settings
from baton.types import FromWorker, Lease, Report, Retry, SamplingParams, Trajectory


class RolloutSettings(Settings):
    """[rollout] what one train step generates."""

    batch_groups: int = Field(default=32, ge=1)
    """Groups per train step."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per group: samples of one prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, tokens; counted over all resumes."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes its probabilities at the same one."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the model's end-of-sequence ids."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a single new token after which the run stops and names the worker."""

    def sampling(self) -> SamplingParams:
        """The sampling parameters of a training rollout."""
        return SamplingParams(self.max_new_tokens, temperature=self.temperature, stop=self.stop)


class Request(msgspec.Struct, frozen=True):
    """One group to be generated."""

    group_id: int
    prompt_ids: tuple[int, ...]
    group_size: int


class Runner:
    """Grows trajectories on one worker."""

    def __init__(
        self, port: WorkerPort, stall_timeout_s: float = 300.0, *, max_context_tokens: int | None = None
    ) -> None:
        """`max_context_tokens` is the worker's: requests that cannot fit are refused before any is sent."""
        self._port = port
        self._max_context_tokens = max_context_tokens
        self._stall_timeout_s = stall_timeout_s
        self._next_lease_id = 0

    def rollout(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        noise_seed: int,
        version: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Trajectory]:
        """Yield every trajectory of the requests as it finishes, all under exactly `version`.

        `on_tokens` hears of each report's token count. Raises EngineFault when the worker breaks the protocol or does
        not hold the version, DeadlineExceeded when no token is made for `stall_timeout_s`, and UserError for a
        prompt that leaves no room for a response.
        """
        self._check_room(requests)
        growing: dict[int, Trajectory] = {}
        for request in requests:
            for sample_index in range(request.group_size):
                trajectory = Trajectory(request.group_id, sample_index, request.prompt_ids)
                growing[self._next_lease_id] = trajectory
                self._port.send(Lease(self._next_lease_id, trajectory, sampling, noise_seed, version))
                self._next_lease_id += 1
        last_sign_s, last_stats = time.monotonic(), self._port.stats()
        while growing:
            messages = self._port.receive(timeout_s=1.0)
            stats = self._port.stats()
            if messages or stats != last_stats:
                last_sign_s, last_stats = time.monotonic(), stats
            elif time.monotonic() - last_sign_s > self._stall_timeout_s:
                waiting = ", ".join(t.name for t in list(growing.values())[:4])
                raise DeadlineExceeded(
                    f"{self._port.name} has made no progress for {self._stall_timeout_s:.0f} s while "
                    f"{len(growing)} trajectories wait for it (first: {waiting})"
                )
            for message in messages:
                finished = self._take(message, growing, on_tokens)
                if finished is not None:
                    yield finished

    def _check_room(self, requests: Sequence[Request]) -> None:
        room = self._max_context_tokens
        longest = max(requests, key=lambda r: len(r.prompt_ids), default=None)
        if room is not None and longest is not None and len(longest.prompt_ids) >= room:
            raise UserError(
                f"a prompt of {len(longest.prompt_ids)} tokens (group {longest.group_id}) does not fit: "
                f"engine.max_context_tokens is {room} for prompt and response together; raise it, or leave such "
                "prompts out"
            )

    def _take(
        self, message: FromWorker, growing: dict[int, Trajectory], on_tokens: Callable[[int], None] | None
    ) -> Trajectory | None:
        trajectory = growing.get(message.lease_id)
        if trajectory is None:
            return None  # a late message of a lease that has ended: idempotent
        if isinstance(message, Retry):
            raise EngineFault(
                f"{self._port.name} serves version {message.has_version} and refused trajectory {trajectory.name}"
            )
        grown = append_report(trajectory, message)
        if on_tokens is not None:
            on_tokens(grown.num_tokens - trajectory.num_tokens)
        if grown.finish_reason is None:
            if message.is_aborted:
                raise EngineFault(f"{self._port.name} aborted trajectory {trajectory.name}, which nobody asked for")
            growing[message.lease_id] = grown
            return None
        del growing[message.lease_id]
        return grown


def append_report(trajectory: Trajectory, report: Report) -> Trajectory:
    """Append a report's segments where its offset is the trajectory's length; return it unchanged where it is not."""
    if report.token_offset != trajectory.num_tokens:
        return trajectory
    return trajectory.extended(report.segments, report.finish_reason)
