"""A run in virtual time: the controller, scheduler and journal of a live run, and a trainer that takes time.

      script ──lengths──▶ SimulatedTransport: pool or swarm ──▶ engines
                                 ▲ │ reports
                    leases, aborts │ ▼                   waits of the controller advance the clock
        prompts ──▶ RolloutController ──groups──▶ train step, which takes time
                             ▲── rewards ── SimulatedScorer

The loop over train steps is that of `run/loop.py`, without evaluations and without files. In mode `async`, engines
generate during the train step. In all other modes, a train step starts when no lease is left. The simulated engines
take time and count tokens, but generate no tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.clock import TimedEvent
from baton.errors import DeadlineExceeded, EngineFault
from baton.records.journal import Journal, StreamCursor
from baton.records.trace import Tracer
from baton.rollout import events as ro
from baton.rollout.controller import RolloutController
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import Ledger
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.simulator.clock import NoProgress, VirtualClock
from baton.simulator.inputs import Setting
from baton.simulator.result import RunRecord, SimulatedStep
from baton.simulator.scorer import SimulatedScorer
from baton.simulator.scripted_trajectories import Script, ScriptedPrompts
from baton.simulator.transport import ControllerStopped, SimulatedTransport
from baton.types import Group, PolicyVersion, SamplingParams

HANG_S = 24 * 3600.0
"""A run fails with NoProgress after this virtual time without a message of an engine."""
CLOSE = 1e-9
"""Part of the virtual time by which a train step may end early, because of rounding errors."""
SAMPLING = SeededSampling(SamplingParams(1), 0)
"""The length of each trajectory is scripted (`Script.limited`)."""


class EventObserver(Protocol):
    """An observer of every event and command of the scheduler and of the hub's lease table, such as an invariant
    checker or a log."""

    def on_event(self, event: TimedEvent) -> None:
        """Called before the scheduler or the table handles an event."""

    def on_command(self, command: msgspec.Struct) -> None:
        """Called before a command is applied."""

    def settled(self, event: TimedEvent) -> None:
        """Called after an event, and all events that it caused, have been handled."""
        return

    def on_batch(self, groups: Sequence[Group]) -> None:
        """Called when a batch has been recorded."""
        return


class ObservedController(RolloutController):
    """A `RolloutController` that calls observers."""

    watches: Sequence[EventObserver] = ()
    _depth = 0

    def _dispatch(self, event: ro.Event) -> None:
        for watch in self.watches:
            watch.on_event(event)
        self._depth += 1
        super()._dispatch(event)
        self._depth -= 1
        for watch in self.watches if not self._depth else ():
            watch.settled(event)

    def _apply_command(self, command: ro.Command) -> None:
        for watch in self.watches:
            watch.on_command(command)
        super()._apply_command(command)


class Simulation:
    """One simulated run."""

    def __init__(
        self,
        setting: Setting,
        seed: int = 0,
        *,
        has_restarts: bool = False,
        tracer: Tracer | None = None,
        make_scheduler: Callable[..., RolloutScheduler] = RolloutScheduler,
    ) -> None:
        """has_restarts: whether the controller is restarted. Without restarts, it needs no journal."""
        self.setting, self.rules, self.clock = setting, setting.rules, VirtualClock()
        self.script = Script(setting.work, seed, self.rules.batch_groups, self.rules.group_size)
        self.record = RunRecord()
        self.watches: list[EventObserver] = []
        self.lineage = 0
        """Number of restarts of the controller."""
        self.version = 0
        self.recorded: dict[int, Sequence[Group]] = {}
        """Recorded batches by train step, from the last checkpoint on."""
        self.port: SimulatedTransport
        """Set before `run`."""
        self._make_scheduler, self._tracer = make_scheduler, tracer
        self._scorer = SimulatedScorer(setting.judges, self.script, self.clock, seed, tracer)
        self._journal = Journal(None, keeps_partials=self.rules.mode != "sync") if has_restarts else None
        self._checkpoint = 0
        """Train step of the last checkpoint."""
        self._carried_tokens = 0
        """Number of tokens that the controller had when it was stopped."""
        self.controller: RolloutController | None = None
        """None while no controller runs."""

    @property
    def scheduler(self) -> RolloutScheduler:
        assert self.controller is not None, "no controller runs"
        return self.controller.scheduler

    def run(self) -> RunRecord:
        """Run until the last train step. Raises NoProgress if the run stops making progress."""
        while self.version < self.setting.num_steps:
            try:
                self._run()
            except ControllerStopped as stopped:
                self._on_stopped()
                self.clock.wait(stopped.down_s)
            except (DeadlineExceeded, EngineFault, NoProgress) as error:
                raise NoProgress(f"at {self.clock.now_s:.1f} s, version {self.version}: {error}") from error
        record = self.record
        record.seconds = self.clock.now_s
        record.engines = [*self.port.busy()]
        self._scorer.close()
        record.close(self.scheduler.ledger, self.scheduler.num_carried_tokens)
        return record

    def _on_stopped(self) -> None:
        """Discard the state of the controller."""
        self.port.restart()
        self._scorer.restart()
        assert self._journal is not None, "a fault restarts the controller, but the simulation has no journal"
        self._journal.roll_back()
        self.lineage += 1
        ledger = Ledger()
        if self.controller is not None:
            scheduler, self.controller = self.controller.scheduler, None
            # nonzero if a batch has been delivered but not recorded
            consumed, masked = scheduler.step.consumed_tokens, scheduler.step.masked_tokens
            ledger, self._carried_tokens = scheduler.ledger, scheduler.num_carried_tokens + consumed
            ledger.trained -= consumed - masked
            ledger.masked -= masked
        self.record.restarted(self.clock.now_s, ledger)

    # ---- one process of the controller -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run from the last checkpoint, as `Loop` does: train the recorded batches again, then continue."""
        setting, self.version = self.setting, self._checkpoint
        self.port.begin()
        while self.version + 1 in self.recorded:
            self.clock.wait(setting.train.step_s(_lengths(self.recorded[self.version + 1])))
            self._trained()
        worker = WorkerClient(self.port, HANG_S, clock=lambda: self.clock.now_s)
        make = ObservedController if self.watches else RolloutController
        controller = self.controller = make(
            worker, self.rules, ScriptedPrompts(self.script), self._scorer, SAMPLING, self._journal
        )
        controller.make_scheduler = self._make_scheduler
        if isinstance(controller, ObservedController):
            controller.watches = self.watches
        begin = controller.begin if self._journal is None else controller.resume
        begin(self.version, StreamCursor(0, {}), num_batches=setting.num_steps)
        if self.lineage:
            self.record.lose("restart", self._carried_tokens - controller.scheduler.ledger.generated)
        is_published = True
        while self.version < setting.num_steps:
            if setting.cycle_overhead_s:
                self.clock.wait(setting.cycle_overhead_s)
            if is_published:
                controller.publish({}, PolicyVersion(f"lineage {self.lineage}", self.version, f"digest {self.version}"))
            else:
                controller.version_trained(self.version)
            self._step(controller)
            is_published = self.version % setting.publish_every == 0

    def _step(self, controller: RolloutController) -> None:
        wanted_s, step = self.clock.now_s, self.version + 1
        groups = controller.next_batch()
        counts = controller.scheduler.take_step_counts()
        if self._journal is not None:
            self.recorded[step] = groups
            self._journal.consumed(step, [group.group_id for group in groups])
        for watch in self.watches:
            watch.on_batch(groups)
        staleness: Counter[int] = Counter()
        for segment in (s for group in groups for m in group.members for s in m.trajectory.segments):
            staleness[self.version - segment.policy_version] += len(segment.token_ids)
        begin_s, lengths = self.clock.now_s, _lengths(groups)
        self.record.steps.append(
            SimulatedStep(wanted_s, begin_s, sum(lengths), counts, dict(sorted(staleness.items())))
        )
        self._train(controller, self.setting.train.step_s(lengths))
        now_s = self.clock.now_s
        self.record.trained_step(now_s, now_s - begin_s)
        if self._tracer is not None:
            if begin_s > wanted_s:
                self._tracer.span("wait_for_batch", "trainer", 0, wanted_s, begin_s, step=step)
            self._tracer.span("train", "trainer", 0, begin_s, now_s, step=step, version=step)
        self._trained()

    def _train(self, controller: RolloutController, seconds: float) -> None:
        """Let the time of a train step pass while the controller runs. In mode `async`, trainer and engines are slower
        while both are busy. `seconds`: time of the train step alone."""
        setting, clock = self.setting, self.clock
        is_async, left_s, last_s, slowdown = self.rules.mode == "async", seconds, clock.now_s, 0.0

        def is_over() -> bool:
            nonlocal left_s, last_s, slowdown
            if slowdown:
                left_s -= (clock.now_s - last_s) / slowdown
            last_s, now = clock.now_s, setting.train_slowdown if is_async and controller.scheduler.num_leased else 1.0
            if now != slowdown and left_s > 0:
                slowdown = now
                clock.after(left_s * slowdown, lambda: None)
            return left_s <= CLOSE * max(1.0, clock.now_s)

        slows = is_async and setting.engine_slowdown != 1
        if slows:
            self.port.slow(setting.engine_slowdown)
        try:
            controller.run_until(lambda timeout_s: clock.poll(timeout_s, is_over))
        finally:
            if slows:
                self.port.slow(1.0)

    def _trained(self) -> None:
        self.version += 1
        if self.version % self.setting.checkpoint_every == 0:
            self._checkpoint = self.version
            self.recorded = {step: groups for step, groups in self.recorded.items() if step > self.version}
            if self._journal is not None:
                self._journal.checkpointed(self.version, self.version)


def _lengths(groups: Sequence[Group]) -> list[int]:
    """Return each trajectory's number of tokens, with masked tokens, which the trainer computes too."""
    members = [member.trajectory for group in groups for member in group.members]
    return [len(trajectory.prompt_ids) + trajectory.num_tokens for trajectory in members]
