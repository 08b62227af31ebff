"""A file system that does not answer: every call ends with the store's name, and no thread keeps the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from baton.errors import WeightsFault
from baton.types import PolicyVersion
from baton.weights import storage as places
from baton.weights.storage import RemoteStorage
from baton.weights.store import Store

pytestmark = pytest.mark.timing

PATIENCE_S = 120
CALLS = {
    "read": lambda place: place.read("chunks/a", 10),
    "write": lambda place: place.write("chunks/a", b"data"),
    "size": lambda place: place.size("chunks/a"),
    "names": lambda place: place.names("chunks"),
    "remove": lambda place: place.remove("chunks/a"),
}


class HangingFileSystem(MemoryFileSystem):
    """Answers nothing until it is let go."""

    protocol = "hanging"
    let_go = threading.Event()

    def _hang(self, *arguments: Any, **options: Any) -> Any:
        self.let_go.wait(PATIENCE_S)
        raise FileNotFoundError

    open = cat_file = makedirs = size = find = exists = _hang


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
    HangingFileSystem.let_go.clear()
    yield "hanging://store"
    HangingFileSystem.let_go.set()


@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_and_names_the_store(url: str, name: str) -> None:
    with pytest.raises(
        WeightsFault, match=r"hanging://store did not answer in 0 s while (reading|writing|look|list|rem)"
    ):
        CALLS[name](RemoteStorage(url, call_s=0.05))


def test_a_store_that_does_not_answer_is_no_evidence_that_a_version_is_not_published(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SLOWEST_BYTES_PER_S", 1e12)  # of a manifest, whose size is not known before
    monkeypatch.setattr(places, "open_storage", lambda where: RemoteStorage(str(where), call_s=0.05))
    monkeypatch.setattr("baton.weights.store.open_storage", places.open_storage)
    store = Store(url)
    for ask in (lambda: store.find("a", 1), store.versions, lambda: store.collect([PolicyVersion("a", 1)])):
        with pytest.raises(WeightsFault, match="did not answer"):
            ask()


def test_calls_that_hang_are_only_so_many(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_CALLS", 2)
    place = RemoteStorage(url, call_s=0.05)
    for _ in range(2):
        with pytest.raises(WeightsFault, match="did not answer"):
            place.size("chunks/a")
    num_threads = threading.active_count()
    with pytest.raises(WeightsFault, match="was not tried: 2 earlier calls have not returned"):
        place.size("chunks/a")
    assert threading.active_count() <= num_threads
    HangingFileSystem.let_go.set()
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            assert place.size("chunks/a") is None  # places are free again once calls return
            return
        except WeightsFault:
            time.sleep(0.01)
    raise AssertionError("no call is made any more")


def test_a_process_ends_while_a_call_hangs() -> None:
    code = (
        "from tests.weights import test_hanging_store as t\n"
        "t.fsspec.register_implementation('hanging', t.HangingFileSystem)\n"
        "try: t.RemoteStorage('hanging://store', call_s=0.05).size('a')\n"
        "except t.WeightsFault as error: print(error, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S - 20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hanging://store did not answer" in done.stdout
