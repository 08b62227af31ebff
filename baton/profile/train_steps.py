"""Measures the times of batches and train steps, alternately as in mode `sync`.

The trajectories of a train step have the lengths of generated trajectories, or multiples of these lengths. Advantages
are nonzero in all groups or in half of the groups. Groups with zero advantages need no backward pass, so the fit can
separate the times of backward and forward passes.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from baton.cost.fit import Measurement
from baton.policy.tokenizer import load_tokenizer
from baton.profile.bench import NoJudges
from baton.profile.engine import REPEATS, Say
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.records.journal import Journal, StreamCursor
from baton.records.lease_trace import LeaseTrace
from baton.rollout.controller import RolloutController
from baton.rollout.settings import RolloutSettings
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.run.assemble import build_port, build_trainer
from baton.run.tokenization import PromptEncoder, TokenizedPrompts
from baton.simulator.run import Spans
from baton.specs.workload import Workload, measured
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer.trainer import PublishedWeights, Trainer
from baton.types import (
    Batch,
    FinishReason,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

LONGEST_ROLLOUT = 256
"""Maximum response length in tokens, which limits the duration of the measurement."""
TRAIN_KINDS = ((1.0, 1.0), (0.5, 1.0), (3.0, 1.0), (1.0, 0.5), (3.0, 0.5))
"""Kinds of train steps to measure. Each kind has two numbers: the factor by which generated lengths are multiplied, and
the share of groups with nonzero advantages."""
MEASURE_S = 60.0
"""Seconds after which no further round over `TRAIN_KINDS` begins."""


class StepTimings(msgspec.Struct):
    """Measured times of batches and train steps."""

    rollout: Measurement
    train: list[Measurement]
    lengths: Workload
    handover_s: float


class _Rollouts:
    """Generates batches from the recipe's prompts; for a multi-turn task, only the first turn of each episode. As in a
    run, a controller and a journal are used, and a version is published before each batch."""

    def __init__(self, recipe: Recipe, weights: PublishedWeights, directory: Path) -> None:
        rollout, seed = recipe.rollout, recipe.run.seed
        sampling = rollout.sampling()
        longest = min(sampling.max_new_tokens, LONGEST_ROLLOUT)
        sampling = msgspec.structs.replace(sampling, max_new_tokens=longest)
        self._spans = Spans()
        """Spans of the last batch's leases."""
        self._weights, self._version = weights, 0
        version = PolicyVersion("profile", 0)
        self.port = build_port(recipe, version, LeaseTrace(self._spans))
        self._journal = Journal(directory / "journal.sqlite", keeps_partials=False)
        worker = WorkerClient(self.port, rollout.stall_timeout_s, max_context_tokens=recipe.engine.max_context_tokens)
        encoder = PromptEncoder(load_tokenizer(recipe.model.path), recipe.task)
        mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, tool_format=encoder.tool_format)
        self._stream = PromptStream(mixture, seed)
        prompts = TokenizedPrompts(self._stream, encoder)
        rules = RolloutSettings(mode="sync", batch_groups=rollout.batch_groups, group_size=rollout.group_size).rules()
        self._controller = RolloutController(
            worker, rules, prompts, NoJudges(), SeededSampling(sampling, seed), self._journal
        )
        self._controller.begin(0, StreamCursor(0, {}))

    def batch(self) -> tuple[float, list[Trajectory]]:
        """Generate a batch. Return the duration in seconds and the trajectories."""
        self._controller.publish(self._weights.tensors, PolicyVersion("profile", self._version))
        self._spans.spans.clear()
        started = time.perf_counter()
        groups = self._controller.next_batch()
        seconds = time.perf_counter() - started
        self._version += 1
        self._journal.consumed(self._version, [group.group_id for group in groups])
        return seconds, [member.trajectory for group in groups for member in group.members]

    def handover_s(self) -> float:
        """Return the median seconds that a slot is empty between two leases of the last batch; 0 if unknown."""
        gaps: list[float] = []
        ends: dict[tuple[str, int], float] = {}
        for span in sorted(self._spans.spans, key=lambda span: span.begin_s):
            place = (span.actor, span.lane)
            if place in ends:
                gaps.append(span.begin_s - ends[place])
            ends[place] = span.end_s
        return statistics.median(gaps) if gaps else 0.0

    def close(self) -> None:
        self._stream.close()
        self.port.close()
        self._journal.close()


