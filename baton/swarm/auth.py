"""Authentication with access tokens. Each token has a role and an expiry time. The token file contains only the token's
hash. The hub checks the token at every request.

    baton token create ──▶ token file (hashes) ──read again when it changes──▶ Authenticator.check ──▶ AccessGrant
            └─ the token itself, shown once ──▶ worker ──"Authorization: Bearer …"──┘    └─▶ Denied ──▶ Audit

A token has 32 random bytes and cannot be guessed, so a fast hash is sufficient. A process that can read the token file
gains no access, because the file contains only hashes. A process that can write the file can grant access. While the
hub cannot read the file, it refuses all requests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3

from baton.errors import BatonError, DeadlineExceeded, UserError
from baton.files import flush_to_disk

logger = logging.getLogger(__name__)

DEFAULT_TOKEN_FILE = Path("baton-tokens.json")
"""Default token file, in the working directory. `baton token` writes this file, and the hub reads it."""

Clock = Callable[[], float]
"""Function that returns the time in Unix seconds, UTC."""

MAX_FILE_BYTES = 1 << 20
MAX_TOKENS = 1_000
LOCK_WAIT_S = 10.0
_FORGOTTEN_AFTER_S = 30 * 86_400
"""When a token is created, tokens that expired more than this number of seconds ago are removed from the file. The hub
then refuses these tokens as unknown."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_TOKEN = re.compile(r"baton_(?:worker|admin|relay)_[A-Za-z0-9_-]{43}")
_BEARER = re.compile(rf"(?i:bearer) {{1,100}}({_TOKEN.pattern})")
_UnixTime = Annotated[int, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Unix seconds up to the year 9999, which is the last year that datetime supports."""
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_DURATION_S = 3_650 * 86_400


class Role(StrEnum):
    """The role of a token, which determines its permissions."""

    WORKER = "worker"
    """May receive leases, fetch weights and report segments."""
    ADMIN = "admin"
    """May read the status of the swarm."""
    RELAY = "relay"
    """May fetch weights and serve them to workers."""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token's entry in the token file."""

    name: Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME.pattern}\Z")]
    role: Role
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """blake3 digest of the token's text, in hex."""
    created: _UnixTime
    """Time of creation in Unix seconds, UTC."""
    expires: _UnixTime
    """Expiry time in Unix seconds, UTC. From this time on, the token is refused."""
    is_revoked: bool = False
    is_trusted: bool = False
    """True if the run's owner controls the workers that use this token. Only such trusted workers may keep KV caches
    across versions. The checks of other workers use tolerances that are estimated from the reports of trusted
    workers."""

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        if self.is_revoked:
            return "revoked"
        return "expired" if now >= self.expires else "valid"


class ShownToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a token that `baton token` prints."""

    name: str
    role: Role
    trusted: bool
    created: str
    """Time of creation in UTC, ISO 8601."""
    expires: str
    state: str
    """`valid`, `expired` or `revoked`."""
    token: str | None = None
    """Text of the token. Present only in the output of `baton token create` without --out."""
    written_to: str | None = None

    @classmethod
    def of(cls, token: Token) -> ShownToken:
        created, expires = (datetime.fromtimestamp(at, UTC).isoformat() for at in (token.created, token.expires))
        return cls(token.name, token.role, token.is_trusted, created, expires, token.state(time.time()))


class _Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[Token, ...]
    format: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class AccessGrant:
    """The sender of a request and the sender's permissions."""

    name: str
    role: Role
    is_trusted: bool
    digest: str = field(default="", repr=False)
    """Digest of the sender's token, which identifies the sender: two token files may contain the same name."""
    is_own: bool = False
    """True if the sender is a worker that the run itself has started."""

    @property
    def label(self) -> str:
        """Name of the sender that is shown to users."""
        return f"{self.name} (own)" if self.is_own else self.name


INVALID_TOKEN: Final = 'Bearer error="invalid_token"'
"""Value of the header WWW-Authenticate (RFC 6750) in the answer 401 if the token itself is refused."""


