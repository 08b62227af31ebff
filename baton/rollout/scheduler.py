"""The state machine of rollouts: it receives events and returns commands.

The scheduler decides which trajectory is leased, which lease is aborted, and which groups form a batch. The scheduler
uses no clock, no I/O, no torch and no token ids, so live runs and simulations share its code. Every trajectory is in
exactly one state, and the `Ledger` counts each of its tokens in exactly one account:

    Open ─▶ pending ──Assign──▶ leased ──Finished──▶ scoring ──Rewarded──▶ scored ─▶ (group complete) ─▶ buffer
              ▲  ▲                │  │                  ▲                  │                         │
              │  ├── LeaseEnded ──┘  └─TurnEnded─▶ acting ─Finished─┘      filtered, dropped         Deliver
              │  └── Observed, EnvironmentFailed ─────┘
              └───── Revoked ◀── any of these

The mode determines when a new group may be opened:

    sync, async   floor((N − 1) / batch_groups) ≤ v + max_staleness               (AReaL, arXiv 2505.24298, equation 3)
    partial       at most overprovision × batch_groups groups are in no batch     (APRIL, arXiv 2509.18521);
                  without overprovision: see `_may_open`

N counts the new group and all groups opened before it, except filtered and dropped groups. v is the oldest version that
a worker may serve. In `sync`, max_staleness is 0. In the modes `sync` and `partial`, trajectories are generated only
while the trainer waits for a batch. When a batch is delivered in `partial`, all leases are aborted, unless the workers
pause (`Rules.pauses`). The worker transport chooses the worker of each trajectory.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from baton.errors import UserError
from baton.rollout import events as ev
from baton.rollout.buffer import Buffer
from baton.rollout.overprovision import OverprovisionSearch, SlotUse
from baton.rollout.scheduler_state import Ledger, StepCounts, TrackedGroup, TrackedTrajectory, TrajectoryState
from baton.rollout.settings import FILTERED_LIMIT, Rules


class RolloutScheduler:
    """The scheduler of training rollouts. `handle` applies one event and returns the resulting commands."""

    def __init__(
        self, rules: Rules, *, version: int = 0, next_group_id: int = 0, num_batches: float = math.inf
    ) -> None:
        """Start at `version`, which equals the number of batches delivered before. `num_batches`: number of batches in
        the whole run; it limits how many groups are opened."""
        self._most_groups = num_batches * rules.batch_groups
        self.rules = rules
        self.version = version
        """Policy version of the trainer: the number of completed train steps. It equals the number of delivered
        batches, except during a train step, whose batch is already delivered."""
        self.overprovision = rules.overprovision
        self._search = OverprovisionSearch(rules.overprovision, rules.most_overprovision)
        self._busy_slot_s = self._slot_s = self._running_s = 0.0
        self.ledger = Ledger()
        self.step = StepCounts()
        """Counters since the last call to `take_step_counts`."""
        self.next_group_id = next_group_id
        self._delivered = version
        self._groups: dict[int, TrackedGroup] = {}
        self._buffer = Buffer(rules.batch_groups, rules.max_staleness, consume=rules.consume, stale=rules.stale)
        self._slots = self._max_leases = 0
        self._pending: list[tuple[bool, int, int]] = []
        """Heap of the pending trajectories: (whether the trajectory has no tokens, group id, sample index).
        Trajectories with tokens therefore come first; among equals, lower group ids come first. Outdated entries of
        revoked trajectories may remain; `_assign` skips such entries."""
        self._dropped: deque[tuple[int, int]] = deque()
        """Dropped groups whose prompts will be tried again. Each entry has the id of the dropped group and the number
        of attempts at its prompt so far."""
        self._leased: dict[tuple[int, int], None] = {}
        self.generating: dict[int, int] = {}
        """Id of each group with unfinished trajectories → number of these trajectories."""
        self.num_acting = 0
        """Number of trajectories whose environment has not answered yet."""
        self._is_requested = False
        self._is_paused = False
        self._is_changing = False
        """True from the publication of a version until the workers serve it. With `Rules.is_in_flight`, workers load
        the version while leases run. Otherwise no lease is assigned meanwhile, and the version is loaded when the last
        lease has ended."""
        self._published = version
        self._served: int | None = None
        """Version of the last `VersionServed` event; None before the first one."""
        self._is_loading = False
        self._last_s = 0.0

    def restore(self, carried: Sequence[TrackedGroup]) -> list[ev.Command]:
        """Restore groups that an earlier process opened and did not deliver. Call before the first event."""
        commands: list[ev.Command] = []
        for group in carried:
            assert group.group_id < self.next_group_id, (
                f"cannot restore group {group.group_id}: ids from {self.next_group_id} on are not assigned yet"
            )
            self._groups[group.group_id] = group
            self._buffer.opened(group.group_id)
            self.ledger.generated += group.num_tokens
            for member in group.members:
                self.num_acting += member.state is TrajectoryState.ACTING
                if member.state is TrajectoryState.PENDING:
                    self._put_back(member)
            if unfinished := sum(not member.is_finished for member in group.members):
                self.generating[group.group_id] = unfinished
            if not group.num_unscored:
                commands += self._complete(group)
        return commands

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Apply one event and return the resulting commands in the order in which they must be executed. An event with
        an earlier time than the previous event is handled as if both had the time of the previous event."""
        elapsed_s = event.at_s - self._last_s
        if elapsed_s > 0:
            if self._is_running:
                self._running_s += elapsed_s
                busy_s, slot_s = elapsed_s * min(len(self._leased), self._slots), elapsed_s * self._slots
                self.step.busy_slot_s += busy_s
                self.step.slot_s += slot_s
                self._busy_slot_s += busy_s
                self._slot_s += slot_s
            self._last_s = event.at_s
        commands = [*self._apply_event(event)]
        if self._is_changing and not self._is_loading and not self._leased:
            self._is_loading = True
            commands.append(ev.Load(self._published))
        return [*commands, *self._deliver(), *self._assign()]

    @property
    def _is_running(self) -> bool:
        return bool(self._leased) and (self._is_requested or not self.rules.pauses)

    def running_s(self, at_s: float) -> float:
        """Return the total seconds, from the scheduler's creation to `at_s`, in which at least one trajectory was
        leased and not paused."""
        return self._running_s + max(0.0, at_s - self._last_s) * self._is_running

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def num_open(self) -> int:
        """Number of groups that are neither delivered nor discarded."""
        return len(self._buffer)

    @property
    def num_carried_tokens(self) -> int:
        return sum(group.num_tokens for group in self._groups.values())

    def groups(self) -> Iterable[TrackedGroup]:
        return self._groups.values()

    def take_step_counts(self) -> StepCounts:
        taken, self.step = self.step, StepCounts()
        return taken

    # ---- events ------------------------------------------------------------------------------------------------------

    def _apply_event(self, event: ev.Event) -> Iterator[ev.Command]:
        match event:
            case ev.TokensReceived():
                self._on_tokens(event)
            case ev.Finished():
                self._release(event, TrajectoryState.SCORING)
                self.step.finished += 1
                self.generating[event.group_id] -= 1
                if not self.generating[event.group_id]:
                    del self.generating[event.group_id]
            case ev.TurnEnded():
                self._release(event, TrajectoryState.ACTING)
                self.num_acting += 1
                self.step.turns += 1
            case ev.Observed():
                trajectory = self._release(event, TrajectoryState.PENDING)
                trajectory.begins_turn = True
                self._put_back(trajectory)
            case ev.EnvironmentFailed(cause=cause):
                yield from self._begin_again(self._release(event, TrajectoryState.PENDING), cause)
            case ev.LeaseEnded():
                self._put_back(self._release(event, TrajectoryState.PENDING))
            case ev.Rewarded():
                yield from self._on_reward(event)
            case ev.Capacity(slots=slots, queue=queue):
                self._slots, self._max_leases = slots, slots + queue
            case ev.TokensLost(cause=cause, num_tokens=num_tokens):
                self.ledger.generated += num_tokens
                self._lose(cause, num_tokens)
            case ev.Revoked():
                yield from self._on_revoked(event)
            case ev.VersionTrained():
                yield from self._on_version_trained(event)
            case ev.VersionServed(version=version):
                self._is_loading, self._served = False, version
                self._is_changing = version != self._published
            case ev.BatchRequested():
                assert not self._is_requested, "a batch is requested twice"
                assert self._delivered == self.version, "a batch is requested before the last batch has been trained"
                self._is_requested = True
                if self.rules.is_adaptive:
                    wasted = self.ledger.masked + self.ledger.dropped + self.ledger.lost.total()
                    use = SlotUse(self.ledger.generated - wasted, self._busy_slot_s, self._slot_s)
                    self.overprovision = self._search.next(use)
            case ev.DispatchPaused():
                self._is_paused = True
                yield from self._abort_all()
            case ev.DispatchResumed():
                self._is_paused = False
            case _:
                assert_never(event)

    def _on_revoked(self, event: ev.Revoked) -> Iterator[ev.Command]:
        """Restart a trajectory, in any state. If the trajectory is being scored, the controller ignores the reward."""
        trajectory = self._trajectory(event)
        if trajectory.state is TrajectoryState.SCORED:
            group = self._groups[event.group_id]
            if not group.num_unscored:
                self._buffer.reopened(event.group_id)
            group.num_unscored += 1
        yield from self._begin_again(trajectory, event.cause)

    def _begin_again(self, trajectory: TrackedTrajectory, cause: str) -> Iterator[ev.Command]:
        """Discard a trajectory's tokens, and generate it again. `cause`: key of the tokens in `Ledger.lost`."""
        if trajectory.is_finished:
            self.generating[trajectory.group_id] = self.generating.get(trajectory.group_id, 0) + 1
        self._lose(cause, trajectory.forget())
        yield ev.Restart(trajectory.group_id, trajectory.sample_index)
        self._put_back(trajectory)

    def _lose(self, cause: str, num_tokens: int) -> None:
        self.ledger.lost[cause] += num_tokens
        self.step.lost_tokens += num_tokens

    def _on_tokens(self, event: ev.TokensReceived) -> None:
        trajectory = self._trajectory(event)
        assert trajectory.state is TrajectoryState.LEASED, (
            f"trajectory {trajectory.name} received tokens in state {trajectory.state.name}"
        )
        trajectory.grow(event.version, event.num_tokens)
        self.ledger.generated += event.num_tokens
        self.step.generated_tokens += event.num_tokens

    def _on_reward(self, event: ev.Rewarded) -> Iterator[ev.Command]:
        trajectory = self._trajectory(event)
        # a scorer that compares the members of a group scores all members again after one of them was revoked
        if trajectory.state is TrajectoryState.SCORED:
            trajectory.reward = event.reward
            return
        assert trajectory.state is TrajectoryState.SCORING, (
            f"trajectory {trajectory.name} received a reward in state {trajectory.state.name}"
        )
        trajectory.state, trajectory.reward = TrajectoryState.SCORED, event.reward
        group = self._groups[event.group_id]
        group.num_unscored -= 1
        if not group.num_unscored:
            yield from self._complete(group)

    def _on_version_trained(self, event: ev.VersionTrained) -> Iterator[ev.Command]:
        assert event.version == self._delivered, f"version {event.version} was trained on {self._delivered} batches"
        self.version = event.version
        if not event.is_published:
            return
        self._is_changing, self._published = True, event.version
        if self.rules.is_in_flight:
            self._is_loading = True
            yield ev.Load(event.version)
        elif self.rules.on_new_version == "resume":
            yield from self._abort_all()

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def _may_open(self) -> bool:
        rules = self.rules
        submitted = self._delivered * rules.batch_groups + len(self._buffer)
        if submitted >= self._most_groups:
            return False
        if rules.mode == "partial":
            if math.isinf(self.overprovision):
                # acting episodes count too: otherwise groups would be opened without limit while environments run
                if len(self._leased) + self.num_acting >= (rules.max_concurrency or math.inf):
                    return False
                # if scoring is slower than generation, tokens of further groups would be too old when they are scored
                is_fresh = len(self._groups) < (rules.max_staleness + 1) * rules.batch_groups
                return is_fresh or len(self._groups) - len(self.generating) < rules.batch_groups
            return len(self._buffer) < rules.max_outstanding(self.overprovision)
        return submitted // rules.batch_groups <= self._oldest_served() + rules.max_staleness

    def _oldest_served(self) -> int:
        """Return the oldest version that a lease may require now."""
        return max(0, (self._served or 0) - self.rules.max_lag)

    def _is_generating(self) -> bool:
        if self._is_paused or self._served is None or (self._is_changing and not self.rules.is_in_flight):
            return False
        return self._is_requested or self.rules.mode == "async"

    def _assign(self) -> Iterator[ev.Command]:
        """Lease pending trajectories while the workers have free slots or room in their queues. Open a group when no
        trajectory is pending."""
        if not self._is_generating():
            return
        most = min(self._max_leases, self.rules.max_concurrency or math.inf)
        if self.rules.may_pause and most - len(self._leased) < (most - self._slots) / 2:
            return  # half a queue is enough for now, and sending many leases at once takes less time
        is_exact, version = not self.rules.is_in_flight, self._oldest_served()
        while len(self._leased) < most and (self._pending or self._may_open()):
            if not self._pending:
                yield from self._open()
            has_no_tokens, group_id, sample_index = heapq.heappop(self._pending)
            if (group := self._groups.get(group_id)) is None:
                continue
            trajectory = group.members[sample_index]
            if trajectory.state is not TrajectoryState.PENDING or has_no_tokens == bool(trajectory.num_tokens):
                continue
            trajectory.state = TrajectoryState.LEASED
            self._leased[group_id, sample_index] = None
            if trajectory.num_tokens and not trajectory.begins_turn:
                self.step.resumed += 1
                self.step.reprefilled_tokens += trajectory.num_tokens
            trajectory.begins_turn = False
            # versions never decrease along a trajectory, so new tokens need at least the version of its last token
            least = version if is_exact or not trajectory.versions else max(version, trajectory.versions[-1][0])
            yield ev.Assign(group_id, sample_index, least, is_exact)

    def _open(self) -> Iterator[ev.Command]:
        again, attempts = self._dropped.popleft() if self._dropped else (None, 0)
        group_id, self.next_group_id = self.next_group_id, self.next_group_id + 1
        group = TrackedGroup.new(group_id, self.rules.group_size, opened_at=self.version, attempts=attempts)
        self._groups[group_id] = group
        self._buffer.opened(group_id)
        self.generating[group_id] = len(group.members)
        for member in group.members:
            heapq.heappush(self._pending, (True, group_id, member.sample_index))
        yield ev.Open(group_id, again)

    def _complete(self, group: TrackedGroup) -> Iterator[ev.Command]:
        """Mark a scored group as complete, or filter it: dynamic sampling filters groups of equal rewards, whose
        advantages are zero (DAPO, arXiv 2503.14476, section 3.2). Raises UserError at `FILTERED_LIMIT`."""
        if self.rules.dynamic_sampling and group.has_equal_rewards:
            self._buffer.closed(group.group_id)
            del self._groups[group.group_id]
            self.ledger.filtered += group.num_tokens
            yield ev.Discard(group.group_id, "filtered")
            self.step.filtered_groups += 1
            limit = FILTERED_LIMIT * self.rules.batch_groups
            if self.step.filtered_groups >= limit:
                failed = f", or fewer than two could be computed (the last failure: {self.step.failure})"
                raise UserError(
                    f"rollout.dynamic_sampling filtered {limit} groups for one batch of {self.rules.batch_groups}, "
                    f"because in each group all rewards were equal{failed if self.step.failure else ''}; "
                    f"{'repair the scorer, ' if self.step.failure else ''}use tasks "
                    "that are neither too easy nor too hard, a larger rollout.group_size, or "
                    "rollout.dynamic_sampling = false"
                )
        else:
            self._buffer.completed(group.group_id, group.oldest_version(default=self.version))

    def _deliver(self) -> Iterator[ev.Command]:
        if not self._is_requested or self._buffer.num_complete < self.rules.batch_groups:
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
        self._is_requested = False
        self._delivered += 1
        self.step.carried_groups = len(self._buffer)
        if self.rules.mode == "partial" and not self.rules.pauses:
            yield from self._abort_all()
        yield ev.Deliver(self._delivered, take.group_ids)

    def _drop(self, group: TrackedGroup) -> Iterator[ev.Command]:
        """Queue a group's prompt for another attempt under a new id. After `max_requeues` further attempts, discard the
        prompt."""
        if group.attempts < self.rules.max_requeues:
            self._dropped.append((group.group_id, group.attempts + 1))
            self.step.requeued_groups += 1
        else:
            self.step.dropped_groups += 1
        del self._groups[group.group_id]
        self.ledger.dropped += group.num_tokens
        yield ev.Discard(group.group_id, "dropped")

    def _abort_all(self) -> Iterator[ev.Command]:
        for key in sorted(self._leased):
            yield ev.AbortTrajectory(*key)

    # ---- states ------------------------------------------------------------------------------------------------------

    def _trajectory(self, event: ev.TrajectoryEvent) -> TrackedTrajectory:
        return self._groups[event.group_id].members[event.sample_index]

    def _release(self, event: ev.TrajectoryEvent, state: TrajectoryState) -> TrackedTrajectory:
        """End the lease or action of a trajectory, set the trajectory's next state, and return the trajectory."""
        trajectory = self._trajectory(event)
        if trajectory.state is TrajectoryState.ACTING:
            self.num_acting -= 1
        else:
            assert trajectory.state is TrajectoryState.LEASED, (
                f"trajectory {trajectory.name} is {trajectory.state.name}, neither leased nor acting"
            )
            del self._leased[trajectory.group_id, trajectory.sample_index]
        trajectory.state = state
        return trajectory

    def _put_back(self, trajectory: TrackedTrajectory) -> None:
        self._leased.pop((trajectory.group_id, trajectory.sample_index), None)
        self.num_acting -= trajectory.state is TrajectoryState.ACTING
        trajectory.state = TrajectoryState.PENDING
        heapq.heappush(self._pending, (not trajectory.num_tokens, trajectory.group_id, trajectory.sample_index))
