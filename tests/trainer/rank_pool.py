"""Four rank processes that serve many trainers one after the other, since starting one takes seconds.

Run as a script it is their inside: torch is imported once, then a process is forked for each descriptor. Each answers
like `baton rank`, but a new `RankInfo` begins a new rank.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from baton.frames import FrameSocket, frame_socket_of, frame_sockets
from baton.trainer.parallel.local_ranks import MAX_FRAME_BYTES, LocalRanks
from baton.trainer.parallel.messages import RankInfo, decode_to_rank, encode

SIZE = 4


class RankPool:
    """Processes, to be lent to one trainer at a time."""

    def __init__(self, scratch: Path, size: int = SIZE) -> None:
        self.scratch = scratch
        pipes = [frame_sockets(MAX_FRAME_BYTES) for _ in range(size)]
        self.sockets = [ours for ours, _ in pipes]
        descriptors = [theirs.fileno() for _, theirs in pipes]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, descriptors)],
            pass_fds=descriptors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
        for _, theirs in pipes:
            theirs.close()

    def lend(self, size: int) -> LentRanks:
        return LentRanks(self, size)

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.process.wait(60)


class LentRanks(LocalRanks):
    """The first `size` processes of a pool."""

    def __init__(self, pool: RankPool, size: int) -> None:
        self.pids = [pool.process.pid] * size
        self._size = size
        self._sockets = pool.sockets[:size]
        self._processes = [pool.process] * size
        for rank in range(size):
            place = RankInfo(rank=rank, size=size, scratch=str(pool.scratch))
            self._send_frame(rank, encode(place))

    def close(self) -> None:
        """They stay, for the next."""


def serve(parent: FrameSocket) -> None:
    from baton.trainer.parallel.rank_server import RankServer

    server: RankServer | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = decode_to_rank(parent.receive_next())
            if isinstance(message, RankInfo):
                if server is not None:
                    server.close()
                server = RankServer(message)
            else:
                assert server is not None
                parent.send_all(encode(server.handle(message)))


def main(descriptors: list[int]) -> None:
    import baton.trainer.parallel.rank_server  # noqa: F401  so that it is imported once for all

    children = []
    for own in descriptors:
        child = os.fork()
        if not child:
            for other in descriptors:
                if other != own:
                    os.close(other)
            serve(frame_socket_of(own, MAX_FRAME_BYTES))
            os._exit(0)
        children.append(child)
    for descriptor in descriptors:
        os.close(descriptor)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
