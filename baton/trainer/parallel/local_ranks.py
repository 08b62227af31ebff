"""Trainer ranks as processes of this machine, connected by socket pairs.

If a rank exits, or does not read or answer a request before the timeout, all ranks are ended. An exit is detected at
once. No rank survives this process: a rank exits when its socket closes, even within a collective.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from baton.errors import Fault, RankLost
from baton.frames import FrameSocket, end_children, exit_code, ready, start_child
from baton.trainer.parallel.messages import (
    FAULT_GRACE_S,
    HOW_TO_GO_ON,
    FromRank,
    RankInfo,
    ToRank,
    cause_of,
    decode_from_rank,
    encode,
)

MAX_FRAME_BYTES = 4 * 1024**3
"""Maximum length of a frame in bytes; a longer frame is refused before memory is allocated for it. A batch of thousands
of long trajectories takes hundreds of MB."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback network interface, which other machines cannot reach."""


class LocalRanks:
    """Implements `Ranks` with processes of this machine."""

    def __init__(self, size: int, *, threads: int = 1, publish_in: Path | None = None) -> None:
        """`publish_in`: directory in which the first rank writes published versions. The rank creates this directory,
        and `close` removes it. The default is a temporary directory."""
        self.pids: list[int] = []
        self._size = size
        self._sockets: list[FrameSocket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._scratch = publish_in or Path(tempfile.mkdtemp(prefix="baton-"))
        try:
            for rank in range(size):
                scratch = str(self._scratch)
                self._start_rank(RankInfo(rank=rank, size=size, interface=LOOPBACK, threads=threads, scratch=scratch))
        except BaseException:
            self.close()
            raise

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, FromRank] = {}
        data = encode(message)
        try:
            for rank in range(self._size):
                self._send_frame(rank, data)
            while len(answers) < self._size:
                waiting = {socket: rank for rank, socket in enumerate(self._sockets) if rank not in answers}
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise self._timeout_error(waiting, f"{type(message).__name__} in {timeout_s:.0f} s")
                for socket in ready(waiting, left_s):
                    answer = self._receive(waiting[socket])
                    if answer is not None:
                        answers[waiting[socket]] = answer
                    if isinstance(answer, Fault):
                        deadline_s = min(deadline_s, time.monotonic() + FAULT_GRACE_S)
        except RankLost as lost:
            self.close()
            raise cause_of(lost, answers) from lost
        return [answers[rank] for rank in range(self._size)]

    def bring(self, path: str) -> Path:
        """Return the path itself: ranks and caller share the file system."""
        return Path(path)

    def close(self) -> None:
        """Close the sockets, and kill ranks that have not exited after 2 s. Idempotent."""
        end_children(self._sockets, self._processes, grace_s=2.0)
        self._sockets, self._processes = [], []
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start_rank(self, place: RankInfo) -> None:
        ours, process = start_child("rank", threads=place.threads, max_frame_bytes=MAX_FRAME_BYTES)
        self._sockets.append(ours)
        self._processes.append(process)
        self.pids.append(process.pid)
        self._send_frame(place.rank, encode(place))

    def _send_frame(self, rank: int, data: bytes) -> None:
        try:
            self._sockets[rank].send(data)
        except OSError as error:
            raise self._exit_error(rank) from error

    def _receive(self, rank: int) -> FromRank | None:
        """Return a rank's answer, or None while the answer is incomplete."""
        try:
            frame = self._sockets[rank].receive()
        except (EOFError, OSError) as error:
            raise self._exit_error(rank) from error
        return None if frame is None else decode_from_rank(frame)

    def _timeout_error(self, waiting: Mapping[FrameSocket, int], what: str) -> RankLost:
        names = ", ".join(map(str, waiting.values()))
        unread = ", ".join(
            f"rank {rank} has not read the last {socket.num_unsent_bytes} bytes of the request"
            for socket, rank in waiting.items()
            if socket.num_unsent_bytes
        )
        return RankLost(f"trainer rank {names} did not answer {what}{unread and f' ({unread})'}; {HOW_TO_GO_ON}")

    def _exit_error(self, rank: int) -> RankLost:
        code = exit_code(self._processes[rank])
        how = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        return RankLost(f"trainer rank {rank} (pid {self.pids[rank]}) ended {how}; {HOW_TO_GO_ON}")
