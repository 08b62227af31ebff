"""The record of each train step of a simulated run, and a summary with the figures that a live run reports."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.records.predictions import num_warm
from baton.rollout.scheduler_state import ACCOUNTS, Ledger, StepCounts
from baton.rollout.settings import Rules
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.transport import EngineTime

STEADY_STEPS = 5
"""Steady-state figures need at least this number of train steps after the steps that fill the pipeline. The result of a
shorter run has a note."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One train step. Steps that a restart of the controller interrupted are not recorded."""

    wait_s: float
    """Time from the request for the batch until the batch was complete."""
    begin_s: float
    end_s: float
    tokens: int
    """Number of prompt and response tokens of the batch."""
    counts: StepCounts
    """Values that the scheduler has counted since the previous batch."""
    staleness: dict[int, int]
    """Staleness → number of tokens of the batch."""

    @property
    def train_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(slots=True)
class RunRecord(Ledger):
    """Record of one run. Token counts include the work before each restart of the controller."""

    steps: list[SimulatedStep] = field(default_factory=list)
    seconds: float = 0.0
    engines: list[tuple[EngineSpec, EngineTime]] = field(default_factory=list)
    """The engines, including those that have ended, and how they used their time."""
    carried: int = 0
    """Number of tokens in open groups at the end of the run."""
    unreported: int = 0
    """Number of tokens that workers generated but did not report before they ended."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Name of a fault, or of a reaction to a fault → how often it occurred."""

    def add(self, ledger: Ledger) -> None:
        """Add the ledger of a controller that has stopped, except the number of generated tokens, which
        `Simulation.run` computes at the end."""
        for name in ACCOUNTS[1:]:
            setattr(self, name, getattr(self, name) + getattr(ledger, name))
        self.lost += ledger.lost


class Shares(msgspec.Struct, frozen=True):
    """How one kind of engine used its time, in shares of the run's time."""

    name: str
    num: int
    gpus: int
    """Total number of GPUs of these engines."""
    decode: float
    prefill: float
    load: float
    idle: float
    occupancy: float
    """Share of the time in which a slot decoded a trajectory; mean over all slots."""
    tokens_per_s: float
    preemptions: int


class Result(msgspec.Struct, frozen=True):
    """Results of one simulated run. Times are in seconds. Token counts exclude prompts unless stated otherwise."""

    mode: str
    steps: int
    seconds: float
    warm_steps: int
    """Number of train steps at the start that steady-state figures exclude."""
    step_s: float
    """Mean time from one version to the next."""
    step_s_spread: float
    """Standard deviation, over train steps, of the time from one version to the next."""
    wait_s: float
    """Mean time per train step in which the trainer waits for its batch."""
    generate_s: float
    """Mean time per train step in which at least one trajectory runs."""
    train_s: float
    other_s: float
    """Mean time from the end of a train step until the next batch is requested. This time includes the publication of
    the new version."""
    trained_tokens_per_s: float
    """Number of prompt and response tokens trained per second. The planner calls this throughput."""
    generated_tokens_per_s: float
    trajectories_per_s: float
    trainer_busy: float
    """Share of the steady state in which the trainer trains."""
    rollout_occupancy: float
    """Share of the time in which a slot had a lease; mean over all slots. Times in which no trajectory ran are
    excluded."""
    engines: list[Shares]
    """How each kind of engine used its time. Engines of the same shape are one entry."""
    staleness: dict[int, float]
    """Staleness → share of the batches' tokens."""
    mean_staleness: float
    masked_share: float
    """Share of the batches' tokens that were masked as stale."""
    carried_groups: float
    """Mean number of open groups when a batch is delivered."""
    carry_age: float
    """Mean number of versions from the opening of a group to the delivery of its batch."""
    reprefilled_share: float
    """Number of tokens prefilled again after an abort, divided by the number of generated tokens."""
    tokens: dict[str, int]
    """Number of tokens for each of the keys generated, trained, masked, filtered, dropped, carried, unreported and
    `lost: CAUSE`.
    """
    price: float
    price_per_million_tokens: float
    """Price of 10⁶ trained tokens in the steady state, in `currency`."""
    currency: str
    outcomes: dict[str, int]
    """Name of a fault, or of a reaction to a fault → how often it occurred."""
    notes: list[str]
    """Assumptions and remarks, one sentence each."""


