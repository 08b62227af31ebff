"""A process that makes calls for a run and may be killed at any moment: `python -m baton.rewards.worker`.

It ends with the run, however the run ends and whatever the judge is doing, and so does all that the judge starts; what
it is kept from is said in `isolation.py`. The terminal's Ctrl-C stays with the run. Calls are made in a directory that
is removed with the process; modules are imported from the run's own.
Synchronous functions run in its main thread, one at a time; asynchronous ones share its event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.rewards.functions import call_function, import_function, told
from baton.rewards.isolation import keep
from baton.rewards.scorer_protocol import (
    Call,
    CallResult,
    FunctionSpec,
    Outcome,
    ScoreRequest,
    ScorerReady,
    ScorerSetup,
    ScorerSpec,
    Spec,
    failed,
)
from baton.types import FailureCause

Judge = Callable[[tuple[Call, ...]], Awaitable[tuple[Outcome, ...]]]
Message = TypeVar("Message", ScorerSetup, ScoreRequest)


def main() -> None:
    """Serve until the input closes."""
    isolation = keep(network="--network" in sys.argv)
    inbox, outbox = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward function prints must not meet our messages
    sys.stdout = os.fdopen(1, "w", buffering=1)  # line by line: this process may be ended before it has filled a block
    setup = _receive(inbox, ScorerSetup)
    if setup is None:
        return
    sys.path[:] = [str(Path(place).absolute()) for place in setup.sys_path]
    _limit_memory(setup.memory_bytes)
    judges: list[Judge] = []
    for spec in setup.specs:
        try:
            judges.append(_judge(spec))
        except BaseException as error:  # noqa: BLE001 - whatever an import raises, the run has to hear of it
            _send(outbox, ScorerReady(f"{spec} cannot be loaded in a worker process: {told(error)}"))
            return
    os.chdir(isolation.scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = str(isolation.scratch)
    _send(outbox, ScorerReady(isolation=isolation.description))
    asyncio.run(_serve(judges, inbox, outbox))


async def _serve(judges: list[Judge], inbox: Connection, outbox: Connection) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def begin(ask: ScoreRequest) -> None:
        task = loop.create_task(_answer(judges[ask.spec], ask, outbox))
        running.add(task)
        task.add_done_callback(running.discard)

    def listen() -> None:
        while (ask := _receive(inbox, ScoreRequest)) is not None:
            loop.call_soon_threadsafe(begin, ask)

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


async def _answer(judge: Judge, ask: ScoreRequest, outbox: Connection) -> None:
    limit = asyncio.timeout(ask.deadline_s)  # of asynchronous judges; the run kills those that never let go
    try:
        async with limit:
            outcomes = await judge(ask.calls)
    except TimeoutError:
        outcomes = failed(ask.calls, FailureCause.TIMEOUT, f"gave no answer within {ask.deadline_s:g} s")
    _send(outbox, CallResult(ask.call_id, outcomes))


def _judge(spec: Spec) -> Judge:
    """Load what a spec names."""
    if isinstance(spec, FunctionSpec):
        function = import_function(spec.path)
        return lambda calls: call_function(function, spec.signature, calls)
    if isinstance(spec, ScorerSpec):
        module, _, name = spec.path.partition(":")
        return _scorer(getattr(import_module(module), name)(**spec.arguments))
    from baton.rewards.mathematics import load, math_score

    load()
    return _scorer(lambda call: math_score(call.answer, call.prompt.answer))


def _scorer(score: Callable[[Call], Outcome]) -> Judge:
    async def scored(calls: tuple[Call, ...]) -> tuple[Outcome, ...]:
        try:
            return tuple(score(call) for call in calls)
        except Exception as error:  # noqa: BLE001 - an answer may break a verifier in any way
            return failed(calls, FailureCause.RAISED, f"raised {told(error)}")

    return scored


def _receive(inbox: Connection, kind: type[Message]) -> Message | None:
    """Read one message; None when the other side is gone."""
    try:
        return msgspec.msgpack.decode(inbox.recv_bytes(), type=kind)
    except (EOFError, OSError):
        return None


def _send(outbox: Connection, message: msgspec.Struct) -> None:
    outbox.send_bytes(msgspec.msgpack.encode(message))


def _limit_memory(memory_bytes: int) -> None:
    if memory_bytes and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main()
