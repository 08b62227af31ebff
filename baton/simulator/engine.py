"""An engine in virtual time: continuous batching with a number of slots and a KV cache of limited size.

Decode steps are not simulated one by one. Between two events, only the context lengths change: each grows by one token
per step. Each step therefore takes `slope` longer than the step before. If the first step takes `step`, k steps take

    D(k) = k · step + slope · k (k − 1) / 2

Requests take effect between two steps, as in a real engine. When a sequence is admitted, the engine prefills it while
all other sequences wait. A prompt is prefilled once for all members of its group in the engine. If the KV cache is
full, the youngest sequence is evicted and prefilled again later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.cost.generate import scanned_tokens
from baton.records.trace import Tracer
from baton.rollout.engine import OWN_NOISE
from baton.simulator.clock import VirtualClock
from baton.simulator.counted_tokens import counted_segment
from baton.simulator.inputs import EngineSpec
from baton.simulator.timing import steps_within
from baton.simulator.transport import EngineTime
from baton.types import FinishReason, FromWorker, Lease, Report, Retry

WATERMARK = 0.01
"""A sequence is admitted only if this share of the KV cache stays free, as in vLLM."""
CLASS_ENDS = 32
"""A decode step sorts its rows by context length and divides them into length classes. The search for the classes with
the least time considers at most this number of evenly spaced places at which one class can end and the next begin."""
_CLOSE = 1e-9
"""Times that differ by at most this number of seconds count as equal, because of rounding errors."""


@dataclass(slots=True, eq=False)
class SimulatedLease:
    """A lease in an engine."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    tokens: int
    """Number of response tokens at the last call to `_count`."""
    length: int
    """Number of response tokens of the complete trajectory."""
    version: int
    is_exact: bool
    origin: int = 0
    """Origin of the tokens that the engine generates."""
    grown: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens) of segments that are not reported yet."""
    end_step: int = -1
    """Number of the engine step that completes the trajectory; -1 while the lease waits for a slot."""
    born: int = 0
    """Sequence number of the lease's admission to a slot."""
    lane: int = 0
    since_s: float = 0.0
    traced: dict[int, int] = field(default_factory=dict)
    """Version → number of tokens generated since the admission, for the trace."""


