"""The journal of rollouts that no checkpoint contains yet. It records when groups are opened, grow, finish, are scored
and are consumed.

The journal is an SQLite database in WAL mode in the run's directory. `commit` writes changes to the operating system,
so they survive a kill of any process. `settle` flushes them to disk, so they survive a power failure. The loop calls
`settle` before it records a batch and before it renames a checkpoint. A power failure therefore loses at most the
rollouts since the last batch, which are then generated again.

Groups that a checkpoint contains are deleted. Groups of later batches stay; a group is open if the journal lists it in
no batch. Every entry has a digest, which is verified when the journal is opened.
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
from baton.types import ENVIRONMENT, Episode, Prompt, ScoredTrajectory, Segment, Trajectory, plain

FORMAT = 2
"""Version of the journal's format, stored as SQLite's `user_version`."""
_TABLE = """
CREATE TABLE IF NOT EXISTS entries (
  kind TEXT NOT NULL, number INTEGER NOT NULL, sample INTEGER NOT NULL, token_offset INTEGER NOT NULL,
  content BLOB NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (kind, number, sample, token_offset)
)
"""
_GROUP_KINDS = (
    "group",  # key: group id; content: IssuedGroup
    "segments",  # key: group id, sample index, token offset; content: reported segments of an unfinished trajectory
    "finished",  # key: group id, sample index; content: Trajectory
    "judged",  # key: group id, sample index; content: ScoredTrajectory
    # key: group id, sample index, number of exchanges; content: Episode with what the last exchange added to it. 0
    # exchanges: the whole of an episode that is over and not scored yet
    "episode",
    # key: group id, sample index; content: Trajectory that starts a later path of an episode with its new prompt
    "path",
    "turn",  # key: group id, sample index; content: number of tokens of the trajectory when its last turn ended
    "consumed",  # key: group id; content: step whose batch contains the group
    "discarded",  # key: group id; content: reason why the group was discarded
)
"""Kinds of journal entries that belong to a group.

