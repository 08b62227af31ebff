"""Who may speak to the hub: tokens with a role and an end, kept as hashes, checked at every request.

    baton token create ──▶ token file (hashes) ──read anew when it changed──▶ Authenticator.check ──▶ AccessGrant
            └─ the token itself, shown once ──▶ worker ──"Authorization: Bearer …"──┘    └─▶ Denied ──▶ Audit

A token holds 32 random bytes: it cannot be guessed, so one fast hash keeps it, and the file gives nobody access who
reads it. Whoever can write the file can let anybody in. When the file cannot be read, nobody gets in.
"""

from __future__ import annotations

import fcntl
import hmac
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
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from baton.errors import BatonError, DeadlineExceeded, UserError
from baton.files import flush_to_disk

logger = logging.getLogger(__name__)

DEFAULT_TOKEN_FILE = Path("baton-tokens.json")
"""In the working directory: `baton token` writes it, the hub reads it."""

Clock = Callable[[], float]
"""Unix seconds, UTC."""

MAX_FILE_BYTES = 1 << 20
_MAX_HEADER_CHARACTERS = 256
MAX_TOKENS = 1_000
LOCK_WAIT_S = 10.0
_FORGOTTEN_AFTER_S = 30 * 86_400
"""So long after its end a token leaves the file; it is refused all the same, as an unknown one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_TOKEN = re.compile(r"baton_(?:worker|admin|relay)_[A-Za-z0-9_-]{43}")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE | re.ASCII)
_UnixTime = Annotated[int, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Up to the year 9999, where calendars end."""
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_DURATION_S = 3_650 * 86_400


class Role(StrEnum):
    """What a token is for."""

    WORKER = "worker"
    """Takes leases, fetches weights, reports segments."""
    ADMIN = "admin"
    """Asks for the state of the swarm and steers it."""
    RELAY = "relay"
    """Fetches weights and serves them to others."""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file knows of a token."""

    name: Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME.pattern}\Z")]
    role: Role
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """blake3 of the token's text, in hex."""
    created: _UnixTime
    """Unix seconds, UTC."""
    expires: _UnixTime
    """Unix seconds, UTC; from then on it is refused."""
    is_revoked: bool = False
    is_trusted: bool = False
    """A worker of ours: it may keep KV caches over a new version, and its reports set the tolerances of others."""

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        """Say whether it opens anything at that time."""
        if self.is_revoked:
            return "revoked"
        return "expired" if now >= self.expires else "valid"


class ShownToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token as `baton token` prints it."""

    name: str
    role: Role
    trusted: bool
    created: str
    """UTC, ISO 8601."""
    expires: str
    state: str
    """valid, expired or revoked."""
    token: str | None = None
    """Its text: only when it is made, and not written to a file."""
    written_to: str | None = None

    @classmethod
    def of(cls, token: Token) -> ShownToken:
        """Show what the file knows of a token now."""
        created, expires = (datetime.fromtimestamp(at, UTC).isoformat() for at in (token.created, token.expires))
        return cls(token.name, token.role, token.is_trusted, created, expires, token.state(time.time()))


class _Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[Token, ...]
    format: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class AccessGrant:
    """Who a request comes from, and what it may."""

    name: str
    role: Role
    is_trusted: bool
    digest: str = field(default="", repr=False)
    """Of the token: who it is. The name is for people, and another token file may hold the same one."""
    is_own: bool = False
    """A worker that the run has started itself."""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} (own)" if self.is_own else self.name


class Denied(BatonError):
    """A request that must change nothing.

    The reason may be sent back: of tokens it tells only their holders something.
    """

    def __init__(self, status: Literal[401, 403], reason: str, name: str | None = None) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason, self.name = status, reason, name


def parse_duration(text: str) -> int:
    """Turn "7d", "12h", "30m" or "90s" into seconds."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DURATION_S:
        raise UserError(f"a duration is {text!r}; allowed: a whole number of s, m, h or d up to 3650d, such as 7d")
    return seconds


def digest_of(token: str) -> str:
    """Hash a token's text as the file keeps it."""
    return blake3(token.encode()).hexdigest()


def write_private(path: Path, data: bytes) -> None:
    """Replace a file's content in one step, as `files.write_whole` does, with a file that never was another's to read.

    Raises UserError when it cannot be written.
    """
    path = path.resolve()  # a link stays one
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
        raise UserError(f"{path} cannot be written: {error.strerror}; name a place that can be") from error


def read_token_file(path: Path) -> str:
    """Read the one token that a worker was given; warn when others may read it too.

    Raises UserError when the file is missing, empty, too long or holds something else.
    """
    data, mode = _read_bounded(path, 1_024)
    text = data.decode(errors="replace").strip()
    if not _TOKEN.fullmatch(text):
        held = "nothing" if not text else "something else"
        raise UserError(f"{path} should hold one token as baton token create gives it, and holds {held}")
    if mode & 0o077:
        logger.warning("%s holds a token and others may read it: chmod 600 %s", path, path)
    return text


