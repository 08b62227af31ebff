"""The tests of faults detect defects: with each of two fixed defects restored, the expected law is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.live_faults.driver import case_of
from tests.live_faults.faults import ALL, Fault
from tests.live_faults.laws import LawBroken, survive
from tests.live_faults.page import PAGE, rendered
from tests.swarm.swarm_processes import Outcome

pytestmark = [pytest.mark.numerics, pytest.mark.timing]


def named(name: str) -> Fault:
    return next(fault for fault in ALL if fault.name == name)


def silence_is_malformed() -> None:
    """Before commit eb4567e4: one wait for all heartbeats, and its end was handled like a malformed frame."""
    from baton.swarm.hub import worker_connection
    from baton.swarm.hub.session import ReceiveTimeout
    from baton.swarm.messages import Malformed

    worker_connection.SILENT_HEARTBEATS = 1
    read = worker_connection.WorkerConnection.read_unless_silent

    async def read_once(self: worker_connection.WorkerConnection, timeout_s: float) -> object:
        try:
            return await read(self, timeout_s)
        except ReceiveTimeout as error:
            raise Malformed(str(error)) from error

    worker_connection.WorkerConnection.read_unless_silent = read_once  # type: ignore[assignment]


def journal_is_flushed_later() -> None:
    """Before commit 43271257: nothing flushed the journal before a checkpoint, and a resume believed the journal."""
    from baton.records.journal import Journal

    Journal.settle = Journal.commit  # type: ignore[method-assign]
    Journal.last_step = lambda self: 10**6  # type: ignore[method-assign]  # nothing to catch up on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "bug", "law"),
    [
        ("the hub's process is stopped for longer than a worker may be silent", silence_is_malformed, "honest"),
        ("the power fails after a checkpoint, and the last writes are lost", journal_is_flushed_later, "once"),
    ],
    ids=["hub-pause", "journal-order"],
)
def test_a_restored_defect_is_found(
    fault: str, bug: Callable[[], None], law: str, model: Path, tmp_path: Path, undisturbed: Outcome
) -> None:
    with pytest.raises(LawBroken) as caught:
        survive(named(fault), model, tmp_path, undisturbed, bugs=(bug,))
    assert caught.value.law == law


@pytest.mark.slow
def test_a_fault_that_no_process_reaches_fails(model: Path, tmp_path: Path) -> None:
    fault = named("the controller is killed after it has recorded a batch")
    late = replace(fault, point=replace(fault.point, call=99))
    with case_of(late, model, tmp_path) as case:
        case.may_end.touch()
        with pytest.raises(AssertionError, match=r"the run ended before after"):
            late.inject(case)


def test_the_list_is_long_enough_and_each_point_exists() -> None:
    assert len(ALL) >= 25
    assert len({fault.name for fault in ALL}) == len(ALL)
    for fault in ALL:
        fault.point.resolve()


def test_the_page_has_the_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "run python -m tests.live_faults.page"
