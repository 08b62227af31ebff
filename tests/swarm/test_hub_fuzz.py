"""Nonsense, floods and silence at the hub's port: no crash, no effect on others, bounded memory, and it ends.

Whatever is thrown at the hub, a healthy worker trains through it.
"""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from swarm_bench import SwarmBench, hello, quick, wait_until

import baton.swarm.hub.admission
import baton.swarm.hub.sending
import baton.swarm.hub.session
import baton.swarm.hub.worker_connection
from baton.errors import Fault
from baton.rollout.engine import EngineStats
from baton.swarm.auth import Role, digest_of
from baton.swarm.hub.access import AccessControl
from baton.swarm.messages import (
    MAX_FRAME_BYTES,
    Admitted,
    Dropped,
    Heartbeat,
    Hello,
    Leaving,
    Rejected,
    decode_from_hub,
    encode,
)
from baton.types import FinishReason, PolicyVersion, Report, Retry, Segment
from baton.weights.storage import ByteReader
from baton.weights.store import Store

pytestmark = pytest.mark.timing

MESSAGES = [
    hello("fuzz"),
    Heartbeat(None, EngineStats(1, 2, 3, 4), 3, 99, "fault"),
    Heartbeat(PolicyVersion("bench", 0, "0" * 64)),
    Report(0, 0, (Segment((3, 4), (-1.0, -0.5), 0),), FinishReason.STOP),
    Report(1, 5, (), is_aborted=True),
    Retry(0, 7),
    Fault("OSError", "no room"),
    Leaving(),
]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmBench]:
    """A swarm with one healthy worker, that of its owner; strangers have a token of their own."""
    with quick():
        made = SwarmBench(tmp_path_factory.mktemp("hub"), "async", max_staleness=4)
        made.stranger = made.tokens.create(Role.WORKER, 3600, name="stranger")
        made.join(1)
        made.begin()
        yield made
        made.close()


@pytest.fixture
def bench(swarm: SwarmBench) -> Iterator[SwarmBench]:
    """The same for every test: what one does must not trouble the next, nor the run."""
    swarm.step()
    wait_until(lambda: all(peer.served == swarm.version for peer in own(swarm)), "the newest version is served")
    worker = own(swarm)[0].number
    yield swarm
    swarm.step()
    swarm.hub.check()
    swarm.assert_sound()
    wait_until(
        lambda: not [p for p in swarm.hub.members.peers.values() if p.is_connected and p not in own(swarm)], "strangers"
    )
    assert [peer.number for peer in own(swarm) if peer.is_connected] == [worker], "never cut off"


def own(bench: SwarmBench) -> list[Any]:
    return [peer for peer in list(bench.hub.members.peers.values()) if peer.grant.name == "workers"]


