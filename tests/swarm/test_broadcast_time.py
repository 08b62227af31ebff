"""When all workers serve a version is looked up once per tick, not for every worker that begins to serve it."""

from __future__ import annotations

from types import SimpleNamespace as Stub
from typing import Any

from baton.swarm.hub.membership import Membership
from baton.swarm.messages import Heartbeat
from baton.swarm.provisioning import ThroughputTracker
from baton.types import PolicyVersion

WORKERS = 50
VERSION = PolicyVersion("a", 3)


class Tracker(ThroughputTracker):
    """Counts the workers that are looked at."""

    num_seen = 0

    def serve(self, now_s: float, served: Any) -> None:
        found = list(served)
        Tracker.num_seen += len(found)
        super().serve(now_s, found)


def test_workers_are_looked_at_once_per_tick() -> None:
    pace = Tracker(announced={3: 0.0})
    broker: Any = Stub(pace=pace, heartbeat=lambda *_: [], handle=lambda _: [], clock=lambda: 1.0)
    access: Any = Stub(recheck=lambda *_: None)
    members = Membership(access, Stub(), broker, Stub(tick=lambda _: None), print)  # type: ignore[arg-type]
    members.versions[3] = VERSION
    for number in range(WORKERS):
        stats, beat = Stub(decoded_tokens=0), lambda *_: None
        members.peers[number] = Stub(  # type: ignore[assignment]
            number=number, served=None, is_connected=True, outgoing=None, stats=stats, beat=beat, grant=None, worker="",
            address="", is_limited=True,
        )  # fmt: skip
    for peer in list(members.peers.values()):
        members.on_message(peer, Heartbeat(VERSION))  # type: ignore[call-arg]
    assert Tracker.num_seen == 0
    members.tick(0.0)
    members.tick(0.0)
    assert Tracker.num_seen == WORKERS
    assert pace.announced == {}, "all workers serve it"
    assert pace.broadcast_s > 0
