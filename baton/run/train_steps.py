"""The loop over the train steps of a run. Live runs (`loop.py`) and the simulator run this class.

recorded batch of an earlier process ─┐
controller.next_batch ─▶ recorded ────┴─▶ trainer.start ─▶ Pending ─▶ publication of the version
                                           in `async`, the controller receives reports until the train step ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.errors import TrainingDiverged
from baton.records.journal import Journal, OpenGroup, StreamCursor
from baton.records.trace import StageTimer
from baton.rewards.scorer import require_judged
from baton.rollout.controller import RolloutController
from baton.rollout.scheduler_state import StepCounts
from baton.rollout.transport import WorkerTransport
from baton.run.device_sharing import DeviceSharing
from baton.stop import Stopped
from baton.trainer.trainer import StepTrainer
from baton.types import Batch, FailureCause, Group, RewardResult

Phase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Function that shows the progress of a phase: the method `phase` of an `Observer` (`loop.py`)."""


class BatchRecords(Protocol):
    """The recorded batches of a run, which a resumed run trains again."""

    def read(self, step: int) -> Sequence[Group] | None:
        """Return the batch that an earlier process recorded for a step; None if no batch is recorded."""

    def write(self, step: int, groups: Sequence[Group], counts: StepCounts) -> None:
        """Record the batch of a step before it is trained. `counts`: values that the scheduler has counted since the
        previous batch."""

    def remove_after(self, step: int) -> None:
        """Remove the batches that an earlier process recorded for later steps than `step`."""
        return

    def replaced(self, step: int, groups: Sequence[Group], warning: str) -> None:
        """Record that a step is trained on these groups instead of the recorded ones."""
        return

    def resumed(self, carried: Sequence[OpenGroup]) -> None:
        """Called when the controller has started. `carried`: the open groups of an earlier process."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A complete train step, whose version is published."""

    groups: Sequence[Group]
    counts: StepCounts | None
    """Values that the scheduler has counted since the previous batch; None for a recorded batch."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainSteps:
    """The train steps of a run. Methods of this class block only in calls to the controller and to the trainer."""

    controller: RolloutController
    port: WorkerTransport
    trainer: StepTrainer
    journal: Journal | None
    """None if the run is never resumed."""
    records: BatchRecords
    num_steps: int
    publishes: Callable[[int], bool]
    """Function that returns whether the version of a train step is published."""
    step: int
    """Number of completed train steps."""
    cursor: StreamCursor
    """Position in the prompt stream after the last completed train step."""
    clock: StageTimer
    sharing: DeviceSharing | None = None
    """Switches the device between trainer and engine; None if they do not share a device."""
    phase: Phase = lambda name, total: nullcontext(lambda done: None)
    has_begun: bool = field(default=False, init=False)
    """True if the controller has started. Until then the loop trains recorded batches."""
    in_training: Batch | None = field(default=None, init=False)
    """The batch that is being trained, or whose training has failed."""
    newest_group_id: int = field(default=-1, init=False)
    """Largest group id in the batches that this process has recorded or trained again."""

    def next(self) -> TrainedStep:
        """Run the next train step, and publish its version. If a stop is requested during the publication, the train
        step still counts as complete, but some workers may not receive its version.

        Raises the errors of the controller and of the trainer, and UserError for a batch that cannot be trained."""
        step, counts = self.step + 1, None
        groups = None if self.has_begun else self.records.read(step)
        if groups is None:
            groups, counts = self._next_batch(step)
        self.consumed(step, groups)
        groups, metrics = self._trained_on(Batch(step, tuple(groups)))
        self.port.consumed(step, groups)
        with self.clock.stage("weight_sync", step, "publish"):
            if not self.controller.is_stopping:
                self._announce(step)
        self.step = step
        if self.has_begun:
            self.cursor = self.controller.cursor
        return TrainedStep(groups, counts, metrics)

    def _announce(self, step: int) -> None:
        """Publish the version of a train step, or record in the controller that it is not published."""
        if not self.has_begun or self.publishes(step):
            self.publish()
        else:
            with suppress(Stopped):  # as in `publish`
                self.controller.version_trained(step)

    def publish(self) -> None:
        """Wait until the workers have loaded the trainer's version. A stop request ends the wait without an exception.
        The caller's next check of the request raises Stopped."""
        weights = self.trainer.publish()
        load = self.controller.publish if self.has_begun else self.controller.load_weights
        with suppress(Stopped):
            load(weights.tensors, weights.version)

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """Record in the journal that a train step consumes these groups."""
        group_ids = [group.group_id for group in groups]
        self.newest_group_id = max(self.newest_group_id, *group_ids)
        if self.journal is not None:
            self.journal.consumed(step, group_ids)

    def _next_batch(self, step: int) -> tuple[Sequence[Group], StepCounts]:
        if not self.has_begun:
            self._begin()
        rules = self.controller.rules
        total = rules.batch_groups * rules.group_size
        with self.clock.stage("wait_for_batch", step), self.phase("generate", total) as done:
            groups = self.controller.next_batch(done)
        counts = self.controller.scheduler.take_step_counts()
        self.records.write(step, groups, counts)
        return groups, counts

    def _begin(self) -> None:
        """Start the controller from the journal's cursor and open groups. Remove the recorded batches of later steps,
        because their groups are open again. Such batches exist if an earlier batch was skipped or removed."""
        self.records.remove_after(self.step)
        carried = self.controller.resume(self.step, self.cursor, self.newest_group_id, num_batches=self.num_steps)
        self.has_begun = True
        self.records.resumed(carried)
        self.publish()

    def _trained_on(self, batch: Batch) -> tuple[Sequence[Group], dict[str, float]]:
        """Train on a batch. Return its groups, without rewards that `_without_mistrusted` removed, and metrics."""
        if self.sharing is not None:
            with self.clock.stage("turns", batch.step):
                self.sharing.to_trainer()
        with self.clock.stage("train", batch.step), self.phase("train", 0):
            self.in_training = batch
            require_judged(batch.groups, f"train step {batch.step}")
            found = self._trained(batch)
        self.in_training = None
        if self.sharing is not None:
            with self.clock.stage("turns", batch.step):
                self.sharing.to_engine()
        return found

    def _without_mistrusted(self, batch: Batch, error: TrainingDiverged) -> Batch:
        """Return the batch without the rewards of the trajectories that caused the error and come from untrusted
        workers. Trajectories without a reward are not trained on. Raises `error` if it has another cause, or if no
        other trajectory has a reward."""
        reason = "reported logprobs differ from the trainer's beyond trainer.max_logprob_diff or .max_mismatch_kl"
        names = self.port.mistrusted(error.suspects, batch.groups, reason) if error.suspects else frozenset()
        scored = [member for group in batch.groups for member in group.members if member.judgement.is_judged]
        members = [member for member in scored if member.trajectory.name in names]
        if not members or len(members) == len(scored):  # there is another cause, or nothing is left to train on
            raise error
        none, replace = RewardResult(0.0, {}, False, None, reason, FailureCause.QUARANTINED), msgspec.structs.replace
        changed = {member.trajectory.name: replace(member, judgement=none) for member in members}
        kept = [tuple(changed.get(one.trajectory.name, one) for one in group.members) for group in batch.groups]
        groups = tuple(replace(group, members=own) for group, own in zip(batch.groups, kept, strict=True))
        self.records.replaced(batch.step, groups, f"{len(members)} trajectories are not trained on: {reason}")
        return Batch(batch.step, groups)

    def _trained(self, batch: Batch) -> tuple[Sequence[Group], dict[str, float]]:
        in_background = self.has_begun and self.controller.rules.mode == "async"
        try:
            with closing(self.trainer.start(batch, in_background=in_background)) as pending:
                if self.has_begun:
                    with suppress(Stopped):  # raised by the draw of a prompt; the train step must still be completed
                        self.controller.run_until(pending.wait)
                return batch.groups, pending.result()
        except TrainingDiverged as error:
            batch = self._without_mistrusted(batch, error)
        return self._trained(batch)
