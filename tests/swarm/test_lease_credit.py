"""What a stranger's worker may hold follows from what it has delivered; the slots that it claims are only a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_bench import SwarmBench, hello, quick, version_of, wait_until

from baton.rollout.engine import EngineStats
from baton.rollout.settings import RolloutSettings
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import EngineSpec, Setting, SwarmSpec
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant
from baton.swarm import lease_events as ev
from baton.swarm.auth import Role
from baton.swarm.lease_credit import FIRST_LEASES, TOKENS_PER_LEASE, LeaseCredit
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.swarm.messages import Heartbeat, encode

EVENTS = st.lists(
    st.one_of(st.integers(0, 500), st.just("lost"), st.floats(0, 100, allow_nan=False).map(lambda s: ("later", s)))
)


@given(st.integers(1, 4096), EVENTS)
def test_credit_is_bounded_by_what_was_delivered_and_by_the_slots(slots, events):
    credit, now_s, delivered = LeaseCredit(slots, 0.0), 0.0, 0
    for event in events:
        before = credit.num_leases
        match event:
            case int():
                delivered += event
                credit.earn(event)
                assert credit.num_leases >= before
            case "lost":
                credit.lose()
                assert credit.num_leases <= before
            case (_, seconds):
                now_s += seconds
                credit.recover(now_s)
                assert before <= credit.num_leases <= max(before, 1), "waiting earns one lease, and no more"
        assert 0 <= credit.num_leases <= min(slots, FIRST_LEASES + delivered // TOKENS_PER_LEASE)
    credit.recover(now_s + 60.0)
    assert credit.num_leases >= 1, "nobody is shut out for ever"


@pytest.mark.parametrize(("slots", "rounds"), [(8, 0), (64, 2), (512, 3), (4096, 4)])
def test_a_worker_that_delivers_has_all_its_slots_after_a_few_rounds_of_reports(slots, rounds):
    """Each lease that it holds reports 64 tokens a round; engines make 50 a second or so, and report every 2 s."""
    credit, needed = LeaseCredit(slots, 0.0), 0
    while credit.num_leases < slots:
        credit.earn(64 * credit.num_leases)
        needed += 1
    assert needed == rounds


def test_sixteen_tokens_earn_one_lease_up_to_the_slots():
    credit = LeaseCredit(10, 0.0)
    held = [credit.num_leases]
    for num_tokens in (15, 1, 15, 1, 1000):
        credit.earn(num_tokens)
        held.append(credit.num_leases)
    assert held == [8, 8, 9, 9, 10, 10]
    assert credit.tokens == 32, "nothing is saved beyond the slots"
    few = LeaseCredit(4, 0.0)
    few.earn(1000)
    assert (few.num_leases, few.tokens) == (4, 0)


def test_a_lost_lease_costs_64_tokens_down_to_what_50_s_recover():
    credit, seen = LeaseCredit(64, 0.0), []
    for _ in range(4):
        credit.lose()
        seen.append((credit.tokens, credit.num_leases))
    assert seen == [(-64, 4), (-128, 0), (-192, 0), (-192, 0)]
    credit.recover(10.0)
    assert credit.tokens == -176
    credit.recover(10.5)
    assert credit.tokens == pytest.approx(-175.2)
    credit.recover(49.9)
    assert credit.num_leases == 0
    credit.recover(50.1)
    assert (credit.tokens, credit.num_leases) == (-112, 1)
    credit.recover(1000.0)
    assert credit.tokens == -112, "one lease, and no more"


def test_only_time_after_the_loss_recovers_and_a_clock_that_goes_back_takes_nothing():
    credit = LeaseCredit(64, 0.0)
    credit.lose()
    credit.recover(100.0)
    assert credit.tokens == -64, "there are leases left"
    credit.lose()
    credit.lose()
    credit.recover(90.0)
    assert credit.tokens == -192
    credit.recover(100.0)
    assert credit.tokens == -176


def test_returned_leases_take_back_their_tokens_and_beyond_32_cost_64_more():
    credit = LeaseCredit(64, 0.0)
    for _ in range(32):
        credit.earn(500)
        credit.give_back(500)
    assert (credit.tokens, credit.returned) == (0, 32)
    credit.finish()
    credit.give_back(100)
    assert (credit.tokens, credit.returned) == (0, 32), "one was finished"
    credit.earn(100)
    credit.give_back(100)
    assert (credit.tokens, credit.returned) == (-64, 33)
    credit.earn(800)
    credit.give_back(800)
    assert credit.tokens == -128, "more tokens do not pay for it"
    for _ in range(1000):
        credit.finish()
    assert credit.returned == -256, "finished leases are counted up to 4 times the slots"


def test_workers_that_come_earn_nothing_and_that_go_take_along_what_is_beyond_the_slots():
    credit = LeaseCredit(8, 0.0)
    credit.resize(8)
    assert (credit.slots, credit.tokens) == (16, 0)
    credit.earn(1000)
    assert (credit.num_leases, credit.tokens) == (16, 128)
    credit.resize(-4)
    assert (credit.slots, credit.num_leases, credit.tokens) == (12, 12, 64)
    credit.resize(-8)
    assert (credit.slots, credit.num_leases, credit.tokens) == (4, 4, 0)


CLAIMED = 4096


class DeceivedTable(LeaseTable):
    """A table whose workers of 4,096 slots belong to an owner, and say that they serve each version and make tokens."""

    owner: str | None = None
    newest: int | None = None

    def handle(self, event: ev.Event) -> list[ev.Command]:
        if isinstance(event, ev.WorkerJoined) and event.slots == CLAIMED:
            event = msgspec.structs.replace(event, owner=self.owner)
        if isinstance(event, ev.WorkerSeen) and self.workers[event.worker].slots == CLAIMED:
            event = msgspec.structs.replace(event, version=self.newest, decoded_tokens=int(1000 * event.at_s))
        elif isinstance(event, ev.WorkerSeen):
            self.newest = event.version
        return super().handle(event)


class BoundedTable(DeceivedTable):
    owner = "liar"


def seconds_of_steps(
    num_steps: int, make_table: type[LeaseTable] = LeaseTable, num_liars: int = 1, *, comes_again: bool = False
) -> list[float]:
    """Virtual seconds of steps of 32 trajectories of 40 tokens, on an honest worker of 16 slots at 80 tokens/s each.

    Beside it are liars that claim 4,096 slots, and whose engine never ends its first step. They join after 1.5 s,
    because a backup lease goes by the speed that was seen. The first two steps are left out.
    """
    leases = LeaseRules(True, 30.0, 60.0, 600.0, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    honest = EngineSpec("honest", 16, FlatSpeed(1 / 80))
    liars = [EngineSpec(f"liar{index}", CLAIMED, FlatSpeed(1e9)) for index in range(num_liars)]
    setting = Setting(
        RolloutSettings.model_validate({"batch_groups": 32, "group_size": 1}).rules(),
        (honest, *liars),
        TrajectoryWork(constant(1), constant(40)),
        TrainSpeed(0.0, 0.0, 0.0),
        num_steps=2 + num_steps,
        swarm=SwarmSpec(leases, link_s=0.0, fetch_s=0.0, heartbeat_s=0.25, tick_s=0.25, report_every_s=0.125),
    )
    first = [FaultSettings(kind="crash", at_s=0.0, worker=liar.name, for_s=1.5) for liar in liars]
    again = [
        FaultSettings(kind="crash", at_s=float(at_s), worker=liar.name, for_s=0.1)
        for at_s in range(10, 10 + num_steps) for liar in liars if comes_again
    ]  # fmt: skip
    record = simulate(setting, RunOptions(0, [*first, *again], make_table=make_table))
    return [step.wait_s for step in record.steps[2:]]


def test_where_nothing_bounds_such_a_worker_each_step_waits_for_backup_leases():
    alone = seconds_of_steps(8, num_liars=0)
    assert alone == pytest.approx([1.0] * 8, abs=0.01), "32 trajectories of 0.5 s on 16 slots"
    assert seconds_of_steps(4, DeceivedTable) == pytest.approx([6.0] * 4, abs=0.5)


@pytest.mark.parametrize("num_liars", [1, 4])
@pytest.mark.parametrize("comes_again", [False, True])
def test_who_claims_4096_slots_and_delivers_nothing_slows_the_run_little(num_liars, comes_again):
    """By its first 8 leases, for as long as backup leases wait, and by one more in 40 s.

    So do all workers of a token together, also where new ones come every second. A step takes 1 s without them.
    """
    beside = seconds_of_steps(80, BoundedTable, num_liars, comes_again=comes_again)
    assert beside[0] < 6.0
    assert sum(beside) < 1.2 * len(beside)


@pytest.mark.timing
def test_at_a_real_hub_a_worker_that_claims_4096_slots_is_given_few(tmp_path: Path) -> None:
    with quick():
        bench = SwarmBench(
            tmp_path,
            "sync",
            batch_groups=8,
            group_size=4,
            lease_rules={"backup_lease_factor": 2.0, "progress_timeout_s": 600.0},
        )
        try:
            (honest,) = bench.join(1, token_s=0.002)
            bench.begin()
            wait_until(lambda: bench.hub.members.want is not None, "a version")
            headers = {"Authorization": f"Bearer {bench.tokens.create(Role.WORKER, 3600, name='liar')}"}
            most = 0

            async def lie() -> None:
                nonlocal most
                async with aiohttp.ClientSession() as session, asyncio.timeout(60):
                    line = await session.ws_connect(bench.url + "/worker", headers=headers, max_msg_size=0)
                    await line.send_bytes(encode(hello(slots=4096, serves=version_of(0))))
                    steps = asyncio.create_task(asyncio.to_thread(bench.step))
                    beats = 0
                    while not steps.done():
                        beats += 1
                        await line.send_bytes(encode(Heartbeat(version_of(0), EngineStats(decoded_tokens=beats))))
                        await asyncio.sleep(0.05)
                        held = [w.leases for w in bench.in_hub(lambda: list(bench.broker.table.workers.values()))]
                        most = max(most, *map(len, held[1:]), 0)
                    await steps
                    await line.close()

            asyncio.run(lie())
            assert 1 <= most <= FIRST_LEASES
            assert honest.engine.stats.decoded_tokens > 0
            bench.assert_sound()
        finally:
            bench.close()
