"""The main function of an engine process. Each process runs one engine with one torch thread.

| thread | consumes          | produces         | waits for                    | unblocked by                       |
|--------|-------------------|------------------|------------------------------|------------------------------------|
| reader | the socket        | queued messages  | the parent                   | a message, or the parent's end     |
| main   | queued messages   | reports          | a message, when it is idle   | the reader                         |

The reader empties the socket while the engine computes. Parent and engine therefore cannot deadlock on two full socket
buffers. `EnginePool` starts the process as `python -m baton engine FD`.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import msgspec

from baton.errors import BatonError, fault_of
from baton.frames import FrameSocket, frame_socket_of
from baton.rollout.engine import Engine
from baton.rollout.processes import protocol
from baton.types import Abort, Lease, ends_lease

SIGN_OF_LIFE_S = 5.0
"""Maximum seconds between two Progress messages of an engine with leases, even without reports."""


def serve(descriptor: int) -> None:
    """Run the engine until the parent closes the socket. An error is sent as a Fault and ends the process."""
    # a terminal sends Ctrl-C to parent and child; only the parent handles it, and the parent's exit closes the socket
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = frame_socket_of(descriptor, protocol.MAX_FRAME_BYTES)
    scratch = ""
    try:
        start = protocol.decode_to_engine(parent.receive_next())
        assert isinstance(start, protocol.Start), f"the first message must be Start, not {type(start).__name__}"
        scratch = start.scratch
        engine = _build(start)
        parent.send_all(protocol.encode(protocol.Serving(engine.version)))
        inbox: SimpleQueue[protocol.ToEngine | None] = SimpleQueue()
        threading.Thread(target=_read, args=(parent, inbox), daemon=True).start()
        _loop(parent, inbox, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has exited, so the error cannot be reported
    except (BatonError, RuntimeError, AssertionError, OSError) as error:
        parent.send_all(protocol.encode(fault_of(error)))
        return  # the scratch directory stays, because the parent and the other engine processes still use it
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(parent: FrameSocket, inbox: SimpleQueue[protocol.ToEngine | None]) -> None:
    """Queue the messages from the parent. Queue None when the parent has exited."""
    try:
        while True:
            inbox.put(protocol.decode_to_engine(parent.receive_next()))
    except (OSError, EOFError, msgspec.DecodeError):
        inbox.put(None)


def _loop(parent: FrameSocket, inbox: SimpleQueue[protocol.ToEngine | None], engine: Engine) -> None:
    running: set[int] = set()
    last_sign_s = time.monotonic()
    while True:
        while not running or not inbox.empty():
            match inbox.get():
                case None:
                    return
                case Lease() as lease:
                    engine.submit(lease)
                    running.add(lease.lease_id)
                case Abort() as abort:
                    engine.abort(abort.lease_id)
                case protocol.LoadWeights() as wanted:
                    from safetensors.torch import load_file

                    engine.load_weights(load_file(Path(wanted.path)), wanted.version)
                    parent.send_all(protocol.encode(protocol.Serving(engine.version)))
                case other:
                    raise RuntimeError(f"unexpected message {type(other).__name__}")
        reports = engine.step()
        now = time.monotonic()
        if reports or now - last_sign_s > SIGN_OF_LIFE_S:
            parent.send_all(protocol.encode(protocol.Progress(tuple(reports), engine.stats)))
            last_sign_s = now
        running.difference_update(report.lease_id for report in reports if ends_lease(report))


def _build(start: protocol.Start) -> Engine:
    from baton.policy.threads import set_up_threads
    from baton.rollout.engines.factory import engine_of_model

    set_up_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return engine_of_model(start.model(), start.engine_settings(), start.version)
