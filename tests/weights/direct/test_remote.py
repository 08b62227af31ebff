"""Communicators on rank 0 of a trainer, whose ranks send versions for another process."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from baton.errors import WeightsFault
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.remote import Outlet


class Silent:
    """A transport, and its communicator, that never describe a transfer to the replica."""

    def __init__(self) -> None:
        self.closed = Event()

    def connect(self, *_: Any) -> Silent:
        return self

    def close(self) -> None:
        self.closed.set()


def test_a_communicator_that_was_not_described_in_time_is_closed() -> None:
    transport, outlet = Silent(), Outlet()
    with pytest.raises(WeightsFault, match="did not describe a transfer of weights within 0 s"):
        outlet.open(transport, "a-1", 1, DirectRules(connect_s=0.1))
    assert transport.closed.wait(60.0), "the control process does not know the communicator, so only rank 0 can"
