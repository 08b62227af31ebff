"""Silence is no evidence: who says nothing, or is cut off, is let go and may come again."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from swarm_bench import SwarmBench, hello, quick, wait_until
from typer.testing import CliRunner

from baton.cli.hub import token_app
from baton.errors import UserError
from baton.rollout.worker_client import MAX_COUNTED_WAIT_S, WorkerClient
from baton.swarm.auth import Role
from baton.swarm.messages import encode
from baton.swarm.verification.policy import QuarantineRecord
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.verify import violation
from baton.types import FromPort

pytestmark = pytest.mark.timing


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SwarmBench]:
    with quick():
        made = SwarmBench(tmp_path, "async")
        yield made
        made.close()


async def connect(bench: SwarmBench, session: aiohttp.ClientSession, token: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    line = await session.ws_connect(bench.url + "/worker", headers=headers, max_msg_size=0)
    await line.send_bytes(encode(hello()))
    return line


def test_a_worker_that_says_nothing_is_cut_off_and_not_accused(bench):
    """12 heartbeats of 0.1 s; the lease table, which is quicker as a rule, is told to wait."""
    bench.broker.table.rules = type(bench.broker.table.rules)(heartbeat_timeout_s=1e6)
    token = bench.tokens.create(Role.WORKER, 3600, name="mute")

    async def work() -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            line = await connect(bench, session, token)
            while (await line.receive()).type is aiohttp.WSMsgType.BINARY:
                pass
            again = await connect(bench, session, token)
            wait = asyncio.to_thread(wait_until, lambda: "mute#1" in [p.name for p in peers(bench)], "it to come again")
            await wait
            await again.close()

    asyncio.run(work())
    assert bench.verifier.malformed == []
    assert bench.hub.members.counters.malformed == 0
    bench.wait_for_said("worker mute#0: silent for 1.2 s")
    lines = [json.loads(line) for line in (bench.directory / "audit.jsonl").read_text().splitlines()]
    assert {(line["event"], line["status"]) for line in lines} == {("silent", 0)}


def peers(bench: SwarmBench) -> list[Any]:
    return list(bench.hub.members.peers.values())


def test_a_hub_whose_loop_stands_still_hears_what_came_meanwhile(bench):
    """Blocked for longer than it believes a silent worker: nobody is expelled, cut or accused."""
    (worker,) = bench.join(1)
    bench.begin()
    bench.step()
    bench.in_hub(lambda: time.sleep(2.5))
    bench.step()
    bench.assert_sound()
    assert bench.verifier.malformed == []
    assert not [text for text in bench.said if "silent" in text or "sent no message for" in text]
    assert worker.error is None


class Port:
    """A worker port that never has anything."""

    name, slots, no_worker_timeout_s = "nobody", 1, 0.0

    def stats(self) -> int:
        return 0

    def receive(self, timeout_s: float) -> list[FromPort]:
        return []


def test_a_pause_of_the_run_itself_is_no_stall():
    now_s = 0.0
    worker = WorkerClient(Port(), stall_timeout_s=30.0, clock=lambda: now_s)
    for _ in range(4):
        now_s += 1000.0  # stopped, and continued
        worker.receive(1.0, 1, ["0/0"])
    for _ in range(int((30.0 - 4 * MAX_COUNTED_WAIT_S) / 1.0)):
        now_s += 1.0
        worker.receive(1.0, 1, ["0/0"])
    now_s += 1.0
    with pytest.raises(Exception, match="no progress for 30 s"):
        worker.receive(1.0, 1, ["0/0"])


# ---- lifting a quarantine --------------------------------------------------------------------------------------------


def quarantine_record(worker: str) -> QuarantineRecord:
    return QuarantineRecord(worker, "0/0@1", violation("a mistake"), (), (), 0, 1, 1, "digest", f"label of {worker}")


def test_a_quarantine_is_lifted_by_a_command_for_a_hub_that_runs_and_for_one_that_does_not(tmp_path):
    live = Quarantine(tmp_path / "quarantine.jsonl")
    for name in ("a", "b"):
        live.add(quarantine_record(name))
    result = CliRunner().invoke(token_app, ["unquarantine", str(tmp_path), "a"])
    assert result.exit_code == 0, result.output
    assert live.follow() == ("a",)
    assert live.follow() == ()
    assert [one.worker for one in live.records] == ["b"]
    assert [one.worker for one in Quarantine(tmp_path / "quarantine.jsonl").records] == ["b"]
    (line,) = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert (line["event"], line["token"]) == ("unquarantined", "a")
    live.add(quarantine_record("a"))
    assert [one.worker for one in Quarantine(tmp_path / "quarantine.jsonl").records] == ["b", "a"], "it may do it again"
    with pytest.raises(
        UserError, match=r"no worker 'c' in quarantine; workers in quarantine: label of b \(b\), label of a \(a\)"
    ):
        live.lift("c", 0.0)


def test_a_lift_between_two_convictions_is_not_overlooked(tmp_path):
    live, other = Quarantine(tmp_path / "q"), Quarantine(tmp_path / "q")
    live.add(quarantine_record("a"))
    other.lift("a", 0.0)
    live.add(quarantine_record("b"))
    assert live.follow() == ("a",)
    assert [one.worker for one in live.records] == ["b"]


def test_a_write_of_a_part_of_a_line_is_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr("os.write", lambda handle, data: write(handle, data[:10]))
    live = Quarantine(tmp_path / "q")
    live.add(quarantine_record("a"))
    assert live.follow() == (), "nobody's quarantine has ended"
    assert [one.worker for one in Quarantine(tmp_path / "q").records] == ["a"]


def test_a_line_that_was_torn_is_passed_over_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    kept = Quarantine(path)
    kept.add(quarantine_record("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    again = Quarantine(path)
    again.add(quarantine_record("b"))
    assert [one.worker for one in Quarantine(path).records] == ["a", "b"]
    path.write_bytes(whole.replace(b'"worker"', b'"wrkr"'))
    with pytest.raises(UserError, match="line 1, is not a quarantine record"):
        Quarantine(path)
