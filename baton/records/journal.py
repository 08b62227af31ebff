"""The journal of rollouts that are in no checkpoint yet: issued, reported, finished, scored and consumed groups.

An SQLite database in WAL mode in the run's directory. `commit` writes the changes to the operating system, so they
survive a kill of any process. `settle` flushes them to disk, so they survive a power failure. The loop settles before
it records a batch and before it renames a checkpoint. A power failure therefore loses at most the rollouts since the
last batch, which are generated again.

Groups that a checkpoint contains are deleted. Groups of later batches stay, although `trajectories/` contains them too:
without them the journal could not tell which groups are open. Every entry has a digest, which is verified when the
journal is opened.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from baton.errors import StorageFault
from baton.files import flush_to_disk
from baton.types import Prompt, ScoredTrajectory, Segment, Trajectory

FORMAT = 2
"""Stored as SQLite's `user_version`."""
_TABLE = """
CREATE TABLE IF NOT EXISTS entries (
  kind TEXT NOT NULL, number INTEGER NOT NULL, sample INTEGER NOT NULL, token_offset INTEGER NOT NULL,
  content BLOB NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (kind, number, sample, token_offset)
)
"""
"""kind and key → content:

    group        group id                          IssuedGroup
    segments     group id, sample, token offset    segments of an unfinished trajectory
    finished     group id, sample                  Trajectory
    judged       group id, sample                  ScoredTrajectory
    consumed     group id                          the step whose batch contains the group
    discarded    group id                          the cause
    batch        step                              metrics that the scheduler counted for the batch
    place                                          StreamCursor
    last_step                                      the last step whose batch was recorded
"""
_OF_A_GROUP = "('group', 'segments', 'finished', 'judged', 'consumed', 'discarded')"


class IssuedGroup(msgspec.Struct, frozen=True):
    """A group when it was opened."""

    group_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    group_size: int
    opened_at: int
    """The trainer's version at that time."""
    attempts: int = 0
    """Number of earlier attempts at the same prompt."""


class OpenGroup(msgspec.Struct, frozen=True):
    """A group that is in no batch."""

    issued: IssuedGroup
    members: tuple[Trajectory, ...]
    """[G] with the tokens of the last report."""
    judged: dict[int, ScoredTrajectory]
    """Rewards by sample index."""


class StreamCursor(msgspec.Struct, frozen=True):
    """The next group id, and the position of the prompt stream."""

    next_group_id: int
    position: dict[str, int]