def summarise(setting: Setting, record: RunRecord, window: tuple[int, int] | None = None) -> Result:
    """Summarise the record of a run. `window`: the first train step of the steady state, counted from 0, and the step
    after its last; by default, all steps except the first `num_warm` and those that fill the pipeline."""
    rules, done = setting.rules, record.steps
    warm, end = window or (min(len(done) - 1, max(num_warm(len(done)), first_full(rules))), len(done))
    steady = done[warm:end]
    begin_s = done[warm - 1].end_s if warm else 0.0
    span_s = max(1e-9, steady[-1].end_s - begin_s)
    ends = [begin_s, *(step.end_s for step in steady)]
    each = [after - before for before, after in itertools.pairwise(ends)]
    size = rules.batch_groups * rules.group_size
    wait_s, train_s = _mean([s.wait_s for s in steady]), _mean([s.train_s for s in steady])
    by_staleness = sum((Counter(s.staleness) for s in steady), Counter[int]())
    in_batches = max(1, by_staleness.total())
    staleness = {lag: by_staleness[lag] / in_batches for lag in sorted(by_staleness)}
    slot_s, generated = sum(s.counts.slot_s for s in steady), sum(s.counts.generated_tokens for s in steady)
    trained = sum(s.tokens for s in steady)
    price_per_s = setting.price_per_h / 3600
    return Result(
        mode=rules.mode,
        steps=len(done),
        seconds=record.seconds,
        warm_steps=warm,
        step_s=span_s / len(steady),
        step_s_spread=statistics.pstdev(each),
        wait_s=wait_s,
        generate_s=slot_s / setting.slots / len(steady),
        train_s=train_s,
        other_s=span_s / len(steady) - wait_s - train_s,
        trained_tokens_per_s=trained / span_s,
        generated_tokens_per_s=generated / span_s,
        trajectories_per_s=size * len(steady) / span_s,
        trainer_busy=sum(s.train_s for s in steady) / span_s,
        rollout_occupancy=sum(s.counts.busy_slot_s for s in steady) / max(1e-9, slot_s),
        engines=_engines(record),
        staleness=staleness,
        mean_staleness=sum(lag * share for lag, share in staleness.items()),
        masked_share=sum(s.counts.masked_tokens for s in steady) / in_batches,
        carried_groups=_mean([s.counts.carried_groups for s in steady]),
        carry_age=_mean([_mean(s.counts.ages) for s in steady]),
        reprefilled_share=sum(s.counts.reprefilled_tokens for s in steady) / max(1, generated),
        tokens={
            **{name: getattr(record, name) for name in (*ACCOUNTS, "carried", "unreported")},
            **{f"lost: {cause}": count for cause, count in sorted(record.lost.items())},
        },
        price=price_per_s * record.seconds,
        price_per_million_tokens=price_per_s * span_s / max(1, trained) * 1e6,
        currency=setting.currency,
        outcomes=dict(sorted(record.outcomes.items())),
        notes=[*setting.notes, *_too_few(len(done), rules)],
    )


def _too_few(num_steps: int, rules: Rules) -> list[str]:
    """Return a note if the run is too short for steady-state figures, otherwise an empty list."""
    first = first_full(rules)
    if num_steps >= first + STEADY_STEPS:
        return []
    return [
        f"{num_steps} train steps are too few for steady-state figures, because the first {first} fill the pipeline; "
        f"use --steps {first + STEADY_STEPS} or more"
    ]


def first_full(rules: Rules) -> int:
    """Return the number of train steps at the start of a run that fill the pipeline: in these steps, staleness may
    still be below its steady-state value."""
    return rules.max_staleness + 1 if rules.mode == "async" else 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _engines(record: RunRecord) -> list[Shares]:
    """Return how each kind of engine used its time. Engines are of one kind if their names differ only in a number."""
    kinds: dict[str, list[tuple[EngineSpec, EngineTime]]] = {}
    for spec, time in record.engines:
        kinds.setdefault(spec.name.rstrip("0123456789").rstrip("#- "), []).append((spec, time))
    found = []
    for kind, members in kinds.items():
        specs = {spec.name: spec for spec, _ in members}.values()  # a worker and its replacements are one engine
        busy = EngineTime(*(sum(getattr(time, key) for _, time in members) for key in EngineTime.__slots__))
        span_s = max(1e-9, record.seconds * len(specs))
        shares = [getattr(busy, key) / span_s for key in ("decode_s", "prefill_s", "load_s")]
        found.append(
            Shares(
                name=kind,
                num=len(specs),
                gpus=sum(spec.num_gpus for spec in specs),
                decode=shares[0],
                prefill=shares[1],
                load=shares[2],
                idle=max(0.0, 1 - sum(shares)),
                occupancy=busy.row_s * len(specs) / (span_s * sum(spec.slots for spec in specs)),
                tokens_per_s=busy.decoded / max(1e-9, record.seconds),
                preemptions=busy.preemptions,
            )
        )
    return found