class TokenFile:
    """The tokens of a hub, in a JSON file of its owner's that is whole whenever somebody reads it."""

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        self.path, self._clock = path, clock

    def create(self, role: Role, expires_s: int, name: str | None = None, trusted: bool = False) -> str:
        """Make a token and return its text, which is kept nowhere. Raises UserError for a name that is taken."""
        if trusted and role is not Role.WORKER:
            raise UserError(f"a token of role {role} cannot be trusted to generate: only one of role worker can")
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(
                f"a token's name is {name!r}; allowed: up to 32 letters, digits, '.', '_', '-', the first no sign"
            )
        text = f"baton_{role}_{secrets.token_urlsafe(32)}"
        with self._locked():
            now = int(self._clock())
            known = self.tokens() if self.path.exists() else ()
            known = tuple(token for token in known if token.expires + _FORGOTTEN_AFTER_S > now)
            if len(known) >= MAX_TOKENS:
                raise UserError(f"{self.path} holds {len(known)} tokens, which is all it may: begin another file")
            taken = {token.name for token in known}
            if name in taken:
                raise UserError(f"a token is called {name} already in {self.path}: choose another name")
            name = name or next(free for i in range(1, len(taken) + 2) if (free := f"{role}-{i}") not in taken)
            token = Token(name, role, digest_of(text), now, now + expires_s, is_trusted=trusted)
            self._write((*known, token))
        return text

    def revoke(self, name: str) -> None:
        """Let a token open nothing any more, for good. Raises UserError for a name that is not there."""
        with self._locked():
            known = self.tokens()
            if name not in {token.name for token in known}:
                raise UserError(f"no token is called {name!r} in {self.path}: baton token list shows their names")
            self._write(tuple(msgspec.structs.replace(t, is_revoked=True) if t.name == name else t for t in known))

    def tokens(self) -> tuple[Token, ...]:
        """Read what is known of each, the oldest first. Raises UserError when the file is not one that can be used."""
        data, mode = _read_bounded(self.path, MAX_FILE_BYTES)
        if mode & 0o022:
            raise UserError(f"others may write {self.path}, and so let anybody in: chmod 600 {self.path}")
        try:
            found = msgspec.json.decode(data, type=_Tokens).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} is not a file of baton token create: {error}") from error
        if len({token.name for token in found}) < len(found):
            raise UserError(f"{self.path} has two tokens of one name: make it anew with baton token create")
        return found

    def _write(self, tokens: tuple[Token, ...]) -> None:
        write_private(self.path, msgspec.json.format(msgspec.json.encode(_Tokens(tokens))) + b"\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Change the file alone: of two at once, one would undo the other's revocation."""
        path = self.path.resolve()
        lock = path.with_name(f".{path.name}.lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}; name a place that can be") from error
        try:
            _wait_for_lock(handle, lock)
            yield
        finally:
            os.close(handle)  # and the lock with it


class Authenticator:
    """Says who a request comes from. It follows the token file while the hub runs."""

    def __init__(self, path: Path, clock: Clock = time.time, *, is_own: bool = False) -> None:
        """Read the file. Raises UserError when it is missing or bad. is_own: see `AccessGrant.is_own`."""
        self._file, self._clock, self._is_own = TokenFile(path, clock), clock, is_own
        self.fault: str | None = None
        """What is wrong with the file now; while it is, everybody is refused."""
        self._tokens: tuple[Token, ...] = ()
        self._stamp = _stamp(path)
        self._tokens = self._file.tokens()

    def check(self, header: str | None, wanted: Collection[Role]) -> AccessGrant:
        """Admit the bearer of an `Authorization` header whose role is wanted.

        Raises Denied with 401 for a header that is missing, malformed or of a token unknown, expired or revoked, and
        with 403 for another role; nothing else, whatever the header holds.
        """
        if header is None:
            raise Denied(401, "no token")
        if len(header) > _MAX_HEADER_CHARACTERS:
            raise Denied(401, "malformed token")
        bearer = _BEARER.fullmatch(header)
        if bearer is None or not _TOKEN.fullmatch(bearer[1]):
            raise Denied(401, "malformed token")
        return self._admit(digest_of(bearer[1]), wanted)

    def recheck(self, grant: AccessGrant) -> None:
        """Check again who is connected for long. Raises Denied once the token is expired, revoked or gone."""
        self._admit(grant.digest, {grant.role})

    def _admit(self, digest: str, wanted: Collection[Role]) -> AccessGrant:
        self._follow_file()
        if self.fault is not None:
            raise Denied(401, "the hub cannot read its token file")
        found: Token | None = None
        for token in self._tokens:  # all of them, each in constant time: how long it takes tells nothing
            if hmac.compare_digest(token.digest.encode(), digest.encode()):
                found = token
        if found is None:
            raise Denied(401, "unknown token")
        state = found.state(self._clock())
        if state != "valid":
            raise Denied(401, f"{state} token", found.name)
        if found.role not in wanted:
            raise Denied(403, f"role {found.role} does not open this", found.name)
        return AccessGrant(found.name, found.role, found.is_trusted, found.digest, self._is_own)

    def _follow_file(self) -> None:
        stamp = _stamp(self._file.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens, self.fault = self._file.tokens(), None
        except UserError as error:
            self._tokens, self.fault = (), str(error)
            logger.error("everybody is refused until this is mended: %s", error)


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
            raise UserError(f"{path} cannot be locked: {error.strerror}; name a place on another disk") from error
        time.sleep(0.02)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Tell one content of a file from the next: a file that replaces another has a place of its own beside it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read_bounded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Read a small file and its mode. Raises UserError when it cannot be, is none or is too long."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
        try:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(f"{path} is not a plain file")
            data = os.read(handle, max_bytes + 1)
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}: baton token create makes one") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise UserError(f"{path} is longer than {max_bytes} bytes: it is not what baton token create wrote")
    return data, mode
