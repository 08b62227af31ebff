"""Which process is restarted, which is given up and when to replan, from events alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import supervision as sv
from baton.cluster.placement import Placement, ProcessSpec

RULES = sv.SupervisionRules(max_failures=3, first_wait_s=1.0, longest_wait_s=3.0, long_life_s=60.0, settle_s=2.0)


def post(name: str, machine: str = "b", gpu: int = 0, weight: float = 1.0) -> ProcessSpec:
    return ProcessSpec(name, "worker", machine, "L20", (f"{machine}:{gpu}",), {}, 1, 16, 0.5, weight)


def supervision(*workers: ProcessSpec, training: str = "a") -> sv.Supervision:
    rank = ProcessSpec("rank-0", "rank", training, "H100", (f"{training}:0",), {}, 1)
    return sv.Supervision(Placement((rank,), workers, {}), RULES)


def kinds(commands: list[sv.Command], kind: type) -> list[sv.Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_a_worker_that_ends_is_begun_again_each_time_later_and_then_given_up() -> None:
    one = supervision(post("worker-0"), post("worker-1", "c"))
    assert [c.spec.name for c in one.start()] == ["worker-0", "worker-1"]  # type: ignore[union-attr]
    now_s, waits = 0.0, []
    for _ in range(3):
        one.handle(sv.ProcessStarted(now_s, "worker-0"))
        one.handle(sv.ProcessEnded(now_s, "worker-0", "ended"))
        ended_s = now_s
        while not kinds(one.handle(sv.SupervisionTick(now_s)), sv.StartProcess):
            now_s += 0.5
        waits.append(now_s - ended_s)
    assert waits == [1.0, 2.0, 3.0]
    last = one.handle(sv.ProcessEnded(now_s, "worker-0", "out of memory"))
    assert kinds(last, sv.StopProcess) == [sv.StopProcess("worker-0", "is not restarted again")]
    assert "not restarted again, the other workers continue" in kinds(last, sv.LogMessage)[0].text  # type: ignore[union-attr]
    assert [p.name for p in one.workers] == ["worker-1"]


def test_when_the_last_worker_is_given_up_the_run_fails_and_says_why() -> None:
    one = supervision(post("worker-0"))
    failed: list[sv.Command] = []
    for at in range(0, 40, 10):
        failed = one.handle(sv.ProcessEnded(at, "worker-0", "ended with exit code 3: no such model"))
        one.handle(sv.SupervisionTick(at + 9))
    assert kinds(failed, sv.Fail) == [
        sv.Fail("no worker is left; worker-0 on b ended 4 times in a row: ended with exit code 3: no such model")
    ]


def test_a_long_life_forgives_earlier_failures() -> None:
    one = supervision(post("worker-0"))
    for hour in range(10):
        at_s = hour * 3600.0
        one.handle(sv.ProcessStarted(at_s, "worker-0"))
        assert not kinds(one.handle(sv.ProcessEnded(at_s + 100, "worker-0", "ended")), sv.StopProcess)
        assert kinds(one.handle(sv.SupervisionTick(at_s + 101)), sv.StartProcess)


def test_a_lost_machine_takes_its_workers_and_one_plan_is_asked_for_when_it_is_quiet() -> None:
    one = supervision(post("worker-0", "b"), post("worker-1", "c"))
    lost = one.handle(sv.MachineLost(0.0, "b"))
    assert kinds(lost, sv.StopProcess) == [sv.StopProcess("worker-0", "has lost its machine b", is_reachable=False)]
    assert not kinds(lost, sv.TrainerLost)
    assert not one.handle(sv.ProcessEnded(0.1, "worker-0", "actor died"))
    one.handle(sv.MachineJoined(1.0, "d"))
    assert not one.handle(sv.SupervisionTick(2.5))
    assert one.handle(sv.SupervisionTick(3.0)) == [sv.Replan(("b",), ("d",))]
    assert not one.handle(sv.SupervisionTick(10.0)), "one plan at a time, and none without cause"
    done = one.handle(sv.Planned(11.0, (post("worker-5", "d"), post("worker-6", "c", weight=2.0)), "planned"))
    assert [c.spec.name for c in kinds(done, sv.StartProcess)] == ["worker-5"]  # type: ignore[union-attr]
    assert [(c.spec.name, c.spec.weight) for c in kinds(done, sv.SetWorkerWeight)] == [("worker-1", 2.0)]  # type: ignore[union-attr]
    assert sorted(p.name for p in one.workers) == ["worker-1", "worker-5"]


def test_a_lost_trainer_machine_is_said_at_once() -> None:
    assert sv.TrainerLost("a") in supervision(post("worker-0")).handle(sv.MachineLost(0.0, "a"))


def test_machines_lost_while_the_planner_thinks_get_no_worker() -> None:
    one = supervision(post("worker-0", "b"))
    one.handle(sv.MachineJoined(0.0, "c"))
    one.handle(sv.SupervisionTick(5.0))
    one.handle(sv.MachineLost(6.0, "c"))
    done = one.handle(sv.Planned(7.0, (post("w", "b"), post("x", "c")), "planned"))
    assert not kinds(done, sv.StartProcess)
    assert kinds(one.handle(sv.SupervisionTick(8.0)), sv.Replan) == [sv.Replan(("c",), ())]


def test_without_workers_and_machines_the_run_fails_once_the_planner_has_said_so() -> None:
    one = supervision(post("worker-0", "b"))
    assert not kinds(one.handle(sv.MachineLost(0.0, "b")), sv.Fail)
    one.handle(sv.SupervisionTick(2.0))
    assert kinds(one.handle(sv.Planned(3.0, None, "nothing fits")), sv.Fail)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["began", "ended", "lost", "joined", "planned", "tick"]), st.integers(0, 3)), max_size=60
)


@given(EVENTS)
def test_whatever_happens_nothing_runs_twice_and_nothing_runs_on_a_machine_that_is_gone(
    happenings: list[tuple[str, int]],
) -> None:
    """What has been begun and has neither ended nor been told to is a worker of the supervision's, and only once."""
    one = supervision(*(post(f"worker-{i}", "bcde"[i]) for i in range(4)))
    running: set[str] = set()
    gone: set[str] = set()
    asked, number, now_s = False, 4, 0.0

    def obey(commands: list[sv.Command]) -> None:
        nonlocal asked
        for command in commands:
            match command:
                case sv.StartProcess(spec=begun):
                    assert begun.name not in running
                    assert begun.machine not in gone
                    running.add(begun.name)
                case sv.StopProcess(name=name):
                    running.discard(name)
                case sv.Replan():
                    assert not asked
                    asked = True

    obey(one.start())
    for what, index in happenings:
        now_s += 0.7
        machine = "bcde"[index]
        names = sorted(running)
        name = names[index % len(names)] if names else "worker-0"
        match what:
            case "began":
                obey(one.handle(sv.ProcessStarted(now_s, name)))
            case "ended" if names:
                running.discard(name)
                obey(one.handle(sv.ProcessEnded(now_s, name, "ended")))
            case "lost" if machine not in gone:
                gone.add(machine)
                obey(one.handle(sv.MachineLost(now_s, machine)))
            case "joined" if machine in gone:
                gone.discard(machine)
                obey(one.handle(sv.MachineJoined(now_s, machine)))
            case "planned" if asked:
                asked, number = False, number + 4
                wanted = tuple(post(f"worker-{number + i}", m) for i, m in enumerate("bcde") if m not in gone)
                obey(one.handle(sv.Planned(now_s, wanted, "planned")))
            case "tick":
                obey(one.handle(sv.SupervisionTick(now_s)))
        assert running <= {p.name for p in one.workers}
        assert not {p.machine for p in one.workers} & gone
    assert pytest.approx(now_s) == 0.7 * len(happenings)
