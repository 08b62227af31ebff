"""`SlotTable`, which all engines use, assigns leases to slots, detects when a lease ends, and creates reports.

In each step, the engine takes newly admitted leases from the table, computes one token per running lease, and returns
the tokens to the table. This file does not import torch. A lease in a slot is called a row, because it is one row of
the engine's batch.

    submit ─▶ waiting ─▶ slot ─▶ token by token ─▶ Report(finish_reason)
        │         └─ abort, new weights ─▶ Report(is_aborted), Retry
        └─ wrong version ─▶ Retry;  token budget used up ─▶ Report(length)
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from baton.errors import EngineFault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.types import Author, FinishReason, FromWorker, Lease, PolicyVersion, Report, Retry, Segment, Trajectory

Text = Callable[[Sequence[int]], str]
"""Decodes token ids to text, including special tokens."""


class Piece(NamedTuple):
    """A range of a trajectory's token ids whose keys and values are computed and kept together. The input id of the
    next decode step belongs to no piece."""

    end: int
    """Number of ids from the start of the prompt to the end of the piece."""
    version: int | None
    """Number of the version whose weights compute the piece's keys and values. None stands for the version that the
    engine serves."""
    is_within_turn: bool = False
    """Whether the piece ends with tokens of an unfinished turn. Any other piece is computed by a prefill."""


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Identifies the keys and values of a piece, which also depend on the pieces before it."""

    digest: bytes
    """Digest of three things: the piece's fields, the piece's ids, and the digest of the previous piece. With the
    digest, keys of long contexts are compared without reading the ids."""
    piece: Piece = field(compare=False)
    begin: int = field(compare=False)
    """Number of ids before the piece."""
    ids: tuple[int, ...] = field(compare=False)
    """[end - begin] Ids of the piece."""


def prefix_keys(
    pieces: Sequence[Piece], ids: tuple[int, ...], before: PrefixKey | None = None
) -> tuple[PrefixKey, ...]:
    """Return the keys of successive pieces. `ids`: all ids from the start of the prompt. `before`: key of the piece
    before the first of `pieces`; None if `pieces` begin with the prompt."""
    found = []
    digest, begin = (b"", 0) if before is None else (before.digest, before.piece.end)
    for piece in pieces:
        own = ids[begin : piece.end]
        named = repr((digest, *piece)).encode()
        digest = blake3(named + b"\0" + array("q", own).tobytes()).digest(length=16)
        found.append(PrefixKey(digest, piece, begin, own))
        begin = piece.end
    return tuple(found)


