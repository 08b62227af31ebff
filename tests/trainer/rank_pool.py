"""Four rank processes that serve many trainers one after the other. Each answers like `baton rank`, but a new
`RankInfo` begins a new rank."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from threading import RLock

from baton.errors import RankLost
from baton.frames import frame_socket_of, frame_sockets, ready
from baton.trainer.parallel.local_ranks import MAX_FRAME_BYTES, LocalRanks
from baton.trainer.parallel.messages import FromRank, RankInfo, ToRank, decode_to_rank, encode
from tests.fork_server import Descriptor, Forked, start_process

SIZE = 4
START_S = 300.0
STARTED = b"started"
"""Answer of a process to `RankInfo`, which follows all answers to the last trainer."""
M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt`, from malloc.h."""


class RankPool:
    """Processes, to be lent to one trainer at a time."""

    def __init__(self, scratch: Path, size: int = SIZE, *, returns_memory: bool = False) -> None:
        """returns_memory: whether glibc returns freed blocks of at least 64 KiB to the system at once."""
        self.scratch = scratch
        self.lock = RLock()
        """Held during each request to the processes and while they begin anew."""
        self.lent: LentRanks | None = None
        """The ranks of the latest trainer."""
        pipes = [frame_sockets(MAX_FRAME_BYTES) for _ in range(size)]
        self.sockets = [ours for ours, _ in pipes]
        self.processes = [
            Forked(start_process(serve, Descriptor(theirs.fileno()), returns_memory)) for _, theirs in pipes
        ]
        for _, theirs in pipes:
            theirs.close()

    def lend(self, size: int) -> LentRanks:
        return LentRanks(self, size)

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        for process in self.processes:
            process.wait(60)


class LentRanks(LocalRanks):
    """The first `size` processes of a pool.

    The sockets outlive a trainer, so `close` does not end a request of another thread, such as a direct transfer. The
    next trainer waits until this request has ended; otherwise both threads would read each other's answers."""

    def __init__(self, pool: RankPool, size: int) -> None:
        self._size, self._pool = size, pool
        self._sockets = pool.sockets[:size]
        self._processes = pool.processes[:size]
        self.pids = [process.pid for process in self._processes]
        assert pool.lock.acquire(timeout=START_S), "a request of the last trainer has not ended"
        try:
            pool.lent = self
            for rank in range(size):
                place = RankInfo(rank=rank, size=size, scratch=str(pool.scratch))
                self._send_frame(rank, encode(place))
            for socket in self._sockets:  # the last request may have failed before all ranks had answered it
                deadline_s = time.monotonic() + START_S
                while socket.receive() != STARTED:
                    assert time.monotonic() < deadline_s, "a rank of the pool did not begin anew"
                    ready([socket], START_S)
        finally:
            pool.lock.release()

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        with self._pool.lock:
            if self._pool.lent is not self:
                raise RankLost("the processes of the pool serve another trainer")
            return super().ask(message, timeout_s)

    def close(self) -> None:
        """They stay, for the next."""


def serve(descriptor: int, returns_memory: bool) -> None:
    """In the child: serve as one rank after another."""
    import torch

    from baton.trainer.parallel.rank_server import RankServer

    torch.set_num_threads(1)
    if returns_memory:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65_536)
    parent, server = frame_socket_of(descriptor, MAX_FRAME_BYTES), None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = decode_to_rank(parent.receive_next())
            if isinstance(message, RankInfo):
                if server is not None:
                    server.close()
                server = RankServer(message)
                parent.send_all(STARTED)
            else:
                assert server is not None
                parent.send_all(encode(server.handle(message)))
