"""Stores the tokens that the lease table only counts: the prompt and the tokens of each task, and the tokens of each
lease. A task is a trajectory that the controller has requested; a lease is one worker's attempt at a task.

    controller ──want, abort──▶ ┌─────────────┐ ──commands: SendToWorker, SendToController, …──▶ hub
    worker ──report, refuse───▶ │ LeaseBroker │ ◀─events / commands─▶ LeaseTable
                                └─────────────┘

The broker uses no socket, no thread and no callback. Each method returns commands, which the hub executes in order. A
report is checked before it is applied. A message that is late, repeated or out of order changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import msgspec

from baton.clock import Clock
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import ASIDE, TraceWriter
from baton.swarm import lease_events as ev
from baton.swarm.lease_credit import FREE_RETURNS
from baton.swarm.leases import LeaseTable
from baton.swarm.messages import Ack, Dropped
from baton.swarm.provisioning import ThroughputTracker
from baton.types import Abort, FromPort, Lease, Report, Retry, Trajectory, WorkLost, WorkRevoked, without_replay_data

MAX_REFUSALS = 64
"""A worker is disconnected if it has refused more than this number of leases since its last accepted report."""
MAX_PROVENANCE = 200_000
"""After the last lease of a trajectory has ended, the broker still stores which workers generated its tokens, so that
it can revoke the trajectory. This is the maximum number of such records. The oldest records are removed first."""
MAX_REPLACEMENTS = 10_000
"""Maximum number of stored replacements. A replacement is the finished trajectory that replaces a revoked trajectory
(`ReplaceTokens`). It is stored until the controller requests the revoked trajectory again."""

Key = tuple[int, int, int]
"""(noise seed, group id, sample index), which together identify a trajectory."""
Span = tuple[int, int, int]
"""(worker number, `first`, `end`): the worker generated the tokens at positions `first` … `end` − 1 after the
prompt."""
ToWorker = Lease | Abort | Dropped | Ack


class ReportCheck(Protocol):
    """Checks a report for errors that no correct worker makes, as `verification.checks.check_report` does."""

    def __call__(self, lease: Lease, report: Report, *, grown: Trajectory, newest_version: int) -> str | None:
        """Return a sentence that names the error of a report, or None if the report has no such error. `lease`: the
        lease as the hub granted it. `grown`: the lease's trajectory before the report."""


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a message to a worker."""

    worker: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class SendToController:
    """Send a message to the controller."""

    message: FromPort


@dataclass(frozen=True, slots=True)
class ReportViolation:
    """Tell the hub that a worker has sent a report that a correct worker cannot send."""

    worker: int
    sentence: str


@dataclass(frozen=True, slots=True)
class VerifyTrajectory:
    """Verify a finished trajectory, or a turn of a multi-turn episode. The broker holds back the trajectory's last
    report until `LeaseBroker.release` or `LeaseBroker.remake` is called."""

    lease: Lease
    trajectory: Trajectory
    spans: tuple[Span, ...]
    """The workers that generated the tokens of the last turn; the tokens of earlier turns are already verified."""


BrokerCommand = SendToWorker | SendToController | ev.DisconnectWorker | ReportViolation | VerifyTrajectory


@dataclass(slots=True)
class _Task:
    lease: Lease
    """The lease as the controller sent it."""
    trajectory: Trajectory
    """The trajectory with the tokens that have been committed so far."""
    num_sent: int
    """Number of tokens that the controller has. The controller gets the last report of a trajectory, with its tokens,
    only after the verification. If the run is killed earlier, the controller thus has an unfinished trajectory without
    its end token, from which the run resumes."""
    spans: list[Span] = field(default_factory=list)
    """The workers that generated the committed tokens, including the tokens of earlier leases."""
    leases: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _LeaseProgress:
    worker: int
    task: int
    lease: Lease
    """The lease as granted to the worker."""
    trajectory: Trajectory


class LeaseBroker:
    """Holds the tokens of all leases and translates messages between the lease table, workers and the controller."""

    def __init__(self, table: LeaseTable, check: ReportCheck, clock: Clock, trace: LeaseTrace | None = None) -> None:
        """`trace`: records the leases of each worker and the versions that it has fetched."""
        self.table, self.pace = table, ThroughputTracker()
        self.clock, self._check, self._trace = clock, check, trace or LeaseTrace(TraceWriter())
        self._tasks: dict[int, _Task] = {}
        self._progress: dict[int, _LeaseProgress] = {}
        self._provenance: OrderedDict[Key, tuple[Span, ...]] = OrderedDict()
        """Trajectory without a lease (finished, aborted, or waiting for its environment) → the authors of its
        tokens."""
        self._held: dict[Key, Report] = {}
        """Trajectory that is being verified → its last report."""
        self._replacements: OrderedDict[Key, tuple[Trajectory, int]] = OrderedDict()
        """Revoked trajectory → (its replacement, the worker that generated the replacement)."""
        self._authors: set[int] = set()
        """Workers that have reported tokens. A worker that has left is forgotten when its tokens were trained on."""
        self._refusals: Counter[int] = Counter()
        """Worker → number of leases that the worker has refused since its last accepted report."""
        self._names: dict[int, str] = {}
        """Worker → its name in the trace."""
        self._served: dict[int, tuple[int | None, float]] = {}
        """Worker → (version that it serves, time since which it serves this version), for the trace."""
        self._busy_since_s = 0.0
        """Time at which a worker last received a lease while no worker held a lease."""
        self.newest_version = -1
        """Number of the newest version that workers may serve; -1 before the first version."""

    # ---- from the controller -----------------------------------------------------------------------------------------

    def want(self, lease: Lease) -> list[BrokerCommand]:
        """Handle the controller's request to generate a trajectory."""
        task, known, key = lease.lease_id, lease.trajectory, key_of(lease)
        spans = self._provenance.pop(key, ())
        if not known.num_tokens:
            spans = ()  # the controller has discarded the earlier tokens
        found, worker = self._replacements.pop(key, (None, 0))
        if found is not None and _answers(found, lease):
            self._tasks[task] = _Task(lease, found, 0, [(worker, 0, found.num_tokens)])
            return [self._finish(task, found)]
        self._tasks[task] = _Task(lease, known, known.num_tokens, list(spans))
        begins_turn = known.turn_offset == known.num_tokens
        return self.handle(
            ev.TaskSubmitted(
                self.clock(),
                task,
                lease.version,
                lease.is_exact,
                known.num_tokens,
                lease.sampling.max_new_tokens,
                known.turn_offset,
                spans[-1][0] if spans and begins_turn else None,
            )
        )

    def abort(self, task: int) -> list[BrokerCommand]:
        """Handle the controller's request to abort a trajectory. Has no effect if the trajectory has ended."""
        return self.handle(ev.TaskAborted(self.clock(), task))

    # ---- from workers ------------------------------------------------------------------------------------------------

    def join(self, event: ev.WorkerJoined, name: str = "") -> list[BrokerCommand]:
        """Handle a worker that is ready. `name`: the worker's name in the trace."""
        self._names[event.worker], self._served[event.worker] = name, (None, event.at_s)
        return self.handle(event)

    def heartbeat(self, worker: int, version: int | None, decoded_tokens: int) -> list[BrokerCommand]:
        """Record a message of a worker. `version`: number of the version that the worker serves. None if this process
        has not published this version, if workers may no longer serve it, or if the worker is not connected."""
        before, since_s = self._served.get(worker, (version, 0.0))
        if version is not None and version != before:
            now_s = self.clock()
            begin_s = min(now_s, max(since_s, self.pace.announced.get(version, since_s)))
            self._trace.tracer.span("fetch", self._names[worker], ASIDE, begin_s, now_s, version=version)
            self._served[worker] = (version, now_s)
        return self.handle(ev.WorkerSeen(self.clock(), worker, version, decoded_tokens))

    def leave(self, worker: int, cause: str) -> list[BrokerCommand]:
        """Handle a worker that has left or is considered dead."""
        self._forget_worker(worker)
        return self.handle(ev.WorkerLeft(self.clock(), worker, cause))

    def is_author(self, worker: int) -> bool:
        """Return whether the worker has reported tokens, which may be part of a trajectory now or later."""
        return worker in self._authors

    def trained(self, keys: Iterable[Key]) -> None:
        """Forget the authors of trajectories that were trained on, because these cannot be revoked any more. Also
        forget the workers that have left and generated no tokens of other trajectories."""
        for key in keys:
            self._provenance.pop(key, None)
        if self._authors <= self.table.workers.keys():
            return
        known = chain(self._provenance.values(), (task.spans for task in self._tasks.values()))
        needed = {worker for spans in known for worker, _, _ in spans} | self.table.workers.keys()
        self._authors &= needed | {worker for _, worker in self._replacements.values()}

    def authors(self, key: Key) -> tuple[Span, ...]:
        """Return the workers that generated the tokens of a finished trajectory; empty if they are not known."""
        return self._provenance.get(key, ())

    def num_leases(self, worker: int) -> int:
        return len(self.table.workers[worker].leases) if worker in self.table.workers else 0

    def limit_of(self, worker: int) -> str:
        """Return a sentence if the worker returns too many leases and therefore gets fewer; otherwise an empty text."""
        known = self.table.workers.get(worker)
        if known is None or known.num_returned <= FREE_RETURNS:
            return ""
        return (
            f"its access token's workers ended {known.num_returned} more leases without being asked than they finished,"
            f" so this worker may hold {known.room} of {known.slots} leases: check or restart it, or revoke its token"
        )

    def held(self, worker: int, leases: Iterable[int]) -> list[BrokerCommand]:
        """Compare the leases that a worker lists after a reconnection with the lease table. If the worker does not list
        one of its leases, this lease ends and its task is granted again. A listed lease that is no longer valid is
        dropped. A listed lease that was recalled is recalled again."""
        claimed = set(leases)
        known = set(self.table.workers[worker].leases) if worker in self.table.workers else set()
        found: list[BrokerCommand] = []
        for lease in sorted(known - claimed):
            self._trace.ended(lease, "lost")
            found += self.handle(ev.LeaseReturned(self.clock(), lease))
        found += [SendToWorker(worker, Dropped(lease)) for lease in sorted(claimed - known)]
        # the worker may not have received the first recall
        recalled = [lease for lease in sorted(claimed & known) if self.table.leases[lease].recalled_s is not None]
        return [*found, *(SendToWorker(worker, Abort(lease)) for lease in recalled)]

    def report(self, worker: int, report: Report) -> list[BrokerCommand]:
        """Handle a report of new tokens of a lease, or of the end of a lease."""
        number = report.lease_id
        progress = self._valid_progress(worker, number)
        if progress is None:
            return [SendToWorker(worker, Dropped(number))]
        if report.token_offset != progress.trajectory.num_tokens:
            # the report is repeated, or an earlier report is lost; the worker continues after the acknowledged length
            return [self._acknowledge(progress)]
        complaint = self._check(progress.lease, report, grown=progress.trajectory, newest_version=self.newest_version)
        if complaint is not None:
            return [ReportViolation(worker, complaint)]
        self._trace.on_report(report)
        self._refusals.pop(worker, None)
        before = progress.trajectory.num_tokens
        progress.trajectory = progress.trajectory.extended(report.segments, report.finish_reason)
        if self.table.is_comparable(number) and not self._agrees(progress, before):
            # Workers of one kind generated different tokens from the same noise, so at least one worker is at
            # fault. Later checks show which worker.
            return self._revoke_task(progress.task, "contradicted")
        found: list[BrokerCommand] = []
        if grown := progress.trajectory.num_tokens - before:
            self._authors.add(worker)
            version = progress.trajectory.segments[-1].policy_version
            found += self.handle(ev.LeaseProgressed(self.clock(), number, grown, version))
        if report.finish_reason is not None:
            found += self.handle(ev.LeaseFinished(self.clock(), number))
        elif report.is_aborted:
            found += self.handle(ev.LeaseReturned(self.clock(), number))
        return [*found, self._acknowledge(progress)]

    def refuse(self, worker: int, retry: Retry) -> list[BrokerCommand]:
        """Handle a refused lease: the worker does not serve the version that the lease requires."""
        if self._valid_progress(worker, retry.lease_id) is None:
            return []
        self._trace.on_report(retry)
        self._refusals[worker] += 1
        if self._refusals[worker] > MAX_REFUSALS:
            cause = f"refused {MAX_REFUSALS} leases in a row (last: it has version {retry.has_version})"
            return [ev.DisconnectWorker(worker, cause), *self.leave(worker, cause)]
        known = self.table.workers[worker]
        return [
            *self.handle(ev.WorkerSeen(self.clock(), worker, retry.has_version, known.decoded_tokens)),
            *self.handle(ev.LeaseReturned(self.clock(), retry.lease_id)),
        ]

    def revoke(self, workers: frozenset[int], cause: str) -> list[BrokerCommand]:
        """Revoke all trajectories with tokens or leases of these workers; the trajectories are generated again."""
        found: list[BrokerCommand] = []
        for number, task in list(self._tasks.items()):
            holders = (self._progress[lease].worker for lease in task.leases)
            if workers.intersection(holders) or workers.intersection(worker for worker, _, _ in task.spans):
                found += self._revoke_task(number, cause)
        for key in [key for key, (_, worker) in self._replacements.items() if worker in workers]:
            del self._replacements[key]
        for key in [key for key, spans in self._provenance.items() if workers.intersection(s[0] for s in spans)]:
            del self._provenance[key]
            self._held.pop(key, None)
            found.append(_revoked(key, cause))
        return found

    def release(self, key: Key) -> list[BrokerCommand]:
        """Send to the controller the last report of a trajectory, which was held back for verification. Has no effect
        if the trajectory was revoked in the meantime."""
        last = self._held.pop(key, None)
        if last is None:
            return []
        self.pace.finish(self.clock(), self._busy_since_s)
        return [SendToController(last)]

    def remake(self, key: Key) -> list[BrokerCommand]:
        """Revoke a trajectory that is held back for verification, so that it is generated again."""
        if self._held.pop(key, None) is None:
            return []
        self._provenance.pop(key, None)
        return [_revoked(key, "not inspected")]

    # ---- commands of the lease table ---------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[BrokerCommand]:
        """Pass an event to the lease table and apply its commands. Return the resulting commands for the hub."""
        was_idle = not self.table.leases
        commands = self.table.handle(event)
        if was_idle and self.table.leases:
            self._busy_since_s = self.clock()
        return [found for command in commands if (found := self.apply(command)) is not None]

    def apply(self, command: ev.Command) -> BrokerCommand | None:
        """Apply a command from the lease table. Return the resulting command for the hub; None if the hub need not do
        anything."""
        match command:
            case ev.GrantLease():
                return self._grant(command)
            case ev.RecallLease(worker=worker, lease=lease):
                return SendToWorker(worker, Abort(lease))
            case ev.DropLease(worker=worker, lease=lease):
                self._trace.ended(lease, "dropped")
                return SendToWorker(worker, Dropped(lease))
            case ev.CommitTokens(task=task, lease=lease, length=length):
                return self._commit(task, self._progress[lease], length)
            case ev.FinishTask(task=task, lease=lease):
                return self._finish(task, self._progress[lease].trajectory)
            case ev.ReplaceTokens(task=task, lease=lease):
                return self._replace(task, self._progress[lease])
            case ev.ReturnTask(task=task):
                returned = self._forget(task)
                self._remember(returned)
                return SendToController(Report(task, returned.trajectory.num_tokens, (), is_aborted=True))
            case ev.DiscardTokens(cause=cause, num_tokens=num_tokens):
                return SendToController(WorkLost(cause, num_tokens))
            case ev.DisconnectWorker(worker=worker):
                self._forget_worker(worker)
                return command

    def _grant(self, grant: ev.GrantLease) -> BrokerCommand:
        task = self._tasks[grant.task]
        wanted, trajectory = task.lease, task.trajectory
        if grant.base < trajectory.num_tokens:  # a restart generates the tokens after `base` again
            prefix = trajectory.segments_between(0, grant.base)
            trajectory = Trajectory(trajectory.group_id, trajectory.sample_index, trajectory.prompt_ids, prefix)
        assert trajectory.num_tokens == grant.base, f"lease {grant.lease} begins after its trajectory's end"
        newest = trajectory.segments[-1].policy_version if trajectory.segments else wanted.version
        version = wanted.version if wanted.is_exact else max(wanted.version, newest)
        lease = msgspec.structs.replace(wanted, lease_id=grant.lease, trajectory=trajectory, version=version)
        self._progress[grant.lease] = _LeaseProgress(grant.worker, grant.task, lease, trajectory)
        task.leases.append(grant.lease)
        self._trace.on_lease(lease, self._names[grant.worker], self.table.workers[grant.worker].slots)
        return SendToWorker(grant.worker, without_replay_data(lease))

    def _commit(self, number: int, progress: _LeaseProgress, length: int) -> BrokerCommand | None:
        task, worker, grown = self._tasks[number], progress.worker, progress.trajectory
        offset = task.trajectory.num_tokens
        segments = grown.segments_between(offset, length)
        task.trajectory = task.trajectory.extended(segments)
        is_same = bool(task.spans) and task.spans[-1][::2] == (worker, offset)  # an observation separates spans
        first = task.spans.pop()[1] if is_same else offset
        task.spans.append((worker, first, length))
        if grown.finish_reason is not None:
            return None  # `_finish` puts these tokens into the trajectory's last report
        task.num_sent = length
        return SendToController(Report(number, offset, segments))

    def _finish(self, number: int, grown: Trajectory) -> BrokerCommand:
        task = self._forget(number)
        self._remember(task)
        last = grown.segments_between(task.num_sent, grown.num_tokens)
        self._held[key_of(task.lease)] = Report(number, task.num_sent, last, grown.finish_reason)
        start = task.lease.trajectory.turn_offset
        return VerifyTrajectory(task.lease, grown, tuple(span for span in task.spans if span[1] >= start))

    def _remember(self, task: _Task) -> None:
        self._provenance[key_of(task.lease)] = tuple(task.spans)
        while len(self._provenance) > MAX_PROVENANCE:
            self._provenance.popitem(last=False)

    def _replace(self, number: int, progress: _LeaseProgress) -> BrokerCommand:
        """Revoke the trajectory that the controller already has, and store the trajectory of the finished lease as its
        replacement. When the controller requests the trajectory again, `want` sends the replacement. No replacement is
        stored for a later turn of an episode, because the earlier turns are generated again too."""
        lease = self._forget(number).lease
        key = key_of(lease)
        if not lease.trajectory.turn_offset:
            self._replacements[key] = progress.trajectory, progress.worker
        while len(self._replacements) > MAX_REPLACEMENTS:
            self._replacements.popitem(last=False)
        return _revoked(key, "overtaken")

    def _forget(self, number: int) -> _Task:
        task = self._tasks.pop(number)
        for lease in task.leases:
            del self._progress[lease]
        return task

    def _forget_worker(self, worker: int) -> None:
        self._refusals.pop(worker, None)
        self._served.pop(worker, None)
        name = self._names.pop(worker, None)
        if name is not None:
            self._trace.left(name)

    def _acknowledge(self, progress: _LeaseProgress) -> BrokerCommand:
        number, length = progress.lease.lease_id, progress.trajectory.num_tokens
        return SendToWorker(progress.worker, Ack(number, length, has_ended=number not in self.table.leases))

    def _valid_progress(self, worker: int, lease: int) -> _LeaseProgress | None:
        """Return the progress of a lease; None if the worker does not hold this lease or the lease has ended."""
        progress = self._progress.get(lease)
        return progress if progress is not None and progress.worker == worker and lease in self.table.leases else None

    # ---- tokens that are generated twice -----------------------------------------------------------------------------

    def _agrees(self, progress: _LeaseProgress, start: int) -> bool:
        """Return whether a lease's new tokens equal the task's committed tokens, at all positions that both have."""
        known = self._tasks[progress.task].trajectory
        end = min(known.num_tokens, progress.trajectory.num_tokens)
        return end <= start or known.ids_between(start, end) == progress.trajectory.ids_between(start, end)

    def _revoke_task(self, number: int, cause: str) -> list[BrokerCommand]:
        found = self.handle(ev.TaskRevoked(self.clock(), number))
        return [*found, _revoked(key_of(self._forget(number).lease), cause)]


def _answers(found: Trajectory, lease: Lease) -> bool:
    """Return whether the finished trajectory `found` is a valid result of `lease`. The lease must start at the same
    prompt and require an exact version, and all tokens must be of this version."""
    is_new = not lease.trajectory.num_tokens and lease.trajectory.prompt_ids == found.prompt_ids
    return is_new and lease.is_exact and set(found.policy_versions) <= {lease.version}


def key_of(lease: Lease) -> Key:
    """Return the key of a lease's trajectory."""
    return lease.noise_seed, lease.trajectory.group_id, lease.trajectory.sample_index


def _revoked(key: Key, cause: str) -> BrokerCommand:
    return SendToController(WorkRevoked(*key, cause))
