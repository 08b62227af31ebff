"""The simulated engine: its arithmetic by hand, and against every step simulated one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.simulator.clock import VirtualClock
from baton.simulator.counted_tokens import CountedTokens, counted_segment
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import EngineSpec
from baton.simulator.timing import FlatSpeed
from baton.types import FromWorker, Lease, Report, SamplingParams, Trajectory


@dataclass
class Heard:
    """Receives and keeps the reports of an engine."""

    clock: VirtualClock
    said: list[tuple[float, int, str, list[tuple[int, int]]]] = field(default_factory=list)

    def on_reports(self, reports: list[FromWorker]) -> None:
        for report in reports:
            assert isinstance(report, Report), "no lease is refused here"
            end = "put_down" if report.is_aborted else "finished" if report.finish_reason else ""
            segments = [(segment.policy_version, len(segment.token_ids)) for segment in report.segments]
            self.said.append((self.clock.now_s, report.lease_id, end, segments))


def engine(speed: FlatSpeed, slots: int = 4, **options: object) -> tuple[VirtualClock, SimEngine, Heard]:
    clock = VirtualClock()
    of_spec = {key: options.pop(key) for key in ("kv_tokens", "class_cost") if key in options}
    heard = Heard(clock)
    made = SimEngine(clock, EngineSpec("e", slots, speed, **of_spec), heard.on_reports, **options)
    made.version = 0
    return clock, made, heard


def row(lease: int, length: int, prompt: int = 10, tokens: int = 0, group: int | None = None) -> Lease:
    trajectory = Trajectory(lease if group is None else group, 0, CountedTokens(range(prompt)))
    if tokens:
        trajectory = trajectory.extended((counted_segment(0, tokens, 0),))
    return Lease(lease, trajectory, SamplingParams(length), 0, 0, is_exact=False)


def run(clock: VirtualClock) -> None:
    while clock.fire():
        pass


def test_one_trajectory_takes_its_prefill_and_its_steps() -> None:
    clock, made, heard = engine(FlatSpeed(base_s=0.1, token_s=0.01))
    made.submit(row(1, 20))
    run(clock)
    assert heard.said == [(pytest.approx(10 * 0.01 + 20 * 0.1), 1, "finished", [(0, 20)])]
    assert made.busy.prefill_s == pytest.approx(0.1)
    assert made.busy.decode_s == pytest.approx(2.0)


def test_a_growing_context_is_summed_in_closed_form() -> None:
    """0.001 s per token of context: with a prompt of 10 the k-th step takes (10 + k) ms, k from 0."""
    clock, made, heard = engine(FlatSpeed(base_s=0.0, context_s=0.001))
    made.submit(row(1, 5))
    run(clock)
    assert heard.said[0][0] == pytest.approx((10 + 11 + 12 + 13 + 14) * 0.001)


@pytest.mark.parametrize(("class_cost", "positions"), [(None, 60), (0, 60), (15, 75), (1000, 100), (math.inf, 100)])
def test_rows_of_a_fixed_cache_read_up_to_the_longest_of_their_length_class(class_cost, positions) -> None:
    """Contexts of 10 and 50: two classes read 60 positions and cost one more class, a single one reads 100."""
    clock, made, heard = engine(FlatSpeed(base_s=0.0, context_s=0.001), class_cost=class_cost)
    made.submit(row(1, 1, prompt=10))
    made.submit(row(2, 1, prompt=50))
    run(clock)
    assert heard.said[0][0] == pytest.approx(positions * 0.001)


def test_what_arrives_in_the_middle_of_a_step_begins_after_it() -> None:
    clock, made, heard = engine(FlatSpeed(base_s=1.0))
    made.submit(row(1, 10))
    clock.at(2.5, made.submit, row(2, 3))
    run(clock)
    assert [(at_s, lease) for at_s, lease, *_ in heard.said] == [(pytest.approx(6.0), 2), (pytest.approx(10.0), 1)]


def test_a_group_shares_the_prefill_of_its_prompt_and_a_resumed_member_does_not() -> None:
    clock, made, _ = engine(FlatSpeed(base_s=1.0, token_s=0.1))
    for lease in (1, 2, 3):
        made.submit(row(lease, 5, group=7))
    made.submit(row(4, 9, tokens=4, group=7))
    run(clock)
    assert made.busy.prefilled == 10 + 14
    assert made.busy.reprefilled == 4


def test_what_is_admitted_together_shares_the_fixed_time_of_a_prefill() -> None:
    """Two at once: 0.5 s, and 0.1 s for each prompt. One that comes later: 0.5 s more, for which the others wait."""
    clock, made, heard = engine(FlatSpeed(base_s=0.1, token_s=0.01, prefill_overhead_s=0.5))
    made.submit(row(1, 20))
    made.submit(row(2, 20))
    run(clock)
    assert heard.said[0][0] == pytest.approx(0.5 + 2 * 0.1 + 20 * 0.1)
    made.submit(row(3, 5))
    run(clock)
    assert made.busy.prefill_s == pytest.approx(2 * 0.5 + 3 * 0.1)


def test_an_engine_that_is_stopped_twice_generates_nothing_between_the_stops() -> None:
    """A worker that hangs, and then crashes."""
    clock, made, _ = engine(FlatSpeed(base_s=1.0))
    made.submit(row(1, 10))
    clock.wait(3.5)
    made.stop()
    clock.wait(5.0)
    made.stop()
    assert made.unreported() == made.decoded() == made.busy.decoded == 3


def test_an_abort_is_answered_after_the_current_step_with_all_that_there_is() -> None:
    clock, made, heard = engine(FlatSpeed(base_s=1.0))
    made.submit(row(1, 10))
    clock.at(3.5, made.abort, 1)
    run(clock)
    assert heard.said == [(pytest.approx(4.0), 1, "put_down", [(0, 4)])]
    assert not made.leases


def test_a_version_begins_between_two_tokens_and_each_token_knows_its_own() -> None:
    clock, made, heard = engine(FlatSpeed(base_s=1.0, token_s=0.1))
    made.submit(row(1, 10))
    clock.at(3.5, lambda: made.switch(1, resumes=True))
    run(clock)
    assert [(end, segments) for *_, end, segments in heard.said] == [("", [(0, 3)]), ("finished", [(1, 7)])]
    assert made.busy.prefilled == 10 + 13


def test_a_full_kv_cache_makes_the_youngest_wait_and_prefill_again() -> None:
    """Room for 40 tokens: two of 10 + 15 do not fit; the second is put back and comes after the first."""
    clock, made, heard = engine(FlatSpeed(base_s=1.0), kv_tokens=40.0)
    made.submit(row(1, 15))
    made.submit(row(2, 15))
    run(clock)
    assert [lease for _, lease, *_ in heard.said] == [1, 2]
    assert made.busy.preemptions == 1
    assert made.busy.reprefilled > 0
    assert sum(n for *_, segments in heard.said for _, n in segments) == 30


def test_standing_still_costs_the_time_and_no_token() -> None:
    clock, made, heard = engine(FlatSpeed(base_s=1.0))
    made.submit(row(1, 4))
    clock.at(2.0, made.stop)
    clock.at(7.0, made.go_on)
    run(clock)
    assert heard.said == [(pytest.approx(9.0), 1, "finished", [(0, 4)])]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    base=st.floats(0.01, 1),
    per_row=st.floats(0, 0.1),
    per_token=st.floats(0, 0.01),
)
def test_stretches_take_as_long_as_their_steps(
    lengths: list[int], slots: int, base: float, per_row: float, per_token: float
) -> None:
    speed = FlatSpeed(base, per_row, per_token)
    clock, made, heard = engine(speed, slots)
    for lease, length in enumerate(lengths):
        made.submit(row(lease, length))
    run(clock)
    waiting, running, now_s, ends = list(enumerate(lengths)), {}, 0.0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            lease, length = waiting.pop(0)
            running[lease] = [0, length]
        context = sum(10 + done for done, _ in running.values()) / len(running)
        now_s += speed.step_s(len(running), context)
        for lease in list(running):
            running[lease][0] += 1
            if running[lease][0] == running[lease][1]:
                ends[lease] = now_s
                del running[lease]
    assert {lease: at_s for at_s, lease, *_ in heard.said} == pytest.approx(ends, rel=1e-6)
