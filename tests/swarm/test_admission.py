"""Attacks on a hub from this machine: strangers without a token, and a bad token. Others are served all the while."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.swarm.hub.admission import AUTHENTICATE_S, Admission, ConnectionLimits, RateLimit, network_of
from baton.swarm.messages import Heartbeat, encode
from tests.swarm.attacked_hub import BURST, REQUESTS_PER_S, AttackedHub, attacked_hub

pytestmark = pytest.mark.timing

FILES = 512
"""That the attacked process may open."""
STRANGERS = 1100
DEADLINE_S = 120.0

# ---- decisions -------------------------------------------------------------------------------------------------------


@given(
    st.integers(64, 100_000),
    st.lists(st.tuples(st.sampled_from("aabbc"), st.sampled_from(["stay", "leave", "x", "y", "owner"])), max_size=200),
)
def test_no_history_takes_more_places_than_there_are(files: int, history: list[tuple[str, str]]) -> None:
    places = ConnectionLimits.of(files)
    small = ConnectionLimits(6, 8, 4, 12)
    assert places.strangers + places.known <= files // 2 + 4 or places.strangers + places.known <= 4096
    admission, there, known = Admission(small), set[int](), dict[int, str]()
    for number, (address, does) in enumerate(history):
        evicted = admission.arrive(number, address, float(number))
        there.add(number)
        there.discard(-1 if evicted is None else evicted)
        if does == "leave":
            admission.leave(number)
            there.discard(number)
        elif does != "stay" and admission.identify(number, does, is_owner=does == "owner") is None:
            there.discard(number)
            known[number] = does
    keys = list(known.values())
    assert len(there) <= small.strangers
    assert all(keys.count(key) <= small.untrusted_per_token for key in "xy")
    assert len(keys) - keys.count("owner") <= small.untrusted
    assert len(keys) <= small.known
    assert set(admission.overdue(1e9)) == there
    assert admission.overdue(AUTHENTICATE_S) == [], "not before their time"


def test_the_address_with_most_strangers_gives_way_and_of_it_the_oldest() -> None:
    admission = Admission(ConnectionLimits(4, 8, 4, 12))
    assert [admission.arrive(number, "10.0.0.1", 0.0) for number in range(3)] == [None] * 3
    assert admission.arrive(3, "10.0.0.2", 0.0) is None
    assert admission.arrive(4, "10.0.0.3", 0.0) == 0, "there is no place left"
    assert admission.arrive(5, "10.0.0.1", 0.0) == 1, "it closes its own"
    assert admission.identify(5, "token") is None
    assert admission.arrive(6, "10.0.0.1", 0.0) is None, "a caller with a token counts as no stranger"


def test_the_owner_gets_a_place_when_no_token_of_others_does() -> None:
    admission = Admission(ConnectionLimits(20, 8, 4, 12))
    for number in range(9):
        admission.arrive(number, "10.0.0.1", 0.0)
        refusal = admission.identify(number, f"token {number // 4}")
        assert (refusal is None) == (number < 8), refusal
    assert admission.identify(8, "admin", is_owner=True) is None


def test_a_token_that_has_its_share_leaves_room_for_another() -> None:
    admission = Admission(ConnectionLimits(20, 8, 4, 12))
    for number in range(5):
        admission.arrive(number, "10.0.0.1", 0.0)
    refusals = [admission.identify(number, "greedy") for number in range(5)]
    assert refusals == [None] * 4 + ["this token has reached its limit of 4 connections"]
    assert admission.identify(4, "other") is None
    admission.leave(0)
    admission.arrive(5, "10.0.0.1", 0.0)
    assert admission.identify(5, "greedy") is None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_an_ipv6_subscriber_is_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


@given(st.lists(st.floats(0, 2), max_size=300))
def test_no_key_gets_more_than_its_rate_and_none_waits_for_another(gaps_s: list[float]) -> None:
    limit, now_s, used_s = RateLimit(per_s=4.0, burst=8.0), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        used_s.append(now_s + limit.delay_s("flood", now_s))
    for first in range(0, len(used_s), 7):
        span_s = used_s[-1] - used_s[first]
        assert len(used_s) - first <= 4.0 * span_s + 8.0 + 1.001
    assert limit.delay_s("other", now_s) == 0.0


# ---- attacks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make certificates")
    folder = tmp_path_factory.mktemp("pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=elsewhere"
    where = ["-keyout", str(folder / "hub.key"), "-out", str(folder / "hub.pem")]
    subprocess.run([*command.split(), *where], check=True, capture_output=True, timeout=60)
    return folder / "hub.pem", folder / "hub.key"


@pytest.fixture(scope="module", params=["plain", "tls"])
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedHub]:
    """One process for all attacks: what one does must not help the next."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * STRANGERS:
        pytest.skip(f"an attack opens {STRANGERS} connections, and this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * STRANGERS), hard))
    pem = request.getfixturevalue("pem") if request.param == "tls" else ()
    with attacked_hub(tmp_path_factory.mktemp("hub"), FILES, *pem) as found:
        yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def client_context() -> ssl.SSLContext:
    """Of a caller that checks nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def get(hub: AttackedHub, path: str, name: str) -> bytes:
    """Ask with a token on a connection of its own, again while the hub has no place for it."""
    end_s = time.monotonic() + DEADLINE_S
    context = client_context() if hub.is_tls else None
    while time.monotonic() < end_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", hub.port), timeout=20) as plain:
            line = context.wrap_socket(plain) if context else plain
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {hub.tokens[name]}"
            line.sendall(f"{head}\r\n\r\n".encode())
            answer = b"".join(iter(lambda line=line: line.recv(2**20), b""))
            if answer.startswith(b"HTTP/1.1 200"):
                return answer.partition(b"\r\n\r\n")[2]
    raise AssertionError(f"{path} was not served to {name}")


def assert_well(hub: AttackedHub) -> None:
    """The run opens files, its admin and a worker are served."""
    assert hub.ask("files 150") == 150
    assert get(hub, "/status", "admin").startswith(b"{")
    assert get(hub, "/model", "worker")


@pytest.mark.slow
@pytest.mark.parametrize(
    "opening", [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", b"\x16\x03\x01"], ids=["silent", "slow", "tls"]
)
def test_more_strangers_than_files_end_nothing(hub: AttackedHub, opening: bytes) -> None:
    """Also in the middle of a TLS handshake, which an HTTP server does not see."""
    with ExitStack() as lines:
        for number in range(STRANGERS):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", hub.port), timeout=20))
            with suppress(OSError):
                line.sendall(opening)
            if number % 500 == 499:
                assert_well(hub)
        assert_well(hub)


def ask(hub: AttackedHub, path: str, name: str) -> socket.socket:
    """Send a request with a token, and read nothing."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.settimeout(20)
    line.connect(("127.0.0.1", hub.port))
    line = client_context().wrap_socket(line) if hub.is_tls else line
    line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hub.tokens[name]}\r\n\r\n".encode())
    return line


