"""The pool of rank processes that the tests of this folder share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_pool import LentRanks, RankPool

from baton.errors import RankLost
from baton.trainer.parallel import messages

REQUEST_S = 60.0


def test_requests_of_the_last_trainer_read_no_answer_to_the_next(pool: RankPool) -> None:
    """A direct transfer may still send requests in its own thread after its trainer was closed."""

    def ask_until_refused(ranks: LentRanks) -> int:
        for number in range(100_000):
            try:
                assert all(isinstance(answer, messages.Listening) for answer in ranks.ask(messages.Listen(), REQUEST_S))
            except RankLost:
                return number
            time.sleep(0.001)  # the lock is not fair: without a pause, this thread could hold it for long
        pytest.fail("the ranks of the last trainer were not refused")

    with ThreadPoolExecutor(1) as threads:
        last = pool.lend(2)
        for _ in range(20):
            refused = threads.submit(ask_until_refused, last)
            last = pool.lend(2)
            refused.result(REQUEST_S)
            assert [type(answer) for answer in last.ask(messages.Listen(), REQUEST_S)] == [messages.Listening] * 2
