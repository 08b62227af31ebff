"""A keyframe's whole encoding delays no later version, and its chunks are kept until its manifest names them."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import StorageFault
from baton.policy.tensors import weights_digest
from baton.swarm.background_publisher import BackgroundPublisher, VersionRetention
from baton.swarm.messages import Heartbeat
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.manifest import Manifest
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.storage import LocalStorage
from baton.weights.store import Store

pytestmark = pytest.mark.timing
DEADLINE_S = 60.0
HELD = 2


class HeldStore(Store):
    """A store that stores the manifest of the held version's whole encoding only when `release` is set."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self.reached, self.release, self.stored = (threading.Event() for _ in range(3))
        self.fault: StorageFault | None = None

    def put_manifest(self, manifest: Manifest) -> None:
        if manifest.version.number != HELD or manifest.whole is None:
            super().put_manifest(manifest)
            return
        self.reached.set()
        assert self.release.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        super().put_manifest(manifest)
        self.stored.set()


class FakeHub:
    """What a publisher uses of a hub. Calls run at once; `announced` receives each version that is stored."""

    def __init__(self) -> None:
        self.announced: dict[int, threading.Event] = {number: threading.Event() for number in range(6)}
        self.said: list[str] = []
        self.members: Any = SimpleNamespace(
            verifier=SimpleNamespace(published=lambda version, mapped: None),
            broker=SimpleNamespace(pace=SimpleNamespace(announced={})),
            announce=self._announce,
            versions={},
            peers={},
            say=self.said.append,
        )

    def call(self, action: Any) -> None:
        action()

    def _announce(self, want: Any, *, only_near: bool) -> None:
        if not only_near:
            self.members.versions[want.version.number] = want.version
            self.announced[want.version.number].set()


def weights(number: int) -> dict[str, torch.Tensor]:
    tensor = torch.arange(20_000, dtype=torch.float32)
    tensor[:10] += number
    return {"weight": tensor}


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number, weights_digest(weights(number)))


@pytest.fixture
def run(tmp_path: Path):
    """A publisher of versions 0 to 2, of which 2 is a keyframe: its delta is stored, its whole encoding held back."""
    hub, store = FakeHub(), HeldStore(tmp_path)
    retention = VersionRetention(fetchable=2, stored=2)
    publisher = Publisher(store, WeightsSettings(keyframe_every=HELD))
    publication = BackgroundPublisher(hub, publisher, store, retention)  # type: ignore[arg-type]
    for number in range(HELD + 1):
        publication.publish(weights(number), version(number))
    assert store.reached.wait(DEADLINE_S)
    yield hub, store, publication
    store.release.set()
    publication.close()


def test_later_versions_do_not_wait_for_a_keyframe_whose_chunks_are_kept(run):
    """Version 4 is a keyframe too. Its whole encoding is stored while that of version 2 is still held back."""
    hub, store, publication = run
    for number in (3, 4, 5):
        publication.publish(weights(number), version(number))
        assert hub.announced[number].wait(DEADLINE_S)
    assert store.find("run", HELD).whole is None
    assert store.find("run", 4).whole is not None
    store.release.set()
    assert store.stored.wait(DEADLINE_S)
    publication.check()
    whole = store.find("run", HELD).whole
    assert all(len(store.chunk(chunk.digest)) == chunk.size for chunk in whole.chunks)
    fetched = Fetcher([store]).fetch(version(HELD), deadline_s=DEADLINE_S)
    assert torch.equal(fetched["weight"], weights(HELD)["weight"])


def test_a_version_is_kept_while_a_worker_fetches_it(tmp_path: Path) -> None:
    """Otherwise, a worker that fetches more slowly than versions are published would never complete a fetch."""
    hub, store = FakeHub(), Store(tmp_path)
    retention = VersionRetention(fetchable=2, stored=2)
    publisher = Publisher(store, WeightsSettings(keyframe_every=2))
    with closing(BackgroundPublisher(hub, publisher, store, retention)) as publication:  # type: ignore[arg-type]
        for number in range(6):
            publication.publish(weights(number), version(number))
            assert hub.announced[number].wait(DEADLINE_S)
            publication.check()
            hub.members.peers = {1: SimpleNamespace(heartbeat=Heartbeat(None, fetching=1))}
    fetched = Fetcher([store]).fetch(version(1), deadline_s=DEADLINE_S)
    assert torch.equal(fetched["weight"], weights(1)["weight"])
    assert 2 not in hub.members.versions, "versions that nobody needs are removed"


def test_a_run_goes_on_in_a_store_that_permits_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket may permit writing, but not removing. The user is told once."""

    def refused(self: LocalStorage, name: str) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(LocalStorage, "remove", refused)
    hub, store = FakeHub(), Store(tmp_path)
    publisher = Publisher(store, WeightsSettings(keyframe_every=2))
    retention = VersionRetention(fetchable=1, stored=1)
    with closing(BackgroundPublisher(hub, publisher, store, retention)) as publication:  # type: ignore[arg-type]
        for number in range(6):
            publication.publish(weights(number), version(number))
            assert hub.announced[number].wait(DEADLINE_S)
            publication.check()
    (said,) = hub.said
    assert said.startswith(f"warning: old versions cannot be removed from {tmp_path} (Access Denied)")


def test_the_error_of_a_keyframe_is_raised_by_check(run):
    _, store, publication = run
    store.fault = StorageFault("the disk is full")
    store.release.set()
    publication.close()  # waits for the thread
    with pytest.raises(StorageFault, match="the disk is full"):
        publication.check()
