"""Frames between a parent and real processes that stop or die at any point of a frame: the parent never blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.frames import FrameSocket, frame_sockets, ready

pytestmark = pytest.mark.timing

PATIENCE_S = 60.0
MEGABYTE = 1_000_000
CHILD = """
import os, signal, sys
from baton.frames import frame_socket_of
parent = frame_socket_of(int(sys.argv[1]), 100_000_000)
{body}
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HALF_A_FRAME = "parent._socket.send((10).to_bytes(8, 'big') + b'12345')"


@contextmanager
def child(body: str, max_frame_bytes: int = 100 * MEGABYTE) -> Iterator[tuple[FrameSocket, subprocess.Popen[bytes]]]:
    ours, theirs = frame_sockets(max_frame_bytes)
    code = CHILD.format(body=body)
    process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.wait()


def next_frame(socket: FrameSocket) -> bytes:
    until_s = time.monotonic() + PATIENCE_S
    while (left_s := until_s - time.monotonic()) > 0:
        if ready([socket], left_s) and (frame := socket.receive()) is not None:
            return frame
    raise AssertionError("no frame came")


def wait_until_stopped(process: subprocess.Popen[bytes]) -> None:
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


def test_frames_of_any_size_arrive_whole_and_in_their_order() -> None:
    with child("while True: parent.send_all(parent.receive_next())") as (socket, _):
        frames = [b"", b"x", os.urandom(70_000), os.urandom(5 * MEGABYTE), b"last"]
        for frame in frames:  # more than the socket holds is queued, not waited for
            socket.send(frame)
        assert [next_frame(socket) for _ in frames] == frames
        assert socket.num_unsent_bytes == 0


def test_a_message_larger_than_the_sockets_buffer_to_a_stopped_process_does_not_block() -> None:
    with child(f"parent.send_all(b'up'); {STOP}; parent.send_all(parent.receive_next())") as (socket, process):
        assert next_frame(socket) == b"up"
        wait_until_stopped(process)
        message = os.urandom(20 * MEGABYTE)
        socket.send(message)
        assert ready([socket], 0.1) == []
        assert 0 < socket.num_unsent_bytes < 20 * MEGABYTE
        process.send_signal(signal.SIGCONT)  # what is stopped for a while is not lost
        assert next_frame(socket) == message


def test_half_a_frame_of_a_stopped_process_does_not_block_and_the_rest_completes_it() -> None:
    with child(f"{HALF_A_FRAME}; {STOP}; parent._socket.send(b'67890')") as (socket, process):
        wait_until_stopped(process)
        assert ready([socket], PATIENCE_S) == [socket]
        assert socket.receive() is None
        assert ready([socket], 0.1) == []
        process.send_signal(signal.SIGCONT)
        assert next_frame(socket) == b"1234567890"


@pytest.mark.parametrize("last_words", [HALF_A_FRAME, "parent._socket.send(b'123')", "parent.send_all(b'')"])
def test_a_process_killed_in_mid_frame_is_gone_and_half_a_frame_is_none(last_words: str) -> None:
    with child(f"{last_words}; os.kill(os.getpid(), signal.SIGKILL)") as (socket, _):
        if last_words == "parent.send_all(b'')":
            assert next_frame(socket) == b""
        with pytest.raises(EOFError):
            next_frame(socket)


def test_a_process_killed_while_a_message_waits_for_it_is_gone() -> None:
    with child(f"parent.send_all(b'up'); {STOP}") as (socket, process):
        assert next_frame(socket) == b"up"
        wait_until_stopped(process)
        socket.send(bytes(20 * MEGABYTE))
        process.kill()
        with pytest.raises((EOFError, OSError)):
            next_frame(socket)


def test_a_frame_that_is_too_long_is_refused_before_its_bytes_are_allocated() -> None:
    with (
        child("parent._socket.send((2**62).to_bytes(8, 'big'))", max_frame_bytes=1000) as (socket, _),
        pytest.raises(OSError, match="a frame of 4611686018427387904 bytes, allowed are at most 1000"),
    ):
        next_frame(socket)


def test_a_child_that_waits_for_its_parent_ends_with_it() -> None:
    for body in ("parent.receive_next()", "parent.send_all(bytes(20_000_000))"):
        with child(f"parent.send_all(b'up'); {body}") as (socket, process):
            assert next_frame(socket) == b"up"
            socket.close()
            assert process.wait(PATIENCE_S) != 0  # EOFError or BrokenPipeError
