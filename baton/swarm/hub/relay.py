"""A relay between a hub and the workers of one site, so that the hub sends a version about once per site.

    hub ──chunk──▶ relay ──chunk──▶ worker, worker, worker …

When a worker requests a chunk, the relay fetches the chunk from the hub, verifies it, writes it to a cache of limited
size, and sends it to the worker. Workers verify every chunk against the chunk's digest, so a relay can withhold weights
but cannot forge them. The hub sends workers the URLs of its relays and a secret for their requests to relays. A relay
therefore never receives a worker's access token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from blake3 import blake3
from yarl import URL

from baton.clock import in_thread
from baton.console import say
from baton.errors import BatonError, UserError, WeightsFault
from baton.swarm.hub.admission import network_of
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.sending import READ_S, Downloads
from baton.swarm.listen import ListenAddress
from baton.swarm.transfer import CHUNK_ROUTE, MANIFEST_ROUTE, chunk_url, get_bounded, manifest_url
from baton.types import PolicyVersion
from baton.weights.manifest import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, decode_manifest
from baton.weights.sources import ChunkCache
from baton.weights.storage import ByteReader

ANNOUNCE_EVERY_S = 20.0
RETRY_S = 2.0
MAX_URL = 256
MAX_MANIFESTS = 64
MAX_VERIFIED = 100_000
"""Maximum number of chunks that a relay remembers as verified. Beyond it, chunks are verified again."""
MAX_FETCHES = 16
"""Maximum number of chunks that a relay fetches at the same time. Each chunk is in memory until it is verified."""
T = TypeVar("T")


class RelayTicket(msgspec.Struct, frozen=True):
    """The hub's reply to a relay that announces itself."""

    secret: str
    """Secret that workers present to a relay. The secret changes with each start of the hub."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The addresses and the cache of a relay."""

    hub: str
    headers: dict[str, str]
    listen: ListenAddress
    public_url: str | None
    """URL at which workers reach the relay; None if workers use the listening address."""
    cache: Path
    cache_bytes: int
    ssl: Any = None
    say: Callable[[str], None] = say


