"""A journal in memory. What was committed survives a restart of the simulated controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.records.journal import EntryKey, Journal


class JournalInMemory(Journal):
    """A `Journal` with other storage: dicts by number and key."""

    def __init__(self, *, keeps_partials: bool) -> None:
        self._keeps_partials = keeps_partials
        self._by_number: dict[int, dict[EntryKey, Any]] = {}
        self._before: list[tuple[EntryKey, Any]] = []
        """Uncommitted changes: the key of an entry, and its content before the change (None: there was no entry)."""

    def commit(self) -> None:
        self._before.clear()

    def roll_back(self) -> None:
        """Undo the uncommitted changes, as a kill does."""
        while self._before:
            key, content = self._before.pop()
            if content is None:
                del self._by_number[key.number][key]
            else:
                self._by_number[key.number][key] = content

    def _put(self, key: EntryKey, content: Any) -> None:
        of_number = self._by_number.setdefault(key.number, {})
        self._before.append((key, of_number.get(key)))
        of_number[key] = content

    def _remove(self, kinds: Sequence[str], number: int, sample: int | None = None) -> None:
        of_number = self._by_number.get(number, {})
        for key in [key for key in of_number if key.kind in kinds and sample in (None, key.sample)]:
            self._before.append((key, of_number.pop(key)))

    def _find(self, kinds: Sequence[str], number: int | None = None) -> list[tuple[EntryKey, Any]]:
        found = [self._by_number.get(number, {})] if number is not None else self._by_number.values()
        entries = (entry for of_number in found for entry in of_number.items() if entry[0].kind in kinds)
        return sorted(entries, key=lambda entry: entry[0])
