"""Backup leases in sequential pull with engines that do not make the same tokens twice: the first to finish is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swarm_bench import SwarmBench, quick, wait_until

from baton.rollout.engines.fake import END_ID
from baton.types import Report, Segment, WorkRevoked

pytestmark = pytest.mark.timing


def with_noise_of_its_own(engine: Any, salt: int) -> Callable[[], list[Any]]:
    """Make an engine report other tokens than another one does, its end ids apart."""
    step = engine.step

    def changed(segment: Segment) -> Segment:
        ids = tuple(token if token == END_ID else (token + salt) % 40 + 50 for token in segment.token_ids)
        return msgspec.structs.replace(segment, token_ids=ids)

    def salted() -> list[Any]:
        return [
            msgspec.structs.replace(one, segments=tuple(map(changed, one.segments))) if isinstance(one, Report) else one
            for one in step()
        ]

    return salted


def test_a_straggler_with_noise_of_its_own_is_relieved_and_the_first_to_finish_is_kept(tmp_path: Path) -> None:
    """Before, both branches were called contradicted, and the trajectory was made anew: with a new straggler."""
    rules = {
        "backup_lease_factor": 1.0,
        "backup_lease_after_s": 1.0,
        "heartbeat_timeout_s": 60.0,
        "progress_timeout_s": 600.0,
    }
    with quick():
        bench = SwarmBench(tmp_path, "sync", lease_rules=rules)
        try:
            slow, fast = (*bench.join(1, kind="vllm", token_s=0.3), *bench.join(1, kind="vllm", token_s=0.002))
            for salt, worker in enumerate((slow, fast)):
                worker.engine.step = with_noise_of_its_own(worker.engine, 7 * salt)
            bench.begin()
            wait_until(lambda: all(peer.served == 0 for peer in bench.hub.members.peers.values()), "the first version")
            revoked: list[WorkRevoked] = []
            while not revoked:  # until a trajectory of the slow one was long enough to be relieved
                assert bench.version < 20, "no trajectory was relieved"
                groups = bench.step()
                revoked = [message for message in list(bench.told.all) if isinstance(message, WorkRevoked)]
            assert {message.cause for message in revoked} == {"overtaken"}
            keys = [(message.group_id, message.sample_index) for message in revoked]
            assert len(keys) == len(set(keys)), "each is replaced once, and not made anew"
            assert len(groups) == 3
            assert all(len(group.members) == 3 for group in groups)
            assert bench.convicted == []
            bench.hub.check()
        finally:
            bench.close()
