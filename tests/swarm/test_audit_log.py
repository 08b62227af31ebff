"""Audit lines are bounded in number, length and bytes, and hold no secret whatever they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import Denied


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refuse(audit: AuditLog, times: int = 1) -> None:
    for _ in range(times):
        audit.denied(Denied(401, "unknown token"), "198.51.100.1", "GET /v1/weights")


def test_a_flood_of_refusals_is_counted_and_hides_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    audit = AuditLog(tmp_path / "audit.jsonl", max_lines_per_minute=10, clock=clock)
    refuse(audit, 1_000)
    assert len(lines(audit.path)) == 10
    assert audit.num_suppressed == 990
    audit.record("joined", 101, "", "198.51.100.2", "GET /v1/connect", "anna")
    assert lines(audit.path)[-1] == {
        "at": 1_000.0,
        "event": "joined",
        "status": 101,
        "peer": "198.51.100.2",
        "route": "GET /v1/connect",
        "token": "anna",
    }
    clock.now += 60
    refuse(audit, 11)
    found = lines(audit.path)
    assert found[11] == {"at": 1_060.0, "event": "suppressed", "status": 0, "count": 990}
    assert len(found) == 11 + 1 + 10
    audit.close()
    assert lines(audit.path)[-1]["count"] == 1
    clock.now = 5.0  # a clock that was set back silences nobody
    refuse(audit)
    assert lines(audit.path)[-1]["at"] == 5.0


def test_the_files_are_its_owners_and_bounded(tmp_path: Path) -> None:
    clock = Clock()
    audit = AuditLog(tmp_path / "audit.jsonl", max_bytes=2_000, clock=clock)
    for _ in range(100):
        refuse(audit)
        clock.now += 60
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["audit.jsonl", "audit.jsonl.1"]
    for path in files:
        assert path.stat().st_size <= 2_000
        assert path.stat().st_mode & 0o777 == 0o600
    kept = [line["at"] for line in lines(files[1]) + lines(files[0])]
    assert kept == [clock.now - 60 * back for back in range(len(kept), 0, -1)], "the latest, in order"
    AuditLog(tmp_path / "audit.jsonl", clock=clock).record("started", 0, "", "", "")
    assert lines(files[0])[-2]["at"] == kept[-1], "a hub that starts again goes on behind what is there"


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(tmp_path / "absent" / "audit.jsonl")
    refuse(audit, 3)
    assert audit.num_suppressed == 3
    assert "cannot write audit lines" in caplog.text
    audit.path.parent.mkdir()
    audit.close()
    assert lines(audit.path)[0]["count"] == 3
    assert audit.num_suppressed == 0


SECRET = "q" * 43


@given(st.text(), st.text(st.characters(exclude_characters="?")))
def test_a_secret_is_cut_wherever_it_stands_and_a_field_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, before: str, after: str
) -> None:
    audit = AuditLog(tmp_path_factory.mktemp("audit") / "audit.jsonl")
    for secret in (SECRET, f"baton_worker_{SECRET}", f"baton%5Fworker%5F{SECRET}"):
        text = before + secret + after
        audit.record(text, 200, text, text, text, text)
        line = json.loads(audit.path.read_bytes().splitlines()[-1])
        assert SECRET not in audit.path.read_text()
        assert all(len(line.get(field, "")) <= 160 for field in ("event", "reason", "peer", "route", "token"))


def test_bytes_that_are_no_text_make_a_line_all_the_same(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.record("denied", 401, "x" * 10_000, "\udc80\n\0", "GET /\udcff?token=" + SECRET)
    (line,) = lines(audit.path)
    assert (line["reason"], line["peer"], line["route"]) == ("…", "\\udc80\n\0", "GET /\\udcff")
