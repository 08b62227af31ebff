"""The trace: every token in one span, no two spans over each other, bounded, and in Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.main import app
from baton.records.lease_trace import LeaseTrace
from baton.records.run_directory import RunDirectory
from baton.records.trace import (
    ASIDE,
    GAP,
    Span,
    TraceWriter,
    actors_of,
    chrome_trace,
    gapless_periods,
    read_trace,
    trace_files,
)
from baton.rollout.transport import LocalTransport
from baton.run.tokenization import ResponseScorer
from baton.swarm.lease_broker import BrokerCommand, LeaseBroker, SendToWorker
from baton.swarm.lease_events import WorkerJoined
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.types import FinishReason, Lease, Report, Retry, SamplingParams, Segment, Trajectory
from tests.records.trace_cases import Collected, Ticks, assert_tiled
from tests.rollout.test_controller import MODES, Bench


def lease(number: int, version: int = 0) -> Lease:
    return Lease(number, Trajectory(number, 0, (1, 2)), SamplingParams(16), 7, version)


def report(number: int, tokens: int, *, at: int = 0, version: int = 0, **how: Any) -> Report:
    segments = (Segment((5,) * tokens, (-0.5,) * tokens, version),) if tokens else ()
    return Report(number, at, segments, **how)


# ---- leases in slots -------------------------------------------------------------------------------------------------


class Ticking(LocalTransport):
    """An engine's port on a clock of engine steps."""

    def __init__(self, tracer: Collected) -> None:
        self.clock = Ticks()
        super().__init__(None, LeaseTrace(tracer, self.clock))  # type: ignore[arg-type]

    def receive(self, timeout_s: float) -> Any:
        self.clock.now_s += 1
        return super().receive(timeout_s)


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_every_generated_token_is_in_exactly_one_span_and_lanes_are_slots(mode, values):
    tracer = Collected()
    bench = Bench(mode, Ticking(tracer), **values)
    bench.begin()
    for _ in range(8):
        bench.step()
    with bench.controller.paused():
        pass
    spans = tracer.spans
    assert sum(s.facts["tokens"] for s in spans) == bench.engine.stats.decoded_tokens
    assert {s.lane for s in spans} == set(range(values.get("max_concurrency", 8))), "as many as it has slots"
    assert_tiled(spans)
    pauses = values.get("may_pause", False)  # a pause ends within the first step after it
    for span in spans:  # one token a step: a lease had its slot for as many steps as it has tokens
        assert span.facts["tokens"] - pauses <= span.end_s - span.begin_s <= span.facts["tokens"] + 2
        assert sum(span.facts.get("versions", {"": span.facts["tokens"]}).values()) == span.facts["tokens"]
    finished = [(s.facts["group"], s.facts["sample"]) for s in spans if s.facts["ended"] == "finish"]
    assert len(finished) == len(set(finished)) >= 96
    assert ("abort" in {s.facts["ended"] for s in spans}) == (mode != "sync")
    assert any("versions" in s.facts for s in spans) == (mode == "async" and values.get("on_new_version") == "keep")


def test_an_engine_takes_what_waits_in_order_and_what_never_had_a_slot_has_no_span():
    tracer, clock = Collected(), Ticks()
    trace = LeaseTrace(tracer, clock)
    for number in range(4):
        trace.on_lease(lease(number), "engine", 2)
    clock.now_s = 3.0
    trace.on_report(report(1, 3, finish_reason=FinishReason.STOP))
    clock.now_s = 4.0
    trace.on_report(report(3, 0, is_aborted=True))
    trace.on_report(Retry(0, 9))
    clock.now_s = 6.0
    trace.on_report(report(2, 2, version=5, is_aborted=True))
    trace.on_report(report(2, 2, at=2))  # late: the lease has ended
    assert [(s.facts["group"], s.lane, s.begin_s, s.end_s) for s in tracer.spans] == [
        (1, 1, 0.0, 3.0),
        (2, 1, 3.0, 6.0),
    ]
    assert [s.facts["version"] for s in tracer.spans] == [0, 5]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["give", "grow", "finish", "abort", "refuse", "leave"]))))
def test_lanes_never_overlap_whatever_comes(events):
    tracer, clock = Collected(), Ticks()
    trace, grown, said = LeaseTrace(tracer, clock), {}, 0
    for number, what in events:
        clock.now_s += 1
        if what == "give" and number not in grown:
            trace.on_lease(lease(number), f"worker {number % 2}", 2)
            grown[number] = 0
        elif what == "leave":
            trace.left(f"worker {number % 2}")
            grown = {n: t for n, t in grown.items() if n % 2 != number % 2}
        elif number in grown and what != "give":
            tokens = 3 if what in ("grow", "finish") else 0
            how = {"finish": {"finish_reason": FinishReason.STOP}, "abort": {"is_aborted": True}}.get(what, {})
            trace.on_report(Retry(number, 1) if what == "refuse" else report(number, tokens, **how))
            said += tokens
            if what != "grow":
                del grown[number]
    for number in range(2):
        trace.left(f"worker {number}")
    assert sum(s.facts["tokens"] for s in tracer.spans) == said
    assert_tiled(tracer.spans)


