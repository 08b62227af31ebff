"""The training loop in virtual time. The simulated engines take time and count tokens, but generate no tokens.

      script ──lengths──▶ world ══ leases ══▶ port: pool or swarm ──▶ engines
                     events ▼ ▲ commands  ◀══ reports ══════┘
                        RolloutScheduler ──Deliver──▶ trainer ──VersionTrained──▶ port.load
                            ▲── Rewarded ── scorer

The control flow is that of `run/loop.py` and `rollout/controller.py`. In mode `async`, engines generate during the
train step. In all other modes, a train step starts when no lease is left. The next batch is requested when the new
version is loaded (pool) or when its publication is scheduled (swarm). The scheduler, which decides which trajectory
runs and which groups form a batch, is the same code as in a live run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from baton.records.trace import Tracer
from baton.rollout import events as ro
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import TrackedGroup, TrajectoryState
from baton.simulator.clock import VirtualClock
from baton.simulator.counted_tokens import CountedTokens, new_trajectory
from baton.simulator.inputs import Setting
from baton.simulator.result import RunRecord, SimulatedStep
from baton.simulator.scorer import SimulatedScorer
from baton.simulator.scripted_trajectories import Script
from baton.simulator.transport import SimulatedTransport
from baton.types import Abort, FromPort, Lease, Report, Retry, SamplingParams, Trajectory, WorkLost, WorkRevoked

Key = tuple[int, int]
HANG_S = 24 * 3600.0
"""A run fails with NoProgress after this virtual time without a new token, reward or train step."""


class NoProgress(Exception):
    """Raised if no event is scheduled although the run is not complete, or if the run makes no progress for HANG_S."""


class EventObserver(Protocol):
    """An observer of every event and command, such as an invariant checker or a log."""

    def on_event(self, event: ro.Event) -> None:
        """Called before the scheduler handles an event."""

    def on_command(self, command: ro.Command) -> None:
        """Called before a command is applied."""

    def settled(self) -> None:
        """Called after an event, and all events that it caused, have been handled."""


class Simulation:
    """One simulated run."""

    def __init__(
        self,
        setting: Setting,
        seed: int = 0,
        *,
        tracer: Tracer | None = None,
        make_scheduler: Callable[..., RolloutScheduler] = RolloutScheduler,
    ) -> None:
        self.setting, self.rules, self.clock = setting, setting.rules, VirtualClock()
        self.script = Script(setting.work, seed, self.rules.batch_groups, self.rules.group_size)
        self.record = RunRecord()
        self.watches: list[EventObserver] = []
        self.lineage = 0
        """Number of restarts of the controller. Actions that were scheduled before the last restart are ignored."""
        self.version = 0
        self.port: SimulatedTransport
        """Set before `begin`."""
        self._make_scheduler, self._tracer = make_scheduler, tracer
        self._judges = SimulatedScorer(setting.judges, self.clock, seed, tracer)
        self._key_of: dict[int, Key] = {}
        self._lease_of: dict[Key, int] = {}
        self._trajectories: dict[Key, Trajectory] = {}
        """The trajectories that are running, aborted or being scored."""
        self._made: dict[int, list[Counter[int]]] = {}
        """Group id → version → number of tokens of each trajectory. Groups of delivered batches are absent."""
        self._next_lease = 0
        self._batch: dict[int, Counter[int]] | None = None
        """Group id of the delivered batch → version → number of tokens."""
        self._is_training = False
        self._wanted_s = 0.0
        self._moved_s = 0.0
        self._since_checkpoint: list[float] = []
        """Duration in seconds of each train step since the last checkpoint."""
        self._depth = 0
        self.scheduler = self._new_scheduler(0, 0)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> RunRecord:
        """Run until the last train step. Raises NoProgress if the run stops making progress."""
        self.begin()
        while not self.is_over:
            self.fire()
        return self.end()

    @property
    def is_over(self) -> bool:
        return self.version >= self.setting.num_steps

    def begin(self) -> None:
        """Load the first version and request the first batch."""
        self.port.begin()
        self._announce_version()

    def fire(self) -> None:
        if not self.clock.fire():
            raise NoProgress(f"{self._where()}: no action is scheduled")
        if not self._is_training and self.clock.now_s - self._moved_s > HANG_S:
            raise NoProgress(f"{self._where()}: no token for {HANG_S:.0f} s")

    def end(self) -> RunRecord:
        record = self.record
        record.seconds = self.clock.now_s
        record.engines = self.port.busy()
        self._judges.close()
        record.close(self.scheduler.ledger, self.scheduler.num_carried_tokens)
        return record

    def _where(self) -> str:
        scheduler = self.scheduler
        return (
            f"at {self.clock.now_s:.1f} s, version {self.version}, {scheduler.num_open} open groups, "
            f"{scheduler.num_leased} leased trajectories"
        )

    def _new_scheduler(self, version: int, next_group_id: int) -> RolloutScheduler:
        steps = self.setting.num_steps
        return self._make_scheduler(self.rules, version=version, next_group_id=next_group_id, num_batches=steps)

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def dispatch(self, event: ro.Event) -> None:
        """Send an event to the scheduler, and apply the commands that it returns."""
        if not self.watches:
            for command in self.scheduler.handle(event):
                self._apply_command(command)
            return
        for watch in self.watches:
            watch.on_event(event)
        self._depth += 1
        self.do(self.scheduler.handle(event))
        self._depth -= 1
        if not self._depth:
            for watch in self.watches:
                watch.settled()

    def do(self, commands: list[ro.Command]) -> None:
        """Apply commands. Observers receive each command before it is applied."""
        for command in commands:
            for watch in self.watches:
                watch.on_command(command)
            self._apply_command(command)

    def _apply_command(self, command: ro.Command) -> None:
        match command:
            case ro.Assign():
                self._assign(command)
            case ro.Open(group_id=group_id):
                self._made[group_id] = [Counter() for _ in range(self.rules.group_size)]
            case ro.AbortTrajectory(group_id=group_id, sample_index=sample_index):
                lease = self._lease_of.get((group_id, sample_index))
                if lease is not None:
                    self.port.send(Abort(lease))
            case ro.Restart(group_id=group_id, sample_index=sample_index):
                self._trajectories.pop((group_id, sample_index), None)
                self._made[group_id][sample_index].clear()
            case ro.Deliver(group_ids=group_ids):
                self._batch = {group_id: sum(self._made.pop(group_id), Counter()) for group_id in group_ids}
                self._train_when_free()
            case ro.Load(version=version):
                self.port.load(version)
            case ro.Discard(group_id=group_id):
                del self._made[group_id]

    def _assign(self, command: ro.Assign) -> None:
        group_id, sample_index = key = (command.group_id, command.sample_index)
        lease = self._next_lease = self._next_lease + 1
        self._key_of[lease], self._lease_of[key] = key, lease
        trajectory = self._trajectories.get(key)
        if trajectory is None:
            trajectory = self._trajectories[key] = new_trajectory(*key, self.script.prompt(group_id))
        sampling = SamplingParams(self.script.length(group_id, sample_index))
        self.port.send(Lease(lease, trajectory, sampling, 0, command.version, command.is_exact))

    # ---- calls from the transport ------------------------------------------------------------------------------------

    def on_message(self, message: FromPort) -> None:
        """Handle a message of the transport."""
        match message:
            case Report():
                if message.lease_id in self._key_of:  # else its trajectory was revoked
                    self._on_report(message)
            case Retry(lease_id=lease):
                if lease in self._key_of:
                    self._lease_ended(lease)
            case WorkLost(cause=cause, num_tokens=num_tokens):
                self.dispatch(ro.TokensLost(self.clock.now_s, cause, num_tokens))
            case WorkRevoked(group_id=group_id, sample_index=sample_index, cause=cause):
                running = self._lease_of.get((group_id, sample_index))
                if running is not None:
                    self.port.send(Abort(running))
                    self._release_lease(running)
                if group_id in self._made:
                    self.dispatch(ro.Revoked(self.clock.now_s, group_id, sample_index, cause))

    def _on_report(self, report: Report) -> None:
        key = self._key_of[report.lease_id]
        if report.segments:
            self._moved_s = self.clock.now_s
            self._trajectories[key] = self._trajectories[key].extended(report.segments)
        for segment in report.segments:
            version, num_tokens = segment.policy_version, len(segment.token_ids)
            self._made[key[0]][key[1]][version] += num_tokens
            self.dispatch(ro.TokensReceived(self.clock.now_s, *key, version, num_tokens))
        if report.finish_reason is not None:
            self._release_lease(report.lease_id)
            self.dispatch(ro.Finished(self.clock.now_s, *key))
            self._train_when_free()
            self._ask_judges(key)
        elif report.is_aborted:
            self._lease_ended(report.lease_id)

    def _lease_ended(self, lease: int) -> None:
        self.dispatch(ro.LeaseEnded(self.clock.now_s, *self._release_lease(lease)))
        self._train_when_free()

    def capacity(self, slots: int) -> None:
        self.dispatch(ro.Capacity(self.clock.now_s, slots, queue=slots))

    def serving(self, version: int) -> None:
        self._moved_s = self.clock.now_s
        self.dispatch(ro.VersionServed(self.clock.now_s, version))
        self._want()

    def _release_lease(self, lease: int) -> Key:
        key = self._key_of.pop(lease)
        del self._lease_of[key]
        return key

    def _ask_judges(self, key: Key) -> None:
        lineage, trajectory = self.lineage, self._trajectories[key]
        if not self.setting.judges.latency_s:
            self._judged(lineage, key, trajectory)
        else:
            self._judges.submit(lambda: self._judged(lineage, key, trajectory))

    def _judged(self, lineage: int, key: Key, trajectory: Trajectory) -> None:
        if lineage == self.lineage and self._trajectories.get(key) is trajectory:  # else it was revoked
            del self._trajectories[key]
            self._moved_s = self.clock.now_s
            self.dispatch(ro.Rewarded(self.clock.now_s, *key, self.script.reward(*key)))

    def has_one_origin(self, key: Key) -> bool:
        """Return whether all tokens of a finished trajectory have one origin."""
        columns = [segment.token_ids for segment in self._trajectories[key].segments]
        origins = {column.origin if isinstance(column, CountedTokens) else -1 for column in columns}
        return len(origins) == 1 and -1 not in origins

    # ---- the trainer -------------------------------------------------------------------------------------------------

    def _want(self) -> None:
        """Request a batch. As in the live loop, a train step begins with this request."""
        if self.version < self.setting.num_steps:
            self._wanted_s = self.clock.now_s
            self.dispatch(ro.BatchRequested(self.clock.now_s))

    def _train_when_free(self) -> None:
        """Train the delivered batch. Except in mode `async`, training waits until no lease is left, and the engines are
        idle until the next request."""
        if self._batch is None or (self.rules.mode != "async" and self.scheduler.num_leased):
            return
        batch, self._batch = self._batch, None
        size, script = self.rules.group_size, self.script
        lengths: list[int] = []
        made: Counter[int] = Counter()
        for group_id, counts_of_group in batch.items():
            prompt = script.prompt(group_id)
            # the trainer computes whole trajectories, even if some tokens are masked
            lengths += [prompt + script.length(group_id, index) for index in range(size)]
            made += counts_of_group
        seconds = self.setting.train.step_s(lengths)
        slowdown = self.setting.train_slowdown if self.rules.mode == "async" else 1.0
        if self.rules.mode == "async" and self.setting.engine_slowdown > 1:
            self.port.slow(self.setting.engine_slowdown)
        counts = self.scheduler.take_step_counts()
        staleness = {self.version - of: num for of, num in sorted(made.items(), reverse=True)}
        self.record.steps.append(SimulatedStep(self._wanted_s, self.clock.now_s, sum(lengths), counts, staleness))
        self._is_training = True
        self._since_checkpoint.append(seconds)
        self.clock.after(seconds * slowdown, self._trained, self.lineage, self.clock.now_s)

    def _trained(self, lineage: int, begin_s: float) -> None:
        if lineage != self.lineage:
            return
        now_s = self.clock.now_s
        self._is_training, self._moved_s = False, now_s
        if self.setting.engine_slowdown > 1:
            self.port.slow(1.0)
        self.version += 1
        self.record.trained_step(now_s, now_s - begin_s)
        if self._tracer is not None:
            if begin_s > self._wanted_s:
                self._tracer.span("wait_for_batch", "trainer", 0, self._wanted_s, begin_s, step=self.version)
            self._tracer.span("train", "trainer", 0, begin_s, now_s, step=self.version, version=self.version)
        if self.version % self.setting.checkpoint_every == 0:
            self._since_checkpoint = []
        if self.is_over:
            return
        if self.version % self.setting.publish_every == 0:
            self._announce_version()
        else:
            self.dispatch(ro.VersionTrained(now_s, self.version, is_published=False))
            self._want()

    def _announce_version(self) -> None:
        self.dispatch(ro.VersionTrained(self.clock.now_s, self.version))

    # ---- restarts of the controller ----------------------------------------------------------------------------------

    def restart(self, down_s: float) -> None:
        """Stop the controller and start it again after `down_s`. The journal restores reported tokens; unreported
        tokens are lost.

        The controller resumes from its checkpoint, trains the recorded batches again in order, and continues with the
        open groups. In `sync`, unfinished trajectories start again.
        """
        now_s = self.clock.now_s
        self.port.restart()
        old = self.scheduler
        delivered = self.version + (self._is_training or self._batch is not None)
        self.lineage += 1
        replay_s = sum(self._since_checkpoint)
        self._batch = None  # it is recorded, but its training has not begun
        self.record.restarted(now_s, old.ledger)
        groups = sorted((self._kept(group) for group in old.groups()), key=lambda group: group.group_id)
        self._key_of, self._lease_of, self._is_training = {}, {}, False
        self.clock.after(down_s + replay_s, self._resume, self.lineage, delivered, old.next_group_id, groups)

    def _kept(self, group: TrackedGroup) -> TrackedGroup:
        """Return a group in the state that the journal would restore."""
        for member in group.members:
            if member.state is TrajectoryState.LEASED:
                member.state = TrajectoryState.PENDING
            if member.state is TrajectoryState.PENDING and self.rules.mode == "sync" and member.num_tokens:
                self.record.lose("restart", member.num_tokens)
                member.forget()
                self._trajectories.pop((group.group_id, member.sample_index), None)
        self._made[group.group_id] = [Counter() for _ in group.members]
        for member, counts in zip(group.members, self._made[group.group_id], strict=True):
            for version, count in member.versions:
                counts[version] += count
        return group

    def _resume(self, lineage: int, version: int, next_group_id: int, groups: list[TrackedGroup]) -> None:
        if lineage != self.lineage:
            return
        self.version, self._moved_s = version, self.clock.now_s
        self.scheduler = self._new_scheduler(version, next_group_id)
        self._depth += 1
        self.do(self.scheduler.restore(groups))
        self._depth -= 1
        if self.is_over:
            return
        for group in groups:
            for member in group.members:
                if member.state is TrajectoryState.SCORING:
                    self._ask_judges((group.group_id, member.sample_index))
        self.port.begin()
        self._announce_version()