Further kinds are `batch` (key: step; content: metrics of the batch from the scheduler), `place` (StreamCursor) and
`last_step` (last step whose batch was recorded).
"""
_OF_AN_EPISODE = ("episode", "path", "turn")
"""Kinds of journal entries that belong to an open multi-turn episode."""


class IssuedGroup(msgspec.Struct, frozen=True):
    """A group at the time it was opened, without its trajectories."""

    group_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    group_size: int
    opened_at: int
    """Policy version of the trainer when the group was opened."""
    attempts: int = 0
    """Number of earlier groups with the same prompt."""


class OpenGroup(msgspec.Struct, frozen=True):
    """A group that no batch contains yet."""

    issued: IssuedGroup
    members: tuple[Trajectory, ...]
    """Trajectories of the group, with the tokens reported so far; shape [group_size]."""
    judged: dict[int, ScoredTrajectory]
    """Sample index → trajectory with its reward."""
    episodes: dict[int, Episode] = msgspec.field(default_factory=dict)
    """Sample index → exchanges of the open multi-turn episode."""
    ended_turns: tuple[int, ...] = ()
    """Sample indices of the episodes whose environment has not answered the last turn."""

    def has_begun(self, sample_index: int) -> bool:
        """Whether an unfinished trajectory has tokens: its own, or those of earlier paths of its episode."""
        trajectory = self.members[sample_index]
        return trajectory.finish_reason is None and (trajectory.num_tokens > 0 or sample_index in self.episodes)


class StreamCursor(msgspec.Struct, frozen=True):
    """The next group id, and the position of the prompt stream."""

    next_group_id: int
    position: dict[str, int]


class Journal:
    """The journal of one run. Only one thread may write to it."""

    def __init__(self, path: Path, *, keeps_partials: bool, before_commit: Callable[[], None] = lambda: None) -> None:
        """Open or create the journal. Raises StorageFault if it is damaged.

        keeps_partials: whether segments of unfinished trajectories are recorded. In `sync` mode they are not recorded,
        and a resumed run generates these trajectories again. before_commit: called before each commit; raises if
        another process has taken over the directory.
        """
        self._path, self._keeps_partials, self._before_commit = path, keeps_partials, before_commit
        self._is_open = False
        with self._faults():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            # SQLite then needs no shared memory, which network file systems lack
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._check_format()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            # written before the table is created, so that a kill never leaves a table without a format version
            self._db.execute(f"PRAGMA user_version={FORMAT}")
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
                f"{self._path} has format {version}, but this version of Baton reads format {FORMAT}; resume with the "
                "version that wrote it, or remove it, and the run continues from its last checkpoint and the batches "
                "recorded since then"
            )

    def _check_entries(self) -> None:
        (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        for *key, content, digest in self._db.execute(
            "SELECT kind, number, sample, token_offset, content, digest FROM entries"
        ):
            if digest != _digest(key, content):
                raise sqlite3.DatabaseError(f"the digest of the entry {key} is wrong")

    def issued(self, group: IssuedGroup, place: StreamCursor) -> None:
        """Record an opened group, and the position of the prompt stream after its prompt."""
        self._put("group", group.group_id, content=group)
        self._put("place", content=place)

    def grew(self, group_id: int, sample_index: int, token_offset: int, segments: Sequence[Segment]) -> None:
        """Record the reported segments of an unfinished trajectory."""
        if self._keeps_partials and segments:
            self._put("segments", group_id, sample_index, token_offset, content=segments)

    def finished(self, trajectory: Trajectory, episode: Episode | None = None) -> None:
        """Record a complete trajectory; of a multi-turn task with its episode, until the reward is recorded."""
        key = (trajectory.group_id, trajectory.sample_index)
        for kind in ("segments", "judged", *_OF_AN_EPISODE):
            self._remove(kind, *key)
        self._put("finished", *key, content=trajectory)
        if episode is not None:
            self._put("episode", *key, content=episode)

    def turn_ended(self, trajectory: Trajectory) -> None:
        """Record that a turn of a multi-turn episode has ended and that its action is sent to the environment."""
        if self._keeps_partials:
            self._put("turn", trajectory.group_id, trajectory.sample_index, content=trajectory.num_tokens)

    def observed(self, trajectory: Trajectory, episode: Episode) -> None:
        """Record the last exchange of an open episode. If its observation started a new path, record the path before
        and the trajectory of the new one. Otherwise `grew` records the observation's tokens."""
        if not self._keeps_partials:
            return
        key = (trajectory.group_id, trajectory.sample_index)
        begins_path = not trajectory.segments
        paths = episode.earlier[-1:] if begins_path else ()
        added = msgspec.structs.replace(episode, exchanges=episode.exchanges[-1:], earlier=paths)
        self._put("episode", *key, len(episode.exchanges), content=added)
        self._remove("turn", *key)  # a new path could grow to the same number of tokens
        if begins_path:
            self._remove("segments", *key)
            self._put("path", *key, content=trajectory)

    def judged(self, judged: ScoredTrajectory) -> None:
        """Record a complete trajectory with its reward or, if scoring failed, with the cause of the failure."""
        key = (judged.trajectory.group_id, judged.trajectory.sample_index)
        self._put("judged", *key, content=judged)
        if judged.episode is not None:
            self._remove("episode", *key)

    def delete_rewards(self) -> None:
        """Delete the rewards of open groups, so that they are scored again after a change of the reward parts.

        Episodes keep the rewards of their environments, or the failure of the environment.
        """
        for number, content in self._entries("judged"):
            scored = _unpack(content, ScoredTrajectory)
            if scored.episode is not None and ENVIRONMENT not in scored.judgement.parts:
                continue
            self._remove("judged", number, scored.trajectory.sample_index)
            if scored.episode is not None:
                self._put("episode", number, scored.trajectory.sample_index, content=scored.episode)
        self.commit()

    def revoked(self, group_id: int, sample_index: int) -> None:
        """Delete the tokens and the reward of a trajectory that is no longer trusted. The trajectory starts again from
        its prompt."""
        for kind in ("segments", "finished", "judged", *_OF_AN_EPISODE):
            self._remove(kind, group_id, sample_index)

    def discarded(self, group_id: int, cause: str) -> None:
        """Record that a group was discarded and will not be trained on."""
        self._put("discarded", group_id, content=cause)

    def counted(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step's batch, then call `settle`. Call this before the batch is written to the run's
        directory."""
        self._put("batch", step, content=metrics)
        self.settle()

    def consumed(self, step: int, group_ids: Sequence[int]) -> None:
        """Record that a step's batch, with these groups, has been written to the run's directory."""
        for group_id in group_ids:
            self._put("consumed", group_id, content=step)
        self._put("last_step", content=step)
        self.commit()

    def checkpointed(self, step: int, oldest_step: int) -> None:
        """Delete the groups of all batches up to `step`, because a checkpoint now contains them.

        oldest_step: step of the oldest checkpoint from which the run may resume. The metrics of batches after this step
        are kept.
        """
        gone = [*self._steps_by_group(up_to=step), *(number for number, _ in self._entries("discarded"))]
        for group_id in gone:
            self._execute(f"DELETE FROM entries WHERE kind IN {_GROUP_KINDS} AND number = ?", group_id)
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
        """Commit and flush to disk, so that all changes survive a power failure."""
        self.commit()
        with self._faults():
            # a checkpoint of the WAL flushes the log first, then the database
            (is_busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not is_busy, f"another connection reads {self._path}"

    def close(self) -> None:
        """Commit, then close the journal even if the commit fails. May be called twice."""
        try:
            self.commit()
        finally:
            self._is_open = False
            with self._faults():
                self._db.close()

    def metrics(self, step: int) -> dict[str, float]:
        """Return the recorded metrics of a step's batch, or an empty dict if no metrics are recorded."""
        found = self._get("batch", dict[str, float], step)
        return {} if found is None else found

    def place(self) -> StreamCursor | None:
        """Return the cursor of the prompt stream, or None if no group has been opened yet."""
        found: StreamCursor | None = self._get("place", StreamCursor)
        return found

    def last_step(self) -> int:
        """Return the last step whose batch was recorded; 0 before the first batch."""
        return self._get("last_step", int) or 0

    def open_groups(self, step: float = math.inf) -> list[OpenGroup]:
        """Return the groups that no batch up to `step` contains, ordered by id."""
        gone = {*self._steps_by_group(up_to=step), *(number for number, _ in self._entries("discarded"))}
        groups = [_unpack(content, IssuedGroup) for number, content in self._entries("group") if number not in gone]
        return [self._open_group(issued) for issued in groups]

    def groups_of(self, step: int) -> list[int]:
        """Return the ids of the groups in a step's batch, or an empty list if a checkpoint contains the batch."""
        return [group_id for group_id, at in self._steps_by_group().items() if at == step]

    def _steps_by_group(self, up_to: float = math.inf) -> dict[int, int]:
        steps = {number: _unpack(content, int) for number, content in self._entries("consumed")}
        return {group_id: step for group_id, step in steps.items() if step <= up_to}

    def _open_group(self, issued: IssuedGroup) -> OpenGroup:
        group_id = issued.group_id
        members = [Trajectory(group_id, index, issued.prompt_ids) for index in range(issued.group_size)]
        judged: dict[int, ScoredTrajectory] = {}
        episodes: dict[int, Episode] = {}
        turns: dict[int, int] = {}
        for kind, index, offset, content in self._db.execute(
            "SELECT kind, sample, token_offset, content FROM entries WHERE number = ? AND kind IN (?, ?, ?, ?, ?, ?) "
            "ORDER BY kind = 'finished', kind = 'segments', sample, token_offset",
            (group_id, "segments", "finished", "judged", *_OF_AN_EPISODE),
        ).fetchall():
            match kind:
                case "judged":
                    judged[index] = _unpack(content, ScoredTrajectory)
                case "episode":
                    known, added = episodes.get(index, Episode()), _unpack(content, Episode)
                    episodes[index] = msgspec.structs.replace(
                        added, exchanges=known.exchanges + added.exchanges, earlier=known.earlier + added.earlier
                    )
                case "turn":
                    turns[index] = _unpack(content, int)
                case "path" | "finished":
                    members[index] = _unpack(content, Trajectory)
                case "segments" if offset == members[index].num_tokens:
                    members[index] = members[index].extended(_unpack(content, tuple[Segment, ...]))
        ended = tuple(
            index
            for index, length in sorted(turns.items())
            if members[index].finish_reason is None and members[index].num_tokens == length
        )
        return OpenGroup(issued, tuple(members), judged, episodes, ended)

    # ---- entries -----------------------------------------------------------------------------------------------------

    def _put(self, kind: str, number: int = 0, sample: int = 0, offset: int = 0, *, content: Any) -> None:
        key, packed = (kind, number, sample, offset), msgspec.msgpack.encode(content, enc_hook=plain)
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
                f"{self._path}, the run's journal, is damaged: {error}; remove it and use --resume: the rollouts since "
                "the last recorded batch are then generated again"
            ) from error


def _digest(key: Sequence[Any], content: bytes) -> bytes:
    return blake3(msgspec.msgpack.encode((*key, content))).digest(length=16)


def _unpack(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind)
