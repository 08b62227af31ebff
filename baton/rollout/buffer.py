"""`Buffer`: forms batches of complete groups and enforces the staleness bound. A buffer stores ids and versions, but no
tokens.

    opened ──▶ unfinished ──complete──▶ waiting ──take──▶ a batch
       └──────── closed (filtered, dropped, lost) ◀── too old, stale = "drop"

The staleness bound: when the trainer is at version v, only tokens of version v − max_staleness or newer are trained.
The scheduler limits how early groups are opened, so tokens older than this bound are rare. With `stale = "drop"`,
`take` drops groups that contain older tokens; with `stale = "mask"`, `trainer/samples.py` masks these tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

Consume = Literal["completion", "submission", "stalest"]
Stale = Literal["mask", "drop"]


@dataclass(frozen=True, slots=True)
class TakeResult:
    """The result of `Buffer.take`."""

    group_ids: tuple[int, ...]
    """[batch_groups] Ids of the batch's groups; empty if too few groups are complete."""
    expired: tuple[int, ...]
    """Ids of the groups that were removed because they contain tokens that are too old (`stale = "drop"`)."""


class Buffer:
    """The open groups. A group is open until it is taken into a batch or discarded."""

    def __init__(self, batch_groups: int, max_staleness: int, *, consume: Consume, stale: Stale) -> None:
        self._batch_groups, self._max_staleness = batch_groups, max_staleness
        self._consume, self._stale = consume, stale
        self._open: dict[int, None] = {}
        """Ids of the open groups, in the order in which the groups were opened; the values are unused."""
        self._complete: dict[int, int] = {}
        """Id of each complete group → oldest version among its tokens, in the order of completion."""
        self._refused: tuple[int, int] | None = None
        """The values (`version`, `_num_changes`) at the last call to `take` that found too few groups. Another call
        with the same values would find too few groups again."""
        self._num_changes = 0
        self._first_incomplete = -1
        """Used only with `consume = "submission"`: id of the incomplete group at which `take` last stopped."""

    def __len__(self) -> int:
        """Return the number of open groups, complete or not."""
        return len(self._open)

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    def opened(self, group_id: int) -> None:
        """Add a group. Group ids must ascend, so that their order is the order in which groups were opened."""
        assert group_id not in self._open, f"group {group_id} was opened twice"
        self._open[group_id] = None

    def completed(self, group_id: int, oldest_version: int) -> None:
        """Mark a group as complete: all members are finished and scored."""
        assert group_id in self._open, f"group {group_id} was completed but is not open"
        assert group_id not in self._complete, f"group {group_id} was completed twice"
        self._complete[group_id] = oldest_version
        self._num_changes += 1

    def reopened(self, group_id: int) -> None:
        """Mark a complete group as incomplete, because one of its members will be generated again."""
        del self._complete[group_id]
        self._num_changes += 1

    def closed(self, group_id: int) -> None:
        del self._open[group_id]
        self._complete.pop(group_id, None)
        self._num_changes += 1

    def take(self, version: int) -> TakeResult:
        """Remove and return the batch of the train step that starts at `version`, if enough groups are complete. With
        `stale = "drop"`, groups with tokens that are too old are removed first."""
        if self._refused == (version, self._num_changes):
            # nothing has changed since the last call; the scheduler calls this method after every event
            return TakeResult((), ())
        floor = version - self._max_staleness
        expired: tuple[int, ...] = ()
        if self._stale == "drop":
            expired = tuple(group_id for group_id, oldest in self._complete.items() if oldest < floor)
            for group_id in expired:
                self.closed(group_id)
        chosen = self._choice()
        if len(chosen) < self._batch_groups:
            self._refused = version, self._num_changes
            return TakeResult((), expired)
        for group_id in chosen:
            assert self._stale != "drop" or self._complete[group_id] >= floor, f"group {group_id} is too old to train"
            self.closed(group_id)
        return TakeResult(tuple(chosen), expired)

    def _choice(self) -> list[int]:
        """Return up to `batch_groups` complete groups in the order that `rollout.consume` selects."""
        if len(self._complete) < self._batch_groups:
            return []
        ids: Iterable[int] = self._complete
        if self._consume == "stalest":
            ids = sorted(self._complete, key=lambda group_id: (self._complete[group_id], group_id))
        elif self._consume == "submission":
            ids = self._first_in_order()
        return list(islice(ids, self._batch_groups))

    def _first_in_order(self) -> Iterable[int]:
        """Yield groups in the order in which they were opened, and stop at the first incomplete group."""
        waits_for = self._first_incomplete
        if waits_for in self._open and waits_for not in self._complete:
            return
        for group_id in self._open:
            if group_id not in self._complete:
                self._first_incomplete = group_id
                return
            yield group_id
