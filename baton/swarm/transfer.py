"""Transfers weights and model files over HTTP. The size of every body and the duration of every wait are limited."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
from blake3 import blake3
from yarl import URL

from baton.errors import DeadlineExceeded, UserError, WeightsFault
from baton.types import PolicyVersion
from baton.weights.manifest import MAX_MANIFEST_BYTES

MAX_MODEL_BYTES = 256 * 1024 * 1024
"""Maximum total size of a model's files except weights. A tokenizer may have tens of megabytes."""
MAX_MODEL_FILES = 64
MANIFEST_ROUTE = "/weights/manifest/{lineage:[A-Za-z0-9_-]{1,64}}/{number:[0-9]{1,15}}"
CHUNK_ROUTE = "/weights/chunk/{digest:[0-9a-f]{64}}"
"""Routes of a hub and of a relay. A request whose parameters do not match the patterns gets HTTP 404."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SILENCE_S = 30.0
"""A transfer fails if no data arrive for this number of seconds."""
_SLOWEST_BYTES_PER_S = 10_000.0
"""A transfer fails if its rate in bytes per second stays below this value. The deadline is at first 2 × `_SILENCE_S`
seconds away. Each byte extends it by 1 / `_SLOWEST_BYTES_PER_S` seconds, at most to 2 × `_SILENCE_S` seconds."""


class HttpSource:
    """A source of weights: the hub or a relay. Calls block until the event loop has performed the HTTP request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        loop: asyncio.AbstractEventLoop,
        url: str,
        token: str,
        *,
        distance: int = 1,
    ) -> None:
        self.name, self.distance = url, distance
        self._session, self._loop = session, loop
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def manifest(self, version: PolicyVersion) -> bytes:
        return self._get(manifest_url(self.name, version), MAX_MANIFEST_BYTES)

    def chunk(self, digest: str, size: int) -> bytes:
        return self._get(chunk_url(self.name, digest), size)

    def _get(self, url: URL, size: int) -> bytes:
        deadline_s = 2 * _SILENCE_S + size / _SLOWEST_BYTES_PER_S
        work = get_bounded(self._session, url, self._headers, size)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except aiohttp.ServerTimeoutError as error:
            raise DeadlineExceeded(f"{self.name} sent nothing for {_SILENCE_S:.0f} s") from error
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"{self.name} did not send {size} bytes in {deadline_s:.0f} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise ConnectionError(f"{self.name}: {error or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise WeightsFault(f"{self.name}: {error or type(error).__name__}") from error


def manifest_url(base: str, version: PolicyVersion) -> URL:
    """Return the URL of a version's manifest at a hub or a relay."""
    return URL(base).joinpath("weights", "manifest", quote(version.lineage, safe=""), str(version.number), encoded=True)


def chunk_url(base: str, digest: str) -> URL:
    """Return the URL of a chunk at a hub or a relay."""
    return URL(base).joinpath("weights", "chunk", quote(digest, safe=""), encoded=True)


async def get_bounded(session: aiohttp.ClientSession, url: URL, headers: dict[str, str], limit: int) -> bytes:
    """Return the body of a GET request. Raises WeightsFault for more than `limit` bytes or a status other than 200,
    ConnectionError if the status means that a later request may succeed (429, 503), and DeadlineExceeded if the bytes
    arrive too slowly."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    now, body = asyncio.get_running_loop().time, bytearray()
    slow = asyncio.timeout(2 * _SILENCE_S)
    try:
        async with slow, session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                said = (await response.content.read(500)).decode("utf-8", "replace").strip()
                fault = ConnectionError if response.status in (429, 503) else WeightsFault
                raise fault(f"{url} answered {response.status}: {said or response.reason}")
            async for piece in response.content.iter_chunked(2**16):
                body += piece
                if len(body) > limit:
                    raise WeightsFault(f"{url} sent more than the requested {limit} bytes")
                end_s = (slow.when() or 0.0) + len(piece) / _SLOWEST_BYTES_PER_S
                slow.reschedule(min(now() + 2 * _SILENCE_S, end_s))
            return bytes(body)
    except TimeoutError as error:
        if not slow.expired():  # aiohttp's own
            raise
        raise DeadlineExceeded(
            f"{url} sent {len(body)} bytes, at last at less than {_SLOWEST_BYTES_PER_S:,.0f} bytes/s: the request ends"
        ) from error


async def fetch_model(session: aiohttp.ClientSession, url: str, token: str, digest: str) -> bytes:
    """Fetch the model files of a hub, as `pack_model` packs them. Raises WeightsFault for a wrong digest."""
    packed = await get_bounded(session, URL(url) / "model", {"Authorization": f"Bearer {token}"}, MAX_MODEL_BYTES)
    if model_digest(packed) != digest:
        raise WeightsFault(f"the model's files at {url} do not have the digest that the hub announced")
    return packed


def pack_model(directory: Path) -> bytes:
    """Pack a directory (configuration, tokenizer) into one message. Raises UserError if the files exceed a limit."""
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
    if len(files) > MAX_MODEL_FILES or sum(map(len, files.values())) > MAX_MODEL_BYTES:
        raise UserError(
            f"{directory}: configuration and tokenizer exceed {MAX_MODEL_FILES} files or {MAX_MODEL_BYTES} bytes"
        )
    return msgspec.msgpack.encode(files)


def model_digest(packed: bytes) -> str:
    """Return the blake3 digest of a message of `pack_model`."""
    return blake3(packed).hexdigest()


def unpack_model(packed: bytes, directory: Path) -> None:
    """Write the files of `packed`, a message of `pack_model`, to `directory`. Raises WeightsFault for an invalid
    message, and OSError if a file cannot be written."""
    try:
        files = msgspec.msgpack.decode(packed, type=dict[str, bytes])
    except (msgspec.DecodeError, ValueError) as error:
        raise WeightsFault(f"cannot decode the model's files: {error}") from error
    if len(files) > MAX_MODEL_FILES:
        raise WeightsFault(f"the model has {len(files)} files; at most {MAX_MODEL_FILES} are allowed")
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise WeightsFault(f"the model has a file named {name!r}; allowed are letters, digits, '.', '_' and '-'")
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
