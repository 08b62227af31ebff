"""The rollout side's memory on disk: what was issued, grown, finished, judged, consumed. A kill loses nothing.

SQLite in WAL mode, in the run's directory. Each change is in the operating system's hands when `commit` returns: that
outlives any kill of any process; a power cut may cost the last moments, which are then generated again.

Groups that a checkpoint contains are forgotten; those of later batches stay, although `trajectories/` holds them whole,
so that it is known which are open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import StorageFault
from baton.types import Judged, Prompt, Segment, Trajectory

_TABLES = """
CREATE TABLE IF NOT EXISTS groups (
  group_id INTEGER PRIMARY KEY,
  prompt BLOB NOT NULL,
  prompt_ids BLOB NOT NULL,
  group_size INTEGER NOT NULL,
  opened_at INTEGER NOT NULL,
  attempts INTEGER NOT NULL,
  step INTEGER
);
CREATE TABLE IF NOT EXISTS segments (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, token_offset INTEGER NOT NULL, segments BLOB NOT NULL,
  PRIMARY KEY (group_id, sample_index, token_offset)
);
CREATE TABLE IF NOT EXISTS finished (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, trajectory BLOB NOT NULL, judged BLOB,
  PRIMARY KEY (group_id, sample_index)
);
CREATE TABLE IF NOT EXISTS discarded (group_id INTEGER PRIMARY KEY, cause TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, metrics BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS stream (only INTEGER PRIMARY KEY, next_group_id INTEGER NOT NULL, position BLOB NOT NULL);
"""


class Issued(msgspec.Struct, frozen=True):
    """A group as it was opened."""

    group_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    group_size: int
    opened_at: int
    """The trainer's version."""
    attempts: int = 0
    """Times that the prompt was tried before."""


class OpenGroup(msgspec.Struct, frozen=True):
    """A group that is in no batch."""

    issued: Issued
    members: tuple[Trajectory, ...]
    """[G] with what they had when it was last reported."""
    judged: dict[int, Judged]
    """By sample index."""


class StreamPlace(msgspec.Struct, frozen=True):
    """Where the prompts go on."""

    next_group_id: int
    position: dict[str, int]


class Journal:
    """One run's journal. A single thread writes it."""

    def __init__(self, path: Path, *, keeps_partials: bool) -> None:
        """Open or make it. `keeps_partials`: unfinished trajectories are resumed; else generated again (sync)."""
        self._path, self._keeps_partials = path, keeps_partials
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except sqlite3.DatabaseError as error:
            raise StorageFault(f"{path} cannot be used as the run's journal: {error}") from error
        self._is_open = False

    def issued(self, group: Issued, place: StreamPlace) -> None:
        """A group has been opened, and the stream of prompts is where it is."""
        self._write(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, NULL)",
            group.group_id,
            _pack(group.prompt),
            _pack(group.prompt_ids),
            group.group_size,
            group.opened_at,
            group.attempts,
        )
        self._write("INSERT OR REPLACE INTO stream VALUES (0, ?, ?)", place.next_group_id, _pack(place.position))

    def grew(self, group_id: int, sample_index: int, token_offset: int, segments: Sequence[Segment]) -> None:
        """An unfinished trajectory has been reported on."""
        if self._keeps_partials and segments:
            row = (group_id, sample_index, token_offset, _pack(segments))
            self._write("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)", *row)

    def finished(self, trajectory: Trajectory) -> None:
        """A trajectory is complete."""
        key = (trajectory.group_id, trajectory.sample_index)
        self._write("INSERT OR REPLACE INTO finished VALUES (?, ?, ?, NULL)", *key, _pack(trajectory))
        self._write("DELETE FROM segments WHERE group_id = ? AND sample_index = ?", *key)

    def judged(self, judged: Judged) -> None:
        """… and judged, or known to have no judgement."""
        key = (judged.trajectory.group_id, judged.trajectory.sample_index)
        self._write("UPDATE finished SET judged = ? WHERE group_id = ? AND sample_index = ?", _pack(judged), *key)

    def revoked(self, group_id: int, sample_index: int) -> None:
        """A trajectory is not to be trusted: it begins again at its prompt."""
        for table in ("segments", "finished"):
            self._write(f"DELETE FROM {table} WHERE group_id = ? AND sample_index = ?", group_id, sample_index)

    def discarded(self, group_id: int, cause: str) -> None:
        """A group will not be trained."""
        self._write("INSERT OR REPLACE INTO discarded VALUES (?, ?)", group_id, cause)

    def counted(self, step: int, metrics: dict[str, float]) -> None:
        """What the rollout side counted for the batch of a step, which is about to be recorded."""
        self._write("INSERT OR REPLACE INTO batches VALUES (?, ?)", step, _pack(metrics))
        self.commit()

    def consumed(self, step: int, group_ids: Sequence[int]) -> None:
        """The batch of a step has been recorded elsewhere."""
        for group_id in group_ids:
            self._write("UPDATE groups SET step = ? WHERE group_id = ?", step, group_id)
        self.commit()

    def checkpointed(self, step: int) -> None:
        """A checkpoint contains all batches up to a step: what belongs to them is forgotten."""
        gone = "SELECT group_id FROM groups WHERE step <= ? UNION SELECT group_id FROM discarded"
        for table in ("segments", "finished", "groups"):
            self._write(f"DELETE FROM {table} WHERE group_id IN ({gone})", step)
        self._write("DELETE FROM discarded")
        self._write("DELETE FROM batches WHERE step <= ?", step)
        self.commit()

    def commit(self) -> None:
        """Make what was written outlive a kill."""
        if self._is_open:
            self._db.execute("COMMIT")
            self._is_open = False

    def close(self) -> None:
        """Commit and close. May be called twice."""
        self.commit()
        self._db.close()

    def metrics(self, step: int) -> dict[str, float]:
        """What the rollout side counted for a recorded batch."""
        row = self._db.execute("SELECT metrics FROM batches WHERE step = ?", (step,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=dict[str, float]) if row else {}

    def place(self) -> StreamPlace | None:
        """Where the prompts go on; None where none was ever taken."""
        row = self._db.execute("SELECT next_group_id, position FROM stream").fetchone()
        return StreamPlace(row[0], msgspec.msgpack.decode(row[1], type=dict[str, int])) if row else None

    def open_groups(self) -> list[OpenGroup]:
        """The groups that are in no batch, in the order of their ids."""
        rows = self._db.execute(
            "SELECT group_id, prompt, prompt_ids, group_size, opened_at, attempts FROM groups "
            "WHERE step IS NULL AND group_id NOT IN (SELECT group_id FROM discarded) ORDER BY group_id"
        )
        return [
            self._open_group(
                Issued(row[0], _unpack(row[1], Prompt), _unpack(row[2], tuple[int, ...]), row[3], row[4], row[5])
            )
            for row in rows.fetchall()
        ]

    def _open_group(self, issued: Issued) -> OpenGroup:
        group_id = issued.group_id
        members = [Trajectory(group_id, index, issued.prompt_ids) for index in range(issued.group_size)]
        found = self._db.execute(
            "SELECT sample_index, token_offset, segments FROM segments WHERE group_id = ? ORDER BY 1, 2", (group_id,)
        )
        for index, offset, packed in found.fetchall():
            if offset == members[index].num_tokens:
                members[index] = members[index].extended(_unpack(packed, tuple[Segment, ...]))
        judged: dict[int, Judged] = {}
        for index, packed, verdict in self._db.execute(
            "SELECT sample_index, trajectory, judged FROM finished WHERE group_id = ?", (group_id,)
        ).fetchall():
            members[index] = _unpack(packed, Trajectory)
            if verdict is not None:
                judged[index] = _unpack(verdict, Judged)
        return OpenGroup(issued, tuple(members), judged)

    def _write(self, statement: str, *values: Any) -> None:
        try:
            if not self._is_open:
                self._db.execute("BEGIN")
                self._is_open = True
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise StorageFault(f"the run's journal {self._path} could not be written: {error}") from error


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _unpack(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind)
