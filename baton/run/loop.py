"""A live run: its train steps (`train_steps.py`), evaluations, checkpoints and metrics."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFault,
    EnvironmentFault,
    StorageFault,
    TrainingDiverged,
    UserError,
)
from baton.files import STORAGE_ERRORS
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation, evaluation_metrics
from baton.records.journal import Journal, OpenGroup, StreamCursor
from baton.records.metrics import MetricsWriter
from baton.records.predictions import RunPredictions, ratios
from baton.records.run_directory import RunDirectory, Source
from baton.records.run_lock import RunLock
from baton.records.trace import StageTimer, TraceWriter
from baton.rewards.scorer import RewardScorer, failure_metrics
from baton.rewards.warnings import first_impression
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineStats
from baton.rollout.scheduler_state import StepCounts
from baton.rollout.transport import WorkerTransport
from baton.run.device_sharing import DeviceSharing
from baton.run.evaluation import Evaluator
from baton.run.train_steps import BatchRecords, TrainSteps
from baton.stop import Stopped, StopRequest
from baton.swarm.serial_executor import SerialExecutor
from baton.tasks.stream import PromptStream
from baton.trainer.trainer import Trainer
from baton.types import Group, SamplingParams

ABORT_TIMEOUT_S = 5.0
"""Maximum seconds that a run waits at its end for workers to report their remaining tokens."""
SAVE_S = 1800.0
"""Maximum seconds that a run waits for a checkpoint that is being written in the background."""


class LoopState(msgspec.Struct, frozen=True):
    """The state that a checkpoint contains in addition to the trainer's state."""

    step: int = 0
    """Number of completed train steps."""
    next_group_id: int = 0
    position: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of prompts drawn from each task's training stream."""
    best_step: int = 0
    """Train step with the best accuracy so far; 0 is the initial model."""
    best_accuracy: float = -1.0
    """Accuracy of sampled responses after `best_step`, over all tasks; -1 before the first evaluation."""


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """The result of writing a checkpoint."""

    path: Path
    oldest_step: int
    """Train step of the oldest checkpoint from which the run may still resume."""


class Observer(Protocol):
    """Receives the events of a run, for example to print them."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context manager for a phase with `total` units of work. Entering the context manager returns a
        function, which the run calls with the number of units completed since the last call."""

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the metrics of a complete train step."""

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """Receive the results of a complete evaluation."""

    def said(self, text: str) -> None:
        """Receive a message for the user."""


@dataclass(frozen=True, slots=True)
class RunBatches(BatchRecords):
    """Stores the batches of a live run in the run's directory, and their metrics in the journal."""

    run: RunDirectory
    journal: Journal
    stream: PromptStream
    controller: RolloutController
    say: Callable[[str], None]

    def read(self, step: int) -> Sequence[Group] | None:
        if not self.run.has_groups(step):
            return None
        self.say(f"step {step}: the recorded batch is used again")
        return self.run.groups(step)

    def write(self, step: int, groups: Sequence[Group], counts: StepCounts) -> None:
        rules = self.controller.rules
        in_batch = sum(m.num_policy_tokens for g in groups for m in g.members)
        metrics = counts.metrics() | self.stream.take_counts() | self.controller.take_episode_metrics()
        metrics["tokens/generated"] = float(in_batch if rules.mode == "sync" else counts.generated_tokens)
        if rules.is_adaptive:
            metrics["rollout/overprovision"] = self.controller.scheduler.overprovision
        # the metrics are written before the batch, so a recorded batch has its metrics even after a kill
        self.journal.counted(step, metrics)
        self.run.write_groups(step, groups)

    def remove_after(self, step: int) -> None:
        if self.run.remove_groups_after(step):
            self.say(f"recorded batches after step {step} are removed: their groups are put into new batches")

    def replaced(self, step: int, groups: Sequence[Group], warning: str) -> None:
        self.run.write_groups(step, groups)
        self.say(f"warning: step {step}: {warning}")

    def resumed(self, carried: Sequence[OpenGroup]) -> None:
        if carried:
            finished = sum(t.finish_reason is not None for g in carried for t in g.members)
            self.say(f"{len(carried)} open groups continue; {finished} of their trajectories are finished")


