"""The runner over a swarm: what is trained is what the script says, once, whatever happens to workers and wires."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swarm_bench import BenchWorker, SwarmBench, quick, wait_until

from baton.errors import DeadlineExceeded, EngineFault
from baton.swarm import transport as port_module

pytestmark = pytest.mark.timing

MODES = [
    ("sync", {}),
    ("partial", {"overprovision": 2.0}),
    ("async", {"on_new_version": "resume", "max_staleness": 2}),
    ("async", {"on_new_version": "keep", "max_staleness": 2}),
    ("async", {"on_new_version": "resume", "max_staleness": 3, "publish_every": 2}),
    ("async", {"on_new_version": "resume", "max_staleness": 4, "max_lag": 3, "stale": "drop", "max_requeues": 1}),
    ("async", {"on_new_version": "resume", "max_staleness": 2, "consume": "submission", "stale": "drop"}),
]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SwarmBench]]:
    made: list[SwarmBench] = []

    def build(*args: object, **values: object) -> SwarmBench:
        made.append(SwarmBench(tmp_path, *args, **values))
        return made[-1]

    with quick():
        yield build
        for bench in made:
            bench.close()


def assert_bounds(bench: SwarmBench) -> None:
    """Staleness of what is trained; in `sync` none, and no trajectory of two versions."""
    stale = bench.staleness()
    if bench.rules.mode == "sync":
        assert set(stale) == {0}
        assert all(len(m.trajectory.segments) == 1 for b in bench.batches for g in b for m in g.members)
    ledger, bound = bench.controller.scheduler.ledger, bench.rules.max_staleness
    assert sum(age > bound for age in stale) == ledger.masked, "beyond the bound no token is trained"


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_three_workers_train_what_the_script_says(mode, values, make):
    bench = make(mode, **values)
    bench.join(3)
    bench.begin()
    for _ in range(6):
        bench.step()
    with bench.controller.paused():
        bench.assert_sound()
    assert_bounds(bench)
    assert max(bench.judges.asked.values()) == 1
    used = [worker for worker in bench.workers if worker.engine.stats.decoded_tokens]
    assert len(used) > 1, "who serves the version is given something"


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_deaths_joins_cuts_and_delays_change_nothing_that_is_trained(mode, values, make):
    bench = make(mode, **values)
    bench.join(3, token_s=0.003)
    bench.begin()
    rng = random.Random(f"{mode}{values}")
    for step in range(8):
        bench.step(train_s=0.02)
        alive = [worker for worker in bench.workers if not worker.is_over]
        victim = rng.choice(alive)
        match rng.choice(["kill", "cut", "cut", "late"]) if step else "kill":
            case "kill":
                victim.kill()
                bench.join(1, token_s=0.003)
            case "cut":
                victim.cut()
            case "late":
                victim.wire.delay_s = 0.05
    with bench.controller.paused():
        bench.assert_sound()
    assert_bounds(bench)
    assert all(worker.error is None or not str(worker.error) for worker in bench.workers), "killed, or alive"


def test_cuts_in_the_middle_of_growth_lose_no_token(make):
    """Every few milliseconds the connection of the only worker breaks; what it made is never made again."""
    bench = make("partial", overprovision=1.0, lease_rules={"heartbeat_timeout_s": 600.0})
    (worker,) = bench.join(1, token_s=0.01)
    bench.begin()
    cuts = 0

    def cut(count: int) -> None:
        nonlocal cuts
        cuts += 1
        worker.cut()

    for _ in range(3):
        bench.controller.next_batch(on_scored=cut)
        bench.version += 1
        bench.publish()
    assert cuts > 9
    ledger = bench.controller.scheduler.ledger
    assert not ledger.lost, "a cut is no death"
    assert worker.engine.stats.decoded_tokens == ledger.generated


def test_nobody_at_the_start_and_nobody_in_between_is_waited_for(make):
    bench = make("async", max_staleness=2)
    bench.begin()
    assert bench.port.slots == 0
    first = bench.join(1)
    bench.step()
    first[0].kill()
    wait_until(lambda: bench.port.slots == 0, "the hub's notice")
    bench.join(2)
    bench.step()
    bench.step()
    bench.assert_sound()


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_a_swarm_that_nobody_joins_is_named_when_patience_ends(mode, make):
    bench = make(mode, stall_timeout_s=0.3)
    bench.begin()
    with pytest.raises(DeadlineExceeded, match=r"the swarm at http://127.0.0.1:\d+, which has no workers,"):
        bench.step()


def test_a_run_waits_longer_for_workers_to_come_than_for_those_that_are_there_and_says_so(make, monkeypatch):
    monkeypatch.setattr(port_module, "FIRST_MESSAGE_S", 0.2)
    bench = make("async", stall_timeout_s=0.3, no_worker_timeout_s=60.0)
    bench.begin()

    def join() -> None:
        bench.wait_for_said("the run waits")
        bench.join(1)

    late = threading.Thread(target=join)
    late.start()
    bench.step()
    late.join()
    where = f"the swarm at {bench.url}, which has no workers"
    assert re.fullmatch(rf"no worker for \d+ s: {where}; the run waits up to swarm.no_worker_timeout_s", bench.said[0])
    bench.wait_for_said("workers have joined again")


def test_workers_that_are_all_gone_are_named_when_patience_ends(make):
    """Time stands still for the run until its only worker is gone."""
    times = itertools.repeat(0.0)
    rules = {"heartbeat_timeout_s": 600.0}
    bench = make("async", stall_timeout_s=10.0, clock=lambda: next(times), lease_rules=rules)
    (worker,) = bench.join(1, token_s=0.05)
    bench.begin()

    def kill(count: int) -> None:
        nonlocal times
        if not worker.is_over:
            worker.kill()
            wait_until(lambda: "is disconnected" in bench.port.name, "the hub's notice")
            times = itertools.count(0.0, 4.0)

    with pytest.raises(DeadlineExceeded, match=r"the swarm of 1 workers \(workers#0 is disconnected"):
        bench.controller.next_batch(on_scored=kill)


def test_a_worker_that_leaves_hands_in_what_it_has(make):
    bench = make("async", max_staleness=4)
    first, _ = bench.join(2, token_s=0.005)
    bench.begin()
    bench.step()
    first.leave()
    assert first.error is None
    for _ in range(3):
        bench.step()
    bench.assert_sound()
    bench.wait_for_said("left")


def test_an_engine_that_fails_ends_its_worker_and_others_go_on(make):
    # on a busy machine a worker may be silent for a second: a worker that is disconnected cannot report its fault
    bench = make("async", max_staleness=4, lease_rules={"heartbeat_timeout_s": 600.0})
    bad, _ = bench.join(2, token_s=0.002)
    bench.begin()
    bench.step()
    bad.engine.fails = True
    for _ in range(3):
        bench.step()
    wait_until(lambda: bad.is_over, "the worker's end")
    assert isinstance(bad.error, EngineFault)
    assert "out of memory" in str(bad.error)
    bench.assert_sound()
    bench.wait_for_said("RuntimeError: out of memory")


def test_an_engine_that_cannot_be_built_ends_its_worker(make, monkeypatch):
    bench = make("async")

    def fail(*args: object) -> None:
        raise EngineFault("no such device")

    monkeypatch.setattr(BenchWorker, "make_engine", fail)
    (broken,) = bench.join(1)
    wait_until(lambda: broken.is_over, "the worker's end")
    assert isinstance(broken.error, EngineFault)
    assert "no such device" in str(broken.error)


def test_a_wedged_worker_is_taken_for_dead_and_its_work_goes_on_elsewhere(make):
    bench = make("async", max_staleness=4, lease_rules={"progress_timeout_s": 0.5})
    stuck, _ = bench.join(2, token_s=0.002)
    bench.begin()
    bench.step()
    stuck.engine.token_s = 3.0
    for _ in range(3):
        bench.step()
    bench.wait_for_said("generated no token")
    stuck.engine.token_s = 0.002
    bench.step()
    bench.assert_sound()


def test_what_fails_in_the_hubs_thread_ends_the_run_with_its_name(make):
    bench = make("async")
    bench.join(1)
    bench.begin()

    def fail() -> None:
        raise KeyError("a fault of the hub")

    bench.hub.call(fail)

    def go_on() -> None:
        for _ in range(100):
            bench.step()
            time.sleep(0.01)

    with pytest.raises(KeyError, match="a fault of the hub"):
        go_on()
