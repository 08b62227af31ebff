"""Four rank processes that serve many trainers one after the other, since starting one takes seconds.

Run as a script it is the inside of such a process: like `baton rank`, but a new `Place` begins a new rank.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from baton.launch.ranks import LocalRanks
from baton.trainer.ranks import Place, decode_to_rank, encode

SIZE = 4


class RankPool:
    """Processes, to be lent to one trainer at a time."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(SIZE):
            ours, theirs = Pipe(duplex=True)
            command = [sys.executable, __file__, str(theirs.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            self.connections.append(ours)
            theirs.close()

    def lend(self, size: int) -> LentRanks:
        return LentRanks(self, size)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.wait(10)


class LentRanks(LocalRanks):
    """The first `size` processes of a pool."""

    def __init__(self, pool: RankPool, size: int) -> None:
        self.pids = [process.pid for process in pool.processes[:size]]
        self._size = size
        self._connections = pool.connections[:size]
        self._processes = pool.processes[:size]
        for rank in range(size):
            place = Place(rank=rank, size=size, scratch=str(pool.scratch))
            self._send(rank, self._connections[rank], encode(place))

    def close(self, grace_s: float = 2.0) -> None:
        """They stay, for the next."""


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    from baton.trainer.rank_server import RankServer

    server: RankServer | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = decode_to_rank(connection.recv_bytes())
            if isinstance(message, Place):
                if server is not None:
                    server.close()
                server = RankServer(message)
            else:
                assert server is not None
                connection.send_bytes(encode(server.handle(message)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