class Denied(BatonError):
    """Raised for a refused request. `reason` may be sent to the sender. It states that a token has expired or is
    revoked only if the sender has presented this token."""

    def __init__(
        self, status: Literal[401, 403], reason: str, name: str | None = None, *, is_final: bool = True
    ) -> None:
        """`is_final`: False if the token itself is not refused, so that a later request may succeed."""
        super().__init__(f"{status}: {reason}")
        self.status, self.reason, self.name, self.is_final = status, reason, name, is_final


def parse_duration(text: str) -> int:
    """Convert a string such as "7d", "12h", "30m" or "90s" to seconds. Raises UserError for other text."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DURATION_S:
        raise UserError(f"the duration is {text!r}; allowed: a whole number of s, m, h or d up to 3650d, such as 7d")
    return seconds


def digest_of(token: str) -> str:
    """Return the blake3 digest of a token's text, in hex. The token file contains this digest instead of the text."""
    return blake3(token.encode()).hexdigest()


def write_private(path: Path, data: bytes) -> None:
    """Replace a file's content atomically, like `files.write_whole`. Other users cannot read the new file, not even
    while it is written. Raises UserError if the file cannot be written."""
    path = path.resolve()  # replace the target of a symbolic link, not the link
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent)  # mode 0600
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        flush_to_disk(unfinished)
        unfinished.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another path") from error


def read_token_file(path: Path) -> str:
    """Read a worker's token from a file. Log a warning if other users may read the file. Raises UserError if the file
    is missing or too long, or does not contain exactly one token."""
    data, mode = _read_bounded(path, 1_024)
    text = data.decode(errors="replace").strip()
    if not _TOKEN.fullmatch(text):
        held = "nothing" if not text else "other text"
        raise UserError(f"{path} contains {held}; it must contain one token that baton token create made")
    if mode & 0o077:
        logger.warning("%s contains a token and other users may read it: chmod 600 %s", path, path)
    return text


