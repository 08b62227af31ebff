"""A live hub shares trajectories as a plan says: weights come by the token's name, whatever a worker says of itself."""

from __future__ import annotations

import http.client
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from urllib.error import HTTPError

import pytest
from swarm_bench import PATIENCE_S, ScriptedEngine, SwarmBench, wait_until

from baton.swarm.auth import Role
from baton.swarm.hub import http_routes, sending
from baton.swarm.supervisor import HubAccess
from baton.weights.storage import ByteReader
from baton.weights.store import Store

pytestmark = pytest.mark.timing

PLANNED = {"fast": 1.5, "slow": 0.75, "slower": 0.75}
"""Of a slot: half of the batch for one, a quarter for each of the others."""


class PlannedCrew:
    """Workers that the test starts."""

    def begin(self, hub: HubAccess) -> None: ...

    def weight(self, name: str) -> float:
        return PLANNED[name]

    def check_health(self) -> None: ...

    def close(self) -> None: ...


def planned(directory: Path, token_s: dict[str, float]) -> SwarmBench:
    """A hub of steps of 16 trajectories with workers of these names and speeds, which serve the first version."""
    bench = SwarmBench(
        directory,
        "sync",
        batch_groups=4,
        group_size=4,
        worker_supervisor=PlannedCrew(),
        lease_rules={"heartbeat_timeout_s": 600.0, "progress_timeout_s": 600.0},
    )
    for name in PLANNED:
        token = bench.tokens.create(Role.WORKER, 3600, name=name, trusted=True)
        bench.join(token=token, token_s=token_s[name])
    bench.begin()
    wait_until(lambda: all(peer.served == 0 for peer in bench.hub.members.peers.values()), "the first version")
    return bench


def held(bench: SwarmBench) -> dict[str, int]:
    """How many leases each worker has."""
    workers = bench.in_hub(lambda: {number: len(w.leases) for number, w in bench.broker.table.workers.items()})
    return {peer.name.partition("#")[0]: workers[number] for number, peer in bench.hub.members.peers.items()}


def shares(directory: Path, token_s: dict[str, float], num_steps: int) -> dict[str, float]:
    """Run sync steps of 16 trajectories on workers of these names and speeds; return who made which part of all."""
    bench = planned(directory, token_s)
    try:
        for _ in range(num_steps):
            bench.step()
            number = bench.version
            wait_until(
                lambda number=number: all(peer.served == number for peer in bench.hub.members.peers.values()),
                "a version",
            )
        made = {worker.engine: worker.engine.stats.decoded_tokens for worker in bench.workers}
        total = sum(made.values())
        return dict(zip(PLANNED, (tokens / total for tokens in made.values()), strict=True))
    finally:
        bench.close()


def test_the_first_trajectories_are_shared_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16, all given out before anybody has made a token, and so before anything but the plan is known."""
    may_grow = Event()
    grow = ScriptedEngine.step
    monkeypatch.setattr(ScriptedEngine, "step", lambda engine: may_grow.wait(PATIENCE_S) and grow(engine))
    bench = planned(tmp_path, dict.fromkeys(PLANNED, 0.0))
    try:
        with ThreadPoolExecutor(1) as trainer:
            step = trainer.submit(bench.step)
            wait_until(lambda: sum(held(bench).values()) == 16, "all to be given out")
            given = held(bench)
            may_grow.set()
            step.result(PATIENCE_S)
        assert given == {"fast": 8, "slow": 4, "slower": 4}
        bench.assert_sound()
    finally:
        may_grow.set()
        bench.close()


def test_a_worker_much_slower_than_planned_is_given_less(tmp_path: Path) -> None:
    """Planned as half of all; ten times as slow as that."""
    found = shares(tmp_path, {"fast": 0.04, "slow": 0.008, "slower": 0.008}, 8)
    assert found["fast"] < 0.35


def test_a_store_that_does_not_answer_ends_the_download_and_not_with_404(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs, where it is asked for a chunk, and where it is read for a manifest."""
    may_end = Event()
    monkeypatch.setattr(http_routes, "READ_S", 0.2)
    monkeypatch.setattr(sending, "READ_S", 0.2)
    monkeypatch.setattr(Store, "chunk_body", lambda self, digest: may_end.wait(300))
    monkeypatch.setattr(
        Store, "manifest_body", lambda self, lineage, number: ByteReader(9, lambda offset, limit: may_end.wait(300))
    )
    bench = SwarmBench(tmp_path, "sync")
    headers = {"Authorization": f"Bearer {bench.tokens.create(Role.WORKER, 3600, name='reader')}"}

    def read(path: str) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(bench.url + path, headers=headers), timeout=120) as answer:
            return bytes(answer.read())

    try:
        with pytest.raises(HTTPError, match="503") as refused:
            read("/weights/chunk/" + "ab" * 32)
        assert refused.value.read() == b"the store did not answer in 0 s"
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            read("/weights/manifest/run/0")
    finally:
        may_end.set()
        bench.close()
