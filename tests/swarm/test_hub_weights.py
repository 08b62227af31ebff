"""A live hub shares trajectories as a plan says: weights come by the token's name, whatever a worker says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_bench import SwarmBench, wait_until

from baton.swarm.auth import Role

pytestmark = pytest.mark.timing

PLANNED = {"fast": 1.5, "slow": 0.75, "slower": 0.75}
"""Of a slot: half of the batch for one, a quarter for each of the others."""


def shares(directory: Path, token_s: dict[str, float], num_steps: int) -> dict[str, float]:
    """Run sync steps of 16 trajectories on workers of these names and speeds; return who made which part of all."""
    bench = SwarmBench(
        directory, "sync", batch_groups=4, group_size=4, parts={"weight": lambda grant: PLANNED[grant.name]}
    )
    try:
        for name in PLANNED:
            token = bench.tokens.create(Role.WORKER, 3600, name=name, trusted=True)
            bench.join(token=token, token_s=token_s[name])
        bench.begin(num_batches=num_steps)
        wait_until(lambda: all(peer.served == 0 for peer in bench.hub.peers.values()), "the first version")
        for _ in range(num_steps):
            bench.step()
            number = bench.version
            wait_until(
                lambda number=number: all(peer.served == number for peer in bench.hub.peers.values()), "a version"
            )
        made = {worker.engine: worker.engine.stats.decoded_tokens for worker in bench.workers}
        total = sum(made.values())
        return dict(zip(PLANNED, (tokens / total for tokens in made.values()), strict=True))
    finally:
        bench.close()


def test_trajectories_are_shared_as_planned_among_unequal_workers(tmp_path: Path) -> None:
    found = shares(tmp_path, {"fast": 0.004, "slow": 0.008, "slower": 0.008}, 8)
    assert found == pytest.approx({"fast": 0.5, "slow": 0.25, "slower": 0.25}, abs=0.12)


def test_a_worker_much_slower_than_planned_is_given_less(tmp_path: Path) -> None:
    """Planned as half of all; ten times as slow as that."""
    found = shares(tmp_path, {"fast": 0.04, "slow": 0.008, "slower": 0.008}, 8)
    assert found["fast"] < 0.35
