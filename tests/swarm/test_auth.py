"""Nobody without a valid token of the right role gets in, nothing changes when they try, and no secret is written."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import string
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, UserError
from baton.swarm import auth
from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import (
    Authenticator,
    Denied,
    Role,
    TokenFile,
    digest_of,
    parse_duration,
    read_token_file,
    write_private,
)

pytestmark = pytest.mark.timing

DAY_S = 86_400
EVERYONE = set(Role)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(tmp_path: Path, clock: Clock) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json", clock)


def bearer(token: str) -> str:
    return f"Bearer {token}"


def refusal(gate: Authenticator, header: str | None, wanted: set[Role] = EVERYONE) -> Denied:
    with pytest.raises(Denied) as caught:
        gate.check(header, wanted)
    return caught.value


def test_a_token_opens_what_its_role_opens_until_its_end(tokens: TokenFile, clock: Clock) -> None:
    text = tokens.create(Role.WORKER, 7 * DAY_S, trusted=True)
    assert re.fullmatch(r"baton_worker_[A-Za-z0-9_-]{43}", text), "32 bytes are 43 characters of 6 bits"
    gate = Authenticator(tokens.path, clock)
    grant = gate.check(bearer(text), {Role.WORKER, Role.ADMIN})
    assert (grant.name, grant.role, grant.is_trusted) == ("worker-1", Role.WORKER, True)
    assert gate.check(f"bearer   {text}", {Role.WORKER}) == grant, "the scheme's case and its spaces do not matter"
    clock.now += 7 * DAY_S - 1
    gate.check(bearer(text), {Role.WORKER})
    gate.recheck(grant)
    clock.now += 1
    assert refusal(gate, bearer(text)).reason == "expired token"
    with pytest.raises(Denied, match="401: expired"):
        gate.recheck(grant)


def test_the_file_is_its_owners_and_holds_no_secret(tokens: TokenFile) -> None:
    texts = [tokens.create(role, DAY_S) for role in Role]
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    data = tokens.path.read_text()
    for text in texts:
        assert digest_of(text) in data
        assert text.split("_", 2)[2][:8] not in data
    assert [token.name for token in tokens.tokens()] == ["worker-1", "admin-1", "relay-1"]
    assert len(set(texts)) == 3
    assert {p.name for p in tokens.path.parent.iterdir()} == {"tokens.json", ".tokens.json.lock"}


def test_every_refusal_has_its_status_changes_nothing_and_leaves_a_line_without_the_secret(
    tokens: TokenFile, clock: Clock, tmp_path: Path
) -> None:
    short, revoked = tokens.create(Role.WORKER, 60, "short"), tokens.create(Role.WORKER, DAY_S, "revoked")
    relay = tokens.create(Role.RELAY, DAY_S, "relay")
    tokens.revoke("revoked")
    clock.now += 60
    gate, audit = Authenticator(tokens.path, clock), AuditLog(tmp_path / "audit.jsonl", clock=clock)
    unknown = f"baton_admin_{'A' * 43}"
    promoted = relay.replace("relay", "admin")
    cases = (
        (None, 401, "no token", ""),
        ("", 401, "malformed token", ""),
        (relay, 401, "malformed token", ""),
        (f"Basic {relay}", 401, "malformed token", ""),
        (bearer(relay) + "x", 401, "malformed token", ""),
        (bearer(relay) + "\n", 401, "malformed token", ""),
        ("Bearer" + " " * 300 + relay, 401, "malformed token", ""),
        (bearer(relay[:-1]), 401, "malformed token", ""),
        (bearer(unknown), 401, "unknown token", ""),
        (bearer(promoted), 401, "unknown token", ""),
        (bearer(short), 401, "expired token", "short"),
        (bearer(revoked), 401, "revoked token", "revoked"),
        (bearer(relay), 403, "role relay has no access to this route", "relay"),
    )
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for header, status, reason, name in cases:
        denied = refusal(gate, header, {Role.WORKER, Role.ADMIN})
        assert (denied.status, denied.reason, denied.name or "") == (status, reason, name), header
        assert {path: path.read_bytes() for path in before} == before
        audit.denied(denied, "203.0.113.7:4711", f"GET /v1/lease?token={header}")
    written = audit.path.read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    for line, (_, status, reason, name) in zip(lines, cases, strict=True):
        assert line["at"] == clock.now
        assert (line["event"], line["status"], line["reason"]) == ("denied", status, reason)
        assert (line["peer"], line["route"], line.get("token", "")) == ("203.0.113.7:4711", "GET /v1/lease", name)
    for secret in (short, revoked, relay, unknown):
        assert secret[-8:] not in written
    gate.check(bearer(relay), {Role.RELAY})  # and it still opens what it is for


def test_what_is_created_or_revoked_while_the_hub_runs_counts_at_once(tokens: TokenFile, clock: Clock) -> None:
    first = tokens.create(Role.WORKER, DAY_S)
    gate = Authenticator(tokens.path, clock)
    connected = gate.check(bearer(first), {Role.WORKER})
    second = tokens.create(Role.WORKER, DAY_S)
    assert gate.check(bearer(second), {Role.WORKER}).name == "worker-2"
    tokens.revoke("worker-1")
    assert refusal(gate, bearer(first)).reason == "revoked token"
    with pytest.raises(Denied, match="401: revoked"):
        gate.recheck(connected)
    tokens.revoke("worker-1")  # again: the same
    assert [token.state(clock()) for token in tokens.tokens()] == ["revoked", "valid"]


def test_the_file_is_read_again_only_when_it_changed(
    tokens: TokenFile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens.create(Role.WORKER, DAY_S)
    gate = Authenticator(tokens.path, clock)
    reads: list[Path] = []
    real = TokenFile.tokens
    monkeypatch.setattr(TokenFile, "tokens", lambda self: (reads.append(self.path), real(self))[1])
    for _ in range(50):
        gate.check(bearer(text), {Role.WORKER})
    assert reads == []
    write_private(tokens.path, tokens.path.read_bytes())
    for _ in range(50):
        gate.check(bearer(text), {Role.WORKER})
    assert reads == [tokens.path]


@pytest.mark.parametrize("damage", ["", "not json", '{"tokens": [', '{"tokens": {}}', None])
def test_when_the_file_is_damaged_or_gone_nobody_gets_in_until_it_is_mended(
    tokens: TokenFile, clock: Clock, damage: str | None
) -> None:
    text = tokens.create(Role.WORKER, DAY_S)
    gate, whole = Authenticator(tokens.path, clock), tokens.path.read_bytes()
    if damage is None:
        tokens.path.unlink()
    else:
        write_private(tokens.path, damage.encode())
    for _ in range(2):
        assert refusal(gate, bearer(text)).status == 401
        assert gate.fault is not None
        assert str(tokens.path) in gate.fault
    with pytest.raises(UserError, match=re.escape(str(tokens.path))) as caught:
        Authenticator(tokens.path, clock)
    assert "\n" not in str(caught.value)
    write_private(tokens.path, whole)
    assert gate.check(bearer(text), {Role.WORKER}).name == "worker-1"
    assert gate.fault is None


def test_a_token_file_that_is_not_one_is_refused_in_a_sentence(tokens: TokenFile, clock: Clock) -> None:
    tokens.create(Role.WORKER, DAY_S)
    content = json.loads(tokens.path.read_text())
    (token,) = content["tokens"]

    def sentence(value: object) -> str:
        write_private(tokens.path, value if isinstance(value, bytes) else json.dumps(value).encode())
        with pytest.raises(UserError) as caught:
            Authenticator(tokens.path, clock)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "digest" in sentence({"format": 1, "tokens": [token | {"digest": "0" * 63}]})
    assert "digest" in sentence({"format": 1, "tokens": [token | {"digest": "0" * 64 + "\n"}]})
    assert "role" in sentence({"format": 1, "tokens": [token | {"role": "root"}]})
    assert "expires" in sentence({"format": 1, "tokens": [token | {"expires": 10**12}]})
    assert "name" in sentence({"format": 1, "tokens": [token | {"name": "x" * 33}]})
    assert "secret" in sentence({"format": 1, "tokens": [token | {"secret": 1}]})
    assert "two tokens with the same name" in sentence({"format": 1, "tokens": [token, token]})
    assert "format" in sentence({"format": 2, "tokens": []})
    assert "longer than 1048576 bytes" in sentence(b" " * (1 << 20) + b"{}")
    sentence(b"\xff\xfe{}")
    write_private(tokens.path, json.dumps(content).encode())
    tokens.path.chmod(0o620)
    with pytest.raises(UserError, match=r"other users may write .*: chmod 600"):
        Authenticator(tokens.path, clock)
    with pytest.raises(UserError, match="not a regular file"):
        Authenticator(tokens.path.parent, clock)


def test_names_are_one_each_and_only_a_worker_can_be_trusted(tokens: TokenFile) -> None:
    tokens.create(Role.WORKER, DAY_S, "anna")
    for name, sentence in (
        ("anna", "already contains a token named anna"),
        ("", "allowed"),
        ("a b", "allowed"),
        ("é", "allowed"),
    ):
        with pytest.raises(UserError, match=sentence):
            tokens.create(Role.WORKER, DAY_S, name)
    for role in (Role.ADMIN, Role.RELAY):
        with pytest.raises(UserError, match="only tokens of role worker can"):
            tokens.create(role, DAY_S, trusted=True)
    with pytest.raises(UserError, match="no token named 'ann'"):
        tokens.revoke("ann")
    assert [token.name for token in tokens.tokens()] == ["anna"]
    tokens.create(Role.WORKER, DAY_S, "worker-2")
    tokens.create(Role.WORKER, DAY_S)
    tokens.create(Role.WORKER, DAY_S)
    assert [token.name for token in tokens.tokens()] == ["anna", "worker-2", "worker-1", "worker-3"]


def test_a_request_costs_as_much_with_many_tokens_as_with_one(tokens: TokenFile, clock: Clock) -> None:
    """The hub checks the token of each worker every second."""
    costs: list[int] = []
    text = tokens.create(Role.WORKER, DAY_S)
    (own,) = tokens.tokens()
    for count in (1, 500):
        others = [msgspec.structs.replace(own, name=f"other-{i}", digest=digest_of(f"{i}")) for i in range(1, count)]
        content = {"format": 1, "tokens": [*others, own]}
        write_private(tokens.path, msgspec.json.encode(content))
        costs.append(calls_of(partial(Authenticator(tokens.path, clock).check, bearer(text), {Role.WORKER})))
    assert 0 < costs[1] < 2 * costs[0]


def calls_of(action: Callable[[], object]) -> int:
    """The number of function calls, of Python and of C, in an action."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        action()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_long_expired_tokens_leave_the_file_and_stay_refused(tokens: TokenFile, clock: Clock) -> None:
    old = tokens.create(Role.WORKER, 60, "old")
    clock.now += 60 + 29 * DAY_S
    tokens.create(Role.WORKER, DAY_S, "later")
    assert {token.name for token in tokens.tokens()} == {"old", "later"}
    clock.now += DAY_S
    new = tokens.create(Role.ADMIN, DAY_S, "old")  # its name is free again, and gives the old one nothing
    gate = Authenticator(tokens.path, clock)
    assert refusal(gate, bearer(old)).reason == "unknown token"
    assert gate.check(bearer(new), {Role.ADMIN}).role is Role.ADMIN