# ---- a hub's workers -------------------------------------------------------------------------------------------------


def test_a_hub_traces_what_each_worker_did_and_what_was_lost_with_it():
    tracer, clock = Collected(), Ticks()
    given: dict[int, list[int]] = {0: [], 1: []}

    def execute(commands: list[BrokerCommand]) -> None:
        for command in commands:
            if isinstance(command, SendToWorker) and isinstance(command.message, Lease):
                given[command.worker].append(command.message.lease_id)

    broker = LeaseBroker(LeaseTable(LeaseRules()), lambda *_, **__: None, clock, LeaseTrace(tracer, clock))
    broker.pace.announced[3] = 1.0
    for worker in (0, 1):
        execute(broker.join(WorkerJoined(clock.now_s, worker, 2), f"node#{worker}"))
    clock.now_s = 2.0
    for worker in (0, 1):
        execute(broker.heartbeat(worker, 3, 0))
    for task in range(4):
        execute(broker.want(lease(100 + task, version=3)))
    assert [len(mine) for mine in given.values()] == [2, 2]
    first, second = given[0]
    clock.now_s = 5.0
    execute(broker.report(0, report(first, 4, version=3, finish_reason=FinishReason.STOP)))
    execute(broker.report(0, report(second, 2, version=3)))
    clock.now_s = 7.0
    execute(broker.leave(0, "unplugged"))
    clock.now_s = 9.0
    for number in given[1]:
        execute(broker.report(1, report(number, 1, version=3, finish_reason=FinishReason.STOP)))
    resumed = given[1][2:]
    for number in resumed:
        execute(broker.report(1, report(number, 6, at=2, version=3, finish_reason=FinishReason.STOP)))
    leases = [s for s in tracer.spans if s.name == "generate"]
    assert [(s.actor, s.end_s, s.facts["tokens"], s.facts["ended"]) for s in leases] == [
        ("node#0", 5.0, 4, "finish"),
        ("node#0", 7.0, 2, "lost"),
        ("node#1", 9.0, 1, "finish"),
        ("node#1", 9.0, 1, "finish"),
        ("node#1", 9.0, 6, "finish"),
    ]
    fetched = [s for s in tracer.spans if s.name == "fetch"]
    assert [(s.actor, s.lane, s.begin_s, s.end_s) for s in fetched] == [
        ("node#0", ASIDE, 1.0, 2.0),
        ("node#1", ASIDE, 1.0, 2.0),
    ]
    assert_tiled(tracer.spans)


def test_scoring_is_one_span_while_a_trajectory_waits_and_the_scorer_receives_the_full_text():
    class Judges:
        ready: int = 0
        sees_groups = scores_episodes = False
        responses: list[str] = []  # noqa: RUF012

        def submit(self, trajectories: Any, prompt: Any, responses: list[str]) -> None:
            self.responses += responses

        def collect(self, timeout_s: float = 0.0) -> Any:
            return ["judged"] * self.ready

    tracer, judges = Collected(), Judges()
    words = SimpleNamespace(text=lambda ids: " ".join(map(str, ids)))
    scorer = ResponseScorer(judges, words, tracer)  # type: ignore[arg-type]
    segments = (Segment((7, 8), (0.0, 0.0), 1), Segment((9,), (0.0,), 2))
    for index in range(3):
        scorer.submit([Trajectory(0, index, (1,), segments)], None)  # type: ignore[arg-type]
    assert judges.responses == ["7 8 9"] * 3
    scorer.collect()
    judges.ready = 2
    scorer.collect()
    assert tracer.spans == []
    judges.ready = 1
    scorer.collect()
    judges.ready = 0
    scorer.collect()
    assert [(s.name, s.actor, s.facts) for s in tracer.spans] == [("judge", "judges", {"trajectories": 3})]


# ---- on disk ---------------------------------------------------------------------------------------------------------


def fill(writer: TraceWriter, first: int, count: int) -> None:
    for number in range(first, first + count):
        writer.span("generate", "engine", 0, float(number), number + 0.5, group=number)
        if number % 50 == 0:
            writer.flush()
    writer.flush()


def test_a_trace_never_outgrows_its_limit_and_keeps_beginning_and_end(tmp_path: Path):
    writer = TraceWriter(tmp_path, 40_000)
    fill(writer, 0, 2000)
    sizes = [path.stat().st_size for path in trace_files(tmp_path)]
    assert sum(sizes) <= 40_000
    assert all(size > 0 for size in sizes)
    again = TraceWriter(tmp_path, 40_000)  # a resume goes on where it was
    fill(again, 2000, 300)
    assert sum(path.stat().st_size for path in trace_files(tmp_path)) <= 40_000
    head, tail = gapless_periods(read_trace(tmp_path))
    assert [s.facts["group"] for s in head] == list(range(len(head)))
    assert [s.facts["group"] for s in tail] == list(range(2300 - len(tail), 2300)), "the end has no hole"
    assert len(head) > 80, "how many fit depends on the digits of the time"
    assert len(tail) > 80


