"""Identifies workers by the digest of their access token, and by a key that the hub issues to each worker at the
worker's first Hello.

    worker ──Hello(key="")──▶ hub ──Admitted(key)──▶ worker ──Hello(key)──▶ hub     after a reconnection or hub restart

The name of an access token does not identify a worker, because two token files may contain the same name. A key
consists of a nonce and the nonce's keyed hash. The hub therefore needs no list of keys, and a restarted hub with the
same secret recognises its workers. A worker that discards its key counts as a new worker with the same access token. An
access token with too many quarantined workers is therefore quarantined too.
"""

from __future__ import annotations

import hmac
import secrets

from blake3 import blake3


class WorkerKeys:
    """Issues and recognises the keys of one run's workers."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: random bytes that belong to the run and that workers do not know."""
        self._secret = blake3(secret, derive_key_context="baton 2026 keys of workers").digest()

    def issue(self, token: str) -> str:
        """Return a key for a new worker. `token`: the digest of the worker's token."""
        nonce = secrets.token_hex(8)
        return f"{nonce}.{self._hash('key', token, nonce)}"

    def worker(self, token: str, key: str) -> str | None:
        """Return the id of the worker that holds `key`, or None if the hub has not issued `key` for this token.
        `token`: the digest of the worker's token."""
        nonce, _, told = key.partition(".")
        if not hmac.compare_digest(told.encode(), self._hash("key", token, nonce).encode()):
            return None
        return self._hash("id", token, nonce)[:12]

    def _hash(self, what: str, token: str, nonce: str) -> str:
        return blake3(f"{what}\n{token}\n{nonce}".encode(), key=self._secret).hexdigest()[:32]