def measure_train_steps(recipe: Recipe, say: Say) -> StepTimings:
    """Measure batches and train steps alternately, once per round for each of `TRAIN_KINDS`. The first round warms up
    and is not counted, unless it takes so long that no second round begins."""
    trainer, longest = _trainer(recipe), recipe.engine.max_context_tokens
    times: list[float] = []
    seen: list[Trajectory] = []
    train: list[list[tuple[float, float]]] = [[] for _ in TRAIN_KINDS]
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(_Rollouts(recipe, trainer.publish(), Path(directory))) as rollouts,
    ):
        while len(times) < (REPEATS + 1) * len(TRAIN_KINDS):
            kind = len(times) % len(TRAIN_KINDS)
            if kind == 0 and sum(times) + sum(seconds for found in train for seconds, _ in found) > MEASURE_S:
                break
            seconds, trajectories = rollouts.batch()
            times.append(seconds)
            seen += trajectories
            batch = _batch(trainer, trajectories, *TRAIN_KINDS[kind], longest)
            num_tokens = sum(len(t.prompt_ids) + t.num_tokens for t in batch.trajectories)
            started = time.perf_counter()
            trainer.step(batch)
            train[kind].append((time.perf_counter() - started, num_tokens / len(trajectories)))
        handover_s = rollouts.handover_s() if recipe.engine.processes else 0.0
    warm_up = 1 if len(times) > len(TRAIN_KINDS) else 0
    count, lengths = len(trajectories), _lengths(recipe, seen)
    mean = round(lengths.output.mean)
    rollout = Measurement("rollout", count, mean, statistics.median(times[warm_up * len(TRAIN_KINDS) :]))
    say(f"a batch of {count} responses, {mean} tokens on average: {rollout.seconds:.3f} s")
    points = []
    for (_, share), found in zip(TRAIN_KINDS, train, strict=True):
        tokens = round(statistics.fmean(each for _, each in found[warm_up:]))
        seconds = statistics.median(each for each, _ in found[warm_up:])
        points.append(Measurement("train", count, tokens, seconds, trained_share=share))
        taught = f"{tokens} tokens, {share:.0%} with an advantage"
        say(f"train, {count} trajectories of {taught}: {points[-1].tokens_per_s:,.0f} tokens/s")
    return StepTimings(rollout, points, lengths, handover_s)


def _lengths(recipe: Recipe, trajectories: Sequence[Trajectory]) -> Workload:
    return msgspec.structs.replace(
        recipe_workload(recipe),
        prompt=measured([len(t.prompt_ids) for t in trajectories]),
        output=measured([max(1, t.num_tokens) for t in trajectories]),
        max_staleness=0,
    )


def _trainer(recipe: Recipe) -> Trainer:
    """Build the recipe's trainer with one rank and a learning rate that hardly changes the weights."""
    changes: dict[str, object] = {"ranks": 1, "stages": 1, "tensor_parallel": 1}
    changes |= {"lr": 1e-12, "warmup_steps": 0, "decay": "constant"}
    # The batches have made-up behavior logprobs, so their mismatch with the trainer's logprobs has no limit here.
    changes |= {"max_mismatch_kl": (math.inf, math.inf), "max_logprob_diff": (math.inf, math.inf)}
    # Trajectories without advantage get a forward pass too, so the fit can separate forward and backward passes.
    changes["metrics_of_all_tokens"] = True
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=changes)})
    return build_trainer(recipe, load_tokenizer(recipe.model.path))


def _batch(trainer: Trainer, trajectories: Sequence[Trajectory], factor: float, share: float, longest: int) -> Batch:
    """Return a batch whose lengths are those of `trajectories`, each multiplied by `factor`. `share`: fraction of
    groups whose members have different rewards."""
    version = trainer.version.number
    generator = torch.Generator().manual_seed(version)
    groups: dict[int, list[ScoredTrajectory]] = {}

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 60, (count,), generator=generator).tolist())

    for t in trajectories:
        prompt = min(longest - 1, max(1, round(len(t.prompt_ids) * factor)))
        own = min(longest - prompt, max(1, round(t.num_tokens * factor)))
        segment = Segment(ids(own), (-1.0,) * own, version)
        teaches = math.floor((t.group_id + 1) * share) > math.floor(t.group_id * share)
        reward = float(teaches and t.sample_index % 2 == 0)
        made = Trajectory(t.group_id, t.sample_index, ids(prompt), (segment,), FinishReason.LENGTH)
        groups.setdefault(t.group_id, []).append(ScoredTrajectory(made, RewardResult(reward, {}, reward > 0)))
    prompts = Prompt("0", "profile", (Message("user", ""),))
    return Batch(version + 1, tuple(Group(group_id, prompts, tuple(found)) for group_id, found in groups.items()))