class RunningLease:
    """A lease and the state of its generation. The lease either waits for a slot or has a slot."""

    def __init__(self, lease: Lease, end_ids: tuple[int, ...], max_context_tokens: int, stop: StopText | None) -> None:
        trajectory = lease.trajectory
        ids = [*trajectory.prompt_ids, *trajectory.token_ids]
        self.lease = lease
        self.ids = ids
        """Ids of prompt and response, including those generated under this lease."""
        self.length = trajectory.num_tokens
        """Number of tokens after the prompt, which is also the position that determines the noise of the next draw."""
        self.prefix_ids = tuple(ids[:-1])
        """[prompt + L - 1] Ids whose keys and values must be in the cache before the first decode step."""
        self.position = len(ids) - 1
        """Position of the last id, counted from 0 at the start of the prompt. The last id is the input of the next
        decode step."""
        self.pieces = pieces_of(trajectory)
        self._keys: dict[tuple[int, bool], tuple[PrefixKey, ...]] = {}
        self.kept: tuple[PrefixKey, ...] = ()
        """Pieces that the embedded engine wrote into the row's slot."""
        self.last_version = -1
        self._max_length = min(lease.sampling.max_new_tokens, max_context_tokens - len(trajectory.prompt_ids))
        self.end_ids = frozenset((*end_ids, *lease.sampling.stop_token_ids))
        self._stop = stop
        self._closed: list[Segment] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._routing: list[bytes] = []
        self._kept: list[bytes] = []
        self._from_offset = self.length

    @property
    def room(self) -> int:
        """Number of tokens that max_new_tokens and the context length still allow."""
        return self._max_length - self.length

    def prefix_keys(self, version: int, *, is_own: bool = False) -> tuple[PrefixKey, ...]:
        """Return the keys of `pieces`. Each key contains `version`. With `is_own`, the key of a piece that has a
        version of its own contains the piece's version instead."""
        if (version, is_own) not in self._keys:
            numbers = [version if piece.version is None or not is_own else piece.version for piece in self.pieces]
            named = [piece._replace(version=number) for piece, number in zip(self.pieces, numbers, strict=True)]
            self._keys[version, is_own] = prefix_keys(named, self.prefix_ids)
        return self._keys[version, is_own]

    @property
    def num_unreported(self) -> int:
        return self.length - self._from_offset

    def append(
        self, token: int, logprob: float, routing: bytes | None = None, kept: bytes | None = None
    ) -> FinishReason | None:
        """Append one token; return the finish reason if the token ends the trajectory."""
        self._tokens.append(token)
        self.ids.append(token)
        self._logprobs.append(logprob)
        if routing is not None:
            self._routing.append(routing)
        if kept:
            self._kept.append(kept)
        self.position += 1
        self.length += 1
        if token in self.end_ids or (self._stop is not None and self._stop.ends_with(token)):
            return FinishReason.STOP
        return None if self.room > 0 else FinishReason.LENGTH

    def close_segment(self, version: int) -> None:
        """End the current segment, whose tokens were all sampled under `version`."""
        if self._tokens:
            segment = Segment(self._tokens, self._logprobs, version, Author.POLICY, self._routing, self._kept)
            self._closed.append(segment)
            self._tokens, self._logprobs, self._routing, self._kept = [], [], [], []

    def report(self, version: int, finish_reason: FinishReason | None = None, *, is_aborted: bool = False) -> Report:
        """Return a report of all tokens that were appended since the last report."""
        self.close_segment(version)
        report = Report(self.lease.lease_id, self._from_offset, tuple(self._closed), finish_reason, is_aborted)
        self._closed, self._from_offset = [], self.length
        return report


class StopText:
    """Detects the stop strings of one trajectory. Only the policy's tokens after the last observation are searched.
    Each token with text has at least one byte. A stop string of n bytes therefore spans at most n tokens with text, so
    only the last tokens must be decoded."""

    def __init__(self, lease: Lease, text: Text) -> None:
        self._stop = lease.sampling.stop
        self._text = text
        self._window = max(len(s.encode()) for s in self._stop) + 8
        self._tail = lease.trajectory.turn_ids

    def ends_with(self, token: int) -> bool:
        """Append a token; return whether the text contains a stop string."""
        self._tail.append(token)
        del self._tail[: -self._window]
        text = self._text(self._tail)
        return any(s in text for s in self._stop)


