"""Checks the invariants of docs/architecture.md at every event, with counts of its own.

* Conservation: every trajectory is in exactly one state, and the scheduler and these counts agree on it. The number of
  generated tokens is exactly trained + masked + filtered + dropped + lost + carried. A batch has the required number of
  groups. Its groups are complete and are never trained twice.
* Append only: a trajectory grows only by whole segments with ascending versions, and ends at its scripted length.
* Staleness: tokens beyond the staleness bound are masked, so none of them is trained. The number of open groups is
  limited.
* Version: tokens have the requested version, and that version is published. No trajectory runs while weights are
  loaded, unless the mode allows this.
* Order: trajectories with tokens are leased before trajectories without tokens. No trajectory is leased during a pause.
* Leases: the invariants of `lease_invariants.py`.
* Workers: no worker is quarantined, because all simulated workers are correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from baton.clock import TimedEvent
from baton.rollout import events as ro
from baton.rollout.scheduler_state import ACCOUNTS, TrajectoryState
from baton.simulator.counted_tokens import ORIGIN
from baton.simulator.simulation import Simulation
from baton.simulator.swarm import Swarm
from baton.swarm import lease_events as ev
from baton.types import Group
from tests.simulator.lease_invariants import LeaseInvariants

Key = tuple[int, int]
LEASE_EVENTS = get_args(ev.Event)


class InvariantViolation(AssertionError):
    """Raised if an invariant does not hold."""

    def __init__(self, law: str, what: str, at_s: float) -> None:
        super().__init__(f"{law}, at {at_s:.3f} s: {what}")
        self.law, self.what, self.at_s = law, what, at_s


@dataclass(slots=True)
class _Own:
    """State and number of tokens of one trajectory, as this module counts them."""

    state: TrajectoryState = TrajectoryState.PENDING
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    ask: tuple[int, bool] = (0, False)


class InvariantChecker:
    """An `EventObserver` that checks the invariants of one run."""

    def __init__(self, world: Simulation, swarm: Swarm | None) -> None:
        self._world, self._swarm = world, swarm
        self._rules = world.rules
        self._own: dict[Key, _Own] = {}
        self._groups: dict[int, None] = {}
        self._last_id = -1
        self._trained: set[int] = set()
        self._delivered_own: dict[int, list[_Own]] = {}
        """Members of the groups of a delivered batch, until it is recorded."""
        self._lineage = world.lineage
        self._served: int | None = None
        self._wanted = False
        self._is_paused = False
        self._places = 0
        self._restored = 0
        """Number of groups that were open at the last restart of the controller, or the lowest number since."""
        self._counts: Counter[str] = Counter()
        """Category of tokens, such as generated or lost → number of tokens since the controller started."""
        self._leases: LeaseInvariants | None = None

    def check(self, holds: bool, law: str, what: Any = "") -> None:
        """Raise InvariantViolation unless `holds`. what: details, or a function that is called only for the error."""
        if not holds:
            raise InvariantViolation(law, what() if callable(what) else str(what), self._world.clock.now_s)

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_event(self, event: TimedEvent) -> None:
        if self._lineage != self._world.lineage:
            self._restarted()
        if isinstance(event, LEASE_EVENTS):
            self._lease_table.on_event(event)
        match event:
            case ro.TokensReceived():
                self._grew(event)
            case ro.Finished(group_id=g, sample_index=s):
                own = self._moved((g, s), TrajectoryState.LEASED, TrajectoryState.SCORING)
                length = self._world.script.length(g, s)
                self.check(own.num_tokens == length, "append only", f"{g}/{s} ends at {own.num_tokens}, not {length}")
            case ro.LeaseEnded(group_id=g, sample_index=s):
                self._moved((g, s), TrajectoryState.LEASED, TrajectoryState.PENDING)
            case ro.Rewarded(group_id=g, sample_index=s):
                self._moved((g, s), TrajectoryState.SCORING, TrajectoryState.SCORED)
            case ro.TokensLost(num_tokens=count):
                self._counts["generated"] += count
                self._counts["lost"] += count
            case ro.VersionServed(version=version):
                self._served = version
            case ro.BatchRequested():
                self._wanted = True
            case ro.Capacity(slots=slots, queue=queue):
                self._places = min(slots + queue, self._rules.max_concurrency or slots + queue)
            case ro.DispatchPaused() | ro.DispatchResumed():
                self._is_paused = isinstance(event, ro.DispatchPaused)
            case _:
                pass

    def _moved(self, key: Key, before: TrajectoryState, after: TrajectoryState) -> _Own:
        own = self._own[key]
        self.check(own.state is before, "conservation", f"{key} becomes {after.name} while {own.state.name}")
        own.state = after
        return own

    def _grew(self, event: ro.TokensReceived) -> None:
        key, version = (event.group_id, event.sample_index), event.version
        own = self._own[key]
        self.check(own.state is TrajectoryState.LEASED, "conservation", f"{key} grew while {own.state.name}")
        last = own.versions[-1][0] if own.versions else -1
        self.check(version >= last, "append only", f"{key}: tokens of version {version} after version {last}")
        asked, is_exact = own.ask
        right = version == asked if is_exact else version >= asked
        self.check(right, "version", f"{key}: requested {'exactly ' * is_exact}version {asked}, got {version}")
        known = self._swarm.members.versions if self._swarm is not None else range(self._world.version + 1)
        self.check(version in known, "version", f"{key}: version {version} is not published")
        count = own.versions.pop()[1] if version == last else 0
        own.versions.append((version, count + event.num_tokens))
        own.num_tokens += event.num_tokens
        longest = self._world.script.length(*key)
        self.check(own.num_tokens <= longest, "append only", f"{key} has {own.num_tokens} of {longest} tokens")
        self._counts["generated"] += event.num_tokens

    def _restarted(self) -> None:
        """Reset the counts for a new controller. Only tokens in open groups count as generated."""
        self._lineage = self._world.lineage
        self._counts.clear()
        self._wanted, self._served = False, None
        for group_id, members in self._delivered_own.items():  # the batch has not been recorded
            self._groups[group_id] = None
            self._trained.discard(group_id)
            self._own |= {(group_id, index): own for index, own in enumerate(members)}
        self._restored = len(self._groups)
        for own in self._own.values():
            if own.state is TrajectoryState.LEASED:
                own.state = TrajectoryState.PENDING
            if own.state is TrajectoryState.PENDING and self._rules.mode == "sync":
                own.versions, own.num_tokens = [], 0
            self._counts["generated"] += own.num_tokens
        self._is_paused = False

    # ---- commands ----------------------------------------------------------------------------------------------------

    def on_command(self, command: msgspec.Struct) -> None:
        if self._lineage != self._world.lineage:
            self._restarted()
        match command:
            case ro.Open(group_id=g):
                self.check(g > self._last_id, "conservation", f"group id {g} is used again")
                self._last_id = g
                self._groups[g] = None
                self._own |= {(g, s): _Own() for s in range(self._rules.group_size)}
            case ro.Assign():
                self._assigned(command)
            case ro.Deliver():
                self._delivered(command)
            case ro.Discard(group_id=g, cause=cause):
                self._counts[cause] += sum(own.num_tokens for own in self._taken(g, "discarded"))
            case ro.Load(version=version):
                self.check(
                    version <= self._world.version, "version", f"version {version} is loaded before it is trained"
                )
                is_free = self._rules.is_in_flight or not self._leased
                self.check(is_free, "version", "weights are loaded while trajectories run")
            case ro.Restart(group_id=g, sample_index=s):
                self._counts["lost"] += self._own[g, s].num_tokens
                self._own[g, s] = _Own()
            case ro.AbortTrajectory():
                pass
            case _:
                self._lease_table.on_command(command)

    @property
    def _leased(self) -> int:
        return sum(own.state is TrajectoryState.LEASED for own in self._own.values())

    def _assigned(self, assign: ro.Assign) -> None:
        key, rules = (assign.group_id, assign.sample_index), self._rules
        own = self._moved(key, TrajectoryState.PENDING, TrajectoryState.LEASED)
        self.check(self._leased <= self._places, "conservation", "more leases than slots")
        self.check(rules.mode == "async" or self._wanted, "conservation", "generated although no batch is requested")
        self.check(not self._is_paused, "order", f"{key} is leased during a pause")
        kept = [k for k, o in self._own.items() if o.num_tokens and o.state is TrajectoryState.PENDING]
        self.check(bool(own.num_tokens) or not kept, "order", f"{key} is leased before {kept}")
        served = self._served
        self.check(served is not None, "version", "leased while nothing is served")
        is_exact = not rules.is_in_flight
        self.check(assign.is_exact == is_exact, "version", f"{key}: exactness {assign.is_exact}")
        self.check(
            assign.version == served if is_exact else assign.version <= (served or 0),
            "version",
            "wrong version requested",
        )
        own.ask = (assign.version, assign.is_exact)

    def _taken(self, group_id: int, why: str) -> list[_Own]:
        """Remove a group and return its members."""
        del self._groups[group_id]
        members = [self._own.pop((group_id, s)) for s in range(self._rules.group_size)]
        whole = all(own.state is TrajectoryState.SCORED for own in members)
        self.check(whole, "conservation", f"group {group_id} is {why} before all its rewards arrived")
        return members

    def _delivered(self, deliver: ro.Deliver) -> None:
        rules, ids, now = self._rules, deliver.group_ids, self._world.version
        self.check(self._wanted, "conservation", "a batch was delivered that was not requested")
        self._wanted = False
        self.check(len(ids) == len(set(ids)) == rules.batch_groups, "conservation", f"a batch of {len(ids)} groups")
        self.check(not self._trained & set(ids), "conservation", f"trained twice: {self._trained & set(ids)}")
        self.check(deliver.step == now + 1, "conservation", f"batch {deliver.step} after version {now}")
        self._trained |= set(ids)
        floor = now - rules.max_staleness
        masks = rules.mode != "sync" and rules.stale == "mask"
        for group_id in ids:
            self._delivered_own[group_id] = self._taken(group_id, "in a batch")
            for own in self._delivered_own[group_id]:
                for version, count in own.versions:
                    is_old = version < floor
                    allowed = not is_old or masks
                    self.check(allowed, "staleness", f"group {group_id} has tokens of {version} at {now}")
                    self._counts["masked" if is_old else "trained"] += count

    def on_batch(self, groups: Sequence[Group]) -> None:
        """Compare the tokens of a recorded batch with the counts."""
        for trajectory in [member.trajectory for group in groups for member in group.members]:
            name, own = trajectory.name, self._delivered_own[trajectory.group_id][trajectory.sample_index]
            counts, reported = {s.policy_version: len(s.token_ids) for s in trajectory.segments}, Counter[int]()
            for version, count in own.versions:
                reported[version] += count
            self.check(counts == reported, "append only", f"{name} has tokens {counts}, reported were {reported}")
            origins = {s.token_ids[place] // ORIGIN for s in trajectory.segments for place in (0, -1)}
            self.check(
                self._rules.mode != "sync" or len(origins) == 1, "append only", f"{name} mixes tokens of two leases"
            )
        self._delivered_own = {}

    # ---- at every event ----------------------------------------------------------------------------------------------

    def settled(self, event: TimedEvent) -> None:
        if isinstance(event, LEASE_EVENTS):
            self._settled_leases(event)
        elif self._lineage == self._world.lineage:
            self._settled_groups()

    def _settled_groups(self) -> None:
        scheduler, counts, rules = self._world.scheduler, self._counts, self._rules
        ledger = scheduler.ledger
        theirs = {name: getattr(ledger, name) for name in ACCOUNTS} | {"lost": ledger.lost.total()}
        self.check(
            counts.keys() <= theirs.keys() and all(counts[account] == count for account, count in theirs.items()),
            "conservation",
            lambda: f"the scheduler counts {theirs}, the checker {dict(counts)}",
        )
        carried = leased = 0
        unfinished = {g.group_id: sum(not m.is_finished for m in g.members) for g in scheduler.groups()}
        held = {group_id: count for group_id, count in unfinished.items() if count}
        self.check(scheduler.generating == held, "conservation", lambda: f"{scheduler.generating}, counted {held}")
        self.check({g.group_id for g in scheduler.groups()} == self._groups.keys(), "conservation", "open groups")
        for group in scheduler.groups():
            for member in group.members:
                own = self._own[member.group_id, member.sample_index]
                carried += own.num_tokens
                leased += own.state is TrajectoryState.LEASED
                if member.state is not own.state or member.versions != own.versions:
                    self.check(False, "conservation", f"the scheduler has {member}, the checker {own}")
        self.check(ledger.generated == ledger.settled + carried, "conservation", f"{carried} carried")
        self.check(scheduler.num_leased == leased, "conservation", "leased trajectories")
        is_open = len(self._groups)
        if rules.mode == "partial":
            # overprovision = "auto" starts again at a lower level, so a restart may restore more groups
            most = max(rules.max_outstanding(scheduler.overprovision), self._restored)
            self.check(is_open <= most, "staleness", f"{is_open} groups are open, allowed {most}")
            self._restored = min(self._restored, is_open)
        elif not self._world.lineage:
            made = len(self._trained) + is_open - 1
            bound = self._world.version + rules.max_staleness
            self.check(made // rules.batch_groups <= bound, "staleness", f"{is_open} groups open at {bound}")

    # ---- leases ------------------------------------------------------------------------------------------------------

    @property
    def _lease_table(self) -> LeaseInvariants:
        """The invariants of the hub's current table. A restart makes a new table."""
        assert self._swarm is not None, "leases without a swarm"
        table = self._swarm.members.broker.table
        if self._leases is None or self._leases.table is not table:
            self._leases = LeaseInvariants(table, self.check)
        return self._leases

    def _settled_leases(self, event: TimedEvent) -> None:
        self._lease_table.settled(event)
        for record in self._swarm.quarantine.records if self._swarm is not None else ():
            self.check(False, "workers", f"the correct worker {record.shown} is in quarantine: {record.verdict}")
