"""The hub's port apart from its workers' connections: who may ask, model files, weights, status.

GET /model                         configuration and tokenizer; role worker, relay
GET /weights/manifest/LINEAGE/N    a version's manifest; role worker, relay
GET /weights/chunk/DIGEST          a chunk; role worker, relay
GET /relay?url=URL                 a relay announces itself; role relay
GET /status, /metrics              JSON, Prometheus; role admin
GET /health                        "ok", for anybody
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton.errors import BatonError, UserError
from baton.swarm.auth import Denied, Grant, Role
from baton.swarm.listen import check_url
from baton.swarm.relay import MAX_URL, RelayTicket
from baton.types import PolicyVersion
from baton.waits import in_thread

if TYPE_CHECKING:
    from baton.swarm.hub import Hub


MAX_SENDING = 64
"""Bodies on their way at once, each in memory."""
QUEUE_S = 20.0
"""Who waits longer for one of these places is asked to come again."""
SEND_S = 60.0
SLOWEST_BYTES_PER_S = 10_000.0
"""Who takes longer over a body than `SEND_S` and this allow is hung up on."""


class Requests:
    """Answers what is asked of a hub over plain HTTP. All in the hub's thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._sending = asyncio.Semaphore(MAX_SENDING)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Say what is answered where."""
        router.add_get("/model", self._model)
        router.add_get("/weights/manifest/{lineage}/{number}", self._manifest)
        router.add_get("/weights/chunk/{digest}", self._chunk)
        router.add_get("/relay", self._relay)
        router.add_get("/status", self._status)
        router.add_get("/metrics", self._metrics)
        router.add_get("/health", self._health)

    def admit(self, request: web.Request, roles: Collection[Role]) -> Grant:
        """Return who is asking. Raises HTTPUnauthorized or HTTPForbidden, with a line in the audit."""
        header = request.headers.get("Authorization")
        refusals: list[Denied] = []
        for authenticator in self._hub.parts.authenticators:
            try:
                grant = authenticator.check(header, roles)
            except Denied as error:
                refusals.append(error)
                continue
            banned = self._hub.parts.is_banned(grant, "")
            if banned is None:
                return grant
            refusals.append(Denied(403, banned, grant.label))
            break
        denied = max(refusals, key=lambda one: (one.status, one.name is not None))  # who knows the token knows why
        self._hub.counters.denied += 1
        route = request.match_info.route.resource
        self._hub.parts.audit.denied(denied, request.remote or "", route.canonical if route else "")
        kind = web.HTTPUnauthorized if denied.status == 401 else web.HTTPForbidden
        raise kind(text=denied.reason)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, request: web.Request) -> web.Response:
        self.admit(request, {Role.ADMIN})
        return web.Response(
            body=msgspec.json.encode(self._hub.parts.status(self._hub)), content_type="application/json"
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        self.admit(request, {Role.ADMIN})
        text = self._hub.parts.prometheus(self._hub)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _relay(self, request: web.Request) -> web.Response:
        self.admit(request, {Role.RELAY})
        try:
            url = check_url(request.query.get("url", "")[:MAX_URL], is_insecure=True)
        except UserError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        self._hub.relay_announced(url)
        ticket = RelayTicket(self._hub.parts.welcome.relay_secret)
        return web.Response(body=msgspec.json.encode(ticket), content_type="application/json")

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self.admit(request, {Role.WORKER, Role.RELAY})
        return await self._send(request, lambda: self._hub.parts.model, "model")

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        self.admit(request, {Role.WORKER, Role.RELAY})
        lineage, number = request.match_info["lineage"], request.match_info["number"]
        if not number.isascii() or not number.isdigit() or len(number) > 15:
            raise web.HTTPBadRequest(text="a version's number has up to 15 digits")
        version = PolicyVersion(lineage, int(number))
        return await self._send(request, lambda: self._hub.parts.store.read_manifest(version), "manifest")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        self.admit(request, {Role.WORKER, Role.RELAY})
        digest = request.match_info["digest"]
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise web.HTTPBadRequest(text="a chunk is named by its digest, 64 hexadecimal digits")
        return await self._send(request, lambda: self._hub.parts.store.get_chunk(digest), "chunk")

    async def _send(self, request: web.Request, read: Callable[[], bytes], route: str) -> web.StreamResponse:
        """Send what is read; it is in memory for no longer than its deadline, and few such are at a time."""
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._sending.acquire()
        except TimeoutError as error:
            raise web.HTTPServiceUnavailable(text=f"{MAX_SENDING} others are served just now") from error
        try:
            body = await in_thread(read)
            response = web.Response(body=body, content_type="application/octet-stream")
            async with asyncio.timeout(SEND_S + len(body) / SLOWEST_BYTES_PER_S):
                await response.prepare(request)
                await response.write_eof()
            self._hub.counters.sent(route, len(body))
            return response
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise
        except ConnectionError:
            raise
        except (BatonError, OSError) as error:
            raise web.HTTPNotFound(text=str(error)[:500]) from error
        finally:
            self._sending.release()