def run(work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """Run a client to its end, within a deadline."""

    async def whole() -> Any:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            return await work(session)

    return asyncio.run(whole())


async def connect(session: aiohttp.ClientSession, bench: SwarmBench) -> aiohttp.ClientWebSocketResponse:
    headers = {"Authorization": f"Bearer {bench.stranger}"}
    return await session.ws_connect(bench.url + "/worker", headers=headers, max_msg_size=0)


async def say(
    session: aiohttp.ClientSession, bench: SwarmBench, frames: list[bytes | str], quiet_s: float = 0.2
) -> list[Any]:
    """Send frames on a connection of their own; return the hub's messages until it closes it, or for `quiet_s`."""
    line, heard = await connect(session, bench), []
    try:
        for frame in frames:
            await (line.send_str(frame) if isinstance(frame, str) else line.send_bytes(frame))
    except (aiohttp.ClientError, ConnectionError):
        pass
    try:
        async with asyncio.timeout(quiet_s):
            while (message := await line.receive()).type is aiohttp.WSMsgType.BINARY:
                heard.append(decode_from_hub(message.data))
    except TimeoutError:
        pass
    await line.close()
    return heard


def view(bench: SwarmBench) -> Any:
    """What nobody but its own worker may change."""

    def look() -> Any:
        mine = own(bench)
        known = [peer.number in bench.broker.table.workers for peer in mine]
        return (
            [(p.number, p.hello, p.served) for p in mine],
            known,
            bench.hub.members.want,
            dict(bench.hub.members.versions),
        )

    return bench.in_hub(look)


def framed(message: bytes) -> bytes:
    """A WebSocket frame as a client sends it, masked with zeros."""
    assert len(message) < 126 or len(message) < 2**16
    size = bytes([0x80 | len(message)]) if len(message) < 126 else b"\xfe" + len(message).to_bytes(2, "big")
    return b"\x82" + size + bytes(4) + message


def memory_mb() -> float:
    """Resident, of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def mutated(frame: bytes, rng: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(4):
            case 0 if data:
                data[at] = rng.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _ if data:
                del data[at]
    return bytes(data)


def test_random_and_mutated_frames_end_their_connection_and_nothing_else(bench):
    rng, before, malformed = random.Random(5), view(bench), bench.hub.members.counters.malformed
    frames = [rng.randbytes(rng.randrange(0, 200)) for _ in range(60)]
    frames += [mutated(encode(rng.choice(MESSAGES)), rng) for _ in range(240)]

    async def work(session: aiohttp.ClientSession) -> None:
        async def one(frame: bytes) -> None:
            await say(session, bench, [encode(hello(f"fuzz{id(frame)}")), frame] if rng.random() < 0.5 else [frame])

        for at in range(0, len(frames), 20):
            await asyncio.gather(*(one(frame) for frame in frames[at : at + 20]))

    run(work)
    assert view(bench) == before
    assert bench.hub.members.counters.malformed - malformed > 100
    assert bench.convicted == []
    wait_until(lambda: len(bench.hub.members.peers) == len(own(bench)), "the strangers are forgotten")


def is_wrong(first: Any, second: Any) -> bool:
    """Whether the hub rejects these two messages in this order. It does not answer a worker that could not be built."""
    if isinstance(first, Hello):
        return isinstance(second, Hello)
    return not isinstance(first, Fault) and not (isinstance(first, Heartbeat) and isinstance(second, Hello | Heartbeat))


def test_every_message_in_every_wrong_order(bench):
    before = view(bench)
    wrong = [(a, b) for a in MESSAGES for b in MESSAGES]

    async def work(session: aiohttp.ClientSession) -> list[list[Any]]:
        return await asyncio.gather(
            # the hub closes the connection after a rejection, so a long wait ends early
            *(say(session, bench, [encode(a), encode(b)], 30.0 if is_wrong(a, b) else 0.2) for a, b in wrong)
        )

    answers = run(work)
    for (first, second), heard in zip(wrong, answers, strict=True):
        rejected = [message for message in heard if isinstance(message, Rejected)]
        assert bool(rejected) == is_wrong(first, second) or isinstance(second, Fault | Leaving), (first, second, heard)
    assert view(bench) == before
    wait_until(lambda: len(bench.hub.members.peers) == len(own(bench)), "the strangers are forgotten")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x81" * 500_000,
        b"\x91" * 500_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa6Report" + b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "Heartbeat", "serves": {"lineage": "x" * 5_000_000, "number": 1}}),
        msgspec.msgpack.encode({"type": "Heartbeat", "serves": None, "stats": {"decoded_tokens": 2**64 - 1}}),
        msgspec.msgpack.encode({"type": "Heartbeat", "serves": None, "fault": "\x1b[2J" * 5000}),
        msgspec.msgpack.encode({"type": "Report", "lease_id": 0, "token_offset": 0, "segments": [[]] * 100_000}),
        b"",
        "a text",
        "x" * 9_000_000,
        b"\x00" * (MAX_FRAME_BYTES + 1),
    ],
    ids=lambda frame: f"{len(frame)} {frame[:8]!r}",
)
@pytest.mark.parametrize("is_seated", [False, True])
def test_deep_huge_and_lying_frames_are_refused(bench, frame, is_seated):
    before, malformed, memory = view(bench), bench.hub.members.counters.malformed, memory_mb()

    async def work(session: aiohttp.ClientSession) -> Any:
        line = await connect(session, bench)
        if is_seated:
            await line.send_bytes(encode(hello("deep")))
        try:
            await (line.send_str(frame) if isinstance(frame, str) else line.send_bytes(frame))
        except (aiohttp.ClientError, ConnectionError):
            return
        while (await line.receive()).type is aiohttp.WSMsgType.BINARY:
            pass
        assert line.closed, "the connection is ended"

    run(work)
    wait_until(lambda: bench.hub.members.counters.malformed == malformed + 1, "it is counted")
    assert view(bench) == before
    assert memory_mb() - memory < 150
    audit = (bench.directory / "audit.jsonl").read_text()
    assert '"event":"malformed"' in audit
    assert '"token":"stranger"' in audit


def test_a_seated_worker_that_says_what_is_no_message_is_named(tmp_path):
    with quick():
        bench: Any = SwarmBench(tmp_path)
        bench.stranger = bench.tokens.create(Role.WORKER, 3600, name="stranger")
        run(lambda session: say(session, bench, [encode(hello("a")), b"\xc1"]))
        run(lambda session: say(session, bench, [b"\xc1"]))
        wait_until(lambda: bench.hub.members.counters.malformed == 2, "both are counted")
        bench.close()
    names = [author.grant.name for author, _ in bench.verifier.malformed]
    assert names == ["stranger"], "who has no place yet has nothing to lose it for"


def test_raw_nonsense_over_http_is_answered_or_hung_up_on(bench):
    rng, before = random.Random(9), view(bench)
    token = bench.stranger.encode()
    requests = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(5000)) + b"\r\n",
        b"GET /weights/manifest/..%2f..%2fetc/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token + b"\r\n\r\n",
        b"GET /weights/manifest/bench/-1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token + b"\r\n\r\n",
        b"GET /weights/manifest/bench/" + b"9" * 5000 + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token
        + b"\r\n\r\n",
        b"GET /weights/chunk/" + b"0" * 64 + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token + b"\r\n\r\n",
        b"GET /weights/chunk/..%2f..%2f..%2ftokens.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token
        + b"\r\n\r\n",
        b"POST /worker HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /worker HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        *(rng.randbytes(300) for _ in range(20)),
    ]  # fmt: skip
    for request in requests:
        with socket.create_connection(("127.0.0.1", bench.port_number), timeout=20) as line:
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            try:
                answer = line.recv(65536)
            except ConnectionResetError:
                continue
            status = answer.split(b" ")[1] if answer.startswith(b"HTTP/1") else b""
            wanted = {b"200"} if request.startswith(b"GET /health HTTP/1.1\r\nT") else set()
            assert not answer or status in {b"400", b"404", b"405", b"431"} | wanted, answer[:200]
            assert b"Traceback" not in answer
    assert view(bench) == before


def test_hundreds_who_say_nothing_are_hung_up_on_and_starve_nobody(bench, monkeypatch):
    monkeypatch.setattr(baton.swarm.hub.admission, "AUTHENTICATE_S", 1.0)
    memory, lines = memory_mb(), []
    for number in range(700):
        line = socket.socket()
        line.settimeout(20)
        line.connect(("127.0.0.1", bench.port_number))
        if number % 2:
            with suppress(OSError):
                line.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        lines.append(line)
    for line in lines:
        with suppress(ConnectionResetError):
            assert line.recv(100) == b"", "hung up on"
    assert memory_mb() - memory < 100
    for line in lines:
        line.close()
    with socket.create_connection(("127.0.0.1", bench.port_number), timeout=20) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in line.recv(1000), "and there is room again"


def test_who_never_says_hello_is_hung_up_on(bench, monkeypatch):
    monkeypatch.setattr(baton.swarm.hub.session, "PREPARE_SILENCE_S", 0.2)

    async def work(session: aiohttp.ClientSession) -> None:
        line = await connect(session, bench)
        heard = []
        while (message := await line.receive()).type is aiohttp.WSMsgType.BINARY:
            heard.append(decode_from_hub(message.data))
        assert isinstance(heard[-1], Rejected)

    run(work)


def test_who_never_reads_is_hung_up_on_and_costs_bounded_memory(bench, monkeypatch):
    """It asks without end, and takes no answer off its connection."""
    monkeypatch.setattr(baton.swarm.hub.peers, "MAX_UNSENT_BYTES", 2**20)
    monkeypatch.setattr(AccessControl, "delay_s", lambda self, grant: 0.0)  # it would take longer otherwise
    monkeypatch.setattr(baton.swarm.hub.worker_connection, "CLOSE_S", 0.2)
    memory = memory_mb()
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(60)
    line.connect(("127.0.0.1", bench.port_number))
    head = f"GET /worker HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bench.stranger}\r\nConnection: Upgrade\r\n"
    line.sendall(
        f"{head}Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode()
    )
    line.sendall(framed(encode(hello("deaf"))))
    many = framed(encode(Report(2**40, 0, ()))) * 500  # each is answered

    def flood() -> None:
        for _ in range(2000):
            line.sendall(many)

    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        flood()
    line.close()
    assert memory_mb() - memory < 100
    wait_until(lambda: len(bench.hub.members.peers) == len(own(bench)), "the deaf one is forgotten")
    bench.wait_for_said("does not read its messages")


def test_who_does_not_take_a_body_off_is_hung_up_on(bench, monkeypatch):
    monkeypatch.setattr(baton.swarm.hub.sending, "STALL_S", 0.3)
    monkeypatch.setattr(
        Store, "chunk_body", lambda self, digest: ByteReader(20_000_000, lambda offset, size: bytes(size))
    )
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(60)
    line.connect(("127.0.0.1", bench.port_number))
    bearer = f"Authorization: Bearer {bench.stranger}\r\n"
    line.sendall(f"GET /weights/chunk/{'0' * 64} HTTP/1.1\r\nHost: x\r\n{bearer}\r\n".encode())
    wait_until(lambda: line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "it is hung up on")
    line.close()


def test_a_flood_from_one_worker_does_not_starve_another(bench):
    """Thirty thousand reports of leases that are not its own, as fast as the hub takes them."""
    before = bench.workers[0].engine.stats.decoded_tokens

    async def work(session: aiohttp.ClientSession) -> None:
        line = await connect(session, bench)
        await line.send_bytes(encode(hello("flood")))

        async def read() -> int:
            num_dropped = 0
            while (message := await line.receive()).type is aiohttp.WSMsgType.BINARY:
                num_dropped += isinstance(decode_from_hub(message.data), Dropped)
            return num_dropped

        reader = asyncio.create_task(read())
        frame = encode(Report(0, 0, (Segment((3, 4), (-1.0, -0.5), 0),)))
        for _ in range(30_000):
            await line.send_bytes(frame)
        await line.send_bytes(encode(Leaving()))
        assert await reader >= 30_000

    run(work)
    for _ in range(5):  # some batches may have been generated before the flood
        bench.step()
    assert bench.workers[0].engine.stats.decoded_tokens > before


def test_two_connections_with_one_key_are_one_worker_and_the_old_one_ends(bench):
    async def work(session: aiohttp.ClientSession) -> None:
        old, new = await connect(session, bench), await connect(session, bench)
        await old.send_bytes(encode(hello("not a key of this hub")))
        while not isinstance(admitted := decode_from_hub((await old.receive()).data), Admitted):
            pass
        await new.send_bytes(encode(hello(admitted.key)))
        while (await old.receive()).type is aiohttp.WSMsgType.BINARY:
            pass
        assert old.closed
        own = bench.access.keys.worker(digest_of(bench.stranger), admitted.key)
        assert [p.worker for p in bench.hub.members.peers.values()].count(own) == 1
        assert bench.hub.port is not None
        await new.send_bytes(encode(Leaving()))
        while (await new.receive()).type is aiohttp.WSMsgType.BINARY:
            pass

    run(work)
    wait_until(lambda: len(bench.hub.members.peers) == len(own(bench)), "it has left")
