"""Length-prefixed frames over a socket pair between a parent and a child process. The parent never blocks.

A frame is a length (8 bytes, big-endian) followed by that number of bytes. `send` queues the bytes that the socket does
not accept, `ready` sends more of the queue, and `receive` returns only complete frames. A child that stops in the
middle of a frame or does not read therefore cannot block its parent, which waits only in `ready`, with a timeout.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence

_HEADER = struct.Struct("!Q")
_MAX_RECEIVE_BYTES = 4 * 1024**2
"""Maximum bytes per read, so that the parent can serve other children while a frame of gigabytes arrives."""


class FrameSocket:
    """One end of a socket pair. One thread may send while another thread receives."""

    def __init__(self, end: socket.socket, max_frame_bytes: int) -> None:
        end.setblocking(False)
        self._socket, self._max_frame_bytes = end, max_frame_bytes
        self._unsent: deque[memoryview] = deque()
        self._header, self._body, self._filled = bytearray(_HEADER.size), bytearray(), 0
        self._in_body = False

    def fileno(self) -> int:
        """Return the file descriptor; -1 after `close`."""
        return self._socket.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """Number of queued bytes that the socket has not accepted yet."""
        return sum(map(len, self._unsent))

    def send(self, data: bytes) -> None:
        """Send a frame; queue bytes that the socket does not accept. Raises OSError if the other process has exited."""
        self._unsent += (memoryview(_HEADER.pack(len(data))), memoryview(data))
        self.send_more()

    def send_more(self) -> None:
        """Send as much of the queue as the socket accepts. Raises OSError if the other process has exited."""
        while self._unsent:
            try:
                count = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            if count < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][count:]
            else:
                self._unsent.popleft()

    def receive(self) -> bytes | None:
        """Return the next frame, or None while it is incomplete. Raises EOFError or OSError if the other process has
        exited, and OSError for a frame that is too long."""
        while True:
            wanted = self._body if self._in_body else self._header
            if self._filled < len(wanted):
                try:
                    end = min(len(wanted), self._filled + _MAX_RECEIVE_BYTES)
                    count = self._socket.recv_into(memoryview(wanted)[self._filled : end])
                except BlockingIOError:
                    return None
                if not count:
                    raise EOFError("the other process has closed its socket")
                self._filled += count
                if self._filled < len(wanted):
                    return None
            self._filled, self._in_body = 0, not self._in_body
            if not self._in_body:
                frame, self._body = self._body, bytearray()
                return bytes(frame)
            (size,) = _HEADER.unpack(self._header)
            if size > self._max_frame_bytes:
                raise OSError(f"received a frame of {size} bytes, allowed are at most {self._max_frame_bytes}")
            self._body = bytearray(size)

    def send_all(self, data: bytes) -> None:
        """Send a frame and block until it is accepted. This call has no deadline, so only children use it: for them,
        the wait ends at the latest when the parent exits."""
        self.send(data)
        while self._unsent:
            _wait_for([(self, selectors.EVENT_WRITE)], None)
            self.send_more()

    def receive_next(self) -> bytes:
        """Block until the next frame is complete. This call has no deadline, so only children use it: for them, the
        wait ends at the latest when the parent exits."""
        while (frame := self.receive()) is None:
            _wait_for([(self, selectors.EVENT_READ)], None)
        return frame

    def close(self) -> None:
        """Close this end. May be called twice."""
        self._socket.close()


def frame_sockets(max_frame_bytes: int) -> tuple[FrameSocket, socket.socket]:
    """Make a socket pair. Return the parent's end and the child's end."""
    ours, theirs = socket.socketpair()
    return FrameSocket(ours, max_frame_bytes), theirs


def frame_socket_of(descriptor: int, max_frame_bytes: int) -> FrameSocket:
    """Return the child's end of a socket pair. `descriptor`: the file descriptor passed by the parent."""
    return FrameSocket(socket.socket(fileno=descriptor), max_frame_bytes)


def start_child(command: str, *, threads: int, max_frame_bytes: int) -> tuple[FrameSocket, subprocess.Popen[bytes]]:
    """Start `python -m baton COMMAND DESCRIPTOR` with `threads` torch threads; return (socket to the child, child)."""
    ours, theirs = frame_sockets(max_frame_bytes)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if threads == 1:  # with more threads, passive waiting makes a step about 1.5 times as long
        environment["OMP_WAIT_POLICY"] = "passive"
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", command, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    theirs.close()
    return ours, process


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child that has closed its socket; None if it does not exit within 2 s."""
    try:
        return process.wait(2.0)
    except subprocess.TimeoutExpired:
        return None


def end_children(
    sockets: Iterable[FrameSocket], processes: Sequence[subprocess.Popen[bytes]], *, grace_s: float
) -> None:
    """Close the sockets, which makes the children exit, and kill the children that still run after `grace_s`."""
    for one in sockets:
        one.close()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready(sockets: Iterable[FrameSocket], timeout_s: float) -> list[FrameSocket]:
    """Wait until a socket can be read or can send more of its queue; return the readable sockets. Sends as much of the
    queues as the sockets accept. The result includes sockets whose process has exited; their `receive` raises."""
    found = []
    wanted = [(one, selectors.EVENT_READ | (selectors.EVENT_WRITE if one.num_unsent_bytes else 0)) for one in sockets]
    for one, events in _wait_for(wanted, timeout_s):
        if events & selectors.EVENT_WRITE:
            try:
                one.send_more()
            except OSError:  # the process has exited: `receive` returns the buffered frames, and then raises
                events |= selectors.EVENT_READ
        if events & selectors.EVENT_READ:
            found.append(one)
    return found


def _wait_for(wanted: Iterable[tuple[FrameSocket, int]], timeout_s: float | None) -> list[tuple[FrameSocket, int]]:
    with selectors.DefaultSelector() as selector:
        for one, events in wanted:
            selector.register(one, events)
        return [(key.fileobj, events) for key, events in selector.select(timeout_s)]  # type: ignore[misc]