def test_a_short_trace_has_no_gap(tmp_path: Path):
    fill(TraceWriter(tmp_path, 400_000), 0, 500)
    fill(TraceWriter(tmp_path, 400_000), 500, 500)
    spans = read_trace(tmp_path)
    assert [s.facts["group"] for s in spans] == list(range(1000))
    assert GAP not in {s.name for s in spans}


def test_a_line_that_a_process_died_in_costs_no_other(tmp_path: Path):
    fill(TraceWriter(tmp_path, 400_000), 0, 10)
    file = trace_files(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:-7])
    fill(TraceWriter(tmp_path, 400_000), 10, 10)
    assert [s.facts["group"] for s in read_trace(tmp_path)] == [*range(9), *range(10, 20)]


def test_a_line_that_is_not_utf_8_costs_no_other(tmp_path: Path):
    fill(TraceWriter(tmp_path, 400_000), 0, 10)
    file = trace_files(tmp_path)[0]
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first.replace(b"engine", b"engin\xff") + b"".join(others))
    assert [s.facts["group"] for s in read_trace(tmp_path)] == list(range(1, 10))


def test_a_writer_without_a_place_keeps_nothing(tmp_path: Path):
    fill(TraceWriter(), 0, 10)
    assert list(tmp_path.iterdir()) == []


# ---- for Perfetto ----------------------------------------------------------------------------------------------------


def test_chrome_gets_whole_microseconds_integer_ids_and_names():
    spans = [
        Span("begin", "trainer", 0, 100.0, 100.0, {"step": 0}),
        Span("generate", "node#10", 1, 100.0000004, 100.5, {"tokens": 3}),
        Span("generate", "node#9", 0, 100.1, 100.2000004, {"tokens": 2}),
        Span("generate", "node#9", 0, 100.2000004, 100.3),
        Span("fetch", "node#9", ASIDE, 100.0, 100.1),
        Span("train", "trainer", 0, 100.5, 101.0, {"step": 1}),
    ]
    found = json.loads(chrome_trace(spans))
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    events = found["traceEvents"]
    for event in events:
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid")), event
        assert event["name"]
        if event["ph"] != "M":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["trainer", "node#9", "node#10"], "the trainer first, and 9 before 10"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert all(type(e["dur"]) is int for e in complete)
    assert {(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete} == {
        ("node#10", "slot 1", "generate", 0, 500_000),
        ("node#9", "slot 0", "generate", 100_000, 100_000),
        ("node#9", "slot 0", "generate", 200_000, 100_000),
        ("node#9", "weights", "fetch", 0, 100_000),
        ("trainer", "main", "train", 500_000, 500_000),
    }
    assert [e["args"] for e in events if e["ph"] == "i"] == [{"step": 0}]
    assert json.loads(chrome_trace([]))["traceEvents"] == []


# ---- a live run ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_trace_of_every_stage(small):
    spans = read_trace(small.run)
    assert spans[0].name == "begin"
    others, workers = actors_of(spans)
    assert (others, workers) == (["trainer", "judges"], ["engine"])
    of_trainer = [(s.name, s.facts["step"]) for s in spans if s.actor == "trainer" and s.name != "begin"]
    each = [[("wait_for_batch", n), ("train", n), ("publish", n)] for n in (1, 2, 3)]
    assert of_trainer == [
        ("eval", 0),
        *each[0],
        *each[1],
        ("eval", 2),
        ("checkpoint", 2),
        *each[2],
        ("eval", 3),
        ("checkpoint", 3),
    ]
    assert_tiled(spans)
    judged = sum(s.facts["trajectories"] for s in spans if s.name == "judge")
    groups = [group for step in (1, 2, 3) for group in RunDirectory.open(small.run).groups(step)]
    trained = sum(m.trajectory.num_tokens for g in groups for m in g.members)
    assert judged == sum(len(g.members) for g in groups) == 48
    waits = [s for s in spans if s.name == "wait_for_batch"]
    leases = [s for s in spans if s.name == "generate"]
    of_steps = [s for s in leases if any(w.begin_s <= s.begin_s and s.end_s <= w.end_s for w in waits)]
    assert sum(s.facts["tokens"] for s in of_steps) == trained


def test_the_command_writes_a_file_for_perfetto_and_says_what_is_wrong(small, tmp_path: Path):
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["trace", str(small.run), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    names = {e["name"] for e in json.loads(out.read_bytes())["traceEvents"] if e["ph"] == "X"}
    assert names == {"generate", "judge", "wait_for_batch", "train", "publish", "eval", "checkpoint"}
    assert json.loads(done.stdout)["spans"] == len(read_trace(small.run))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    for command, sentence in (
        (["trace", str(empty)], "has no trace"),
        (["trace", str(small.run), "--out", str(tmp_path)], "cannot write"),
    ):
        failed = CliRunner().invoke(app, command)
        assert sentence in str(failed.exception)
