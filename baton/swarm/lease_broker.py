"""The payloads behind the lease table: prompts and tokens of every task, and what each lease has grown.

    runner ──want, abort──▶ ┌──────┐ ──Lease, Abort, Dropped, Ack──▶ worker
           ◀──Report, lost──│ LeaseBroker │ ◀──Report, Retry─────────────── (whoever carries the messages)
                            └──────┘ ◀─events / commands─▶ LeaseTable

No socket and no thread: the hub drives it from its event loop, tests from a list. What a worker says is checked before
it counts; a message that is late, repeated or out of order changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseTable
from baton.swarm.messages import Ack, Dropped
from baton.types import Abort, FromPort, Lease, Report, Retry, Trajectory, WorkLost, WorkRevoked

MAX_REFUSALS = 64
"""In a row, after which a worker that refuses leases is hung up on."""
MAX_PROVENANCE = 200_000
"""Finished trajectories whose authors are remembered."""
MAX_REPLACEMENTS = 10_000
"""Finished trajectories kept until the runner wants them again."""

Key = tuple[int, int, int]
"""(noise seed, group id, sample index) of a trajectory."""
Span = tuple[int, int, int]
"""(worker, first token, end) of what one worker wrote of a trajectory."""
ToWorker = Lease | Abort | Dropped | Ack
Check = Callable[[Lease, Trajectory, Report], str | None]
"""(lease as it was granted, what it had grown, report) → what is wrong with the report, in a sentence."""


@dataclass(frozen=True, slots=True)
class BrokerCallbacks:
    """Whom a desk speaks to."""

    to_worker: Callable[[int, ToWorker], None]
    to_runner: Callable[[FromPort], None]
    hang_up: Callable[[int, str], None]
    """A worker is taken for dead."""
    convict: Callable[[int, str], None]
    """A worker has said what no honest one says."""
    finished: Callable[[Lease, Trajectory, tuple[Span, ...]], bool] = lambda lease, trajectory, spans: False
    """A trajectory is complete, by these; whether it is held back until `release`."""


@dataclass(slots=True)
class _Task:
    lease: Lease
    """As the runner gave it."""
    trajectory: Trajectory
    """With what is committed."""
    spans: list[Span] = field(default_factory=list)
    """Of what is committed."""
    branches: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _LeaseProgress:
    worker: int
    task: int
    lease: Lease
    """As the worker got it."""
    trajectory: Trajectory


class LeaseBroker:
    """The hub's side of all leases."""

    def __init__(self, table: LeaseTable, outside: BrokerCallbacks, check: Check, clock: Callable[[], float]) -> None:
        self.table = table
        self._outside, self._check, self._clock = outside, check, clock
        self._tasks: dict[int, _Task] = {}
        self._branches: dict[int, _LeaseProgress] = {}
        self._provenance: OrderedDict[Key, frozenset[int]] = OrderedDict()
        self._held: dict[Key, Report] = {}
        """The last words on trajectories that are being checked."""
        self._replacements: OrderedDict[Key, tuple[Trajectory, int]] = OrderedDict()
        """(trajectory, worker) that take the place of what the runner has."""
        self._events: deque[ev.Event] = deque()
        """The one that is being dealt with, and those that have come of it."""
        self._refusals: Counter[int] = Counter()
        """Of leases, by worker, since its last report."""
        self.busy_since_s = 0.0
        """Since when somebody has been at work without a break."""
        self.refused = 0
        """Messages that were late, repeated, or of somebody else's lease."""

    # ---- from the runner ---------------------------------------------------------------------------------------------

    def want(self, lease: Lease) -> None:
        """Have a trajectory grown."""
        task = lease.lease_id
        found, worker = self._replacements.pop(_key(lease), (None, 0))
        if found is not None and _answers(found, lease):
            self._tasks[task] = _Task(lease, found, [(worker, 0, found.num_tokens)])
            self._outside.to_runner(Report(task, 0, found.segments))
            self._finish(task, found)
            return
        self._tasks[task] = _Task(lease, lease.trajectory)
        self._tell(
            ev.TaskSubmitted(
                self._clock(),
                task,
                lease.version,
                lease.is_exact,
                lease.trajectory.num_tokens,
                lease.sampling.max_new_tokens,
            )
        )

    def abort(self, task: int) -> None:
        """Have a trajectory put down; harmless for one that has ended."""
        self._tell(ev.TaskAborted(self._clock(), task))

    # ---- from workers ------------------------------------------------------------------------------------------------

    def join(
        self, worker: int, slots: int, weight: float = 1.0, kind: str | None = "", owner: str | None = None
    ) -> None:
        """A worker is ready. See `WorkerJoined`."""
        self._tell(ev.WorkerJoined(self._clock(), worker, slots, weight, kind, owner))

    def weigh(self, worker: int, weight: float) -> None:
        """Another plan expects something else of a worker."""
        self._tell(ev.WorkerWeightChanged(self._clock(), worker, weight))

    def hear(self, worker: int, version: int | None, decoded_tokens: int) -> None:
        """A worker has given a sign of life. version: the number it serves, None for none of this lineage."""
        self._tell(ev.WorkerSeen(self._clock(), worker, version, decoded_tokens))

    def leave(self, worker: int, cause: str) -> None:
        """A worker is gone."""
        self._refusals.pop(worker, None)
        self._tell(ev.WorkerLeft(self._clock(), worker, cause))

    def num_leases(self, worker: int) -> int:
        """How many leases a worker holds."""
        return len(self.table.workers[worker].leases) if worker in self.table.workers else 0

    def held(self, worker: int, leases: Iterable[int]) -> None:
        """After a cut: what a worker holds. What it should hold and does not is leased anew, what it should not is
        dropped; what is recalled is recalled again."""
        claimed = set(leases)
        known = set(self.table.workers[worker].leases) if worker in self.table.workers else set()
        for lease in sorted(known - claimed):
            self._tell(ev.LeaseReturned(self._clock(), lease))
        for lease in sorted(claimed - known):
            self._outside.to_worker(worker, Dropped(lease))
        for lease in sorted(claimed & known):
            if self.table.is_recalled(lease):  # the worker may not have heard of it
                self._outside.to_worker(worker, Abort(lease))

    def report(self, worker: int, report: Report) -> None:
        """A worker has grown a lease."""
        number = report.lease_id
        branch = self._branches.get(number)
        if branch is None or branch.worker != worker or not self.table.knows(number):
            self.refused += 1
            self._outside.to_worker(worker, Dropped(number))
            return
        if report.token_offset != branch.trajectory.num_tokens:
            self.refused += 1  # said twice, or before what lies between: it will be said again
            self._acknowledge(worker, number, branch)
            return
        complaint = self._check(branch.lease, branch.trajectory, report)
        if complaint is not None:
            self._outside.convict(worker, complaint)
            return
        self._refusals.pop(worker, None)
        before, branch.trajectory = branch.trajectory, branch.trajectory.extended(report.segments, report.finish_reason)
        if self.table.is_comparable(number) and not self._agrees(branch, before.num_tokens):
            self._contradicted(branch)
            return
        grown = branch.trajectory.num_tokens - before.num_tokens
        if grown:
            version = branch.trajectory.segments[-1].policy_version
            self._tell(ev.LeaseProgressed(self._clock(), number, grown, version))
        if report.finish_reason is not None:
            self._tell(ev.LeaseFinished(self._clock(), number))
        elif report.is_aborted:
            self._tell(ev.LeaseReturned(self._clock(), number))
        self._acknowledge(worker, number, branch)

    def refuse(self, worker: int, retry: Retry) -> None:
        """A worker does not serve the version that a lease asks for."""
        branch = self._branches.get(retry.lease_id)
        if branch is None or branch.worker != worker or not self.table.knows(retry.lease_id):
            self.refused += 1
            return
        self._refusals[worker] += 1
        if self._refusals[worker] > MAX_REFUSALS:
            cause = f"refused {MAX_REFUSALS} leases in a row (last: it has version {retry.has_version})"
            self._outside.hang_up(worker, cause)
            self.leave(worker, cause)
            return
        known = self.table.workers[worker]
        self._tell(ev.WorkerSeen(self._clock(), worker, retry.has_version, known.decoded_tokens))
        self._tell(ev.LeaseReturned(self._clock(), retry.lease_id))

    def tick(self, delay_s: float = 0.0) -> None:
        """Time has passed; the hub itself was late by so much."""
        self._tell(ev.LeaseTick(self._clock(), delay_s))

    def revoke(self, workers: frozenset[int], cause: str) -> list[Key]:
        """Have everything made again that these workers wrote in; return the finished trajectories among it."""
        for number, task in list(self._tasks.items()):
            branches = (self._branches[lease].worker for lease in task.branches)
            if workers.intersection(branches) or workers.intersection(worker for worker, _, _ in task.spans):
                self._tell(ev.TaskRevoked(self._clock(), number))
                self._forget(number)
                self._say_revoked(_key(task.lease), cause)
        found = [key for key, authors in self._provenance.items() if authors & workers]
        for key in [key for key, (_, worker) in self._replacements.items() if worker in workers]:
            del self._replacements[key]
        for key in found:
            del self._provenance[key]
            self._held.pop(key, None)
            self._say_revoked(key, cause)
        return found

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        """Tell the table, and obey.

        What comes of obeying, such as a worker that takes nothing any more, is told afterwards: the table's other
        commands were given before it could know.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events:
                was_idle = not self.table.num_leases
                commands = self.table.handle(self._events[0])
                if was_idle and self.table.num_leases:
                    self.busy_since_s = self._clock()
                for command in commands:
                    self._obey(command)
                self._events.popleft()
        finally:
            self._events.clear()  # after a fault too: the next event is told at once

    def _obey(self, command: ev.Command) -> None:
        match command:
            case ev.GrantLease():
                self._grant(command)
            case ev.RecallLease(worker=worker, lease=lease):
                self._outside.to_worker(worker, Abort(lease))
            case ev.DropLease(worker=worker, lease=lease):
                self._outside.to_worker(worker, Dropped(lease))
            case ev.CommitTokens(task=task, lease=lease, length=length):
                self._commit(task, self._branches[lease], length)
            case ev.FinishTask(task=task, lease=lease):
                self._finish(task, self._branches[lease].trajectory)
            case ev.ReplaceTokens(task=task, lease=lease):
                self._replace(task, self._branches[lease])
            case ev.ReturnTask(task=task):
                length = self._tasks[task].trajectory.num_tokens
                self._forget(task)
                self._outside.to_runner(Report(task, length, (), is_aborted=True))
            case ev.DiscardTokens(cause=cause, num_tokens=num_tokens):
                self._outside.to_runner(WorkLost(cause, num_tokens))
            case ev.DisconnectWorker(worker=worker, cause=cause):
                self._outside.hang_up(worker, cause)

    def _grant(self, grant: ev.GrantLease) -> None:
        task = self._tasks[grant.task]
        wanted = task.lease
        known = task.trajectory
        trajectory = known if grant.base else Trajectory(known.group_id, known.sample_index, known.prompt_ids)
        assert trajectory.num_tokens == grant.base, f"lease {grant.lease} begins at {grant.base}, not where it is"
        newest = trajectory.segments[-1].policy_version if trajectory.segments else wanted.version
        version = wanted.version if wanted.is_exact else max(wanted.version, newest)
        lease = msgspec.structs.replace(wanted, lease_id=grant.lease, trajectory=trajectory, version=version)
        self._branches[grant.lease] = _LeaseProgress(grant.worker, grant.task, lease, trajectory)
        task.branches.append(grant.lease)
        self._outside.to_worker(grant.worker, lease)

    def _commit(self, number: int, branch: _LeaseProgress, length: int) -> None:
        task, worker, grown = self._tasks[number], branch.worker, branch.trajectory
        offset = task.trajectory.num_tokens
        segments = grown.segments_between(offset, length)
        task.trajectory = task.trajectory.extended(segments)
        is_same = bool(task.spans) and task.spans[-1][0] == worker
        first = task.spans.pop()[1] if is_same else offset
        task.spans.append((worker, first, length))
        self._outside.to_runner(Report(number, offset, segments))

    def _finish(self, number: int, grown: Trajectory) -> None:
        task = self._tasks[number]
        key = _key(task.lease)
        self._provenance[key] = frozenset(worker for worker, _, _ in task.spans)
        while len(self._provenance) > MAX_PROVENANCE:
            self._provenance.popitem(last=False)
        self._forget(number)
        last = Report(number, grown.num_tokens, (), grown.finish_reason)
        if self._outside.finished(task.lease, grown, tuple(task.spans)):
            self._held[key] = last
        else:
            self._outside.to_runner(last)

    def _replace(self, number: int, branch: _LeaseProgress) -> None:
        """Take back what the runner has. It wants the trajectory again, and gets it at once: see `want`."""
        key = _key(self._tasks[number].lease)
        self._forget(number)
        self._replacements[key] = branch.trajectory, branch.worker
        while len(self._replacements) > MAX_REPLACEMENTS:
            self._replacements.popitem(last=False)
        self._say_revoked(key, "overtaken")

    def release(self, key: Key) -> None:
        """Let a trajectory be finished that was held back; nothing for one that was revoked meanwhile."""
        last = self._held.pop(key, None)
        if last is not None:
            self._outside.to_runner(last)

    def remake(self, key: Key) -> None:
        """Have a trajectory made again that was held back."""
        if self._held.pop(key, None) is not None:
            self._provenance.pop(key, None)
            self._say_revoked(key, "not inspected")

    def _forget(self, number: int) -> None:
        for lease in self._tasks.pop(number).branches:
            del self._branches[lease]

    def _acknowledge(self, worker: int, number: int, branch: _LeaseProgress) -> None:
        has_ended = not self.table.knows(number)
        self._outside.to_worker(worker, Ack(number, branch.trajectory.num_tokens, has_ended))

    # ---- what is made twice ------------------------------------------------------------------------------------------

    def _agrees(self, branch: _LeaseProgress, start: int) -> bool:
        """Whether tokens that were known already have been made again as they were."""
        known = self._tasks[branch.task].trajectory
        end = min(known.num_tokens, branch.trajectory.num_tokens)
        return end <= start or known.token_ids[start:end] == branch.trajectory.token_ids[start:end]

    def _contradicted(self, branch: _LeaseProgress) -> None:
        """Workers of one class made different tokens from the same noise: they are made anew.

        Who was wrong is for the checks to find. Other classes, and engines with noise of their own, are not compared.
        """
        lease = self._tasks[branch.task].lease
        self._tell(ev.TaskRevoked(self._clock(), branch.task))
        self._forget(branch.task)
        self._say_revoked(_key(lease), "contradicted")

    def _say_revoked(self, key: Key, cause: str) -> None:
        self._outside.to_runner(WorkRevoked(*key, cause))


def _answers(found: Trajectory, lease: Lease) -> bool:
    """Whether a finished trajectory is what a lease asks for, from its prompt on."""
    is_new = not lease.trajectory.num_tokens and lease.trajectory.prompt_ids == found.prompt_ids
    return is_new and lease.is_exact and set(found.policy_versions) <= {lease.version}


def _key(lease: Lease) -> Key:
    return lease.noise_seed, lease.trajectory.group_id, lease.trajectory.sample_index