class Relay:
    """One relay process."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        self._cache = ChunkCache(options.cache, options.cache_bytes)
        self._manifests: dict[PolicyVersion, bytes] = {}
        self.verified: set[str] = set()
        """Digests of the chunks that were correct when the relay wrote them to disk. Workers verify them again."""
        self._running: dict[str, asyncio.Task[Any]] = {}
        """The running fetches. The key is the digest of a chunk, or the version of a manifest. Later requests for the
        same data wait for the running fetch."""
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._listener, self._downloads = HubListener(options.listen), Downloads()
        self._secret = ""
        self.url = ""

    async def run(self, until: asyncio.Event) -> None:
        """Serve until `until` is set. Raises UserError if the address is not available or the hub refuses the relay."""
        app = web.Application()
        app.router.add_get(MANIFEST_ROUTE, self._manifest)
        app.router.add_get(CHUNK_ROUTE, self._chunk)
        listen = self._options.listen
        connector = aiohttp.TCPConnector(ssl=self._options.ssl or True)
        async with aiohttp.ClientSession(connector=connector) as self._http:
            try:
                port = await self._listener.open(app)
                self.url = self._options.public_url or listen.url(port)
                await self._announce_repeatedly(until)
            except OSError as error:
                raise UserError(
                    f"--listen {listen.host}:{listen.port}: the relay cannot listen there: {error}"
                ) from error
            finally:
                await self._listener.close()

    async def _announce_repeatedly(self, until: asyncio.Event) -> None:
        is_connected = True  # so that an outage is logged once
        while not until.is_set():
            wait_s = ANNOUNCE_EVERY_S
            try:
                url = (URL(self._options.hub) / "relay").with_query(url=self.url)
                body = await get_bounded(self._http, url, self._options.headers, 4096)
                if not self._secret:
                    self._options.say(f"relaying {self._options.hub} at {self.url}")
                self._secret = msgspec.json.decode(body, type=RelayTicket).secret
                is_connected = True
            except (BatonError, aiohttp.ClientError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                if not self._secret and any(f"answered {code}" in str(error) for code in (400, 401, 403)):
                    raise UserError(f"the hub at {self._options.hub} refuses this relay: {error}") from error
                if is_connected:
                    self._options.say(f"no connection to {self._options.hub} ({error or type(error).__name__})")
                is_connected, wait_s = False, RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await until.wait()

    def _admit(self, request: web.Request) -> str:
        """Check the secret of a request. Return the caller's network, whose downloads are limited together. The secret
        cannot distinguish callers, because all workers present the same one."""
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # a header that is no UTF-8 has lone surrogates
        if not self._secret or not hmac.compare_digest(shown.encode(errors="replace"), self._secret.encode()):
            raise web.HTTPUnauthorized(text="this relay serves the workers of its hub")
        key = network_of(request.remote or "")
        self._listener.identify(request, key)
        return key

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        key = self._admit(request)
        version = PolicyVersion(request.match_info["lineage"], int(request.match_info["number"]))
        async with self._downloads.place(key):
            body = await self._once(str(version), self._find_manifest(version))
            return (await self._downloads.send(request, ByteReader.of(body)))[0]

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        key, digest = self._admit(request), request.match_info["digest"]
        async with self._downloads.place(key):
            body = await self._once(digest, self._find_chunk(digest))
            return (await self._downloads.send(request, body))[0]

    async def _find_manifest(self, version: PolicyVersion) -> bytes:
        """Return a valid manifest. A manifest that the hub will replace is not kept."""
        body = self._manifests.get(version)
        if body is None:
            body = await self._fetch(manifest_url(self._options.hub, version), MAX_MANIFEST_BYTES)
            if decode_manifest(body).expects_whole is not True:  # raises for an invalid manifest
                self._manifests[version] = body
                while len(self._manifests) > MAX_MANIFESTS:
                    del self._manifests[next(iter(self._manifests))]
        return body

    async def _find_chunk(self, digest: str) -> ByteReader:
        """Return a reader of a verified chunk. It reads the chunk from disk if the cache has room for it, otherwise
        from memory."""
        if digest in self.verified:
            with suppress(OSError):  # the chunk was evicted from the cache
                return await in_thread(self._cache.body, digest, timeout_s=READ_S, who="the cache")
        async with self._fetches:
            body = await in_thread(self._cache.get, digest, timeout_s=READ_S, who="the cache")
            if body is None or blake3(body).hexdigest() != digest:
                body = await self._fetch(chunk_url(self._options.hub, digest), MAX_CHUNK_BYTES)
                if blake3(body).hexdigest() != digest:
                    raise WeightsFault(f"{self._options.hub} sent a chunk that does not match the digest {digest[:8]}")
                full = await in_thread(self._cache.put_or_halve, digest, body, timeout_s=READ_S, who="the cache")
                if full:
                    self._options.say(f"{full}: free space, and restart the relay")
                    return ByteReader.of(body)
            if len(self.verified) >= MAX_VERIFIED:
                self.verified.clear()
            self.verified.add(digest)
            try:
                return await in_thread(self._cache.body, digest, timeout_s=READ_S, who="the cache")
            except OSError:
                return ByteReader.of(body)

    async def _fetch(self, url: URL, limit: int) -> bytes:
        return await get_bounded(self._http, url, self._options.headers, limit)

    async def _once(self, key: str, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a fetch. Concurrent requests with the same key share one fetch."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            work.close()
        try:
            found: T = await asyncio.shield(task)
        except (BatonError, aiohttp.ClientError, OSError, TimeoutError) as error:
            raise web.HTTPBadGateway(text=str(error)[:500]) from error
        return found
