"""Requests to ranks from several threads. The ranks are a fake, which answers each request when the test lets it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from test_ranks import setup_of

from baton.trainer.parallel import messages
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.types import PolicyVersion
from baton.weights.direct.protocol import DirectRules

DEADLINE_S = 60.0
VERSION = PolicyVersion("a", 0)


class Ranks(messages.Ranks):
    """One rank, in whose memory usage reports take until `go_on` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_begun, self.go_on = Event(), Event()

    def ask(self, message: messages.ToRank, timeout_s: float) -> list[messages.FromRank]:
        self.asked.append(type(message).__name__ + getattr(message, "name", ""))
        match message:
            case messages.Listen():
                return [messages.Listening("127.0.0.1", 1)]
            case messages.ConnectReplica():
                return [messages.Sending({})]
            case messages.UseDevice():
                self.has_begun.set()
                assert self.go_on.wait(DEADLINE_S)
                return [messages.DeviceMemory(0, None)]
            case _:
                return [messages.Ready(VERSION)]

    def bring(self, path: str) -> Path:
        return Path(path)

    def close(self) -> None: ...


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_communicator_that_cannot_be_closed_yet_is_closed_before_the_next_request(
    tmp_path: Path, *, is_busy: bool
) -> None:
    ranks, closed = Ranks(), ["CloseReplicap", "CloseReplicaq"]
    trainer = RankedTrainer(ranks, setup_of(str(tmp_path)), DEADLINE_S)
    trainer.backend = "gloo"
    for name in "pq":
        trainer.connect_replica(name, 2, DirectRules(connect_s=0.01))
    ranks.asked.clear()
    with ThreadPoolExecutor(1) as thread:
        if is_busy:
            held = thread.submit(lambda: trainer.held_bytes)
            assert ranks.has_begun.wait(DEADLINE_S)
        for name in "pq":
            trainer.close_replica(name)
        assert ranks.asked == (["UseDevice"] if is_busy else closed)
        ranks.go_on.set()
        if is_busy:
            held.result(DEADLINE_S)
    ranks.asked.clear()
    trainer.save(tmp_path / "checkpoint")
    trainer.save(tmp_path / "checkpoint")
    assert ranks.asked == [*(closed if is_busy else []), "Save", "Save"]
