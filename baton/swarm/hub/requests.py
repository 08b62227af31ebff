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
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton.clock import in_thread
from baton.errors import BatonError, UserError
from baton.swarm.auth import AccessGrant, Denied, Role
from baton.swarm.hub.admission import RateLimit
from baton.swarm.hub.relay import MAX_URL, RelayTicket
from baton.swarm.hub.sending import Downloads
from baton.swarm.listen import check_url
from baton.swarm.transfer import CHUNK_ROUTE, MANIFEST_ROUTE
from baton.weights.storage import ByteReader

if TYPE_CHECKING:
    from baton.swarm.hub.hub import Hub


REQUESTS_PER_S = 4000.0
"""Messages and requests of one token that are dealt with; more than that waits."""
BURST = 8000.0


class Requests:
    """Answers what is asked of a hub over plain HTTP. All in the hub's thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._downloads = Downloads()
        self._rate = RateLimit(REQUESTS_PER_S, BURST)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Say what is answered where."""
        router.add_get("/model", self._model)
        router.add_get(MANIFEST_ROUTE, self._manifest)
        router.add_get(CHUNK_ROUTE, self._chunk)
        router.add_get("/relay", self._relay)
        router.add_get("/status", self._status)
        router.add_get("/metrics", self._metrics)
        router.add_get("/health", self._health)

    def admit(self, request: web.Request, roles: Collection[Role]) -> AccessGrant:
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
                is_owner = grant.role is Role.ADMIN or grant.is_trusted
                self._hub.door.identify(request, grant.digest, is_owner=is_owner)
                return grant
            refusals.append(Denied(403, banned, grant.label))
            break
        denied = max(refusals, key=lambda one: (one.status, one.name is not None))  # who knows the token knows why
        self._hub.counters.denied += 1
        route = request.match_info.route.resource
        self._hub.parts.audit.denied(denied, request.remote or "", route.canonical if route else "")
        kind = web.HTTPUnauthorized if denied.status == 401 else web.HTTPForbidden
        raise kind(text=denied.reason)

    def delay_s(self, grant: AccessGrant) -> float:
        """Return how long a message or request of a token has to wait for its turn."""
        return self._rate.delay_s(grant.digest, time.monotonic())

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
        listen, url = self._hub.listen, request.query.get("url", "")[:MAX_URL]
        try:
            url = check_url(url, is_insecure=True)
            if url.startswith("http:") and listen.certificate is not None and not listen.is_insecure:
                raise UserError(
                    f"the relay's URL is {url}, but its hub uses TLS, so its workers use no plain http: give the relay "
                    "a certificate, or start the hub with --insecure where the network is private"
                )
        except UserError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        self._hub.relay_announced(url)
        ticket = RelayTicket(self._hub.parts.welcome.relay_secret)
        return web.Response(body=msgspec.json.encode(ticket), content_type="application/json")

    async def _model(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, lambda: ByteReader.of(self._hub.parts.model), "model")

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        lineage, number = request.match_info["lineage"], int(request.match_info["number"])
        return await self._send(request, lambda: self._hub.parts.store.manifest_body(lineage, number), "manifest")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        return await self._send(request, lambda: self._hub.parts.store.chunk_body(digest), "chunk")

    async def _send(self, request: web.Request, find: Callable[[], ByteReader], route: str) -> web.StreamResponse:
        grant = self.admit(request, {Role.WORKER, Role.RELAY})
        await asyncio.sleep(self.delay_s(grant))
        async with self._downloads.place(grant.digest):
            try:
                body = await in_thread(find)
            except (BatonError, OSError) as error:
                raise web.HTTPNotFound(text=str(error)[:500]) from error
            response, sent_bytes = await self._downloads.send(request, body)
            self._hub.counters.sent(route, sent_bytes)
            return response
