"""Which worker is which: the digest of its token, and a key that the hub issues to each worker at its first Hello.

    worker ──Hello(key="")──▶ hub ──Admitted(key)──▶ worker ──Hello(key)──▶ hub     after a cut, or a restart of the hub

Names of tokens are for people: two token files may hold the same one. A key is a nonce and its keyed hash, so the hub
keeps no list of keys, and with the same secret a restarted hub knows its workers again. A worker that drops its key is
a new worker of the same token; how many of these may be put into quarantine is bounded for each token.
"""

from __future__ import annotations

import hmac
import secrets

from blake3 import blake3


class WorkerKeys:
    """Issues and recognises the keys of one run's workers."""

    def __init__(self, secret: bytes) -> None:
        """secret: the run's own, known to no worker."""
        self._secret = blake3(secret, derive_key_context="baton 2026 keys of workers").digest()

    def issue(self, token: str) -> str:
        """Return a new worker's key. token: the digest of its token."""
        nonce = secrets.token_hex(8)
        return f"{nonce}.{self._hash('key', token, nonce)}"

    def worker(self, token: str, key: str) -> str | None:
        """Return the id of the worker that bears a key, or None where the key was not issued to this token."""
        nonce, _, told = key.partition(".")
        if not hmac.compare_digest(told.encode(), self._hash("key", token, nonce).encode()):
            return None
        return self._hash("id", token, nonce)[:12]

    def _hash(self, what: str, token: str, nonce: str) -> str:
        return blake3(f"{what}\n{token}\n{nonce}".encode(), key=self._secret).hexdigest()[:32]