class SlotTable:
    """The slots of an engine, the queue of waiting leases, and pending reports."""

    def __init__(self, settings: EngineSettings, version: PolicyVersion, end_ids: tuple[int, ...], text: Text) -> None:
        self.version = version
        self.rows: list[RunningLease | None] = [None] * settings.slots
        """The lease in each slot, shape [slots]; None for a free slot."""
        self.num_running = 0
        self._settings = settings
        self._end_ids = end_ids
        self._text = text
        self._waiting: OrderedDict[int, RunningLease] = OrderedDict()
        self._aborted: set[int] = set()
        self._running: set[int] = set()
        """Ids of the leases that have a slot."""
        self._outbox: list[FromWorker] = []

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError if the prompt is empty or leaves no room for a token."""
        trajectory, room = lease.trajectory, self._settings.max_context_tokens
        if not 1 <= len(trajectory.prompt_ids) < room:
            raise UserError(
                f"trajectory {trajectory.name}: the prompt has {len(trajectory.prompt_ids)} tokens, allowed are 1 to "
                f"{room - 1}, because engine.max_context_tokens is {room} for prompt and response together; "
                "increase it, or remove such prompts from the data"
            )
        assert trajectory.finish_reason is None, f"trajectory {trajectory.name} is finished and cannot be leased"
        assert not self._knows(lease.lease_id), f"lease {lease.lease_id} was submitted twice"
        if not _serves(lease, self.version.number):
            self._outbox.append(Retry(lease.lease_id, self.version.number))
            return
        stop = StopText(lease, self._text) if lease.sampling.stop else None
        row = RunningLease(lease, self._end_ids, room, stop)
        if row.room <= 0:
            self._outbox.append(row.report(self.version.number, FinishReason.LENGTH))
            return
        self._waiting[lease.lease_id] = row

    def abort(self, lease_id: int) -> None:
        """Mark a lease as aborted; the next `open_step` ends it. Has no effect on an unknown or ended lease."""
        if self._knows(lease_id):
            self._aborted.add(lease_id)

    def switch(self, version: PolicyVersion) -> None:
        """Switch to a new version, and end the current segment of every row. Leases that do not accept this version are
        aborted if they are running, and refused if they are waiting."""
        for row in self.rows:
            if row is not None:
                row.close_segment(self.version.number)
                if not _serves(row.lease, version.number):
                    self._aborted.add(row.lease.lease_id)
        for row in [row for row in self._waiting.values() if not _serves(row.lease, version.number)]:
            del self._waiting[row.lease.lease_id]
            self._aborted.discard(row.lease.lease_id)
            self._outbox.append(Retry(row.lease.lease_id, version.number))
        self.version = version

    def open_step(self) -> list[FromWorker]:
        """Free the slots of aborted leases; return the messages to send before the next tokens are generated."""
        reports, self._outbox = self._outbox, []
        for lease_id in [i for i in self._aborted if i in self._waiting]:
            reports.append(self._waiting.pop(lease_id).report(self.version.number, is_aborted=True))
        for slot, row in self.aborted():
            reports.append(row.report(self.version.number, is_aborted=True))
            self._free(slot)
        self._aborted.clear()
        return reports

    def aborted(self) -> list[tuple[int, RunningLease]]:
        """Return the slots and rows that the next `open_step` frees."""
        return [found for found in self.running() if found[1].lease.lease_id in self._aborted] if self._aborted else []

    def waiting(self) -> list[RunningLease]:
        """Return the waiting leases, oldest first."""
        return list(self._waiting.values())

    def admit(self) -> list[tuple[int, RunningLease]]:
        """Move waiting leases into free slots, and return (slot, row) of each moved lease. Leases of trajectories that
        have tokens come first; otherwise older leases come first. The first lease gets the lowest slot."""
        admitted: list[tuple[int, RunningLease]] = []
        if not self._waiting or self.num_running == len(self.rows):
            return admitted
        free = (slot for slot, row in enumerate(self.rows) if row is None)
        order = sorted(self._waiting.values(), key=lambda waiting: not waiting.length)
        for slot, row in zip(free, order, strict=False):
            lease_id = row.lease.lease_id
            del self._waiting[lease_id]
            self._running.add(lease_id)
            self.rows[slot] = row
            self.num_running += 1
            admitted.append((slot, row))
        return admitted

    def compact(self, width: int) -> list[tuple[int, int]]:
        """Move rows into free slots below `width`; return (source slot, destination slot) of each moved row."""
        assert self.num_running <= width, f"{self.num_running} rows do not fit into {width} slots"
        free = (slot for slot in range(width) if self.rows[slot] is None)
        moves = [(slot, next(free)) for slot in range(width, len(self.rows)) if self.rows[slot] is not None]
        for source, destination in moves:
            self.rows[destination], self.rows[source] = self.rows[source], None
        return moves

    def reorder(self, order: Sequence[int]) -> None:
        """For each i, move the row of slot `order[i]` to slot i; `order` is a permutation of the lowest slots."""
        self.rows[: len(order)] = [self.rows[slot] for slot in order]

    def running(self) -> list[tuple[int, RunningLease]]:
        return [(slot, row) for slot, row in enumerate(self.rows) if row is not None]

    def commit(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        routing: Sequence[bytes] | None = None,
        kept: Sequence[bytes] | None = None,
    ) -> list[FromWorker]:
        """Append one token to every row and free the slots of finished trajectories; return the reports that are due.
        All arguments are indexed by slot. Raises EngineFault if a logprob is not finite."""
        reports: list[FromWorker] = []
        for slot, _ in self.running():
            experts = None if routing is None else routing[slot]
            mask = None if kept is None else kept[slot]
            due = self.grow(slot, token_ids[slot], logprobs[slot], experts, mask)
            if due is not None:
                reports.append(due)
        return reports

    def grow(
        self, slot: int, token: int, logprob: float, routing: bytes | None = None, kept: bytes | None = None
    ) -> Report | None:
        """Append one token to a row, and free the row's slot if the trajectory is finished; return a report if one is
        due. Raises EngineFault if the logprob is not finite."""
        row, number = self.rows[slot], self.version.number
        assert row is not None, f"slot {slot} is empty and cannot receive a token"
        if not -1e30 < logprob < 1e30:
            name, lease_id = row.lease.trajectory.name, row.lease.lease_id
            raise EngineFault(
                f"trajectory {name} (lease {lease_id}): the logits of token {row.length} under policy version "
                f"{number} are not finite; check whether training has diverged"
            )
        finish_reason = row.append(token, logprob, routing, kept)
        row.last_version = number
        if finish_reason is not None:
            self._free(slot)
            return row.report(number, finish_reason)
        return row.report(number) if row.num_unreported >= self._settings.report_every_tokens else None

    def flush(self) -> list[FromWorker]:
        number = self.version.number
        return [row.report(number) for _, row in self.running() if row.num_unreported]

    def _knows(self, lease_id: int) -> bool:
        return lease_id in self._waiting or lease_id in self._running

    def _free(self, slot: int) -> None:
        row = self.rows[slot]
        assert row is not None, f"slot {slot} is free already"
        self._running.discard(row.lease.lease_id)
        self.rows[slot] = None
        self.num_running -= 1


def pieces_of(trajectory: Trajectory) -> tuple[Piece, ...]:
    """Divide all ids except the last one into pieces. A new piece begins at the start of each turn. The result depends
    only on the trajectory.

    The first piece is the prompt. Each later piece contains the tokens of a turn and of the observation after the turn;
    the last piece may contain the tokens of an unfinished turn. Each piece has a version: the version of the first
    token that was sampled after the piece. The lease that sampled this token also computed the piece's keys and values,
    so both have the same version. A piece of an unfinished turn has the version of its last token.
    """
    found, before = [], Author.ENVIRONMENT
    offset = len(trajectory.prompt_ids) - 1
    for segment in trajectory.segments:
        if segment.author is Author.POLICY and before is Author.ENVIRONMENT:
            found.append(Piece(offset, segment.policy_version))
        before, offset = segment.author, offset + len(segment.token_ids)
    if before is Author.ENVIRONMENT:
        found.append(Piece(offset, None))
    else:
        found.append(Piece(offset, trajectory.segments[-1].policy_version, is_within_turn=True))
    return tuple(piece for piece in found if piece.end)


def _serves(lease: Lease, number: int) -> bool:
    return lease.version == number if lease.is_exact else lease.version <= number


class SlotEngine:
    """Base class of engines, with the methods of `Engine` that only call a `SlotTable`."""

    def __init__(self, settings: EngineSettings, version: PolicyVersion, end_ids: tuple[int, ...], text: Text) -> None:
        self._table = SlotTable(settings, version, end_ids, text)
        self._prefilled_tokens = self._decoded_tokens = self._decode_steps = self._decode_rows = 0

    @property
    def version(self) -> PolicyVersion:
        return self._table.version

    @property
    def slots(self) -> int:
        return len(self._table.rows)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._prefilled_tokens, self._decoded_tokens, self._decode_steps, self._decode_rows)

    def metrics(self) -> dict[str, float]:
        return {}

    def submit(self, lease: Lease) -> None:
        self._table.submit(lease)

    def abort(self, lease_id: int) -> None:
        self._table.abort(lease_id)

    def flush(self) -> list[FromWorker]:
        return self._table.flush()

    def close(self) -> None:
        """Do nothing, because this engine has no processes."""
