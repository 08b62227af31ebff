"""A run in virtual time: the controller, scheduler, journal and train steps of a live run, and a virtual trainer.

      script ──lengths──▶ SimulatedTransport: pool or swarm ──▶ engines
                                 ▲ │ reports
                    leases, aborts │ ▼                   waits of the controller advance the clock
        prompts ──▶ RolloutController ──groups──▶ TrainSteps ──batch──▶ VirtualTrainer
                             ▲── rewards ── SimulatedScorer

A simulated run has no evaluations and no files. The simulated engines take time and count tokens, but generate no
tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.clock import TimedEvent
from baton.errors import DeadlineExceeded, EngineFault
from baton.records.journal import Journal, OpenGroup, StreamCursor
from baton.records.trace import StageTimer, Tracer, TraceWriter
from baton.rollout import events as ro
from baton.rollout.controller import RolloutController
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import StepCounts
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.run.train_steps import BatchRecords, TrainedStep, TrainSteps
from baton.simulator.clock import NoProgress, VirtualClock
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import Setting
from baton.simulator.result import RunRecord, SimulatedStep
from baton.simulator.scorer import SimulatedScorer
from baton.simulator.scripted_trajectories import Script, ScriptedPrompts
from baton.simulator.timing import computed_tokens
from baton.simulator.trainer import VirtualTrainer
from baton.simulator.transport import ControllerStopped, SimulatedTransport
from baton.swarm.leases import LeaseTable
from baton.types import Group, PolicyVersion, SamplingParams

HANG_S = 24 * 3600.0
"""If no engine sends a message for this virtual time, the run fails with NoProgress."""
SAMPLING = SeededSampling(SamplingParams(1), 0)
"""The sampling parameters of all leases. Their token limit, 1, is a placeholder: `Script.limited` replaces it by the
scripted length of each trajectory."""


class EventObserver(Protocol):
    """Observes every event and command of the scheduler and of the hub's lease table. Examples are `EventLog` and the
    checker of invariants in `tests/simulator`."""

    def on_event(self, event: TimedEvent) -> None:
        """Called before the scheduler or the lease table handles an event."""

    def on_command(self, command: msgspec.Struct) -> None:
        """Called before a command is applied."""

    def settled(self, event: TimedEvent) -> None:
        """Called when an event and all events that it caused have been handled."""
        return

    def on_batch(self, groups: Sequence[Group]) -> None:
        """Called when a batch has been recorded."""
        return


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Seed, faults and observers of a simulated run."""

    seed: int = 0
    faults: Sequence[FaultSettings] = ()
    log: EventObserver | None = None
    tracer: Tracer | None = None
    make_scheduler: Callable[..., RolloutScheduler] = field(default=RolloutScheduler)
    make_table: Callable[..., LeaseTable] = field(default=LeaseTable)
    on_step: Callable[[int, int], None] = lambda step, num_steps: None
    """Called after each new train step, with its number and the number of train steps of the run."""


NO_OPTIONS = RunOptions()


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


