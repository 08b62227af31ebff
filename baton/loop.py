"""The live run, synchronous: nobody waits for anybody but in turn.

      stream ──prompts──▶ runner ══ leases ══▶ worker: engine
                            ▲  ◀══ reports ══════════┘
                            └─ finished trajectory ─▶ judge ─▶ group complete
                                                                  ▼
      worker loads version v+1 ◀── publish ◀── trainer.step ◀── batch of version-v groups

| stage    | consumes               | produces            | waits for       | unblocked by                          |
|----------|------------------------|---------------------|-----------------|---------------------------------------|
| generate | prompts, version v     | trajectories        | the worker      | reports; a stall deadline names it    |
| judge    | a finished trajectory  | a judgement         | its judges      | an answer, or the call's deadline     |
| train    | the batch              | version v+1         | all groups      | the last judgement                    |
| publish  | version v+1            | a worker at v+1     | the worker      | its load_weights returning            |

Every token's version is the trainer's, so staleness is 0 and no group ever waits over a train step.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import Field

from baton.errors import StorageFault, TrainingDiverged
from baton.evaluation import EvalSettings, Evaluation, evaluate
from baton.metrics import MetricsWriter
from baton.policy.tokenizer import Tokenizer
from baton.rollout.engine import EngineStats
from baton.rollout.port import WorkerPort
from baton.rollout.runner import Request, RolloutSettings, Runner
from baton.runs import RunDirectory
from baton.settings import Settings
from baton.tasks.rewards import Judge, failure_metrics, require_judged
from baton.tasks.stream import PromptStream
from baton.trainer.trainer import Trainer
from baton.types import Batch, Group, Judged, Prompt, SamplingParams, Trajectory


class CheckpointSettings(Settings):
    """[checkpoint] what is kept to resume from and to use."""

    every: int = Field(default=50, ge=1)
    """Train steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints kept; the one with the best held-out accuracy is kept besides."""


class LoopState(msgspec.Struct, frozen=True):
    """What a resume needs besides the trainer's own state."""

    step: int = 0
    """Train steps done."""
    next_group_id: int = 0
    position: dict[str, int] = msgspec.field(default_factory=dict)
    """Draws made from each task's training stream."""
    best_step: int = 0
    """Train step of the best held-out accuracy so far; 0 is the model the run began with."""
    best_accuracy: float = -1.0
    """Of the sampled responses, over all tasks."""


class Observer(Protocol):
    """Whoever watches a run: the terminal, or nobody."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Enter a phase of `total` units; the context is a function that counts units done."""
        ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """A train step is done."""
        ...

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """A held-out evaluation is done."""
        ...

    def said(self, text: str) -> None:
        """Something worth a line has happened."""
        ...


