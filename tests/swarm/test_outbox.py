"""What a worker keeps until the hub has it."""

from __future__ import annotations

import pytest

from baton.swarm.worker.session import Outbox
from baton.types import FinishReason, Report, Segment

pytestmark = pytest.mark.timing


def said(lease: int, offset: int, count: int, finish: FinishReason | None = None, *, aborted: bool = False) -> Report:
    segments = (Segment((7,) * count, (-1.0,) * count, 0),) if count else ()
    return Report(lease, offset, segments, finish, aborted)


def test_what_is_confirmed_is_not_said_again_and_the_rest_is_in_order():
    box = Outbox()
    for lease in (1, 2):
        box.open(lease)
        for offset in (0, 5, 10):
            box.add(said(lease, offset, 5))
    box.confirm(1, 10, has_ended=False)
    box.confirm(2, 7, has_ended=False)
    assert box.again() == [said(1, 10, 5), said(2, 5, 5), said(2, 10, 5)], "of half a report, all of it"
    assert box.leases == (1, 2)
    box.confirm(1, 3, has_ended=False)
    assert len(box.again()) == 3, "a late confirmation takes nothing back"


def test_the_last_report_of_a_lease_is_kept_until_the_hub_says_that_it_has_ended():
    """Its length alone would not tell: it may hold no token at all."""
    for last in (said(1, 5, 0, FinishReason.LENGTH), said(1, 5, 0, aborted=True), said(1, 5, 3, FinishReason.STOP)):
        box = Outbox()
        box.open(1)
        box.add(said(1, 0, 5))
        box.add(last)
        box.confirm(1, 99, has_ended=False)
        assert box.again() == [last]
        box.confirm(1, 99, has_ended=True)
        assert box.again() == []
        assert box.leases == ()


def test_reports_of_leases_that_are_closed_or_unknown_are_not_kept():
    box = Outbox()
    box.open(1)
    box.open(2)
    box.add(said(1, 0, 5))
    box.close(1)
    box.add(said(1, 5, 5))
    box.add(said(3, 0, 5))
    box.confirm(3, 5, has_ended=False)
    assert box.again() == []
    assert box.leases == (2,), "one that has not grown yet is held all the same"
    box.clear()
    assert box.leases == ()