class Journal:
    """The journal of one run. Only one thread writes to it."""

    def __init__(self, path: Path, *, keeps_partials: bool, before_commit: Callable[[], None] = lambda: None) -> None:
        """Open the journal, or create it. Raises StorageFault if it is damaged.

        keeps_partials: whether segments of unfinished trajectories are recorded; if not (sync), these are generated
        again. before_commit: raises if this process may no longer write to the directory.
        """
        self._path, self._keeps_partials, self._before_commit = path, keeps_partials, before_commit
        self._is_open = False
        with self._faults():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # needs no shared memory: works on network file systems
            self._check_format()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(f"PRAGMA user_version={FORMAT}")  # before the table, in case the process dies in between
            self._db.execute(_TABLE)
            self._check_entries()
        flush_to_disk(path.parent)

    def _check_format(self) -> None:
        (version,), (tables,) = (
            self._db.execute(question).fetchone()
            for question in ("PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if tables and version != FORMAT:
            raise StorageFault(
                f"{self._path} has format {version}, but this version of Baton reads format {FORMAT}: resume with the "
                "version that wrote it, or remove it: the run then goes on from its last checkpoint and the batches "
                "recorded since"
            )

    def _check_entries(self) -> None:
        (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        for *key, content, digest in self._db.execute(
            "SELECT kind, number, sample, token_offset, content, digest FROM entries"
        ):
            if digest != _digest(key, content):
                raise sqlite3.DatabaseError(f"the entry {key} does not have the digest that it was written with")

    def issued(self, group: IssuedGroup, place: StreamCursor) -> None:
        """Record an opened group, and the position of the prompt stream after it."""
        self._put("group", group.group_id, content=group)
        self._put("place", content=place)

    def grew(self, group_id: int, sample_index: int, token_offset: int, segments: Sequence[Segment]) -> None:
        """Record the reported segments of an unfinished trajectory."""
        if self._keeps_partials and segments:
            self._put("segments", group_id, sample_index, token_offset, content=segments)

    def finished(self, trajectory: Trajectory) -> None:
        """Record a complete trajectory."""
        key = (trajectory.group_id, trajectory.sample_index)
        self._remove("segments", *key)
        self._remove("judged", *key)
        self._put("finished", *key, content=trajectory)

    def judged(self, judged: ScoredTrajectory) -> None:
        """Record a complete trajectory with its reward or the reason why it has none."""
        self._put("judged", judged.trajectory.group_id, judged.trajectory.sample_index, content=judged)

    def forget_judgements(self) -> None:
        """Delete the rewards of open groups, which are then scored again: the weights of reward parts have changed."""
        self._execute("DELETE FROM entries WHERE kind = 'judged'")
        self.commit()

    def revoked(self, group_id: int, sample_index: int) -> None:
        """Delete what an untrusted trajectory has; it starts again from its prompt."""
        for kind in ("segments", "finished", "judged"):
            self._remove(kind, group_id, sample_index)

    def discarded(self, group_id: int, cause: str) -> None:
        """Record that a group will not be trained on."""
        self._put("discarded", group_id, content=cause)

    def counted(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a batch, before the batch itself is recorded, and settle."""
        self._put("batch", step, content=metrics)
        self.settle()

    def consumed(self, step: int, group_ids: Sequence[int]) -> None:
        """Record that the groups of a step's batch have been written to the run's directory."""
        for group_id in group_ids:
            self._put("consumed", group_id, content=step)
        self._put("last_step", content=step)
        self.commit()

    def checkpointed(self, step: int, oldest_step: int) -> None:
        """Delete the groups of all batches up to `step`, which a checkpoint contains now.

        oldest_step: step of the oldest checkpoint that the run may go back to; the metrics of later batches stay.
        """
        gone = [*self._steps_by_group(up_to=step), *(number for number, _ in self._entries("discarded"))]
        for group_id in gone:
            self._execute(f"DELETE FROM entries WHERE kind IN {_OF_A_GROUP} AND number = ?", group_id)
        self._execute("DELETE FROM entries WHERE kind = 'batch' AND number <= ?", oldest_step)
        self.commit()

    def commit(self) -> None:
        """Commit the changes, so that they survive a kill of this process."""
        if self._is_open:
            self._before_commit()
            with self._faults():
                self._db.execute("COMMIT")
            self._is_open = False

    def settle(self) -> None:
        """Commit, and flush to disk, so that everything committed survives a power failure."""
        self.commit()
        with self._faults():
            # SQLite flushes the log first, then the database
            (is_busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not is_busy, f"somebody else reads {self._path}, which is open to one process only"

    def close(self) -> None:
        """Commit and close, also if the commit fails. May be called twice."""
        try:
            self.commit()
        finally:
            self._is_open = False
            with self._faults():
                self._db.close()

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics recorded for the batch of a step; empty if there are none."""
        found = self._get("batch", dict[str, float], step)
        return {} if found is None else found

    def place(self) -> StreamCursor | None:
        """Return the cursor of the prompt stream; None if no group was opened."""
        found: StreamCursor | None = self._get("place", StreamCursor)
        return found

    def last_step(self) -> int:
        """Return the last step whose batch was recorded; 0 if there is none."""
        return self._get("last_step", int) or 0

    def open_groups(self, step: float = math.inf) -> list[OpenGroup]:
        """Return the groups that are in no batch up to `step`, ordered by id."""
        gone = {*self._steps_by_group(up_to=step), *(number for number, _ in self._entries("discarded"))}
        groups = [_unpack(content, IssuedGroup) for number, content in self._entries("group") if number not in gone]
        return [self._open_group(issued) for issued in groups]

    def groups_of(self, step: int) -> list[int]:
        """Return the ids of the groups in a step's batch, if no checkpoint contains it."""
        return [group_id for group_id, at in self._steps_by_group().items() if at == step]

    def _steps_by_group(self, up_to: float = math.inf) -> dict[int, int]:
        steps = {number: _unpack(content, int) for number, content in self._entries("consumed")}
        return {group_id: step for group_id, step in steps.items() if step <= up_to}

    def _open_group(self, issued: IssuedGroup) -> OpenGroup:
        group_id = issued.group_id
        members = [Trajectory(group_id, index, issued.prompt_ids) for index in range(issued.group_size)]
        judged: dict[int, ScoredTrajectory] = {}
        for kind, index, offset, content in self._db.execute(
            "SELECT kind, sample, token_offset, content FROM entries WHERE number = ? "
            "AND kind IN ('segments', 'finished', 'judged') ORDER BY kind = 'finished', sample, token_offset",
            (group_id,),
        ).fetchall():
            if kind == "judged":
                judged[index] = _unpack(content, ScoredTrajectory)
            elif kind == "finished":
                members[index] = _unpack(content, Trajectory)
            elif offset == members[index].num_tokens:
                members[index] = members[index].extended(_unpack(content, tuple[Segment, ...]))
        return OpenGroup(issued, tuple(members), judged)

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _put(self, kind: str, number: int = 0, sample: int = 0, offset: int = 0, *, content: Any) -> None:
        key, packed = (kind, number, sample, offset), msgspec.msgpack.encode(content)
        self._execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", *key, packed, _digest(key, packed))

    def _remove(self, kind: str, number: int, sample: int) -> None:
        self._execute("DELETE FROM entries WHERE kind = ? AND number = ? AND sample = ?", kind, number, sample)

    def _get(self, kind: str, wanted: Any, number: int = 0) -> Any:
        return next((_unpack(content, wanted) for at, content in self._entries(kind) if at == number), None)

    def _entries(self, kind: str) -> Iterator[tuple[int, bytes]]:
        with self._faults():
            found = self._db.execute("SELECT number, content FROM entries WHERE kind = ? ORDER BY number", (kind,))
            yield from found.fetchall()

    def _execute(self, statement: str, *values: Any) -> None:
        with self._faults():
            if not self._is_open:
                self._db.execute("BEGIN")
                self._is_open = True
            self._db.execute(statement, values)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StorageFault(f"the run's journal {self._path} could not be read or written: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StorageFault(
                f"{self._path} cannot be used as the run's journal, it is damaged: {error}; remove it and go on with "
                "--resume: the rollouts since the last recorded batch are then generated again"
            ) from error


def _digest(key: Sequence[Any], content: bytes) -> bytes:
    return blake3(msgspec.msgpack.encode((*key, content))).digest(length=16)


def _unpack(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind)
