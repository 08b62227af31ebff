"""The HTTP routes of a hub: model files, weights, relays, status.

GET /model                         configuration and tokenizer; role worker, relay
GET /weights/manifest/LINEAGE/N    a version's manifest; role worker, relay
GET /weights/chunk/DIGEST          a chunk; role worker, relay
GET /relay?url=URL                 announces a relay; role relay
GET /status, /metrics              JSON, Prometheus; role admin
GET /health                        "ok"; no token needed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from baton.clock import in_thread
from baton.errors import BatonError, DeadlineExceeded, UserError
from baton.swarm.auth import Role
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.relay import MAX_URL, RelayTicket
from baton.swarm.hub.sending import READ_S, Downloads
from baton.swarm.hub.status import HubStatus, prometheus
from baton.swarm.listen import check_url
from baton.swarm.transfer import CHUNK_ROUTE, MANIFEST_ROUTE
from baton.weights.storage import ByteReader
from baton.weights.store import Store


class HttpRoutes:
    """Handles a hub's plain HTTP requests, in the hub's thread."""

    def __init__(self, hub: Hub, store: Store, model: bytes, status: Callable[[], HubStatus]) -> None:
        self._hub, self._store, self._model, self._get_status = hub, store, model, status
        self._access = hub.access
        self._downloads = Downloads()

    def routes(self) -> Sequence[web.RouteDef]:
        return (
            web.get("/model", self._send_model),
            web.get(MANIFEST_ROUTE, self._manifest),
            web.get(CHUNK_ROUTE, self._chunk),
            web.get("/relay", self._relay),
            web.get("/status", self._status),
            web.get("/metrics", self._metrics),
            web.get("/health", self._health),
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, request: web.Request) -> web.Response:
        self._access.admit(request, {Role.ADMIN})
        return web.Response(body=msgspec.json.encode(self._get_status()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        self._access.admit(request, {Role.ADMIN})
        text = prometheus(self._get_status())
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _relay(self, request: web.Request) -> web.Response:
        self._access.admit(request, {Role.RELAY})
        listen, url = self._hub.listen, request.query.get("url", "")[:MAX_URL]
        try:
            url = check_url(url, is_insecure=True)
            if url.startswith("http:") and listen.certificate is not None and not listen.is_insecure:
                raise UserError(
                    f"the relay's URL is {url}, but its hub uses TLS, so its workers refuse plain http: give the relay "
                    "a certificate, or start the hub with --insecure if the network is private"
                )
        except UserError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        self._hub.members.relay_announced(url)
        ticket = RelayTicket(self._hub.members.welcome.relay_secret)
        return web.Response(body=msgspec.json.encode(ticket), content_type="application/json")

    async def _send_model(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, lambda: ByteReader.of(self._model), "model")

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        lineage, number = request.match_info["lineage"], int(request.match_info["number"])
        return await self._send(request, lambda: self._store.manifest_body(lineage, number), "manifest")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        return await self._send(request, lambda: self._store.chunk_body(digest), "chunk")

    async def _send(self, request: web.Request, find: Callable[[], ByteReader], route: str) -> web.StreamResponse:
        grant = self._access.admit(request, {Role.WORKER, Role.RELAY})
        await asyncio.sleep(self._access.delay_s(grant))
        async with self._downloads.place(grant.digest):
            try:
                body = await in_thread(find, timeout_s=READ_S, who="the store")
            except DeadlineExceeded as error:
                raise web.HTTPServiceUnavailable(text=str(error)) from error
            except (BatonError, OSError) as error:
                raise web.HTTPNotFound(text=str(error)[:500]) from error
            response, sent_bytes = await self._downloads.send(request, body)
            self._hub.members.counters.bytes_out[route] += sent_bytes
            return response