class TokenFile:
    """The JSON file with the tokens of a hub. The file is written atomically."""

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        self.path, self._clock = path, clock

    def create(self, role: Role, expires_s: int, name: str | None = None, trusted: bool = False) -> str:
        """Create a token and return its text, which is not stored. Raises UserError if the name exists."""
        if trusted and role is not Role.WORKER:
            raise UserError(f"a token of role {role} cannot be --trusted: only tokens of role worker can")
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(
                f"the token's name is {name!r}; allowed: up to 32 letters, digits, '.', '_' and '-', starting with a "
                "letter or a digit"
            )
        text = f"baton_{role}_{secrets.token_urlsafe(32)}"
        with self._locked():
            now = int(self._clock())
            known = self.tokens() if self.path.exists() else ()
            known = tuple(token for token in known if token.expires + _FORGOTTEN_AFTER_S > now)
            if len(known) >= MAX_TOKENS:
                raise UserError(f"{self.path} contains {len(known)} tokens, the maximum: use another file")
            taken = {token.name for token in known}
            if name in taken:
                raise UserError(f"{self.path} already contains a token named {name}: choose another name")
            name = name or next(free for i in range(1, len(taken) + 2) if (free := f"{role}-{i}") not in taken)
            token = Token(name, role, digest_of(text), now, now + expires_s, is_trusted=trusted)
            self._write((*known, token))
        return text

    def revoke(self, name: str) -> None:
        """Revoke a token permanently. Raises UserError for an unknown name."""
        with self._locked():
            known = self.tokens()
            if name not in {token.name for token in known}:
                raise UserError(f"{self.path} contains no token named {name!r}: baton token list shows the names")
            self._write(tuple(msgspec.structs.replace(t, is_revoked=True) if t.name == name else t for t in known))

    def remove(self, name: str) -> None:
        """Remove a token, whose name can then be used again. Has no effect for an unknown name."""
        with self._locked():
            self._write(tuple(token for token in self.tokens() if token.name != name))

    def tokens(self) -> tuple[Token, ...]:
        """Return the tokens, the oldest first. Raises UserError if the file is invalid or writable by other users."""
        data, mode = _read_bounded(self.path, MAX_FILE_BYTES)
        if mode & 0o022:
            raise UserError(
                f"other users may write {self.path} and could grant access to anyone: chmod 600 {self.path}"
            )
        try:
            found = msgspec.json.decode(data, type=_Tokens).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} is not a token file of baton token create: {error}") from error
        if len({token.name for token in found}) < len(found):
            raise UserError(
                f"{self.path} contains two tokens with the same name: create a new file with baton token create"
            )
        return found

    def _write(self, tokens: tuple[Token, ...]) -> None:
        write_private(self.path, msgspec.json.format(msgspec.json.encode(_Tokens(tokens))) + b"\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file within the context. The file may be changed only within this context. Otherwise, two concurrent
        changes could overwrite each other, and a revocation could be lost."""
        path = self.path.resolve()
        lock = path.with_name(f".{path.name}.lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}; choose another path") from error
        try:
            _wait_for_lock(handle, lock)
            yield
        finally:
            os.close(handle)  # closing the file releases the lock


class Authenticator:
    """Identifies the sender of a request by its access token. Reads the token file again when the file changes."""

    def __init__(self, path: Path, clock: Clock = time.time, *, is_own: bool = False) -> None:
        """Read the token file. Raises UserError if the file is missing or invalid. `is_own`: True if the file contains
        the tokens of workers that the run itself starts."""
        self._file, self._clock, self._is_own = TokenFile(path, clock), clock, is_own
        self.fault: str | None = None
        """Reason why the token file is invalid, so that every request is refused; None if the file is valid."""
        self._stamp = _stamp(path)
        self._tokens = self._read()
        """Digest → token."""

    def check(self, header: str | None, wanted: Collection[Role]) -> AccessGrant:
        """Check the token in an `Authorization` header and return its grant. The token must have one of the roles in
        `wanted`.

        Raises Denied with status 401 if the header is missing or malformed, or if its token is unknown, expired or
        revoked. Raises Denied with status 403 if the token has another role. Raises nothing else, whatever the header
        contains.
        """
        if header is None:
            raise Denied(401, "no token")
        bearer = _BEARER.fullmatch(header)
        if bearer is None:
            raise Denied(401, "malformed token")
        return self._admit(digest_of(bearer[1]), wanted)

    def recheck(self, grant: AccessGrant) -> None:
        """Check the token of an open connection again. Raises Denied if the token is expired, revoked or removed."""
        self._admit(grant.digest, {grant.role})

    def _admit(self, digest: str, wanted: Collection[Role]) -> AccessGrant:
        self._follow_file()
        if self.fault is not None:
            raise Denied(401, "the hub cannot read its token file", is_final=False)
        # the sender cannot choose the digest of its text, so the time of the lookup reveals nothing about a token
        found = self._tokens.get(digest)
        if found is None:
            raise Denied(401, "unknown token")
        state = found.state(self._clock())
        if state != "valid":
            raise Denied(401, f"{state} token", found.name)
        if found.role not in wanted:
            raise Denied(403, f"role {found.role} has no access to this route", found.name)
        return AccessGrant(found.name, found.role, found.is_trusted, found.digest, self._is_own)

    def _follow_file(self) -> None:
        stamp = _stamp(self._file.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens, self.fault = self._read(), None
        except UserError as error:
            self._tokens, self.fault = {}, str(error)
            logger.error("every request is refused until the token file is valid again: %s", error)

    def _read(self) -> dict[str, Token]:
        return {token.digest: token for token in self._file.tokens()}


def _wait_for_lock(handle: int, path: Path) -> None:
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                waited = f"another baton token command has held {path} for {LOCK_WAIT_S:g} s"
                raise DeadlineExceeded(waited) from error
        except OSError as error:
            raise UserError(f"{path} cannot be locked: {error.strerror}; choose a path on another disk") from error
        time.sleep(0.02)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return a file's times, size and inode, which differ after a change of the file; None if the file is
    unreadable."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read_bounded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Return the content and the mode of a small file. Raises UserError if the file is unreadable, too long or not
    regular."""
    try:
        # O_NONBLOCK, because opening a FIFO would block
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(f"{path} is not a regular file")
            data = os.read(handle, max_bytes + 1)
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise UserError(f"the file {path} does not exist: baton token create makes it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise UserError(f"{path} is longer than {max_bytes} bytes, so it is not a token file of baton token create")
    return data, mode
