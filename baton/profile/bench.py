"""`baton bench rollout`: runs the rollout modes alternately, one batch at a time. Each mode has its own engine.
Response lengths are scripted; a few responses are much longer than the others.

Only the rollout side is measured: the trainer takes no time, and each version loads the same weights again. The control
`sync_2x` is mode `sync` with as many groups in a batch as `partial` keeps open. The control therefore has the
concurrency of `partial`, but generates no groups beyond the batch.

Each mode is compared with a lower bound of its time: the time that an engine alone needs for the same tokens. This
engine always uses all its slots, prefills each prompt once and never loads weights, and nothing else takes time. The
engine alone and the modes run alternately, one batch each, so that a change of the machine's speed affects all of them.

A second bound, the bound of decode steps, is stricter: it omits the time in which the engine admits and reports
responses. It adds the time of one prefill per prompt to a decode time for each token. The decode time of a token at
position p is the time of a full decode step (all slots in use), divided by the number of slots. The mean position of
the rows of this step is p. Full decode steps are measured at three mean positions, and a line is fitted to their times.
The mean time of a mode's own full steps cannot be used instead: in `sync`, for example, all slots are in use only while
responses are still short.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import msgspec

from baton.cost.memory import SLOT_MULTIPLE
from baton.errors import UserError
from baton.profile.engine_alone import EngineAlone, Work, full_steps_of
from baton.records.journal import StreamCursor
from baton.rollout.controller import PromptSource, RolloutController
from baton.rollout.engine import Engine, EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.settings import Mode, RolloutSettings, Rules
from baton.rollout.transport import STEPS, LocalTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.types import (
    FromHub,
    FromWorker,
    Lease,
    PolicyVersion,
    Prompt,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
)

CONTROL = "sync_2x"
WARM_UP_STEPS = 2
"""Number of unmeasured steps of each mode at the start. After these steps, the number of open groups carried over from
one batch to the next is steady."""
_NORMAL = NormalDist()
_SAMPLE = 4000
_GOLDEN, _SILVER = 0.6180339887498949, 0.7548776662466927
"""Step sizes of two low-discrepancy sequences. Unlike random numbers, low-discrepancy sequences have nearly the
requested spread of lengths even for a few groups."""


@dataclass(frozen=True)
class ScriptedLengths:
    """Scripted response lengths, equal for every mode. The lengths are lognormal with a maximum, and correlated within
    groups.

    A length is median · exp(between · z_group + within · z_trajectory), limited to 1 … `longest`. The median is chosen
    so that the mean is `mean`.
    """

    mean: float
    longest: int
    between: float
    """`between` in the formula: standard deviation of the part of log(length) that a group's members share."""
    within: float
    """`within` in the formula: standard deviation of log(length) among the trajectories of one group."""
    seed: int = 0
    _lengths: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def length(self, group_id: int, sample_index: int) -> int:
        if (group_id, sample_index) not in self._lengths:  # cached, because every mode needs the same lengths
            self._lengths[group_id, sample_index] = self._cut(self._median, group_id, sample_index)
        return self._lengths[group_id, sample_index]

    @cached_property
    def _median(self) -> float:
        low, high = 0.01, float(self.longest)
        for _ in range(50):
            middle = math.sqrt(low * high)
            total = sum(self._cut(middle, i // 8, i % 8) for i in range(_SAMPLE))
            low, high = (middle, high) if total < self.mean * _SAMPLE else (low, middle)
        return low

    def _cut(self, median: float, group_id: int, sample_index: int) -> int:
        own = self._normal(group_id * 64 + sample_index, _SILVER)
        drawn = median * math.exp(self.between * self._normal(group_id, _GOLDEN) + self.within * own)
        return min(self.longest, max(1, round(drawn)))

    def _normal(self, index: int, step: float) -> float:
        return _NORMAL.inv_cdf(min(1 - 1e-9, max(1e-9, ((index + 1 + 7919 * self.seed) * step) % 1.0)))


class ModeResult(msgspec.Struct, frozen=True):
    """Results of one mode, totalled over all rounds."""

    mode: str
    steps: int
    tokens: int
    """Number of generated response tokens: the tokens of the delivered batches, plus the tokens by which the open
    groups have grown. Over many batches, this growth is negligible."""
    delivered_tokens: int
    seconds: float
    """Seconds that the mode took: CPU time if the engine runs on a CPU, otherwise wall time."""
    tokens_per_s: float
    over_sync: float | None
    over_control: float | None
    """Tokens per second divided by the tokens per second of `sync_2x`; None if `sync_2x` was not measured."""
    occupancy: float
    """Fraction of the rows computed by decode steps that belonged to a trajectory."""
    of_bound: float
    """Time that the engine alone needs, divided by the measured time."""
    of_step_bound: float
    """Time of the stricter bound of decode steps, divided by the measured time."""
    full_step_ms: float | None
    """Time of a decode step with all slots in use; None if this mode had no such step. In each step, every row attends
    over the context length of the longest row of its length class."""
    reprefilled_frac: float
    """Ratio of the number of tokens that were prefilled again to the number of generated tokens. When an aborted
    response is resumed, its prompt and its tokens are prefilled again. The first prefill of each delivered group's
    prompt does not count."""
    shares: dict[str, float]
    """Part of the step → its share of the measured time: `decode`; `prefill`, the additional time of steps with a
    prefill; `load` of weights; and `controller`, the rest."""
    mean_staleness: float
    """Staleness of each trajectory's oldest token, averaged over trajectories."""
    rounds_tokens_per_s: tuple[float, ...]
    """Tokens per second of each batch. Batches that were already complete when they were requested are omitted, because
    the clock did not advance."""


class BenchResult(msgspec.Struct, frozen=True):
    """Results of `baton bench rollout`."""

    clock: str
    """Clock of the measurement: `processor`, `wall`, or `steps`, for which every decode step counts as one second."""
    slots: int
    mean_tokens: float
    longest_tokens: int
    between: float
    within: float
    full_step_ms: float
    """Time of a full decode step (all slots in use), as the bound of decode steps assumes it; mean over the tokens of
    all modes."""
    full_step_ms_per_1k: float
    """Additional time of a full decode step per 1,000 positions of mean context."""
    step_ms_by_width: dict[int, float]
    """Number of rows of a decode step → mean time in ms. Covers the steps of all modes, except steps with a prefill."""
    prefill_ms_per_token: float
    bound_over_sync: float | None
    """Upper bound on the tokens per second of any mode, divided by the tokens per second of `sync`."""
    modes: tuple[ModeResult, ...]


class TimedTransport(LocalTransport):
    """A transport that sets each lease's response length, and records each step's rows, prefilled tokens and time."""

    def __init__(
        self, engine: Engine, lengths: ScriptedLengths, clock: Callable[[], float], *, num_steps: int = STEPS
    ) -> None:
        super().__init__(engine, num_steps=num_steps)
        self.clock = clock
        self._lengths = lengths
        self.steps: list[tuple[int, int, float]] = []
        """(number of decoded rows, number of prefilled tokens, seconds) of each step."""
        self.load_s = 0.0
        self.prompt_tokens: dict[int, int] = {}
        """Number of prompt tokens of each leased group."""
        self._before = self.stats()

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            group_id = message.trajectory.group_id
            self.prompt_tokens[group_id] = len(message.trajectory.prompt_ids)
            length = self._lengths.length(group_id, message.trajectory.sample_index)
            message = msgspec.structs.replace(message, sampling=SamplingParams(length))
        super().send(message)

    def step(self) -> Sequence[FromWorker]:
        begin_s = self.clock()
        messages = super().step()
        seconds, before, after = self.clock() - begin_s, self._before, self.stats()
        prefilled, self._before = after.prefilled_tokens - before.prefilled_tokens, after
        self.steps.append((after.decode_rows - before.decode_rows, prefilled, seconds))
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        begin_s = self.clock()
        super().load_weights(tensors, version)
        self.load_s += self.clock() - begin_s


class FlatTransport(TimedTransport):
    """A transport whose clock advances by one second per decode step."""

    def __init__(self, engine: Engine, lengths: ScriptedLengths) -> None:
        super().__init__(engine, lengths, lambda: float(engine.stats.decode_steps), num_steps=1)


class NoJudges:
    """A reward scorer that takes no time. The members of a group get the rewards 0 and 1 alternately."""

    sees_groups = scores_episodes = False

    def __init__(self) -> None:
        self._waiting: list[ScoredTrajectory] = []

    def submit(self, finished: Sequence[Trajectory | ScoredTrajectory], prompt: Prompt) -> None:
        trajectories = [one for one in finished if isinstance(one, Trajectory)]
        self._waiting += [ScoredTrajectory(t, RewardResult(float(t.sample_index % 2), {}, False)) for t in trajectories]

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        found, self._waiting = self._waiting, []
        return found


class ModeBench:
    """The controller and the measurements of one mode."""

    def __init__(
        self,
        name: str,
        settings: RolloutSettings,
        port: TimedTransport,
        prompts: PromptSource,
        tensors: Mapping[str, Any],
    ) -> None:
        self.name, self.port, self._tensors = name, port, tensors
        self.batch_size = settings.batch_groups * settings.group_size
        sampling = SeededSampling(SamplingParams(1), noise_seed=1)  # the port sets the length of each trajectory
        rules = replace(settings.rules(), may_pause=True)  # the engine runs in this process
        self._controller = RolloutController(WorkerClient(port), rules, prompts, NoJudges(), sampling)
        self._version = -1
        self.seconds, self.steps = 0.0, 0
        self.delivered, self.opened = Work(), Work()
        """`delivered`: tokens of the delivered batches. `opened`: increase of the number of tokens in open groups."""
        self.rounds: list[float] = []
        self.decoded = self.prompt_tokens = 0
        self.staleness: list[int] = []

    def step(self, *, is_counted: bool = True) -> None:
        """Deliver one batch and load the next version."""
        if self._version < 0:
            self._controller.begin(0, StreamCursor(0, {}))
            self._publish_next()
        opened = self._open_work()
        decoded, begin_s = self.port.stats().decoded_tokens, self.port.clock()
        groups = self._controller.next_batch()
        self._publish_next()
        seconds = self.port.clock() - begin_s
        counts = self._controller.scheduler.take_step_counts()
        if not is_counted:
            self.port.steps.clear()
            self.port.load_s = 0.0
            return
        now, trajectories = self._open_work(), [m.trajectory for g in groups for m in g.members]
        batch = Work.of((len(t.prompt_ids), t.num_tokens) for t in trajectories)
        self.delivered += batch
        self.opened += now - opened
        self.prompt_tokens += sum(len(g.members[0].trajectory.prompt_ids) - 1 for g in groups)
        self.seconds, self.steps = self.seconds + seconds, self.steps + 1
        if seconds:  # for batches that are complete at once, the clock may not advance
            self.rounds.append(batch.tokens / seconds)
        self.decoded += self.port.stats().decoded_tokens - decoded
        self.staleness += [staleness for _, staleness in counts.lengths_and_staleness]

    def result(
        self, bound_s: float, step_bound_s: float, rates: Mapping[str, float], curve: Mapping[int, float]
    ) -> ModeResult:
        """`rates`: tokens per second of each mode. `curve`: number of rows of a decode step → mean seconds, over the
        steps of all modes without prefill."""
        rate, port = rates[self.name], self.port
        num_rows, num_prefilled = sum(n for n, _, _ in port.steps), sum(n for _, n, _ in port.steps)
        in_steps_s = sum(s for _, _, s in port.steps)
        extra_s = sum(s - curve.get(width, 0.0) for width, prefilled, s in port.steps if prefilled)
        parts = {
            "decode": in_steps_s - extra_s,
            "prefill": extra_s,
            "load": port.load_s,
            "controller": self.seconds - in_steps_s - port.load_s,
        }
        full_steps_s = [s for width, prefilled, s in port.steps if width >= port.slots and not prefilled]
        return ModeResult(
            mode=self.name,
            steps=self.steps,
            tokens=self.work.tokens,
            delivered_tokens=self.delivered.tokens,
            seconds=self.seconds,
            tokens_per_s=rate,
            over_sync=rate / rates["sync"] if "sync" in rates else None,
            over_control=rate / rates[CONTROL] if CONTROL in rates else None,
            occupancy=self.decoded / max(1, num_rows),
            of_bound=bound_s / self.seconds,
            of_step_bound=step_bound_s / self.seconds,
            full_step_ms=1000 * statistics.fmean(full_steps_s) if full_steps_s else None,
            reprefilled_frac=max(0, num_prefilled - self.prompt_tokens) / max(1, self.work.tokens),
            mean_staleness=sum(self.staleness) / max(1, len(self.staleness)),
            shares={name: part_s / self.seconds for name, part_s in parts.items()},
            rounds_tokens_per_s=tuple(self.rounds),
        )

    @property
    def work(self) -> Work:
        return self.delivered + self.opened

    def _open_work(self) -> Work:
        """Return the tokens of open groups that the controller has received."""
        groups, prompts = self._controller.scheduler.groups(), self.port.prompt_tokens
        return Work.of((prompts[g.group_id], t.num_tokens) for g in groups for t in g.members if t.num_tokens)

    def _publish_next(self) -> None:
        self._version += 1
        self._controller.publish(self._tensors, PolicyVersion(self.name, self._version))


def sides_of(recipe: RolloutSettings, modes: Sequence[str]) -> dict[str, RolloutSettings]:
    """Return the settings of each mode and of the control, by name. The recipe's own mode has the recipe's settings.
    The other modes have default settings, with one exception: if the recipe's `on_new_version` is `resume` or `keep`,
    then `partial` and `async` use this value."""
    known: tuple[Mode, ...] = ("sync", "partial", "async")
    unknown = [mode for mode in modes if mode not in known]
    if unknown or not modes:
        raise UserError(
            f"--modes: got {', '.join(modes) or 'none'}, allowed are {', '.join(known)}, with commas between"
        )
    shape = {"batch_groups": recipe.batch_groups, "group_size": recipe.group_size}
    own = recipe.model_dump(exclude_unset=True) | shape
    switch = {"on_new_version": recipe.on_new_version} if recipe.on_new_version in ("resume", "keep") else {}
    found: dict[str, RolloutSettings] = {
        mode: RolloutSettings.model_validate({"mode": mode, **shape, **(switch if mode != "sync" else {})})
        for mode in known
        if mode in modes
    }
    if recipe.mode in found:
        found[recipe.mode] = RolloutSettings.model_validate(own | {"mode": recipe.mode})
    if "sync" in found and "partial" in found:
        open_groups = found["partial"].rules().max_outstanding(found["partial"].rules().overprovision)
        if math.isfinite(open_groups):
            found[CONTROL] = RolloutSettings(batch_groups=int(open_groups), group_size=recipe.group_size)
    return found


def measure(
    sides: Sequence[ModeBench],
    lengths: ScriptedLengths,
    clock: str,
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    alone: EngineAlone | None = None,
    full_steps: Callable[[], list[tuple[int, float]]] = list,
) -> BenchResult:
    """Run the modes alternately until each mode has delivered `steps` batches; return the results.

    `alone`: the engine that measures the bound; it runs before each round of batches. `full_steps`: measures full
    decode steps for the bound of decode steps, and returns (mean position, seconds) of each. Without `alone` and
    `full_steps`, both bounds assume that a full step at any position takes the mean time of the modes' full steps."""
    points: list[tuple[int, float]] = []
    gc.collect()
    gc.freeze()  # as in a run: a full collection took as long as half a batch
    try:
        for number in range(warm_up + steps):
            is_counted = number >= warm_up
            found = full_steps()
            points += found if is_counted else []
            if alone is not None:
                alone.run(sides[0].batch_size * round(lengths.mean), is_counted=is_counted)
            for side in sides:
                side.step(is_counted=is_counted)
    finally:
        gc.unfreeze()
    measured = [step for side in sides for step in side.port.steps]
    plain: dict[int, list[float]] = {}
    for width, prefilled, seconds in measured:
        if width and not prefilled:
            plain.setdefault(width, []).append(seconds)
    curve = {width: sum(times) / len(times) for width, times in sorted(plain.items())}
    per_position_s, base_s = 0.0, curve[max(curve)]
    if points:
        per_position_s, base_s = statistics.linear_regression(*zip(*points, strict=True))
    with_prefill = [(w, n, s) for w, n, s in measured if n and w in curve]
    prefilled = sum(n for _, n, _ in with_prefill)
    prefill_s = max(0.0, sum(s - curve[w] for w, _, s in with_prefill)) / max(1, prefilled)
    work = sum((side.work for side in sides), Work())
    rates = {side.name: side.work.tokens / side.seconds for side in sides}

    def decode_s(work: Work) -> float:
        return (work.tokens * base_s + work.positions * per_position_s) / max(curve)

    def step_bound_s(side: ModeBench) -> float:
        return decode_s(side.work) + side.prompt_tokens * prefill_s

    def bound_s(side: ModeBench) -> float:
        """Return the time that the engine alone would need to generate the tokens that this mode generated. The engine
        alone generated other tokens, so its time is converted to the number and mean position of the mode's tokens."""
        if alone is None:
            return step_bound_s(side)
        scale = side.work.tokens / alone.work.tokens
        return decode_s(side.work) + scale * (alone.seconds - decode_s(alone.work))

    sync = next((side for side in sides if side.name == "sync"), None)
    return BenchResult(
        clock=clock,
        slots=max(curve),
        mean_tokens=lengths.mean,
        longest_tokens=lengths.longest,
        between=lengths.between,
        within=lengths.within,
        full_step_ms=1000 * decode_s(work) * max(curve) / max(1, work.tokens),
        full_step_ms_per_1k=1e6 * per_position_s,
        step_ms_by_width={width: 1000 * s for width, s in curve.items()},
        prefill_ms_per_token=1000 * prefill_s,
        bound_over_sync=sync.seconds / bound_s(sync) if sync else None,
        modes=tuple(side.result(bound_s(side), step_bound_s(side), rates, curve) for side in sides),
    )


def bench_engine(
    engine: Callable[[], Engine],
    settings: Mapping[str, RolloutSettings],
    prompts: Callable[[], PromptSource],
    lengths: ScriptedLengths,
    tensors: Mapping[str, Any],
    *,
    on_cpu: bool,
    steps: int,
    warm_up: int = WARM_UP_STEPS,
) -> BenchResult:
    """Measure the modes on real engines in this process. `engine`: builds the engine of one mode."""
    clock = time.process_time if on_cpu else time.perf_counter
    sides = [
        ModeBench(name, s, TimedTransport(engine(), lengths, clock), prompts(), tensors) for name, s in settings.items()
    ]
    group_size = next(iter(settings.values())).group_size
    alone, full = EngineAlone(engine(), lengths.length, prompts(), group_size, clock), engine()
    return measure(
        sides,
        lengths,
        "processor" if on_cpu else "wall",
        steps,
        warm_up,
        alone,
        lambda: full_steps_of(full, lengths.longest, clock),
    )


def bench_flat(settings: Mapping[str, RolloutSettings], lengths: ScriptedLengths, *, steps: int) -> BenchResult:
    """Measure the modes with a fake engine that has a slot for every trajectory. The clock counts decode steps, so the
    time of a step does not depend on the number of rows. A GPU with small batches of a large model is similar."""
    slots = -(-max(_most_in_flight(s.rules()) for s in settings.values()) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    engine_settings = EngineSettings(slots=slots, max_context_tokens=lengths.longest + 8)
    sides = []
    for name, s in settings.items():
        engine = FakeEngine(engine_settings, PolicyVersion("flat", 0), lambda g, s: 10**9)
        sides.append(ModeBench(name, s, FlatTransport(engine, lengths), NumberedPrompts(), {}))
    return measure(sides, lengths, "steps", steps)


def _most_in_flight(rules: Rules) -> int:
    if rules.max_concurrency is not None:
        return rules.max_concurrency
    groups = rules.max_outstanding(rules.overprovision) if rules.mode == "partial" else rules.batch_groups
    return int(groups) * rules.group_size


class NumberedPrompts:
    """A source of prompts without content."""

    def __init__(self) -> None:
        self.position: dict[str, int] = {}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        return Prompt("", "", ()), (1,)
