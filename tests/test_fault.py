"""Errors cross to another process as what they are, or as who failed with what."""

from __future__ import annotations

import errno

import msgspec
import pytest

from baton import errors
from baton.fault import KINDS, MAX_TEXT, Fault, fault_of


def crossed(error: BaseException) -> Fault:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fault_of(error)), type=Fault)


@pytest.mark.parametrize("kind", KINDS.values())
def test_errors_with_the_same_meaning_on_both_sides_keep_their_class_and_text(kind: type[Exception]) -> None:
    found = crossed(kind("what, got, allowed")).error()
    assert type(found) is kind
    assert str(found) == "what, got, allowed"


def test_the_table_names_classes_by_their_own_names() -> None:
    assert {name: kind.__name__ for name, kind in KINDS.items()} == {name: name for name in KINDS}
    assert all(getattr(errors, name) is kind for name, kind in KINDS.items())


def test_a_full_disk_keeps_its_number_and_any_other_error_only_its_name() -> None:
    found = crossed(OSError(errno.ENOSPC, "No space left on device")).error()
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC
    assert crossed(FileNotFoundError("gone")).kind == "OSError"
    assert crossed(RuntimeError("out of memory")) == Fault("RuntimeError", "out of memory")
    assert crossed(RuntimeError("out of memory")).error() is None
    assert len(crossed(RuntimeError("x" * 10_000)).text) == MAX_TEXT