class Simulation(BatchRecords):
    """One simulated run. The recorded batches are kept in memory."""

    def __init__(self, setting: Setting, options: RunOptions = NO_OPTIONS) -> None:
        self.setting, self.options, self.rules, self.clock = setting, options, setting.rules, VirtualClock()
        self.script = Script(setting.work, options.seed, self.rules.batch_groups, self.rules.group_size)
        self.record = RunRecord()
        self.watches: list[EventObserver] = [] if options.log is None else [options.log]
        self.lineage = 0
        """Number of restarts of the controller."""
        self.port: SimulatedTransport
        """Set before `run`."""
        self._timer = StageTimer(options.tracer or TraceWriter(), now_s=lambda: self.clock.now_s)
        self._scorer = SimulatedScorer(setting.judges, self.script, self.clock, options.seed, options.tracer)
        # without restarts, the simulation needs no journal
        has_restarts = any(fault.kind == "restart" for fault in options.faults)
        self._journal = Journal(None, keeps_partials=self.rules.mode != "sync") if has_restarts else None
        self._recorded: dict[int, Sequence[Group]] = {}
        """Recorded batches by train step, from the last checkpoint on."""
        self._checkpoint = 0, StreamCursor(0, {})
        """Train step of the last checkpoint, and its position in the prompt stream."""
        self._carried_tokens = 0
        """Number of untrained tokens that the controller had in memory when it was stopped."""
        self._steps: TrainSteps

    @property
    def version(self) -> int:
        return self._steps.trainer.version.number

    @property
    def controller(self) -> RolloutController:
        return self._steps.controller

    @property
    def scheduler(self) -> RolloutScheduler:
        return self.controller.scheduler

    def run(self) -> RunRecord:
        """Run until the last train step. Raises NoProgress if the run stops making progress."""
        while True:
            self._steps = self._new_process()
            try:
                self._run()
                break
            except ControllerStopped as stopped:
                self._on_stopped()
                self.clock.wait(stopped.down_s)
            except (DeadlineExceeded, EngineFault, NoProgress) as error:
                raise NoProgress(f"at {self.clock.now_s:.1f} s, version {self.version}: {error}") from error
        record = self.record
        record.seconds = self.clock.now_s
        record.engines = [*self.port.busy()]
        self._scorer.close()
        record.carried = self._carried_tokens
        if self._steps.has_begun:  # otherwise the controller only trained recorded batches after its last start
            record.add(self.scheduler.ledger)
            record.carried = self.scheduler.num_carried_tokens
        record.generated = record.settled + record.carried
        return record

    def _on_stopped(self) -> None:
        self.port.restart()
        self._scorer.restart()
        assert self._journal is not None, "a fault restarts the controller, but the simulation has no journal"
        self._journal.roll_back()
        self.lineage += 1
        self.record.outcomes["controller restarted"] += 1
        if self._steps.has_begun:
            scheduler = self.scheduler
            # `consumed` and `masked` are nonzero only if a batch has been delivered but not recorded
            consumed, masked = scheduler.step.consumed_tokens, scheduler.step.masked_tokens
            ledger, self._carried_tokens = scheduler.ledger, scheduler.num_carried_tokens + consumed
            ledger.trained -= consumed - masked
            ledger.masked -= masked
            self.record.add(ledger)

    # ---- one process of the controller -------------------------------------------------------------------------------

    def _new_process(self) -> TrainSteps:
        """Start the engines. Return the `TrainSteps` of a controller process that continues from the last
        checkpoint."""
        self.port.begin()
        worker = WorkerClient(self.port, HANG_S, clock=lambda: self.clock.now_s)
        prompts = ScriptedPrompts(self.script)
        controller = ObservedController(worker, self.rules, prompts, self._scorer, SAMPLING, self._journal)
        controller.watches, controller.make_scheduler = self.watches, self.options.make_scheduler
        step, cursor = self._checkpoint
        version = PolicyVersion(f"lineage {self.lineage}", step, f"digest {step}")
        return TrainSteps(
            controller=controller,
            port=self.port,
            trainer=VirtualTrainer(
                self.setting, self.clock, self.port, lambda: controller.scheduler.num_leased > 0, version
            ),
            journal=self._journal,
            records=self,
            num_steps=self.setting.num_steps,
            publishes=lambda step: step % self.setting.publish_every == 0,
            step=step,
            cursor=cursor,
            clock=self._timer,
        )

    def _run(self) -> None:
        setting, steps = self.setting, self._steps
        while steps.step < setting.num_steps:
            self._add_to_record(steps.next())
            if steps.step % setting.checkpoint_every == 0:
                self._save()
            self.clock.wait(setting.cycle_overhead_s)

    def _add_to_record(self, trained: TrainedStep) -> None:
        times = self._timer.take()
        if trained.counts is None:  # the step is trained again
            return
        staleness: Counter[int] = Counter()
        for segment in (s for group in trained.groups for m in group.members for s in m.trajectory.segments):
            staleness[self.version - 1 - segment.policy_version] += len(segment.token_ids)
        self.record.steps.append(
            SimulatedStep(
                wait_s=times["wait_for_batch"],
                begin_s=trained.metrics["begin_s"],
                end_s=trained.metrics["end_s"],
                tokens=sum(computed_tokens(group, shares_prompts=False)[0] for group in trained.groups),
                counts=trained.counts,
                staleness=dict(sorted(staleness.items())),
            )
        )
        self.options.on_step(len(self.record.steps), self.setting.num_steps)

    def _save(self) -> None:
        step = self._steps.step
        self._checkpoint = step, self._steps.cursor
        self._recorded = {later: groups for later, groups in self._recorded.items() if later > step}
        if self._journal is not None:
            self._journal.checkpointed(step, step)

    # ---- methods of BatchRecords -------------------------------------------------------------------------------------

    def read(self, step: int) -> Sequence[Group] | None:
        return self._recorded.get(step)

    def write(self, step: int, groups: Sequence[Group], counts: StepCounts) -> None:
        if self._journal is not None:
            self._recorded[step] = groups
        for watch in self.watches:
            watch.on_batch(groups)

    def resumed(self, carried: Sequence[OpenGroup]) -> None:
        if self.lineage:
            self.record.lost["restart"] += self._carried_tokens - self.scheduler.ledger.generated
