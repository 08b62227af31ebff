"""Access control for the HTTP requests and WebSocket connections of a hub: access tokens, quarantine, rate limits.

`hub.py` (WebSockets of workers) and `http_routes.py` use this module in the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from aiohttp import web

from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import INVALID_TOKEN, AccessGrant, Authenticator, Denied, Role
from baton.swarm.hub.admission import RateLimit
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.worker_access import WorkerAccess, WorkerRequirements
from baton.swarm.identity import WorkerKeys
from baton.swarm.verification.quarantine import Quarantine

REQUESTS_PER_S = 4000.0
"""Maximum number of messages and requests per second of all senders that use the same access token. Messages and
requests beyond this rate are delayed."""
BURST = 8000.0


class AccessControl(WorkerAccess):
    """Admits requests and workers, and records refusals in the audit log."""

    def __init__(
        self,
        listener: HubListener,
        authenticators: tuple[Authenticator, ...],
        audit: AuditLog,
        quarantine: Quarantine,
        keys: WorkerKeys,
        requirements: WorkerRequirements | None = None,
    ) -> None:
        super().__init__(quarantine, keys, requirements)
        self.listener, self.authenticators, self.audit = listener, authenticators, audit
        self._rate = RateLimit(REQUESTS_PER_S, BURST)
        self.denied = 0
        """Number of refused requests."""

    def admit(self, request: web.Request, roles: Collection[Role]) -> AccessGrant:
        """Return the grant of a request. Log a refusal and raise HTTPUnauthorized or HTTPForbidden."""
        header = request.headers.get("Authorization")
        refusals: list[Denied] = []
        for authenticator in self.authenticators:
            try:
                grant = authenticator.check(header, roles)
            except Denied as error:
                refusals.append(error)
                continue
            banned = self.quarantine.reason(grant)
            if banned is None:
                is_owner = grant.role is Role.ADMIN or grant.is_trusted
                self.listener.identify(request, grant.digest, is_owner=is_owner)
                return grant
            refusals.append(Denied(403, banned, grant.label))
            break
        # report a refusal with status 403 or, if there is none, a refusal by an authenticator that knows the token
        denied = max(refusals, key=lambda one: (one.status, one.name is not None))
        self.denied += 1
        route = request.match_info.route.resource
        self.audit.denied(denied, request.remote or "", route.canonical if route else "")
        kind = web.HTTPUnauthorized if denied.status == 401 else web.HTTPForbidden
        # without this header, a later request with the same token may succeed
        final = {"WWW-Authenticate": INVALID_TOKEN} if all(refusal.is_final for refusal in refusals) else {}
        raise kind(text=denied.reason, headers=final)

    def recheck(self, grant: AccessGrant, worker: str, address: str) -> Denied | None:
        """Return the reason why a connected worker must be disconnected, or None if it may stay connected. Reasons are
        an expired or revoked access token, a token file that cannot be read, and quarantine."""
        denied = super().recheck(grant, worker, address)
        if denied is None:
            denied = Denied(401, "the token is no longer valid", grant.label)
            for authenticator in self.authenticators:
                try:
                    authenticator.recheck(grant)
                    return None
                except Denied as error:
                    if not error.is_final:
                        denied = Denied(401, error.reason, grant.label, is_final=False)
        self.audit.denied(denied, address, "/worker")
        return denied

    def delay_s(self, grant: AccessGrant) -> float:
        """Return the number of seconds by which a message or request of this sender must be delayed."""
        return self._rate.delay_s(grant.digest, time.monotonic())
