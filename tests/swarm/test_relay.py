"""A relay hands on what is right, once over the long way, to those who may have it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from yarl import URL

from baton.errors import StorageFault, UserError, WeightsFault
from baton.policy.tensors import weights_digest
from baton.swarm.hub.peers import FORGET_AFTER_S, RelayList
from baton.swarm.hub.relay import Relay, RelayOptions, RelayTicket
from baton.swarm.listen import ListenAddress
from baton.swarm.transfer import HttpSource
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.sources import ChunkCache
from baton.weights.storage import LocalStorage
from baton.weights.store import Store

pytestmark = pytest.mark.timing

TOKEN, SECRET = "the relay's token", "the workers' secret"


@dataclass
class Origin:
    """A hub as a relay sees it, with counts, and with lies on demand."""

    store: Store
    asked: Counter[str] = field(default_factory=Counter)
    bytes_out: int = 0
    relays: set[str] = field(default_factory=set)
    lies: bool = False

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized(text="no token")
        _, kind, *rest = request.path.split("/")
        if kind == "relay":
            self.relays.add(request.query["url"])
            return web.Response(body=msgspec.json.encode(RelayTicket(SECRET)))
        self.asked[request.path] += 1
        await asyncio.sleep(0.05)  # so that several ask for the same meanwhile
        if rest[0] == "manifest":
            body = self.store.manifest(PolicyVersion(rest[1], int(rest[2])))
        else:
            body = self.store.chunk(rest[1])
            body = bytes([body[0] ^ 1]) + body[1:] if self.lies else body
        self.bytes_out += len(body)
        return web.Response(body=body)


@asynccontextmanager
async def running(
    origin: Origin, cache: Path, token: str = TOKEN, say: Callable[[str], None] = lambda text: None
) -> AsyncIterator[tuple[Relay, str]]:
    """A relay behind an origin; yields the relay and the origin's URL."""
    app = web.Application()
    app.router.add_get("/{path:.*}", origin.answer)
    controller = web.AppRunner(app)
    await controller.setup()
    await web.TCPSite(controller, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{controller.addresses[0][1]}"
    headers = {"Authorization": f"Bearer {token}"}
    listen = ListenAddress.parse("127.0.0.1:0")
    relay, until = Relay(RelayOptions(url, headers, listen, None, cache, 2**24, say=say)), asyncio.Event()
    serving = asyncio.create_task(relay.run(until))
    try:
        async with asyncio.timeout(60):
            while not origin.relays and not serving.done():
                await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
        yield relay, url
    finally:
        until.set()
        await asyncio.gather(serving, return_exceptions=True)
        await controller.cleanup()


@pytest.fixture
def published(tmp_path: Path) -> tuple[Store, PolicyVersion, int]:
    store = Store(tmp_path / "store")
    tensors = {f"layer.{i}": torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    version = PolicyVersion("run", 0, weights_digest(tensors))
    return store, version, Publisher(store, WeightsSettings(chunk_mb=2**-6)).publish(tensors, version).bytes


def test_many_workers_cost_the_hub_what_one_does(tmp_path: Path, published: tuple[Store, PolicyVersion, int]) -> None:
    store, version, num_bytes = published
    origin = Origin(store)

    async def scenario() -> None:
        async with running(origin, tmp_path / "cache") as (relay, url), aiohttp.ClientSession() as http:
            loop = asyncio.get_running_loop()

            def fetch() -> str:
                near = HttpSource(http, loop, relay.url, SECRET, distance=0)
                fetcher = Fetcher([HttpSource(http, loop, url, "a worker's token"), near])
                return weights_digest(fetcher.fetch(version, deadline_s=30))

            with ThreadPoolExecutor(8) as workers:  # of their own: the relay has its threads too
                digests = await asyncio.gather(*(loop.run_in_executor(workers, fetch) for _ in range(8)))
            assert set(digests) == {version.digest}

    asyncio.run(scenario())
    assert set(origin.asked.values()) == {1}, "each manifest and chunk takes the long way once"
    assert num_bytes <= origin.bytes_out <= 1.5 * num_bytes


def test_a_relay_forges_nothing_that_the_hub_did_not(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int]
) -> None:
    store, version, _ = published
    origin = Origin(store, lies=True)

    async def scenario() -> None:
        async with running(origin, tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            source = HttpSource(http, asyncio.get_running_loop(), relay.url, SECRET)
            with pytest.raises(WeightsFault, match="sent a chunk that does not match"):
                await asyncio.to_thread(Fetcher([source]).fetch, version, deadline_s=30)
            origin.lies = False
            tensors = await asyncio.to_thread(Fetcher([source]).fetch, version, deadline_s=30)
            assert weights_digest(tensors) == version.digest, "nothing wrong was kept"

    asyncio.run(scenario())


def test_an_invalid_manifest_of_the_hub_is_an_error_of_the_hub_and_is_not_kept(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, version, _ = published
    body = store.manifest(version)

    async def scenario() -> None:
        async with running(Origin(store), tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            answers = []
            for sent in (b"no manifest", body):
                monkeypatch.setattr(store, "manifest", lambda _, sent=sent: sent)
                headers = {"Authorization": f"Bearer {SECRET}"}
                async with http.get(f"{relay.url}/weights/manifest/run/{version.number}", headers=headers) as answer:
                    answers.append((answer.status, await answer.read()))
            (status, text), whole = answers
            assert status == 502
            assert b"refused a manifest" in text
            assert whole == (200, body)

    asyncio.run(scenario())


def test_a_relay_remembers_a_bounded_number_of_chunks_and_forgets_no_right_one(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, version, _ = published
    monkeypatch.setattr("baton.swarm.hub.relay.MAX_VERIFIED", 1)
    origin = Origin(store)

    async def scenario() -> None:
        async with running(origin, tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            source = HttpSource(http, asyncio.get_running_loop(), relay.url, SECRET)
            for _ in range(2):
                tensors = await asyncio.to_thread(Fetcher([source]).fetch, version, deadline_s=30)
                assert weights_digest(tensors) == version.digest
            assert len(relay.verified) == 1

    asyncio.run(scenario())
    assert set(origin.asked.values()) == {1}, "each manifest and chunk takes the long way once"


def test_a_relay_whose_disk_is_full_keeps_fewer_chunks_and_still_sends_all(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, version, num_bytes = published
    origin, write, room = Origin(store), LocalStorage.write, num_bytes // 2

    def limited(self: LocalStorage, name: str, *data: bytes) -> None:
        held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
        if held + sum(map(len, data)) > room:
            raise StorageFault(f"{name} cannot be written (No space left on device)")
        write(self, name, *data)

    monkeypatch.setattr(LocalStorage, "write", limited)
    said: list[str] = []

    async def scenario() -> None:
        async with running(origin, tmp_path / "cache", say=said.append) as (relay, _), aiohttp.ClientSession() as http:
            source = HttpSource(http, asyncio.get_running_loop(), relay.url, SECRET)
            tensors = await asyncio.to_thread(Fetcher([source]).fetch, version, deadline_s=30)
            assert weights_digest(tensors) == version.digest

    asyncio.run(scenario())
    last = store.find("run", 0).chunks[-1].digest  # type: ignore[union-attr]
    assert (tmp_path / "cache" / "chunks" / last).exists(), "there is room again"
    assert "No space left on device" in said[-1]
    assert "; from now on, the cache keeps at most 0.00 GiB: free space, and restart the relay" in said[-1]


def test_a_relay_whose_disk_allows_no_change_sends_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ChunkCache(tmp_path, max_bytes=8)
    assert not cache.put_or_halve("a" * 64, b"12345678")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    assert "Read-only file system" in cache.put_or_halve("b" * 64, b"12345678")
    assert not cache.put_or_halve("c" * 64, b"12345678"), "no later chunk is stored, and there is no second message"


def test_a_relay_opens_to_the_secret_only_and_a_refused_token_ends_it(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int]
) -> None:
    store, version, _ = published

    async def scenario() -> None:
        origin = Origin(store)
        async with running(origin, tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            for token in ("", "a worker's token", TOKEN):
                headers = {"Authorization": f"Bearer {token}"}
                async with http.get(f"{relay.url}/weights/manifest/run/{version.number}", headers=headers) as answer:
                    assert answer.status == 401
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(relay.url).port)
            path = b"/weights/manifest/run/%d" % version.number
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: relay\r\nAuthorization: Bearer \xff\r\n\r\n")
            async with asyncio.timeout(60):
                assert (await reader.readline()).startswith(b"HTTP/1.1 401"), "no text at all"
            writer.close()
            assert not origin.asked
        with pytest.raises(UserError, match="refuses this relay"):
            async with running(Origin(store), tmp_path / "other", token="wrong"):
                pass

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path",
    [
        "/weights/manifest/x%2F..%2F..%2F..%2Frelay%3Furl=http:%2F%2F203.0.113.1:80%23/1",
        "/weights/manifest/..%2Frelay/1",
        "/weights/manifest/%2e%2e/1",
        "/weights/manifest/run/1%2F..%2F..",
        "/weights/manifest/run%3F/1",
        "/weights/manifest/" + "r" * 65 + "/1",
        "/weights/manifest/run/-1",
        "/weights/chunk/..%2F..%2Fmodel",
        "/weights/chunk/" + "0" * 63 + "G",
    ],
)
def test_a_relay_asks_the_hub_for_nothing_but_manifests_and_chunks(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int], path: str
) -> None:
    """Its token opens more than that of the worker that asks."""
    origin = Origin(published[0])

    async def scenario() -> None:
        async with running(origin, tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with http.get(URL(relay.url + path, encoded=True), headers=headers) as answer:
                assert answer.status == 404
            assert origin.relays == {relay.url}
            assert not origin.asked

    asyncio.run(scenario())


def test_strangers_at_a_relay_give_way_to_each_other_and_keep_no_worker_out(
    tmp_path: Path, published: tuple[Store, PolicyVersion, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, version, _ = published
    monkeypatch.setattr("baton.swarm.hub.listener.raised_file_limit", lambda: 64)  # 8 places for strangers

    async def scenario() -> None:
        async with running(Origin(store), tmp_path / "cache") as (relay, _), aiohttp.ClientSession() as http:
            port = URL(relay.url).port
            lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with http.get(f"{relay.url}/weights/manifest/run/{version.number}", headers=headers) as answer:
                assert answer.status == 200
            async with asyncio.timeout(60):
                for reader, _ in lines[:32]:
                    with suppress(ConnectionResetError):
                        assert await reader.read(1) == b"", "hung up on"
            for _, writer in lines:
                writer.transport.abort()

    asyncio.run(scenario())


def test_relays_that_are_silent_are_named_no_more() -> None:
    now = [0.0]
    relays = RelayList(lambda: now[0])
    assert relays.announce("http://a:1")
    now[0] = FORGET_AFTER_S / 2
    assert not relays.announce("http://a:1")
    assert relays.announce("http://b:1")
    now[0] = FORGET_AFTER_S * 1.2
    assert relays.urls() == ("http://a:1", "http://b:1")
    now[0] = FORGET_AFTER_S * 1.6
    assert relays.urls() == ()
    assert relays.announce("http://a:1"), "it is new again"
