"""A rank process: one `RankServer`, driven by messages.

| thread | consumes        | produces        | waits for  | unblocked by                    |
|--------|-----------------|-----------------|------------|---------------------------------|
| reader | the socket      | queued messages | the parent | a message, or the parent's exit |
| main   | queued messages | answers         | a message  | the reader                      |

When the parent closes the socket, the reader ends the process, because the main thread may be blocked in a collective.
`LocalRanks` starts this process as `python -m baton rank FD`.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from queue import SimpleQueue

import msgspec

from baton.frames import FrameSocket, frame_socket_of
from baton.trainer.parallel.local_ranks import MAX_FRAME_BYTES
from baton.trainer.parallel.messages import RankInfo, ToRank, decode_to_rank, encode


def serve(descriptor: int) -> None:
    """Run a rank for one parent process until the parent closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles stop signals, and its exit ends this process
        signal.signal(number, signal.SIG_IGN)
    parent = frame_socket_of(descriptor, MAX_FRAME_BYTES)
    try:
        place = decode_to_rank(parent.receive_next())
    except (EOFError, OSError):
        return
    assert isinstance(place, RankInfo), f"the first message must be RankInfo, not {type(place).__name__}"
    inbox: SimpleQueue[ToRank] = SimpleQueue()
    threading.Thread(target=_read, args=(parent, inbox, place.scratch), daemon=True).start()
    from baton.trainer.parallel.rank_server import RankServer

    server = RankServer(place)
    while True:
        parent.send_all(encode(server.handle(inbox.get())))


def _read(parent: FrameSocket, inbox: SimpleQueue[ToRank], scratch: str) -> None:
    """Queue the parent's messages; exit the process when the socket closes."""
    try:
        while True:
            inbox.put(decode_to_rank(parent.receive_next()))
    except (OSError, EOFError, msgspec.DecodeError):
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)
