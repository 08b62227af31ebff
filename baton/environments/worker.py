"""An environment process: `python -m baton.environments.worker`, with one end of a socket pair as its standard input.

The main thread reads requests and checks deadlines. Each call runs in a thread of its own; the calls of one episode
never overlap. A call that exceeds its deadline cannot be stopped, so it is reported, and the run kills the process.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from baton.clock import begin
from baton.environments import calls
from baton.environments.adapters import load_environment
from baton.environments.instances import EnvironmentInstances
from baton.errors import UserError
from baton.frames import FrameSocket, frame_socket_of
from baton.rewards.functions import describe_error
from baton.rewards.isolation import detach_streams, import_from, keep
from baton.types import FailureCause

TICK_S = 1.0
"""Maximum interval between two checks of the deadlines, and between two `Alive` messages."""


def main() -> None:
    """Execute requests until the run closes the socket."""
    isolation = keep(network="--network" in sys.argv, who="environments", network_key="environments.allow_network")
    pipe = frame_socket_of(os.dup(0), calls.MAX_FRAME_BYTES)
    detach_streams()
    lock = threading.Lock()

    def send(message: calls.FromEnvironment) -> None:
        with lock:
            pipe.send_all(msgspec.msgpack.encode(message))

    setup = msgspec.msgpack.decode(pipe.receive_next(), type=calls.EnvironmentSetup)
    import_from(setup.sys_path, setup.memory_bytes)
    try:
        environments = {spec.name: load_environment(spec) for spec in setup.specs}
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, and the run must report it
        send(calls.EnvironmentReady(str(error) if isinstance(error, UserError) else describe_error(error)))
        return
    isolation.enter_scratch()
    never = tuple(name for name, loaded in environments.items() if loaded.replay == "never")
    notes = dict.fromkeys(filter(None, (isolation.description, *(one.note for one in environments.values()))))
    send(calls.EnvironmentReady(isolation="; ".join(notes), never_replayed=never))
    _serve(EnvironmentInstances(environments, setup.max_observation_chars), pipe, send, setup.timeout_s)


def _serve(
    instances: EnvironmentInstances, pipe: FrameSocket, send: Callable[[calls.FromEnvironment], None], timeout_s: float
) -> None:
    running: dict[int, calls.ActRequest] = {}
    tick_s = min(TICK_S, timeout_s / 4)
    alive_at = 0.0

    def execute(request: calls.ActRequest) -> None:
        result = instances.act(request)
        if running.pop(id(request), None) is not None:
            send(result)

    while True:
        if select.select([pipe], [], [], tick_s)[0]:  # `frames.ready` would also send, concurrently with the threads
            while (frame := pipe.receive()) is not None:
                message: calls.ToEnvironment = msgspec.msgpack.decode(frame, type=calls.ToEnvironment)
                match message:
                    case calls.ActRequest() as request:
                        running[id(request)] = request
                        begin(lambda request=request: execute(request))  # type: ignore[misc]
                    case calls.CloseEpisode(key):
                        instances.discard(key, run=begin)
                    case calls.EnvironmentSetup():
                        raise AssertionError("a process is set up once")
        now_s = time.monotonic()
        for name, request in list(running.items()):
            called_s = now_s - instances.called_at.get(request.key, now_s)
            if called_s > timeout_s and running.pop(name, None) is not None:
                sentence = f"no observation within environments.timeout_s = {timeout_s:g} s; the process was killed"
                send(calls.ActFailure(request.key, request.turn, FailureCause.TIMEOUT, sentence))
        if running and now_s - alive_at >= tick_s:
            alive_at = now_s
            send(calls.Alive())


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):  # the run is gone
        pass
    except BaseException:  # noqa: BLE001 - printed as usual; `finally` would end the process before that
        traceback.print_exc()
    finally:
        os._exit(0)  # threads of hanging environments would delay the usual exit
