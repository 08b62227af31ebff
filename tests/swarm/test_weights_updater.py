"""A worker that ends leaves no fetch behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from baton.swarm.messages import Want
from baton.swarm.worker.weights_updater import WeightsUpdater
from baton.types import PolicyVersion

FIRST, SECOND = PolicyVersion("run", 0, "0" * 64), PolicyVersion("run", 1, "1" * 64)


class StuckSource:
    """Answers nothing until the test ends."""

    name, distance = "stuck", 0

    def __init__(self) -> None:
        self.asked: list[PolicyVersion] = []
        self.is_asked, self.may_end = threading.Event(), threading.Event()

    def manifest(self, version: PolicyVersion) -> bytes:
        self.asked.append(version)
        self.is_asked.set()
        self.may_end.wait(60)
        raise OSError("the test is over")

    def chunk(self, digest: str, size: int) -> bytes:
        raise AssertionError("there is no manifest")


def test_after_close_no_fetch_runs_and_none_begins() -> None:
    source, events = StuckSource(), list[Any]()

    async def play() -> int:
        updater = WeightsUpdater(lambda url: source, (), events.append, print)
        updater.fetch(FIRST, Want(FIRST))
        async with asyncio.timeout(60):
            while not source.is_asked.is_set():
                await asyncio.sleep(0.001)
            await updater.close()
        updater.fetch(SECOND, Want(SECOND))
        return len(asyncio.all_tasks())

    try:
        assert asyncio.run(play()) == 1, "this one"
    finally:
        source.may_end.set()
    assert set(source.asked) == {FIRST}
    assert not events