@pytest.mark.slow
def test_pollers_without_a_token_do_not_lock_the_admin_out(hub: AttackedHub) -> None:
    """Each asks /health again and again, on a connection that it would keep, and on another when that is closed."""

    async def poll(ends: asyncio.Event) -> None:
        tls = client_context() if hub.is_tls else None
        while not ends.is_set():
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", hub.port, ssl=tls)
                try:
                    while not ends.is_set():
                        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                        await reader.readuntil(b"ok")
                finally:
                    writer.transport.abort()

    async def attack() -> None:
        ends = asyncio.Event()
        pollers = [asyncio.create_task(poll(ends)) for _ in range(STRANGERS // 4 if hub.is_tls else STRANGERS)]
        for _ in range(3):
            await asyncio.to_thread(assert_well, hub)
        ends.set()
        for poller in pollers:
            poller.cancel()
        await asyncio.gather(*pollers, return_exceptions=True)

    asyncio.run(attack())


@pytest.mark.slow
def test_downloads_that_nobody_reads_cost_bounded_memory_and_keep_no_other_token_out(hub: AttackedHub) -> None:
    """All connections that one token may have; each would be 8 MiB in memory."""
    before = hub.ask("memory")
    with ExitStack() as lines:
        for number in range(200):
            with suppress(OSError):  # more than the token may have
                lines.enter_context(ask(hub, f"/weights/chunk/{hub.chunks[number % 8]}", "worker"))
        for digest in hub.chunks:
            assert len(get(hub, f"/weights/chunk/{digest}", "other")) == 2**23
        assert hub.ask("memory") - before < 150 * 2**20
        assert hub.ask("files 150") == 150
        assert get(hub, "/status", "admin").startswith(b"{")


@pytest.mark.slow
def test_a_flood_of_heartbeats_is_taken_at_a_bounded_rate(hub: AttackedHub) -> None:
    """What is more waits in the flooder's own connection, and nothing is made of it."""

    async def attack() -> None:
        tls = client_context() if hub.is_tls else False
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
            url = f"http{'s' if hub.is_tls else ''}://127.0.0.1:{hub.port}/worker"
            headers = {"Authorization": f"Bearer {hub.tokens['worker']}"}
            async with session.ws_connect(url, headers=headers) as line:
                begin_s, begin = time.monotonic(), hub.ask("frames")
                flood = asyncio.create_task(send(line, 40_000))
                for _ in range(20):
                    await asyncio.to_thread(get, hub, "/model", "other")
                while hub.ask("frames") - begin < 2 * BURST:
                    await asyncio.sleep(0.1)
                taken, taken_s = hub.ask("frames") - begin, time.monotonic() - begin_s
                assert taken <= BURST + REQUESTS_PER_S * taken_s + 10
                flood.cancel()
                await asyncio.gather(flood, return_exceptions=True)

    async def send(line: aiohttp.ClientWebSocketResponse, count: int) -> None:
        frame = encode(Heartbeat(None))
        for _ in range(count):
            await line.send_bytes(frame)

    asyncio.run(attack())
    assert get(hub, "/status", "admin").startswith(b"{")
