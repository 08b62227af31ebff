"""The journal of rollouts that no checkpoint contains yet. The journal records each opened group, the tokens, ends and
rewards of its trajectories, and the train step that consumed the group.

The journal is an SQLite database in WAL mode in the run's directory. `commit` writes changes to the operating system,
so they survive a kill of any process. `settle` flushes them to disk, so they survive a power failure. The loop calls
`settle` before it records a batch and before it renames a checkpoint. A power failure therefore loses at most the
rollouts since the last batch, which are then generated again.

The journal deletes a group as soon as a checkpoint includes the training on this group. A group is open if no recorded
batch contains it. Every entry has a digest, which is verified when the journal is opened.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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


class EntryKey(NamedTuple):
    """Key of an entry. `number`: id of the entry's group; a train step or 0 if the entry belongs to no group."""

    kind: str
    number: int = 0
    sample: int = 0
    token_offset: int = 0


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
    """Sample indices of the episodes that wait for the environment's answer to their last turn."""

    def has_begun(self, sample_index: int) -> bool:
        """Return whether an unfinished trajectory, or an earlier path of its episode, has recorded tokens."""
        trajectory = self.members[sample_index]
        return trajectory.finish_reason is None and (trajectory.num_tokens > 0 or sample_index in self.episodes)


class StreamCursor(msgspec.Struct, frozen=True):
    """The next group id, and the position of the prompt stream."""

    next_group_id: int
    position: dict[str, int]


_TYPES: dict[str, Any] = {
    "group": IssuedGroup,  # key: group id
    "segments": tuple[Segment, ...],  # key: group id, sample index, token offset; of an unfinished trajectory
    "finished": Trajectory,  # key: group id, sample index
    "judged": ScoredTrajectory,  # key: group id, sample index
    # key: group id, sample index, number of exchanges; content: the data that the last exchange added. With 0
    # exchanges, the content is a complete episode that is not scored yet
    "episode": Episode,
    "path": Trajectory,  # key: group id, sample index; a later path of an episode, which starts with its new prompt
    "turn": int,  # key: group id, sample index; content: number of tokens of the trajectory when its last turn ended
    "consumed": int,  # key: group id; content: step whose batch contains the group
    "discarded": str,  # key: group id; content: reason why the group was discarded
    "batch": dict[str, float],  # key: step; content: metrics of the batch from the scheduler
    "place": StreamCursor,
    "last_step": int,  # last step whose batch was recorded
}
"""Kind of an entry → type of its content."""
_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_GROUP_KINDS = [kind for kind in _TYPES if kind not in ("batch", "place", "last_step")]
_OF_AN_EPISODE = ("episode", "path", "turn")
"""Kinds of entries that belong to an open multi-turn episode."""
_ORDER = {"segments": 1, "finished": 2}
"""Order in which the entries of a group are read. Kinds that are not listed come first."""


