"""Decides which trajectory runs, when it is aborted, and which groups form a batch. Events in, commands out.

The scheduler uses no clock, no I/O, no torch and no token ids, so that the live run and the simulator share it. Every
trajectory is in exactly one state, and each of its tokens is in exactly one account of the `Ledger`:

    Open ─▶ pending ──Assign──▶ leased ──Finished──▶ scoring ──Rewarded──▶ scored ─▶ (group complete) ─▶ buffer
              ▲  ▲                 │                                           │                          │
              │  └──── LeaseEnded ◀───┘ Abort                              filtered, dropped              Deliver
              └─────── Revoked ◀── any of these

One rule opens groups in all modes. With N the number of groups submitted up to version v, a group may be opened while

    sync, async   floor((N − 1) / batch_groups) ≤ v + max_staleness        (AReaL, arXiv 2505.24298, equation 3)
    partial       at most overprovision × batch_groups of them in no batch   (APRIL, arXiv 2509.18521)

Groups that are filtered or dropped are subtracted from N, and v is the oldest version that a worker may serve. `sync`
is the first rule with max_staleness 0. `sync` and `partial` generate only while a batch is requested. The scheduler
does not choose the worker of a trajectory: the worker transport does, by a pool of processes or by the leases of a
swarm.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from baton.errors import UserError
from baton.rollout.buffer import Buffer
from baton.rollout.events import (
    AbortTrajectory,
    Assign,
    BatchRequested,
    Capacity,
    Command,
    Deliver,
    Discard,
    DispatchPaused,
    DispatchResumed,
    Event,
    Finished,
    LeaseEnded,
    Load,
    Open,
    Restart,
    Revoked,
    Rewarded,
    TokensLost,
    TokensReceived,
    VersionServed,
    VersionTrained,
)
from baton.rollout.ledger import Ledger, StepCounts
from baton.rollout.overprovision import next_overprovision
from baton.rollout.settings import FILTERED_LIMIT, Rules
from baton.rollout.tracked import TrackedGroup, TrackedTrajectory, TrajectoryState


class RolloutScheduler:
    """The state machine of rollouts: `handle` takes an event and returns commands."""

    def __init__(
        self, rules: Rules, *, version: int = 0, next_group_id: int = 0, num_batches: float = math.inf
    ) -> None:
        """Start at a version, which equals the number of batches delivered.

        num_batches: of the whole run. No group is opened beyond those that they need.
        """
        self._most_groups = num_batches * rules.batch_groups
        self.rules = rules
        self.version = version
        """The trainer's version. It equals the number of delivered batches, or is one less during a train step."""
        self.overprovision = rules.overprovision
        self.ledger = Ledger()
        self.step = StepCounts()
        """Counts of the batch in progress."""
        self.next_group_id = next_group_id
        """Id of the next group to be opened."""
        self._delivered = version
        self._groups: dict[int, TrackedGroup] = {}
        self._buffer = Buffer(rules.batch_groups, rules.max_staleness, consume=rules.consume, stale=rules.stale)
        self._slots = self._places = 0
        self._pending: list[tuple[bool, int, int]] = []
        """Heap of (has no tokens, group id, sample index): aborted trajectories come first, lower group ids first."""
        self._dropped: deque[tuple[int, int]] = deque()
        """(group id, number of earlier attempts) of dropped groups whose prompts will be tried again."""
        self._leased: dict[tuple[int, int], None] = {}
        self._is_wanted = False
        self._is_paused = False
        self._is_changing = True
        """Whether a published version is not served yet. Nothing is assigned meanwhile, except in flight (`keep`, or
        `async` in a swarm)."""
        self._published = version
        """The latest published version."""
        self._served: int | None = None
        """The version that the workers last reported; None before the first."""
        self._is_loading = False
        self._last_s = 0.0

    def take_up(self, carried: Sequence[TrackedGroup]) -> list[Command]:
        """Restore the unconsumed groups of an earlier process. Call before the first event."""
        commands: list[Command] = []
        for group in carried:
            assert group.group_id < self.next_group_id, f"group {group.group_id} is to be opened yet"
            self._groups[group.group_id] = group
            self._buffer.opened(group.group_id)
            self.ledger.generated += group.num_tokens
            for member in group.members:
                if member.state is TrajectoryState.PENDING:
                    self._put_back(member)
            if not group.num_unjudged:
                commands += self._complete(group)
        return commands

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the resulting commands, in order.

        An event with an earlier time than the last one counts as simultaneous with it.
        """
        elapsed_s = event.at_s - self._last_s
        if elapsed_s > 0:
            self.step.pass_time(elapsed_s, len(self._leased), self._slots)
            self._last_s = event.at_s
        return [*self._apply_event(event), *self._deliver(), *self._assign()]

    @property
    def num_leased(self) -> int:
        """Number of leased trajectories."""
        return len(self._leased)

    @property
    def num_open(self) -> int:
        """Number of groups that are in no batch yet."""
        return len(self._buffer)

    @property
    def num_carried_tokens(self) -> int:
        """Number of tokens in groups that are in no batch yet."""
        return sum(t.num_tokens for g in self._groups.values() for t in g.members)

    def groups(self) -> Iterable[TrackedGroup]:
        """The groups that are in no batch yet."""
        return self._groups.values()

    def take_step_counts(self) -> StepCounts:
        """Return the counts since the last call, and reset them."""
        taken, self.step = self.step, StepCounts()
        return taken

    # ---- events ------------------------------------------------------------------------------------------------------

    def _apply_event(self, event: Event) -> Iterator[Command]:
        match event:
            case TokensReceived():
                self._grew(event)
            case Finished(group_id=group_id, sample_index=sample_index):
                self._release(self._trajectory(group_id, sample_index), TrajectoryState.JUDGING)
                self.step.finished += 1
                yield from self._load_when_free()
            case LeaseEnded(group_id=group_id, sample_index=sample_index):
                self._put_back(self._release(self._trajectory(group_id, sample_index), TrajectoryState.PENDING))
                yield from self._load_when_free()
            case Rewarded():
                yield from self._rewarded(event)
            case Capacity(slots=slots, queue=queue):
                self._slots, self._places = slots, slots + queue
            case TokensLost(cause=cause, num_tokens=num_tokens):
                self.ledger.generated += num_tokens
                self.ledger.lose(cause, num_tokens)
                self.step.lost_tokens += num_tokens
            case Revoked():
                yield from self._revoked(event)
            case VersionTrained():
                yield from self._version_made(event)
            case VersionServed(version=version):
                self._is_loading, self._served = False, version
                self._is_changing = version != self._published
                yield from self._load_when_free()
            case BatchRequested():
                assert not self._is_wanted, "a batch is wanted already"
                assert self._delivered == self.version, "a batch is wanted while the last one is being trained"
                self._is_wanted = True
            case DispatchPaused():
                self._is_paused = True
                yield from self._abort_all()
            case DispatchResumed():
                self._is_paused = False
            case _:
                assert_never(event)

    def _revoked(self, event: Revoked) -> Iterator[Command]:
        """Restart a trajectory in any state. The controller ignores the reward of a scoring that is in progress."""
        trajectory = self._trajectory(event.group_id, event.sample_index)
        if trajectory.state is TrajectoryState.JUDGED:
            group = self._groups[event.group_id]
            if not group.num_unjudged:
                self._buffer.reopened(event.group_id)
            group.num_unjudged += 1
        forgotten = trajectory.forget()
        self.ledger.lose(event.cause, forgotten)
        self.step.lost_tokens += forgotten
        yield Restart(event.group_id, event.sample_index)
        if trajectory.state is TrajectoryState.PENDING:
            self._pending = [item for item in self._pending if item[1:] != (event.group_id, event.sample_index)]
            heapq.heapify(self._pending)
        self._put_back(trajectory)
        yield from self._load_when_free()

    def _grew(self, event: TokensReceived) -> None:
        trajectory = self._trajectory(event.group_id, event.sample_index)
        assert trajectory.state is TrajectoryState.LEASED, (
            f"trajectory {trajectory.name} grew while {trajectory.state.name}"
        )
        trajectory.grow(event.version, event.num_tokens)
        self.ledger.generated += event.num_tokens
        self.step.generated_tokens += event.num_tokens

    def _rewarded(self, event: Rewarded) -> Iterator[Command]:
        trajectory = self._trajectory(event.group_id, event.sample_index)
        if trajectory.state is TrajectoryState.JUDGED:  # the whole group is scored again after a member was revoked
            trajectory.reward = event.reward
            return
        assert trajectory.state is TrajectoryState.JUDGING, (
            f"trajectory {trajectory.name} judged while {trajectory.state.name}"
        )
        trajectory.state, trajectory.reward = TrajectoryState.JUDGED, event.reward
        group = self._groups[event.group_id]
        group.num_unjudged -= 1
        if not group.num_unjudged:
            yield from self._complete(group)

    def _version_made(self, event: VersionTrained) -> Iterator[Command]:
        assert event.version == self._delivered, f"version {event.version} made of {self._delivered} batches"
        self.version = event.version
        if not event.is_published:
            return
        self._is_changing, self._published = True, event.version
        if self.rules.is_in_flight:
            self._is_loading = True
            yield Load(event.version)
        elif self.rules.on_new_version == "resume":
            yield from self._abort_all()
        yield from self._load_when_free()

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def _may_open(self) -> bool:
        rules = self.rules
        submitted = self._delivered * rules.batch_groups + len(self._buffer)
        if submitted >= self._most_groups:
            return False
        if rules.mode == "partial":
            return len(self._buffer) < rules.max_outstanding(self.overprovision)
        return submitted // rules.batch_groups <= self._oldest_served() + rules.max_staleness

    def _oldest_served(self) -> int:
        """The oldest version that a lease may require now."""
        return max(0, (self._served or 0) - self.rules.max_lag)

    def _is_generating(self) -> bool:
        if self._is_paused or self._served is None or (self._is_changing and not self.rules.is_in_flight):
            return False
        return self._is_wanted or self.rules.mode == "async"

    def _assign(self) -> Iterator[Command]:
        """Fill free places: aborted trajectories first, then fresh ones, then those of a new group."""
        if not self._is_generating():
            return
        most = min(self._places, self.rules.max_concurrency or math.inf)
        is_exact, version = not self.rules.is_in_flight, self._oldest_served()
        while len(self._leased) < most and (self._pending or self._may_open()):
            if not self._pending:
                yield from self._open()
            _, group_id, sample_index = heapq.heappop(self._pending)
            trajectory = self._trajectory(group_id, sample_index)
            trajectory.state = TrajectoryState.LEASED
            self._leased[group_id, sample_index] = None
            if trajectory.num_tokens:
                self.step.resumed += 1
                self.step.reprefilled_tokens += trajectory.num_tokens
            least = version if is_exact or not trajectory.versions else max(version, trajectory.versions[-1][0])
            yield Assign(group_id, sample_index, least, is_exact)

    def _open(self) -> Iterator[Command]:
        again, attempts = self._dropped.popleft() if self._dropped else (None, 0)
        group_id, self.next_group_id = self.next_group_id, self.next_group_id + 1
        group = TrackedGroup.new(group_id, self.rules.group_size, opened_at=self.version, attempts=attempts)
        self._groups[group_id] = group
        self._buffer.opened(group_id)
        for member in group.members:
            heapq.heappush(self._pending, (True, group_id, member.sample_index))
        yield Open(group_id, again)

    def _complete(self, group: TrackedGroup) -> Iterator[Command]:
        """Put a scored group into the buffer, or filter it.

        Dynamic sampling filters groups of equal rewards: their advantages are zero (DAPO, arXiv 2503.14476, section
        3.2). Raises UserError when one batch needs more than FILTERED_LIMIT × batch_groups filtered groups.
        """
        if self.rules.dynamic_sampling and group.has_equal_rewards:
            self._buffer.closed(group.group_id)
            yield from self._discard(group, "filtered")
            self.step.filtered_groups += 1
            limit = FILTERED_LIMIT * self.rules.batch_groups
            if self.step.filtered_groups >= limit:
                raise UserError(
                    f"rollout.dynamic_sampling rejected {limit} groups for one batch of {self.rules.batch_groups}: all "
                    "members had equal rewards; take tasks that are neither too easy nor too hard, a larger "
                    "group_size, or dynamic_sampling = false"
                )
        else:
            self._buffer.completed(group.group_id, group.oldest_version(default=self.version))

    def _deliver(self) -> Iterator[Command]:
        """Deliver the requested batch once enough groups are complete."""
        if not self._is_wanted or self._buffer.num_complete < self.rules.batch_groups:
            return
        take = self._buffer.take(self.version)
        for group_id in take.expired:
            yield from self._drop(self._groups[group_id])
        if not take.group_ids:
            return
        floor = self.version - self.rules.max_staleness
        for group_id in take.group_ids:
            group = self._groups.pop(group_id)
            tokens, masked = group.num_tokens, group.num_tokens_before(floor)
            self.ledger.trained += tokens - masked
            self.ledger.masked += masked
            self.step.consume(group, masked, self.version)
        self._is_wanted = False
        self._delivered += 1
        self.step.carried_groups = len(self._buffer)
        if self.rules.mode == "partial":
            yield from self._abort_all()
        if self.rules.is_adaptive:
            most = self.rules.most_overprovision
            self.overprovision = next_overprovision(self.overprovision, self.step.measured(), most)
        yield Deliver(self._delivered, take.group_ids)

    def _drop(self, group: TrackedGroup) -> Iterator[Command]:
        """Queue a group's prompt for another attempt under a new id, or discard it after max_requeues attempts."""
        if group.attempts < self.rules.max_requeues:
            self._dropped.append((group.group_id, group.attempts + 1))
            self.step.requeued_groups += 1
        else:
            self.step.dropped_groups += 1
        yield from self._discard(group, "dropped")

    def _discard(self, group: TrackedGroup, cause: str) -> Iterator[Command]:
        del self._groups[group.group_id]
        if cause == "filtered":
            self.ledger.filtered += group.num_tokens
        else:
            self.ledger.dropped += group.num_tokens
        yield Discard(group.group_id, cause)

    def _abort_all(self) -> Iterator[Command]:
        for key in sorted(self._leased):
            yield AbortTrajectory(*key)

    def _load_when_free(self) -> Iterator[Command]:
        """Load the published version once no trajectory is leased under the old one."""
        if self._is_changing and not self._is_loading and not len(self._leased):
            self._is_loading = True
            yield Load(self._published)

    # ---- states ------------------------------------------------------------------------------------------------------

    def _trajectory(self, group_id: int, sample_index: int) -> TrackedTrajectory:
        return self._groups[group_id].members[sample_index]

    def _release(self, trajectory: TrackedTrajectory, state: TrajectoryState) -> TrackedTrajectory:
        assert trajectory.state is TrajectoryState.LEASED, (
            f"trajectory {trajectory.name} is {trajectory.state.name}, not leased"
        )
        del self._leased[trajectory.group_id, trajectory.sample_index]
        trajectory.state = state
        return trajectory

    def _put_back(self, trajectory: TrackedTrajectory) -> None:
        self._leased.pop((trajectory.group_id, trajectory.sample_index), None)
        trajectory.state = TrajectoryState.PENDING
        heapq.heappush(self._pending, (not trajectory.num_tokens, trajectory.group_id, trajectory.sample_index))
