"""A call in a thread has a deadline: its caller goes on, whatever the call does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.clock import in_thread
from baton.errors import DeadlineExceeded

pytestmark = pytest.mark.timing


def test_a_call_that_does_not_return_ends_its_wait_with_the_name_of_who_did_not_answer() -> None:
    may_end = threading.Event()
    with pytest.raises(DeadlineExceeded, match="the store did not answer in 0 s"):
        asyncio.run(in_thread(may_end.wait, 300, timeout_s=0.1, who="the store"))
    may_end.set()


def test_the_result_and_the_errors_of_a_call_are_its_own() -> None:
    def fail() -> None:
        raise TimeoutError("of the call itself")

    assert asyncio.run(in_thread(divmod, 7, 2, timeout_s=300.0, who="it")) == (3, 1)
    with pytest.raises(TimeoutError, match="of the call itself"):
        asyncio.run(in_thread(fail, timeout_s=300.0, who="it"))
