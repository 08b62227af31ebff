"""The search for over-provision ends at the level with the highest rate of useful tokens, and follows its changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from baton.rollout.overprovision import LEVELS, OverprovisionSearch, SlotUse

SLOTS = 64
RISING = {1.0: 1.0, 1.25: 1.3, 1.5: 1.6, 2.0: 2.0, 2.5: 2.3, 3.0: 2.5, 4.0: 2.8}
FALLING = {1.0: 1.0, 1.25: 0.97, 1.5: 0.94, 2.0: 0.85, 2.5: 0.8, 3.0: 0.75, 4.0: 0.6}
BETWEEN = {1.0: 1.0, 1.25: 1.3, 1.5: 1.5, 2.0: 1.4, 2.5: 1.2, 3.0: 1.0, 4.0: 0.8}
FLAT = dict.fromkeys(LEVELS, 1.0)


def search(
    rates: Callable[[int], dict[float, float]],
    batches: int = 60,
    *,
    most: float = 4.0,
    masked: Callable[[float], float] = lambda level: 0.0,
    occupancy: float = 0.5,
) -> list[float]:
    """Return the level of each batch. rates: batch → level → generated tokens per slot-second."""
    found, now = OverprovisionSearch(min(2.0, most), most), SlotUse()
    levels = [found.next(now)]
    for batch in range(batches):
        level, tokens = levels[-1], 10_000
        stale, slot_s = int(masked(level) * tokens), tokens / rates(batch)[level]
        now = SlotUse(
            now.useful_tokens + tokens - stale,
            now.busy_slot_s + occupancy * slot_s,
            now.slot_s + slot_s,
        )
        levels.append(found.next(now))
    return levels[:-1]


@pytest.mark.parametrize(("rates", "best"), [(RISING, 4.0), (FALLING, 1.0), (BETWEEN, 1.5)])
def test_it_ends_at_the_level_with_the_highest_rate(rates: dict[float, float], best: float) -> None:
    levels = search(lambda batch: rates)
    assert set(levels[30:]) == {best}


def test_levels_of_equal_rate_are_not_worth_staler_tokens() -> None:
    assert set(search(lambda batch: FLAT)[30:]) == {1.0}


def test_it_changes_by_one_level_at_a_time() -> None:
    places = [LEVELS.index(level) for level in search(lambda batch: RISING)]
    assert {abs(after - before) for before, after in pairwise(places)} == {0, 1}


def test_tokens_that_are_too_old_to_be_trained_do_not_count() -> None:
    """At level 2.5 and above, 0.6 of 2.3 and more."""
    assert set(search(lambda batch: RISING, masked=lambda level: 0.4 if level > 2 else 0.0)[30:]) == {2.0}


def test_it_does_not_try_more_open_groups_while_all_slots_are_full() -> None:
    assert max(search(lambda batch: RISING, occupancy=0.99)) == 2.0


def test_it_searches_again_after_the_lengths_have_changed() -> None:
    levels = search(lambda batch: BETWEEN if batch < 40 else RISING, 100)
    assert (levels[39], levels[-1]) == (1.5, 4.0)


@pytest.mark.parametrize("most", [1.0, 2.0, 3.0])
def test_it_keeps_to_its_bound(most: float) -> None:
    assert max(search(lambda batch: RISING, most=most)) == most