@dataclass(slots=True)
class Clock:
    """Seconds by stage since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Any:
        """Add the time of the context to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Return the times and begin again."""
        taken, self.seconds = self.seconds, {}
        return taken


@dataclass(slots=True)
class Loop:
    """The parts of a run, and the state between its steps."""

    run: RunDirectory
    stream: PromptStream
    held_out: Sequence[Prompt]
    judge: Judge
    tokenizer: Tokenizer
    port: WorkerPort
    runner: Runner
    trainer: Trainer
    save_checkpoint: Callable[[LoopState], Path]
    """Writes a checkpoint of the trainer and this state, whole or not at all."""
    metrics: MetricsWriter
    observer: Observer
    rollout: RolloutSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    seed: int
    num_steps: int
    state: LoopState
    should_stop: Callable[[], bool] = lambda: False
    last_checkpoint: Path | None = None
    clock: Clock = field(default_factory=Clock)
    stats: EngineStats = field(default_factory=EngineStats)
    """The engine's counters when the last step ended."""

    def train(self) -> list[Evaluation]:
        """Run from the current state to the last step, or until `should_stop`; return the last evaluation.

        Raises TrainingDiverged and StorageFault naming the last good checkpoint. Whenever the process dies, a resume
        from that checkpoint makes the same steps again: what was written after it is cut or written over.
        """
        try:
            return self._train()
        except TrainingDiverged as error:
            raise TrainingDiverged(
                f"{error}; its batch is in {self.run.path}, step {self.state.step + 1}; {self._way_back()}"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageFault(
                f"the disk is full: {error.filename or self.run.path} could not be written after train step "
                f"{self.state.step}; make room, then go on with --resume; {self._way_back()}"
            ) from error
        finally:
            self.judge.close()

    def _train(self) -> list[Evaluation]:
        self._publish()
        results: list[Evaluation] = []
        if self.state.step == 0:
            results = self.evaluate()
        while self.state.step < self.num_steps and not self.should_stop():
            self._step()
            step, best = self.state.step, self.state.best_step
            is_last = step == self.num_steps
            if is_last or (self.eval.every and step % self.eval.every == 0):
                results = self.evaluate()
            is_best = self.state.best_step != best
            if is_last or is_best or step % self.checkpoint.every == 0 or self.should_stop():
                self.last_checkpoint = self.save_checkpoint(self.state)
        return results

    def close(self) -> None:
        """End the worker and close the files."""
        self.port.close()
        self.metrics.close()

    def _way_back(self) -> str:
        there = self.last_checkpoint
        return f"the last good checkpoint is {there}" if there else "there is no checkpoint yet"

    def _step(self) -> None:
        begin = time.perf_counter()
        step = self.state.step + 1
        prompts = self.stream.take(self.rollout.batch_groups)
        groups = self._recorded(prompts, step)
        if groups is None:
            groups = self._generate(prompts, step)
            self.run.write_groups(step, groups)
        require_judged(groups, f"train step {step}")
        with self.clock.stage("train"), self.observer.phase("train", 0):
            values = self.trainer.step(Batch(step, tuple(groups)))
        self._publish()
        self.state = msgspec.structs.replace(
            self.state,
            step=step,
            next_group_id=self.state.next_group_id + len(prompts),
            position=dict(self.stream.position),
        )
        values |= self._performance(groups, time.perf_counter() - begin)
        self.metrics.write(step, values)
        self.observer.stepped(step, values)

    def _recorded(self, prompts: Sequence[Prompt], step: int) -> list[Group] | None:
        """The batch of a step that a process made before it died, judgements included; None where there is none."""
        if not self.run.has_groups(step):
            return None
        groups = self.run.groups(step)
        ids = [(group.group_id, group.prompt.prompt_id) for group in groups]
        first = self.state.next_group_id
        if ids != [(first + index, prompt.prompt_id) for index, prompt in enumerate(prompts)]:
            return None
        self.observer.said(f"step {step}: the recorded batch is used again")
        return groups

    def _generate(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Grow and judge all groups of a step, in order."""
        first = self.state.next_group_id
        requests = [
            Request(first + index, self.tokenizer.prompt_ids(prompt.messages), self.rollout.group_size)
            for index, prompt in enumerate(prompts)
        ]
        members: list[list[Judged]] = [[] for _ in prompts]
        total = len(prompts) * self.rollout.group_size
        with self.observer.phase("generate", total) as done:

            def keep(found: Iterable[Judged]) -> None:
                for judged in found:
                    members[judged.trajectory.group_id - first].append(judged)
                    done(1)

            trajectories = self.runner.rollout(
                requests, self.rollout.sampling(), noise_seed=self.seed, version=self.trainer.version.number
            )
            while (trajectory := self._next(trajectories)) is not None:
                with self.clock.stage("judge"):
                    text = self.tokenizer.text(trajectory.token_ids)
                    self.judge.submit(trajectory, prompts[trajectory.group_id - first], text)
                    keep(self.judge.collect())
            with self.clock.stage("judge"):
                keep(self.judge.drain())
        return [
            Group(first + index, prompts[index], tuple(sorted(m, key=lambda j: j.trajectory.sample_index)))
            for index, m in enumerate(members)
        ]

    def _next(self, trajectories: Any) -> Trajectory | None:
        with self.clock.stage("generate"):
            return next(trajectories, None)

    def _publish(self) -> None:
        with self.clock.stage("weight_sync"):
            weights = self.trainer.publish()
            self.port.load_weights(weights.tensors, weights.version)

    def _performance(self, groups: Sequence[Group], step_time_s: float) -> dict[str, float]:
        times = {"time/generate": 0.0, **{f"time/{name}": seconds for name, seconds in self.clock.take().items()}}
        generated = sum(m.trajectory.num_tokens for g in groups for m in g.members)
        before, self.stats = self.stats, self.port.stats()
        rows = self.stats.decode_rows - before.decode_rows
        values = {
            **times,
            "perf/step_time": step_time_s,
            "perf/throughput": generated / step_time_s,
            "tokens/generated": generated,
            **failure_metrics(groups),
        }
        if rows:  # else the batch was a recorded one
            values["perf/generate_tokens_per_s"] = generated / times["time/generate"]
            values["perf/occupancy"] = (self.stats.decoded_tokens - before.decoded_tokens) / rows
        return values

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the current version on the held-out prompts, sampled and greedy, and log the results."""
        longest = self.eval.max_new_tokens or self.rollout.max_new_tokens
        ways = [SamplingParams(longest, self.eval.temperature, stop=self.rollout.stop)]
        if self.eval.greedy:
            ways.append(SamplingParams(longest, 0.0, stop=self.rollout.stop))
        results: list[Evaluation] = []
        with self.clock.stage("eval"):
            for sampling in ways:
                samples = self.eval.samples if sampling.temperature else 1
                with self.observer.phase("evaluate", 0):
                    found, _ = evaluate(
                        self.runner,
                        self.judge,
                        self.tokenizer,
                        self.held_out,
                        sampling,
                        samples=samples,
                        version=self.trainer.version.number,
                    )
                results += found
        values: dict[str, float] = {"time/eval": self.clock.take().get("eval", 0.0)}
        for result in results:
            values |= evaluation_metrics(result)
        self.metrics.write(self.state.step, values)
        self.run.write_evaluation(self.state.step, results)
        self.stats = self.port.stats()
        accuracy = next(r.accuracy.value for r in reversed(results) if r.temperature)
        if accuracy > self.state.best_accuracy:
            self.state = msgspec.structs.replace(self.state, best_step=self.state.step, best_accuracy=accuracy)
        self.observer.evaluated(self.state.step, results)
        return results


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Metric names of one evaluation."""
    if result.temperature == 0:
        return {f"eval/{result.task}/greedy": result.accuracy.value}
    values = {
        f"eval/{result.task}/avg@{result.samples}": result.accuracy.value,
        f"eval/{result.task}/response_length": result.mean_length_tokens,
    }
    if result.unjudged:
        values[f"eval/{result.task}/unjudged"] = result.unjudged
    if result.samples > 1:
        values[f"eval/{result.task}/pass@{result.samples}"] = result.pass_at_k.value
    return values
