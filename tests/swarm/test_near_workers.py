"""The run's own workers on its machine learn of a version before it is coded for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from swarm_bench import SwarmBench, hello

from baton.policy.tensors import weights_digest
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.hub.peers import Outgoing, Peer
from baton.swarm.messages import RunOver, Want
from baton.types import PolicyVersion
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store
from baton.weights.version_files import VersionFiles


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SwarmBench]:
    bench = SwarmBench(tmp_path, "async", max_staleness=4)
    yield bench
    bench.close()


class Recorder(Outgoing):
    def __init__(self) -> None:
        self.sent: list[object] = []

    def put(self, message: object) -> bool:
        self.sent.append(message)
        return True

    def close(self) -> None:
        pass


class Full(Recorder):
    def put(self, message: object) -> bool:
        return False


def peer(number: int, *, is_own: bool, address: str) -> Peer:
    grant = AccessGrant("worker", Role.WORKER, True, f"{number}", is_own)
    return Peer(number, grant, hello(), address, Recorder(), f"worker {number}")


def test_the_file_of_a_version_is_complete_before_the_version_is_stored(tmp_path: Path):
    tensors = {"weight": torch.arange(1000, dtype=torch.float32)}
    store, shared = Store(tmp_path / "store"), VersionFiles(tmp_path / "shared")
    version = PolicyVersion("run", 1, weights_digest(tensors))
    seen = []

    def when_shared(mapped: Mapping[str, torch.Tensor]) -> None:
        assert torch.equal(mapped["weight"], tensors["weight"])
        seen.append((shared.read(version), store.find("run", 1)))

    Publisher(store, WeightsSettings(), files=shared).publish(tensors, version, when_shared=when_shared)
    ((found, manifest),) = seen
    assert torch.equal(found["weight"], tensors["weight"])
    assert manifest is None
    assert store.find("run", 1).version == version


@pytest.mark.parametrize(
    ("is_own", "address", "is_near"),
    [(True, "127.0.0.1", True), (True, "::1", True), (True, "10.0.0.2", False), (False, "127.0.0.1", False)],
)
def test_near_is_a_worker_of_the_run_on_its_machine(is_own, address, is_near):
    assert peer(1, is_own=is_own, address=address).is_near == is_near


def test_an_early_announcement_reaches_near_workers_alone_and_the_later_one_all(swarm):
    near, far = peer(901, is_own=True, address="127.0.0.1"), peer(902, is_own=False, address="10.0.0.2")
    members, want = swarm.hub.members, Want(PolicyVersion("near", 7, "0" * 64), shared="somewhere")
    before = swarm.in_hub(lambda: members.want)

    def announce(*, only_near: bool) -> tuple[list[object], list[object], object]:
        members.peers |= {901: near, 902: far}
        members.announce(want, only_near=only_near)
        del members.peers[901], members.peers[902]
        return list(near.outgoing.sent), list(far.outgoing.sent), members.want

    assert swarm.in_hub(lambda: announce(only_near=True)) == ([want], [], before)
    assert swarm.in_hub(lambda: announce(only_near=False)) == ([want, want], [want], want)


def test_a_worker_whose_queue_is_full_is_removed_and_the_others_are_told(swarm):
    members, want = swarm.hub.members, Want(PolicyVersion("near", 7, "0" * 64))

    def tell_all() -> tuple[list[int], list[object]]:
        peers = [peer(number, is_own=False, address="10.0.0.2") for number in (901, 902, 903, 904)]
        peers[0].outgoing = peers[2].outgoing = Full()
        members.peers |= {one.number: one for one in peers[:2]}
        members.announce(want)
        members.peers |= {one.number: one for one in peers[2:]}
        members.announce_end()
        left = sorted(members.peers)
        members.peers.clear()
        return left, [*peers[1].outgoing.sent, *peers[3].outgoing.sent]

    assert swarm.in_hub(tell_all) == ([902, 904], [want, RunOver(), RunOver()])