class Journal:
    """The journal of one run. Only one thread may write to the journal."""

    def __init__(
        self, path: Path | None, *, keeps_partials: bool, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Open or create the journal. Raises StorageFault if the journal is damaged.

        `path`: file of the journal; None for a journal in memory, as in the simulator. `keeps_partials`: whether
        segments of unfinished trajectories are recorded. In `sync` mode such segments are not recorded, and a resumed
        run generates the trajectories again. `before_commit`: called before each commit; raises if another process has
        taken over the directory.
        """
        self._path, self._keeps_partials, self._before_commit = path, keeps_partials, before_commit
        self._is_open = False
        with self._faults():
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            # with exclusive locking, SQLite needs no shared memory, which network file systems lack
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._check_format()
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            # the format version is written first, so that a kill never leaves a table without a format version
            self._db.execute(f"PRAGMA user_version={FORMAT}")
            self._db.execute(_TABLE)
            self._check_entries()
        if path is not None:
            flush_to_disk(path.parent)

    def _check_format(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
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
        for *key, content, digest in self._db.execute("SELECT * FROM entries"):
            if digest != _digest(key, content):
                raise sqlite3.DatabaseError(f"the digest of the entry {key} is wrong")

    def issued(self, group: IssuedGroup, place: StreamCursor) -> None:
        """Record an opened group, and the position of the prompt stream after the group's prompt."""
        self._put(EntryKey("group", group.group_id), group)
        self._put(EntryKey("place"), place)

    def grew(self, group_id: int, sample_index: int, token_offset: int, segments: Sequence[Segment]) -> None:
        """Record the reported segments of an unfinished trajectory."""
        if self._keeps_partials and segments:
            self._put(EntryKey("segments", group_id, sample_index, token_offset), segments)

    def finished(self, trajectory: Trajectory, episode: Episode | None = None) -> None:
        """Record a complete trajectory. `episode`: for a multi-turn task; kept until the reward is recorded."""
        key = (trajectory.group_id, trajectory.sample_index)
        self._remove(("segments", "judged", *_OF_AN_EPISODE), *key)
        self._put(EntryKey("finished", *key), trajectory)
        if episode is not None:
            self._put(EntryKey("episode", *key), episode)

    def turn_ended(self, trajectory: Trajectory) -> None:
        """Record that a turn of a multi-turn episode has ended, so its action is sent to the environment."""
        if self._keeps_partials:
            self._put(EntryKey("turn", trajectory.group_id, trajectory.sample_index), trajectory.num_tokens)

    def observed(self, trajectory: Trajectory, episode: Episode) -> None:
        """Record the last exchange (action and observation) of an open episode. If the exchange's observation started a
        new path, record the previous path and the trajectory of the new path. Otherwise `grew` records the
        observation's tokens."""
        if not self._keeps_partials:
            return
        key = (trajectory.group_id, trajectory.sample_index)
        begins_path = not trajectory.segments
        paths = episode.earlier[-1:] if begins_path else ()
        added = msgspec.structs.replace(episode, exchanges=episode.exchanges[-1:], earlier=paths)
        self._put(EntryKey("episode", *key, len(episode.exchanges)), added)
        self._remove(("turn",), *key)  # a new path could grow to the same number of tokens
        if begins_path:
            self._remove(("segments",), *key)
            self._put(EntryKey("path", *key), trajectory)

    def judged(self, judged: ScoredTrajectory) -> None:
        """Record a complete trajectory with its reward or, if scoring failed, with the cause of the failure."""
        key = (judged.trajectory.group_id, judged.trajectory.sample_index)
        self._put(EntryKey("judged", *key), judged)
        if judged.episode is not None:
            self._remove(("episode",), *key)

    def delete_rewards(self) -> None:
        """Delete the rewards of open groups, so that the groups are scored again after a change of the reward parts.
        Episodes keep the rewards that their environments gave, and the failures of their environments."""
        for key, scored in self._find(("judged",)):
            if scored.episode is not None and ENVIRONMENT not in scored.judgement.parts:
                continue
            self._remove(("judged",), key.number, key.sample)
            if scored.episode is not None:
                self._put(EntryKey("episode", key.number, key.sample), scored.episode)
        self.commit()

    def revoked(self, group_id: int, sample_index: int) -> None:
        """Delete tokens and reward of a trajectory that is not trusted, so that it starts again from its prompt."""
        self._remove(("segments", "finished", "judged", *_OF_AN_EPISODE), group_id, sample_index)

    def discarded(self, group_id: int, cause: str) -> None:
        """Record that a group was discarded and will not be trained on."""
        self._put(EntryKey("discarded", group_id), cause)

    def counted(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step's batch, and `settle`. Called before the batch is written to a file."""
        self._put(EntryKey("batch", step), metrics)
        self.settle()

    def consumed(self, step: int, group_ids: Sequence[int]) -> None:
        """Record that a step's batch, with these groups, has been written to the run's directory."""
        for group_id in group_ids:
            self._put(EntryKey("consumed", group_id), step)
        self._put(EntryKey("last_step"), step)
        self.commit()

    def checkpointed(self, step: int, oldest_step: int) -> None:
        """Delete the groups of all batches up to `step`, because a checkpoint includes the training on these groups.
        `oldest_step`: step of the oldest checkpoint from which the run may resume. The metrics of batches after
        `oldest_step` are kept."""
        for group_id in self._gone(step):
            self._remove(_GROUP_KINDS, group_id)
        for key, _ in self._find(("batch",)):
            if key.number <= oldest_step:
                self._remove(("batch",), key.number)
        self.commit()

    def commit(self) -> None:
        """Commit the changes, so that they survive a kill of this process."""
        if self._is_open:
            self._before_commit()
            with self._faults():
                self._db.execute("COMMIT")
            self._is_open = False

    def roll_back(self) -> None:
        """Undo the changes since the last commit, as a kill of this process would."""
        self._db.rollback()
        self._is_open = False

    def settle(self) -> None:
        """Commit and flush to disk, so that all changes survive a power failure."""
        self.commit()
        with self._faults():
            # a WAL checkpoint (of SQLite, not of the run) flushes the write-ahead log first, then the database
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
        return next((content for _, content in self._find(("batch",), step)), {})

    def place(self) -> StreamCursor | None:
        """Return the cursor of the prompt stream, or None if no group has been opened yet."""
        return next((content for _, content in self._find(("place",))), None)

    def last_step(self) -> int:
        """Return the last step whose batch was recorded; 0 before the first batch."""
        return next((content for _, content in self._find(("last_step",))), 0)

    def open_groups(self, step: float = math.inf) -> list[OpenGroup]:
        """Return the groups that no batch up to `step` contains, ordered by id."""
        gone = self._gone(step)
        return [self._open_group(issued) for key, issued in self._find(("group",)) if key.number not in gone]

    def groups_of(self, step: int) -> list[int]:
        """Return the ids of the groups in a step's batch; empty if a checkpoint includes the training on the batch."""
        return [key.number for key, at in self._find(("consumed",)) if at == step]

    def _gone(self, step: float) -> set[int]:
        """Return the ids of the groups that batches up to `step` contain, and of discarded groups."""
        consumed = {key.number for key, at in self._find(("consumed",)) if at <= step}
        return consumed | {key.number for key, _ in self._find(("discarded",))}

    def _open_group(self, issued: IssuedGroup) -> OpenGroup:
        group_id = issued.group_id
        members = [Trajectory(group_id, index, issued.prompt_ids) for index in range(issued.group_size)]
        judged: dict[int, ScoredTrajectory] = {}
        episodes: dict[int, Episode] = {}
        turns: dict[int, int] = {}
        found = self._find(("segments", "finished", "judged", *_OF_AN_EPISODE), group_id)
        for (kind, _, index, offset), content in sorted(found, key=lambda entry: _ORDER.get(entry[0].kind, 0)):
            match kind:
                case "judged":
                    judged[index] = content
                case "episode":
                    known = episodes.get(index, Episode())
                    episodes[index] = msgspec.structs.replace(
                        content, exchanges=known.exchanges + content.exchanges, earlier=known.earlier + content.earlier
                    )
                case "turn":
                    turns[index] = content
                case "path" | "finished":
                    members[index] = content
                case "segments" if offset == members[index].num_tokens:
                    members[index] = members[index].extended(content)
        ended = tuple(
            index
            for index, length in sorted(turns.items())
            if members[index].finish_reason is None and members[index].num_tokens == length
        )
        return OpenGroup(issued, tuple(members), judged, episodes, ended)

    # ---- the storage of entries --------------------------------------------------------------------------------------

    def _put(self, key: EntryKey, content: Any) -> None:
        packed = _ENCODER.encode(content)
        self._execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", *key, packed, _digest(key, packed))

    def _remove(self, kinds: Sequence[str], number: int, sample: int | None = None) -> None:
        """Remove the entries whose kind is in `kinds` and whose key has this number. With `sample`, remove only the
        entries of this sample."""
        of_sample = () if sample is None else (sample,)
        where = f"kind IN ({', '.join('?' * len(kinds))}) AND number = ?{' AND sample = ?' * len(of_sample)}"
        self._execute(f"DELETE FROM entries WHERE {where}", *kinds, number, *of_sample)

    def _find(self, kinds: Sequence[str], number: int | None = None) -> list[tuple[EntryKey, Any]]:
        """Return the entries whose kind is in `kinds`, ordered by key. With `number`, return only those with this
        number."""
        of_number = () if number is None else (number,)
        where = f"kind IN ({', '.join('?' * len(kinds))}){' AND number = ?' * len(of_number)}"
        with self._faults():
            rows = self._db.execute(
                f"SELECT * FROM entries WHERE {where} ORDER BY kind, number, sample, token_offset", (*kinds, *of_number)
            ).fetchall()
        return [(EntryKey(*key), msgspec.msgpack.decode(data, type=_TYPES[key[0]])) for *key, data, _ in rows]

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
                f"{self._path}, the run's journal, is damaged: {error}; remove it and use --resume: all rollouts "
                "that are in no recorded batch are then generated again"
            ) from error


def _digest(key: Sequence[Any], content: bytes) -> bytes:
    return blake3(msgspec.msgpack.encode((*key, content))).digest(length=16)