@dataclass(slots=True)
class Loop:
    """The parts of a run, and the run's state between train steps."""

    recipe: Recipe
    run: RunDirectory
    lock: RunLock
    """Lock of the run's directory; `close` releases it."""
    opened: ExitStack
    """Closes, in reverse order of their opening, all parts that were opened for the run, except the lock."""
    stream: PromptStream
    judge: RewardScorer
    port: WorkerTransport
    evaluator: Evaluator
    """Generates and scores responses for evaluations; has no prompts if the recipe disables evaluations."""
    controller: RolloutController
    """Part that generates responses for training."""
    journal: Journal
    trainer: Trainer
    predictions: RunPredictions
    save_checkpoint: Callable[[LoopState], Callable[[], SavedCheckpoint]]
    """Takes a snapshot of trainer and state; returns a function that atomically writes this snapshot as a
    checkpoint."""
    metrics: MetricsWriter
    observer: Observer
    state: LoopState
    stop: StopRequest = field(default_factory=StopRequest)
    last_checkpoint: Path | None = None
    sharing: DeviceSharing | None = None
    """Switches the device between trainer and engine; None if they do not share a device."""
    trace: TraceWriter = field(default_factory=TraceWriter)
    stats: EngineStats = field(default_factory=EngineStats)
    """The engine's counters at the end of the last train step or evaluation."""
    peak_memory: Callable[[], dict[str, float]] = dict
    """Function that returns this process's peak memory as a metric."""
    has_failed: bool = False
    clock: StageTimer = field(init=False)
    steps: TrainSteps = field(init=False)
    saved_step: int = field(init=False)
    """Train step of the last checkpoint, which may not be on disk yet (`unwritten`)."""
    writer: SerialExecutor = field(default_factory=lambda: SerialExecutor("checkpoint"))
    """Thread that writes checkpoints if `checkpoint.background` is set."""
    unwritten: tuple[int, Future[SavedCheckpoint]] | None = None
    """Train step and result of the checkpoint that is being written in the background."""

    def __post_init__(self) -> None:
        state = self.state
        self.saved_step, self.clock = state.step, StageTimer(self.trace)
        self.steps = TrainSteps(
            controller=self.controller,
            port=self.port,
            trainer=self.trainer,
            journal=self.journal,
            records=RunBatches(self.run, self.journal, self.stream, self.controller, self.observer.said),
            num_steps=self.recipe.run.steps,
            publishes=lambda step: step % self.recipe.swarm.publish_every == 0 or self._is_evaluated(step),
            step=state.step,
            cursor=StreamCursor(state.next_group_id, state.position),
            clock=self.clock,
            sharing=self.sharing,
            phase=self.observer.phase,
        )

    @property
    def is_complete(self) -> bool:
        """True if all train steps and the last evaluation are complete."""
        return self.state.step >= self.recipe.run.steps and not self._lacks_evaluation()

    def train(self) -> None:
        """Run from the current state to the last train step, or until `stop` is requested.

        Raises TrainingDiverged and StorageFault, which name the last good checkpoint. If the process is killed, a
        resume repeats the steps after the last checkpoint with their recorded batches, and replaces the metrics and
        evaluations of these steps.
        """
        # freeze the 400,000 objects of imported modules, because a full garbage collection in a step would visit them
        # for 0.3 s. No collection runs before the freeze, because it would also take 0.3 s
        gc.freeze()
        try:
            self._train()
        except BaseException as error:
            self.has_failed = True
            if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
                raise self._storage_fault(error) from error
            if isinstance(error, StorageFault):
                raise StorageFault(f"{error}; {self._checkpoint_note()}") from error
            raise
        finally:
            gc.unfreeze()

    def _storage_fault(self, error: OSError) -> StorageFault:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return StorageFault(
            f"{'the disk is full' if is_full else error.strerror}: {error.filename or self.run.path} could not be "
            f"written after train step {self.state.step}; {'free space' if is_full else 'repair it'}, then continue "
            f"with --resume; {self._checkpoint_note()}"
        )

    def _train(self) -> None:
        self._catch_up()
        try:
            with self.stop.interrupting():
                isolation = self.judge.start()
            self._warn([isolation] if isolation else [])
            self.steps.publish()
            if self._lacks_evaluation():
                self._evaluate_and_save()
            while self.state.step < self.recipe.run.steps:
                self.stop.check()
                self._step()
                if self.unwritten is not None and self.unwritten[1].done():
                    self._finish_saving()
                if self._is_evaluated(self.state.step):
                    self._evaluate_and_save()
                is_last = self.state.step == self.recipe.run.steps
                if is_last or self.state.step % self.recipe.checkpoint.every == 0:
                    self._save()
        except Stopped:
            self._save()
        self._finish_saving()
        if self.steps.has_begun:
            try:
                # the workers report their last tokens, and the journal stores them
                self.controller.abort_all(ABORT_TIMEOUT_S)
            except (EngineFault, EnvironmentFault, DeadlineExceeded) as error:
                self.observer.said(
                    f"workers have not reported all tokens; a resumed run generates the missing tokens again: {error}"
                )
            self.journal.settle()

    def _evaluate_and_save(self) -> None:
        """Evaluate the current policy version, and save a checkpoint if the accuracy is the best so far."""
        best = self.state.best_step
        self.evaluate()
        if self.state.best_step != best:
            self._save()

    def close(self) -> None:
        """Stop all processes of the run, close its files and release its lock, also if `train` was never called. If
        `train` has raised an error, this error takes precedence over an error of `close`."""
        outcome = "failed"
        try:
            with self.opened as parts:  # the functions are called in reverse order
                parts.callback(self.trace.flush)
                parts.callback(lambda: self.port.close(is_over=self.is_complete))
                parts.callback(self._finish_saving)  # needed if `train` has raised
            outcome = "failed" if self.has_failed else "finished" if self.is_complete else "stopped"
        except (OSError, BatonError) as error:
            if self.has_failed:
                self.observer.said(f"another error while the run was closed: {error}")
            elif isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
                raise self._storage_fault(error) from error
            else:
                raise
        finally:
            self.lock.release(outcome)

    def _checkpoint_note(self) -> str:
        there = self.last_checkpoint
        return f"the last good checkpoint is {there}" if there else "there is no checkpoint yet"

    def _step(self) -> None:
        begin_s = self.clock.now_s()
        try:
            trained = self.steps.next()
        except (TrainingDiverged, UserError) as error:
            if (batch := self.steps.in_training) is None:
                raise
            raise type(error)(
                f"{error}; its batch is in {self.run.path}, step {batch.step}; {self._checkpoint_note()}; to replace "
                f"the batch by a new one: --resume --skip-batch {batch.step}"
            ) from error
        step, cursor, groups = self.steps.step, self.steps.cursor, trained.groups
        self.state = msgspec.structs.replace(
            self.state, step=step, next_group_id=cursor.next_group_id, position=cursor.position
        )
        counted = self.journal.metrics(step)
        values = trained.metrics | counted | self._performance(groups, counted, self.clock.now_s() - begin_s)
        values |= self.judge.metrics() | self.port.metrics(values)
        values |= {} if self.sharing is None else self.sharing.metrics()
        # a sharded trainer reports the peaks of its ranks, which replace the peak of this process
        values = self.peak_memory() | values
        if (predictions := self.predictions.current) is not None:  # a new plan replaces the predictions
            values |= ratios(predictions, values)
        self.metrics.write(step, values)
        self.trace.flush()
        self.observer.stepped(step, values)
        self._warn([*self.judge.warnings.take(f"step {step}"), *self.judge.warnings.stepped(step, groups)])

    def _lacks_evaluation(self) -> bool:
        """Return True if the current step still needs an evaluation, for example because a stop prevented it."""
        step = self.state.step
        if step == 0:
            return self.recipe.eval.enabled and self.recipe.eval.at_start
        return self._is_evaluated(step) and all(e.step != step for e in self.run.evaluations())

    def _is_evaluated(self, step: int) -> bool:
        every = self.recipe.eval.every
        is_due = step == self.recipe.run.steps or bool(every and step % every == 0)
        return self.recipe.eval.enabled and is_due

    def _catch_up(self) -> None:
        """Repair a journal whose last entries are lost: record the groups of the checkpoint's batches as consumed."""
        known, trained = self.journal.last_step(), self.state.step
        if known >= trained:
            return
        self.observer.said(
            f"warning: the journal of {self.run.path} ends at train step {known}, before the checkpoint of step "
            f"{trained}: unfinished rollouts that the journal has lost are generated again"
        )
        if self.journal.open_groups(trained):
            for step in range(known + 1, trained + 1):
                if self.run.has_groups(step):
                    self.steps.consumed(step, self.run.groups(step))

    def _save(self) -> None:
        """Write a checkpoint of the current step, unless the step is 0 or already has a checkpoint. The journal is
        flushed first, so that no group of the checkpoint's batches can be trained again. With `checkpoint.background`,
        the next call or `_finish_saving` raises the error of a failed write."""
        if self.saved_step == self.state.step or not self.state.step:
            return
        self._finish_saving()
        begin_s, step = self.clock.now_s(), self.state.step
        self.journal.settle()
        self.metrics.flush()
        write = self.save_checkpoint(self.state)
        self.saved_step = step
        if self.recipe.checkpoint.background:
            self.unwritten = step, self.writer.submit(write)
        else:
            self._written(step, write())
        self.trace.span("checkpoint", "trainer", 0, begin_s, self.clock.now_s(), step=step)

    def _finish_saving(self) -> None:
        """Wait until the unwritten checkpoint, if there is one, is on disk. If writing failed, raise the error."""
        if self.unwritten is None:
            return
        (step, future), self.unwritten = self.unwritten, None
        try:
            saved = future.result(SAVE_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the checkpoint of train step {step} was not written in {SAVE_S:.0f} s; {self._checkpoint_note()}"
            ) from error
        self._written(step, saved)

    def _written(self, step: int, saved: SavedCheckpoint) -> None:
        """Delete from the journal the groups on which this checkpoint was trained, because it is on disk now."""
        self.last_checkpoint = saved.path
        self.journal.checkpointed(step, saved.oldest_step)

    def _performance(self, groups: Sequence[Group], counted: dict[str, float], step_time_s: float) -> dict[str, float]:
        waited = self.controller.take_seconds()
        hidden_s = waited.pop("hidden")
        times = {f"time/{name}": seconds for name, seconds in {**waited, **self.clock.take()}.items()}
        before, self.stats = self.stats, self.port.stats()
        rows = self.stats.decode_rows - before.decode_rows
        generated = counted.get("tokens/generated", 0.0)
        values = {
            **times,
            "perf/step_time": step_time_s,
            "perf/throughput": generated / step_time_s,
            "perf/trajectories_per_s": sum(len(g.members) for g in groups) / step_time_s,
            **failure_metrics(groups),
        }
        if "environment" in waited:
            values["env/wait_frac"] = waited["environment"] / step_time_s
        if rows:  # 0 if another process recorded the batch or earlier steps generated it
            values["perf/generate_tokens_per_s"] = generated / max(1e-6, waited["generate"] + hidden_s)
            values["perf/occupancy"] = (self.stats.decoded_tokens - before.decoded_tokens) / rows
        if self.recipe.rollout.mode == "async":
            values["time/generate_hidden"] = hidden_s
            values["perf/overlap"] = hidden_s / max(1e-9, hidden_s + waited["generate"])
        return values

    def evaluate(self) -> None:
        """Evaluate the current version, sampled and greedy, and write the results."""
        settings, stop = self.recipe.eval, self.recipe.rollout.stop
        longest = settings.max_new_tokens or self.recipe.rollout.max_new_tokens
        ways = [SamplingParams(longest, settings.temperature, stop=stop)]
        if settings.greedy:
            ways.append(SamplingParams(longest, 0.0, stop=stop))
        results: list[Evaluation] = []
        impression: list[str] = []
        recorded: dict[Source, list[Group]] = {}
        with (
            self.clock.stage("eval", self.state.step),
            self.controller.paused() if self.steps.has_begun else nullcontext(),
        ):
            for sampling in ways:
                with self.observer.phase("evaluate", 0):
                    found, groups = self.evaluator.evaluate(sampling, version=self.trainer.version.number)
                results += found
                recorded["evaluation" if sampling.temperature else "greedy"] = groups
                if not self.state.step and sampling.temperature:
                    impression = first_impression(groups)
        self.judge.metrics()  # the scoring of the evaluation belongs to no train step
        values: dict[str, float] = {"time/eval": self.clock.take().get("eval", 0.0)}
        for result in results:
            values |= evaluation_metrics(result)
        sampled = [r.accuracy for r in results if r.temperature]
        # if a task has no scores, "all" would cover fewer tasks than in other evaluations
        overall = None if None in sampled else sampled[-1]
        if overall is not None and overall.value > self.state.best_accuracy:
            self.state = msgspec.structs.replace(self.state, best_step=self.state.step, best_accuracy=overall.value)
            if self.saved_step == self.state.step:
                # This step has a checkpoint, which names an earlier step as the best. The checkpoint is replaced before
                # the evaluation is recorded, because a resumed run does not repeat a recorded evaluation.
                self.saved_step = -1
                self._save()
                self._finish_saving()
        self.metrics.write(self.state.step, values)
        self.run.write_evaluation(self.state.step, results, recorded)
        self.trace.flush()
        self.stats = self.port.stats()
        self.observer.evaluated(self.state.step, results)
        self._warn([*self.judge.warnings.take(f"evaluation after step {self.state.step}"), *impression])

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.observer.said(warning)