class SimEngine:
    """One engine with its slots, queue and KV cache."""

    def __init__(
        self,
        clock: VirtualClock,
        spec: EngineSpec,
        on_reports: Callable[[list[FromWorker]], None],
        *,
        report_every_s: float = math.inf,
        shares_prefill: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        """`on_reports`: receives the engine's reports; may call the engine's submit, abort and switch."""
        self.name, self.slots, self.busy = spec.name, spec.slots, EngineTime()
        self.version: int | None = None
        self.wrong = 0
        """0 while the engine generates correct tokens. Otherwise, the tokens of later leases have this number as their
        origin, and therefore differ from correct tokens. Engines of the kinds in `OWN_NOISE` ignore this number."""
        self._has_own_noise = spec.kind in OWN_NOISE
        self._clock, self._speed, self._on_reports, self._tracer = clock, spec.speed, on_reports, tracer
        self._kv_tokens, self._report_every_s = spec.kv_tokens, report_every_s
        self._shares_prefill, self._class_cost = shares_prefill, spec.class_cost
        self._heap: list[tuple[int, int, SimulatedLease]] = []
        self._waiting: deque[SimulatedLease] = deque()
        self._rows: dict[int, SimulatedLease] = {}
        """All leases in the engine, running or waiting."""
        self._here: Counter[int] = Counter()
        """Group id → number of running rows."""
        self._lanes: list[int] = list(range(spec.slots))
        self._aborting: dict[int, None] = {}
        self._dropping: dict[int, None] = {}
        self._reports: list[FromWorker] = []
        """Reports that have not been sent yet."""
        self._switch: tuple[int, bool, float] | None = None
        self._width = self._context = self._step = self._born = 0
        self._planned, self._step_s, self._slope_s, self._since_s = 0, 0.0, 0.0, 0.0
        """`_since_s`: end of the last whole step or, if a prefill followed this step, end of the prefill."""
        self._wake = 0
        """Sequence number of the last scheduled wake. Earlier wakes are ignored."""
        self._report_s, self._slowness = math.inf, 1.0
        self._is_between = self._is_stopped = self._has_prefilled = False

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def leases(self) -> Collection[int]:
        return self._rows.keys()

    def submit(self, lease: Lease) -> None:
        known = lease.trajectory
        row = self._rows[lease.lease_id] = SimulatedLease(
            lease.lease_id,
            known.group_id,
            known.sample_index,
            len(known.prompt_ids),
            known.num_tokens,
            lease.sampling.max_new_tokens,
            lease.version,
            lease.is_exact,
            lease.lease_id + 1 if self._has_own_noise else self.wrong,
        )
        self._waiting.append(row)
        if not self._width or len(self._waiting) + self._width <= self.slots:
            self._poke()

    def abort(self, lease: int) -> None:
        """Abort a lease, and report its tokens. Does nothing if the lease is not in the engine."""
        if lease in self._rows:
            self._aborting[lease] = None
            self._poke()

    def drop(self, lease: int) -> None:
        if lease in self._rows:
            self._dropping[lease] = None
            self._poke()

    def switch(self, version: int, *, resumes: bool, load_s: float = 0.0) -> None:
        """Load another version after the current step. With `resumes`, running trajectories continue and are prefilled
        again."""
        self._switch = (version, resumes, load_s)
        self._poke()

    def slow(self, factor: float) -> None:
        if factor != self._slowness:
            self._slowness = factor
            self._poke()

    def stop(self) -> None:
        """Stop, and discard the step that is being computed. `go_on` continues; without `go_on`, the stop is
        permanent."""
        self._settle(self._whole_steps())
        self._is_stopped, self._wake = True, self._wake + 1

    def pause(self) -> None:
        """Report all tokens, and stop until `go_on`."""
        self.flush()
        self.stop()
        for _, _, row in self._heap:
            self._trace(row, "abort")
            row.since_s = math.inf

    def abandon(self) -> None:
        """Discard the running trajectories after a permanent `stop`. The trajectories' unreported tokens are lost."""
        for _, _, row in self._heap if self._tracer is not None else ():
            self._count(row)
            self._leave(row, "lost")

    def go_on(self) -> None:
        self._is_stopped = False
        self._since_s = max(self._since_s, self._clock.now_s)
        for _, _, row in self._heap:
            row.since_s = min(row.since_s, self._since_s)
        self._between()

    def flush(self) -> None:
        """Report the tokens of all whole steps that have been completed."""
        if self._is_stopped:
            return
        self._settle(self._whole_steps())
        self._report_all()
        self._send_reports()

    def decoded(self) -> int:
        return self.busy.decoded + self._width * self._whole_steps()

    def unreported(self) -> int:
        """Return the number of tokens that have been generated but not reported."""
        steps = self._whole_steps()
        rows = self._rows.values()
        return sum((row.end_step >= 0) * (self._fresh(row) + steps) + sum(n for _, n in row.grown) for row in rows)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _duration_s(self, steps: float) -> float:
        return steps * self._step_s + self._slope_s * steps * (steps - 1) / 2

    def _whole_steps(self) -> int:
        """Return the number of steps completed since `_since_s`, at most `_planned`; 0 while the engine is stopped."""
        elapsed = self._clock.now_s - self._since_s
        if elapsed <= 0 or not self._width or self._is_stopped:
            return 0
        return min(self._planned, int(steps_within(elapsed, self._step_s, self._slope_s) + _CLOSE))

    def _poke(self) -> None:
        """Schedule a wake at the end of the current step, so that new requests are handled then."""
        if self._is_between or self._is_stopped:
            return
        now_s = self._clock.now_s
        if not self._width:
            self._set_wake(max(now_s, self._since_s), 0)
            return
        done = self._whole_steps()
        if now_s <= self._since_s + self._duration_s(done) + _CLOSE:
            self._set_wake(max(now_s, self._since_s + self._duration_s(done)), done)
        elif done + 1 < self._planned:  # otherwise the engine wakes at the end of this step anyway
            self._set_wake(max(now_s, self._since_s + self._duration_s(done + 1)), done + 1)

    def _set_wake(self, at_s: float, steps: int) -> None:
        self._planned = steps
        self._wake += 1
        self._clock.at(at_s, self._woken, self._wake)

    def _woken(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._settle(self._planned)
        self._between()

    def _settle(self, steps: int) -> None:
        """Add the time and the tokens of completed steps to the counts."""
        if not steps:
            return
        seconds, width = self._duration_s(steps), self._width
        busy = self.busy
        busy.decode_s += seconds
        busy.row_s += seconds * width
        busy.decoded += steps * width
        self._since_s += seconds
        self._step += steps
        self._context += steps * width
        self._planned -= steps

    # ---- between two steps -------------------------------------------------------------------------------------------

    def _between(self) -> None:
        self._is_between = True
        self._since_s = max(self._since_s, self._clock.now_s)
        self._end_complete()
        if self._aborting or self._dropping:
            self._end_unwanted()
        if self._switch is not None:
            self._exchange()
        if self._clock.now_s >= self._report_s:
            self._report_all()
        self._send_reports()
        self._is_between = False
        if self._aborting or self._dropping or self._switch is not None:
            self._between()
            return
        self._preempt()
        self._admit()
        self._plan()

    def _end_complete(self) -> None:
        heap, step = self._heap, self._step
        while heap and heap[0][0] <= step:
            row = heapq.heappop(heap)[2]
            self._count(row)
            self._leave(row, "finish")
            del self._rows[row.lease]
            self._report(row, FinishReason.LENGTH)

    def _end_unwanted(self) -> None:
        gone = set()
        for lease in (*self._aborting, *self._dropping):
            row = self._rows.pop(lease, None)
            if row is None:
                continue
            gone.add(lease)
            if row.end_step >= 0:
                self._count(row)
                self._leave(row)
            self._report(row, is_aborted=True)
        self._aborting.clear()
        self._dropping.clear()
        self._heap = [item for item in self._heap if item[2].lease not in gone]
        heapq.heapify(self._heap)
        if self._waiting:
            self._waiting = deque(row for row in self._waiting if row.lease not in gone)

    def _exchange(self) -> None:
        assert self._switch is not None, "no switch was requested"
        version, resumes, load_s = self._switch
        self._switch = None
        old = (row.lease for row in self._rows.values() if row.is_exact and row.version != version)
        self._aborting |= dict.fromkeys(old)
        if self._aborting:
            self._end_unwanted()
        self._report_all()
        if resumes:
            for item in sorted(self._heap, key=lambda item: item[2].born, reverse=True):
                self._put_back(item[2])
            self._heap = []
        self.version = version
        self._since_s += load_s
        self.busy.load_s += load_s

    def _report_all(self) -> None:
        for _, _, row in sorted(self._heap, key=lambda item: item[2].born):
            self._count(row)
            if row.grown:
                self._report(row)
        self._report_s = self._clock.now_s + self._report_every_s

    def _report(self, row: SimulatedLease, reason: FinishReason | None = None, *, is_aborted: bool = False) -> None:
        """Add a report of the tokens that are not reported yet. A dropped lease is not reported."""
        offset = at = row.tokens - sum(count for _, count in row.grown)
        segments = []
        for version, count in row.grown:
            segments.append(counted_segment(at, count, version, row.origin))
            at += count
        row.grown = []
        if row.lease not in self._dropping:
            self._reports.append(Report(row.lease, offset, tuple(segments), reason, is_aborted))

    def _send_reports(self) -> None:
        reports, self._reports = self._reports, []
        if reports:
            self._on_reports(reports)

    def _fresh(self, row: SimulatedLease) -> int:
        return row.length - (row.end_step - self._step) - row.tokens

    def _count(self, row: SimulatedLease) -> None:
        """Add the newly generated tokens to the row, with the version that the engine serves."""
        fresh = self._fresh(row)
        if fresh > 0:
            assert self.version is not None, "an engine without a version generates"
            if self._tracer is not None:
                row.traced[self.version] = row.traced.get(self.version, 0) + fresh
            row.tokens += fresh
            row.grown.append((self.version, fresh))

    def _leave(self, row: SimulatedLease, ended: str = "abort") -> None:
        self._trace(row, ended)
        self._width -= 1
        self._context -= row.prompt + row.tokens
        row.end_step = -1
        self._here[row.group_id] -= 1
        if not self._here[row.group_id]:
            del self._here[row.group_id]
        self._lanes.append(row.lane)

    def _trace(self, row: SimulatedLease, ended: str) -> None:
        """Write to the trace the span of a lease that leaves its slot. `ended` is `finish`, `abort` or `lost`."""
        if self._tracer is None:
            return
        versions, row.traced = row.traced, {}
        if self._since_s <= row.since_s:
            return
        facts: dict[str, Any] = {"group": row.group_id, "sample": row.sample_index, "tokens": sum(versions.values())}
        if versions:
            facts["version"] = max(versions)
        if len(versions) > 1:
            facts["versions"] = {str(version): count for version, count in versions.items()}
        self._tracer.span("generate", self.name, row.lane, row.since_s, self._since_s, **facts, ended=ended)

    def _put_back(self, row: SimulatedLease) -> None:
        self._count(row)
        self._leave(row)
        self._waiting.appendleft(row)

    def _preempt(self) -> None:
        while self._width > 1 and self._context + self._width > self._kv_tokens:
            youngest = max(self._heap, key=lambda item: item[2].born)
            self._heap.remove(youngest)
            heapq.heapify(self._heap)
            self._put_back(youngest[2])
            self.busy.preemptions += 1

    def _admit(self) -> None:
        """Move waiting rows, in order of arrival, into free slots while the KV cache has room."""
        waiting, self._has_prefilled = self._waiting, False
        while waiting and self._width < self.slots:
            row = waiting[0]
            context = row.prompt + row.tokens
            after = self._context + context + self._width + 1
            if self._width and after > self._kv_tokens * (1 - WATERMARK):
                return
            waiting.popleft()
            if self.version is None or (row.version != self.version if row.is_exact else row.version > self.version):
                del self._rows[row.lease]
                refusal = Retry(row.lease, -1 if self.version is None else self.version)
                self._on_reports([refusal])
                continue
            row.lane = self._lanes.pop()
            self._prefill(row, context)
            row.since_s = self._since_s
            self._width += 1
            self._context += context
            self._born += 1
            row.born = self._born
            row.end_step = self._step + row.length - row.tokens
            self._here[row.group_id] += 1
            heapq.heappush(self._heap, (row.end_step, row.born, row))

    def _prefill(self, row: SimulatedLease, context: int) -> None:
        seconds = self._speed.trajectory_s
        if row.tokens or not self._shares_prefill or row.group_id not in self._here:
            seconds += self._speed.prefill_s(context) + (not self._has_prefilled) * self._speed.prefill_overhead_s
            self._has_prefilled = True
            self.busy.prefilled += context
            self.busy.reprefilled += row.tokens
        seconds *= self._slowness
        if self._tracer is not None and seconds:
            facts = {"group": row.group_id, "sample": row.sample_index, "tokens": context}
            self._tracer.span("prefill", self.name, row.lane, self._since_s, self._since_s + seconds, **facts)
        self._since_s += seconds
        self.busy.prefill_s += seconds

    def _plan(self) -> None:
        """Schedule a wake at the next event: a row ends, the KV cache is full, or a report is due."""
        width = self._width
        if not width:
            if self._waiting:
                self._set_wake(self._since_s, 0)
            else:
                self._wake += 1
                self._report_s = math.inf
            return
        steps = self._heap[0][0] - self._step
        if self._context + width * (steps + 1) > self._kv_tokens and width > 1:
            steps = max(1, min(steps, int((self._kv_tokens - self._context) // width)))
        context = self._read_tokens()
        first = self._speed.step_s(width, context)
        last = self._speed.step_s(width, context + steps)
        self._step_s = first * self._slowness
        self._slope_s = (last - first) / steps * self._slowness
        if self._report_every_s < math.inf:
            steps = self._until_report(steps)
        self._set_wake(self._since_s + self._duration_s(steps), steps)

    def _read_tokens(self) -> float:
        """Return the mean number of positions that a running row reads in the next step."""
        if self._class_cost is None:
            return self._context / self._width
        contexts = sorted(self._step - row.end_step + row.prompt + row.length for _, _, row in self._heap)
        ends = np.unique(np.linspace(1, len(contexts), CLASS_ENDS).round().astype(int))
        return scanned_tokens(np.array(contexts, dtype=float)[ends - 1], ends.astype(float), self._class_cost)

    def _until_report(self, steps: int) -> int:
        """Return the number of steps until the next report, at most `steps`."""
        if self._report_s == math.inf:
            self._report_s = self._clock.now_s + self._report_every_s
        if self._since_s + self._duration_s(steps) <= self._report_s:
            return steps
        longest = max(self._step_s, self._step_s + self._slope_s * steps)
        return min(steps, max(1, math.ceil((self._report_s - self._since_s) / longest)))
