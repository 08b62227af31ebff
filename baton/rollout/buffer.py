"""Finished groups → batches within the staleness bound. Decisions only: ids, counts and versions, no tokens.

    opened ──▶ unfinished ──complete──▶ waiting ──take──▶ a batch
       └──────── closed (filtered, dropped, lost) ◀── too old, stale = "drop"

The admission gate of the scheduler keeps groups from growing too old in the first place; that is the economy. `take` is
the guarantee (law 3): at the trainer's version v it names the oldest version whose tokens may be trained, v −
max_staleness, and what `stale` says becomes of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Consume = Literal["completion", "submission", "stalest"]
Stale = Literal["mask", "drop"]


@dataclass(frozen=True, slots=True)
class TakeResult:
    """What a wish for a batch led to."""

    group_ids: tuple[int, ...]
    """[batch_groups], or empty while there is no batch yet."""
    expired: tuple[int, ...]
    """Groups that were too old (`stale = "drop"`) and have left the buffer."""


class Buffer:
    """Groups between their opening and their batch."""

    def __init__(self, batch_groups: int, max_staleness: int, *, consume: Consume, stale: Stale) -> None:
        self._batch_groups, self._max_staleness = batch_groups, max_staleness
        self._consume, self._stale = consume, stale
        self._open: dict[int, None] = {}
        """Every group that is in no batch yet, in the order of submission."""
        self._complete: dict[int, int] = {}
        """Complete ones in the order of completion → the oldest version among their tokens."""

    def __len__(self) -> int:
        """Groups that are in no batch yet, complete or not."""
        return len(self._open)

    @property
    def num_complete(self) -> int:
        """Groups that wait to be taken."""
        return len(self._complete)

    def opened(self, group_id: int) -> None:
        """A group has been submitted. Ids only grow."""
        assert group_id not in self._open, f"group {group_id} was opened twice"
        self._open[group_id] = None

    def completed(self, group_id: int, oldest_version: int) -> None:
        """All members of a group are finished and judged."""
        assert group_id in self._open, f"group {group_id} is complete but was never opened, or is in a batch already"
        assert group_id not in self._complete, f"group {group_id} was completed twice"
        self._complete[group_id] = oldest_version

    def reopened(self, group_id: int) -> None:
        """A complete group has lost a member, which is generated again."""
        del self._complete[group_id]

    def closed(self, group_id: int) -> None:
        """A group will not be in any batch."""
        del self._open[group_id]
        self._complete.pop(group_id, None)

    def take(self, version: int) -> TakeResult:
        """Return a batch for the trainer at `version`, which makes `version + 1`, if there is one."""
        floor = version - self._max_staleness
        expired: tuple[int, ...] = ()
        if self._stale == "drop":
            expired = tuple(group_id for group_id, oldest in self._complete.items() if oldest < floor)
            for group_id in expired:
                self.closed(group_id)
        chosen = self._choice()
        if len(chosen) < self._batch_groups:
            return TakeResult((), expired)
        for group_id in chosen:
            assert self._stale != "drop" or self._complete[group_id] >= floor, f"group {group_id} is too old to train"
            self.closed(group_id)
        return TakeResult(tuple(chosen), expired)

    def _choice(self) -> dict[int, None]:
        """At most `batch_groups` groups, in the order in which they are consumed."""
        if len(self._complete) < self._batch_groups:
            return {}
        ids: Iterable[int] = self._complete
        if self._consume == "stalest":
            ids = sorted(self._complete, key=lambda group_id: (self._complete[group_id], group_id))
        elif self._consume == "submission":
            ids = self._first_in_order()
        return dict.fromkeys(group_id for group_id, _ in zip(ids, range(self._batch_groups), strict=False))

    def _first_in_order(self) -> Iterable[int]:
        """The oldest groups, up to the first that is not complete."""
        for group_id in self._open:
            if group_id not in self._complete:
                return
            yield group_id
