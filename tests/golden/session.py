"""What a hub and a worker say to each other in a short session on loopback: the hub is real, the worker is a script."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))

from swarm_bench import PATIENCE_S, SwarmBench, hello, quick, version_of, wait_until

from baton.swarm.messages import FromWorker, Heartbeat, encode
from baton.types import FinishReason, Report, Retry, Segment

FILE = Path(__file__).parent / "session.json"
TAG = "type"
MASKED = {"incarnation", "key", "reason"}
"""Fields with other values each time, or with sentences."""


class Script:
    """A worker's connections, and what is said on them, phase by phase."""

    def __init__(self, bench: SwarmBench) -> None:
        self.phases: list[dict[str, Any]] = []
        self._bench = bench

    async def connect(self, session: aiohttp.ClientSession) -> None:
        """Open a connection and read what the hub says first."""
        headers = {"Authorization": f"Bearer {self._bench.worker_token}"}
        self._line = await session.ws_connect(f"{self._bench.url}/worker", headers=headers)
        await self.say("connects", [], 1)

    async def say(self, name: str, messages: Sequence[FromWorker | bytes], count: int) -> dict[str, Any]:
        """Send messages and read so many of the hub's; return those by tag."""
        sent = [message if isinstance(message, bytes) else encode(message) for message in messages]
        for frame in sent:
            await self._line.send_bytes(frame)
        heard = [msgspec.msgpack.decode(await self._line.receive_bytes()) for _ in range(count)]
        said = [msgspec.msgpack.decode(frame) for frame in sent if frame[:1] != b"\xc1"]
        phase = {"phase": name, "worker": said, "hub": sorted(heard, key=lambda message: str(message[TAG]))}
        self.phases.append(msgspec.json.decode(msgspec.json.encode(_masked(phase))))
        return {message[TAG]: message for message in heard}

    async def hang_up(self) -> None:
        """Close the connection."""
        await self._line.close()


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "masked" if k in MASKED and v else _masked(v) for k, v in value.items()}
    return [_masked(each) for each in value] if isinstance(value, list | tuple) else value


def _report(lease_id: int, offset: int, token_ids: Sequence[int], reason: FinishReason | None = None) -> Report:
    segment = Segment(tuple(token_ids), tuple(-0.5 for _ in token_ids), 0)
    return Report(lease_id, offset, (segment,), reason)


async def _conversation(bench: SwarmBench) -> list[dict[str, Any]]:
    script, serves = Script(bench), version_of(0)
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        await script.connect(session)
        heard = await script.say("is ready", [hello(slots=1, serves=serves)], 4)
        key, first = heard["Admitted"]["key"], heard["Lease"]["lease_id"]
        await script.say("lives", [Heartbeat(serves)], 1)
        await script.say("reports", [_report(first, 0, (5, 6))], 1)
        await script.hang_up()
        await script.connect(session)
        await script.say("comes again", [hello(key, slots=1, serves=serves, leases=(first,))], 2)
        heard = await script.say("finishes", [_report(first, 2, (7, 0), FinishReason.STOP)], 2)
        second = heard["Lease"]["lease_id"]
        await script.say("refuses", [Heartbeat(None), Retry(second, -1)], 1)
        heard = await script.say("serves again", [Heartbeat(serves)], 2)
        third = heard["Lease"]["lease_id"]
        await script.say("finishes all", [_report(third, 0, (8, 0), FinishReason.STOP)], 2)
        await script.say("is malformed", [b"\xc1"], 1)
        await script.hang_up()
        await script.connect(session)
        await script.say("comes a third time", [hello(key, slots=1, serves=None)], 2)
        closing = asyncio.create_task(asyncio.to_thread(bench.port.close, is_over=True))
        await script.say("hears the end", [], 1)
        await script.hang_up()
        await closing
    return script.phases


def transcript(directory: Path) -> list[dict[str, Any]]:
    """Hold the session; return its phases."""
    with quick():
        rules = {"heartbeat_timeout_s": PATIENCE_S, "progress_timeout_s": PATIENCE_S}
        bench = SwarmBench(directory, "sync", batch_groups=1, group_size=2, lease_rules=rules)
        bench.hub.members.welcome = msgspec.structs.replace(bench.hub.members.welcome, heartbeat_s=PATIENCE_S)
        try:
            bench.begin()
            wait_until(lambda: bench.hub.members.want is not None, "a version")
            trainer = Thread(target=bench.step, daemon=True)  # which no failure here has to wait for
            trainer.start()
            phases = asyncio.run(_conversation(bench))
            trainer.join(PATIENCE_S)
            assert len(bench.batches) == 1
        finally:
            bench.close()
    return phases


def make() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as path:
        phases = transcript(Path(path))
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(phases), indent=1) + b"\n")


if __name__ == "__main__":
    make()