def test_a_file_holds_so_many_tokens_and_no_more(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_TOKENS", 2)
    for _ in range(2):
        tokens.create(Role.WORKER, DAY_S)
    with pytest.raises(UserError, match="contains 2 tokens, the maximum"):
        tokens.create(Role.WORKER, DAY_S)
    longest = {"name": "n" * 32, "role": "worker", "digest": "0" * 64, "created": 10**11, "expires": 10**11}
    longest |= {"is_revoked": False, "is_trusted": False}
    assert 1_000 * len(json.dumps(longest, indent=8)) < auth.MAX_FILE_BYTES, "a full file can be read"


def test_of_two_changes_at_once_none_is_lost(tokens: TokenFile) -> None:
    tokens.create(Role.WORKER, DAY_S, "first")
    threads = [threading.Thread(target=tokens.create, args=(Role.WORKER, DAY_S, f"w{i}")) for i in range(8)]
    threads.append(threading.Thread(target=tokens.revoke, args=("first",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = {token.name: token.is_revoked for token in tokens.tokens()}
    assert found == {"first": True} | {f"w{i}": False for i in range(8)}


def test_waiting_for_another_command_has_an_end(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOCK_WAIT_S", 0.05)
    is_held, may_go_on = threading.Event(), threading.Event()

    def held() -> float:
        """The time, which is asked for while the file is locked."""
        is_held.set()
        assert may_go_on.wait(60)
        return 0.0

    other = threading.Thread(target=TokenFile(tokens.path, held).create, args=(Role.WORKER, DAY_S))
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(DeadlineExceeded, match="another baton token command"):
            tokens.create(Role.WORKER, DAY_S)
        assert not tokens.path.exists()
    finally:
        may_go_on.set()
        other.join(60)
    assert [token.name for token in tokens.tokens()] == ["worker-1"]


def test_ten_thousand_random_headers_never_pass_and_raise_nothing_but_denied(tokens: TokenFile, clock: Clock) -> None:
    token = tokens.create(Role.WORKER, DAY_S)
    gate, draw = Authenticator(tokens.path, clock), random.Random(11)
    valid, alphabet = bearer(token), string.ascii_letters + string.digits + "-_"
    anything = [chr(draw.randrange(0x110000)) for _ in range(500)] + ["\0", "\udc80", "\r\n", " ", "\u0661"]
    for i in range(10_000):
        kind = i % 5
        if kind == 0:  # the right shape
            role = draw.choice(["worker", "admin", "relay"])
            header = bearer(f"baton_{role}_" + "".join(draw.choices(alphabet, k=43)))
        elif kind == 1:  # the right token with one character changed
            at = draw.randrange(len("Bearer "), len(valid))
            header = valid[:at] + draw.choice([c for c in alphabet if c != valid[at]]) + valid[at + 1 :]
        elif kind == 2:  # cut short, or with something inserted
            at = draw.randrange(len(valid))
            header = valid[:at] if i % 2 else valid[: at + 1] + draw.choice(anything) + "x" + valid[at + 1 :]
        elif kind == 3:
            header = "".join(draw.choices(anything, k=draw.randrange(80)))
        else:
            header = "Bearer " + "".join(draw.choices(string.printable, k=draw.randrange(2_000)))
        assert refusal(gate, header).status == 401, header
    gate.check(valid, {Role.WORKER})


@given(st.text())
def test_no_text_is_a_token(text: str) -> None:
    gate = Authenticator.__new__(Authenticator)  # a header that is malformed is refused before any file is looked at
    assert refusal(gate, text).reason == "malformed token"


@given(st.integers(1, 999_999_999), st.sampled_from("smhd"))
def test_a_duration_is_its_number_of_its_unit(count: int, unit: str) -> None:
    seconds = count * {"s": 1, "m": 60, "h": 60 * 60, "d": 24 * 60 * 60}[unit]
    if seconds <= 3_650 * DAY_S:
        assert parse_duration(f"{count}{unit}") == seconds
    else:
        with pytest.raises(UserError, match="up to 3650d"):
            parse_duration(f"{count}{unit}")


def test_durations_by_hand() -> None:
    assert [parse_duration(t) for t in ("7d", "12h", "30m", "90s")] == [604_800, 43_200, 1_800, 90]
    for text in ("", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "1w", "1d12h", "7d\n", "٧d", "1" * 400 + "s"):
        with pytest.raises(UserError, match="the duration is"):
            parse_duration(text)


@given(st.text().filter(lambda text: not re.fullmatch("[0-9]+[smhd]", text)))
def test_what_is_no_duration_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UserError, match="the duration is"):
        parse_duration(text)


def test_a_workers_token_is_read_from_its_file(
    tokens: TokenFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, path = tokens.create(Role.WORKER, DAY_S), tmp_path / "token"
    write_private(path, f"  {text}\n".encode())
    with caplog.at_level(logging.WARNING):
        assert read_token_file(path) == text
        assert caplog.text == ""
        path.chmod(0o644)
        assert read_token_file(path) == text
    assert f"chmod 600 {path}" in caplog.text
    assert text not in caplog.text
    for content, sentence in (
        (b"", "contains nothing"),
        (b"\n \n", "contains nothing"),
        (text.encode() * 2, "contains other text"),
        (b"\xff" * 60, "contains other text"),
        (b"x" * 1_025, "longer than 1024 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence) as caught:
            read_token_file(path)
        assert text not in str(caught.value)
    with pytest.raises(UserError, match="does not exist: baton token create"):
        read_token_file(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):  # nobody writes to it: reading would wait for ever
        read_token_file(tmp_path / "pipe")


def test_a_link_to_the_token_file_stays_one(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "tokens.json", tmp_path / "link.json"
    link.symlink_to(real)
    text = TokenFile(link, clock).create(Role.WORKER, DAY_S)
    gate = Authenticator(real, clock)
    gate.check(bearer(text), {Role.WORKER})
    TokenFile(link, clock).revoke("worker-1")
    assert refusal(gate, bearer(text)).reason == "revoked token"
    assert link.is_symlink()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent/tokens\.json cannot be written: No such file"):
        TokenFile(tmp_path / "absent" / "tokens.json").create(Role.WORKER, DAY_S)
    with pytest.raises(UserError, match="absent/token cannot be written"):
        write_private(tmp_path / "absent" / "token", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written"):
        write_private(tmp_path / "folder", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"], "nothing unfinished is left"
