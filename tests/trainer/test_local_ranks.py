"""What becomes of rank processes that die, hang, or lose their parent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.errors import Fault, RankLost, UserError
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import Listen, Ready, Restore, Stepped, error_of
from baton.types import PolicyVersion

pytestmark = pytest.mark.timing

PATIENCE_S = 60.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"of ranks {pids} some live on"
        time.sleep(0.02)


def test_a_rank_that_hangs_is_named_when_its_time_is_up_and_is_not_left() -> None:
    ranks = LocalRanks(1)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(
        RankLost, match="trainer rank 0 did not answer Listen in 1 s; continue from the last checkpoint"
    ):
        ranks.ask(Listen(), 0.6)
    wait_until_gone(ranks.pids)


@pytest.mark.parametrize("length", [10, 20_000_000], ids=["small", "larger than the socket's buffer"])
def test_a_stopped_rank_does_not_block_its_controller_whatever_it_is_told(length: int) -> None:
    ranks = LocalRanks(1)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    unread = r" \(rank 0 has not read the last \d+ bytes of the request\)" if length > 1000 else ""
    with pytest.raises(RankLost, match=f"trainer rank 0 did not answer Restore in 1 s{unread}; continue from"):
        ranks.ask(Restore("x" * length), 1.0)
    wait_until_gone(ranks.pids)


def test_a_rank_killed_while_it_reads_is_named_at_once() -> None:
    ranks = LocalRanks(1)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (ranks.pids[0], signal.SIGKILL))
    killer.start()
    with pytest.raises(RankLost, match=r"trainer rank 0 \(pid \d+\) ended by SIGKILL"):
        ranks.ask(Restore("x" * 20_000_000), 10 * PATIENCE_S)
    killer.join()


def test_ranks_end_with_their_parent() -> None:
    code = (
        "from baton.trainer.parallel.local_ranks import LocalRanks; import time; r = LocalRanks(2); "
        "print(*r.pids, r._scratch, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *pids, scratch = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    wait_until_gone([int(pid) for pid in pids])
    assert not Path(scratch).exists()


def test_errors_of_ours_go_before_collectives_that_broke_because_of_them() -> None:
    ready = Ready(PolicyVersion("a", 0))
    broken, named = Fault("RuntimeError", "Connection closed by peer"), Fault("UserError", "no such model")
    assert error_of({0: ready, 1: Stepped(PolicyVersion("a", 1), {})}) is None
    found = error_of({0: broken, 1: named})
    assert isinstance(found, UserError)
    assert str(found) == "no such model"
    found = error_of({0: ready, 1: broken})
    assert isinstance(found, RankLost)
    assert str(found).startswith("trainer rank 1 failed: RuntimeError: Connection closed by peer; continue from")
    full = Fault("OSError", "no space left", errno.ENOSPC)
    found = error_of({0: broken, 1: full})
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC  # so that the loop says that the disk is full
