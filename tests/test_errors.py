"""Errors cross to another process as what they are, or as who failed with what."""

from __future__ import annotations

import errno

import msgspec
import pytest

from baton import errors
from baton.errors import KINDS, MAX_TEXT, NAMES, Fault, fault_of
from baton.swarm.auth import Denied
from baton.swarm.messages import Malformed


def crossed(error: BaseException) -> Fault:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fault_of(error)), type=Fault)


@pytest.mark.parametrize("kind", KINDS.values())
def test_errors_with_the_same_meaning_on_both_sides_keep_their_class_and_text(kind: type[Exception]) -> None:
    found = crossed(kind("what, got, allowed")).error()
    assert type(found) is kind
    assert str(found) == "what, got, allowed"


def test_the_names_under_which_errors_are_sent_never_change() -> None:
    assert list(KINDS) == ["UserError", "TaskExhausted", "TrainingDiverged", "EngineFault"]
    assert sorted(NAMES.values()) == [
        "BatonError",
        "Damaged",
        "DeadlineExceeded",
        "EngineFault",
        "EnvironmentFault",
        "OSError",
        "RankLost",
        "RunTakenOver",
        "StorageFault",
        "TaskExhausted",
        "TrainingDiverged",
        "UserError",
        "WeightsFault",
    ]


def test_every_error_of_the_tree_has_a_name_of_its_own() -> None:
    tree = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BatonError)}
    assert tree | {OSError} == NAMES.keys()
    assert len(set(NAMES.values())) == len(NAMES)


def test_renaming_an_error_changes_no_byte_that_is_sent() -> None:
    ours = {kind: kind.__name__ for kind in NAMES if kind is not OSError}
    sent = [msgspec.msgpack.encode(fault_of(kind("what"))) for kind in ours]
    try:
        for kind in ours:
            kind.__name__ = "Renamed"
        assert [msgspec.msgpack.encode(fault_of(kind("what"))) for kind in ours] == sent
    finally:
        for kind, name in ours.items():
            kind.__name__ = name


def test_an_error_that_has_no_name_is_sent_as_its_nearest_base_that_has_one() -> None:
    assert fault_of(Denied(401, "no token")).kind == "BatonError"
    assert fault_of(Malformed("not msgpack")) == Fault("ValueError", "not msgpack")
    assert Fault("AnErrorOfAnotherVersion", "what").error() is None


def test_a_full_disk_keeps_its_number_and_any_other_error_only_its_name() -> None:
    found = crossed(OSError(errno.ENOSPC, "No space left on device")).error()
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC
    assert crossed(FileNotFoundError("gone")).kind == "OSError"
    assert crossed(RuntimeError("out of memory")) == Fault("RuntimeError", "out of memory")
    assert crossed(RuntimeError("out of memory")).error() is None
    assert len(crossed(RuntimeError("x" * 10_000)).text) == MAX_TEXT
