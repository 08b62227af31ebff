"""The worker process `python -m baton.rewards.worker`: executes scorer calls of a run and can be killed at any time.

The process and its children end when the run ends, even if a scorer hangs (`isolation.py`). Ctrl-C in the terminal
reaches only the run. Calls execute in a temporary directory that is deleted with the process; modules are imported from
the run's directory. Synchronous functions run one at a time in the main thread; asynchronous functions share the event
loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from baton.rewards import scorer_protocol as protocol
from baton.rewards.functions import call_function, describe_error, import_function, number
from baton.rewards.isolation import detach_streams, import_from, keep
from baton.types import FailureCause, Message

LoadedScorer = Callable[[tuple[protocol.Call, ...]], Awaitable[tuple[protocol.Outcome, ...]]]
Received = TypeVar("Received", protocol.ScorerSetup, protocol.ScoreRequest)


def main() -> None:
    """Execute calls until the run closes this process's standard input."""
    isolation = keep(network="--network" in sys.argv)
    inbox, outbox = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    detach_streams()
    setup = _receive(inbox, protocol.ScorerSetup)
    if setup is None:
        return
    import_from(setup.sys_path, setup.memory_bytes)
    scorers, error = load_scorers(setup)
    if error is not None:
        _send(outbox, protocol.ScorerReady(error))
        return
    isolation.enter_scratch()
    _send(outbox, protocol.ScorerReady(isolation=isolation.description))
    asyncio.run(_serve(scorers, inbox, outbox))


async def _serve(scorers: list[LoadedScorer], inbox: Connection, outbox: Connection) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    async def reply(request: protocol.ScoreRequest) -> None:
        _send(outbox, await answer(scorers, request))

    def start(request: protocol.ScoreRequest) -> None:
        task = loop.create_task(reply(request))
        running.add(task)
        task.add_done_callback(running.discard)

    def receive_all() -> None:
        while (request := _receive(inbox, protocol.ScoreRequest)) is not None:
            loop.call_soon_threadsafe(start, request)

    threading.Thread(target=receive_all, daemon=True).start()
    await asyncio.Event().wait()


def load_scorers(setup: protocol.ScorerSetup) -> tuple[list[LoadedScorer], str | None]:
    """Load the scorers until one fails. Return the loaded scorers, and the reason of the failure or None."""
    scorers: list[LoadedScorer] = []
    for spec in setup.specs:
        try:
            scorers.append(_load(spec))
        except BaseException as error:  # noqa: BLE001 - reported to the run, whatever the import raises
            return scorers, f"{spec} cannot be loaded in a worker process: {describe_error(error)}"
    return scorers, None


async def answer(scorers: Sequence[LoadedScorer], request: protocol.ScoreRequest) -> protocol.CallResult:
    """Execute a call. A failure of the scorer is an outcome of the call."""
    try:
        # this limit applies to asynchronous scorers only; the run kills the process of a synchronous scorer
        async with asyncio.timeout(request.deadline_s):
            outcomes = await scorers[request.spec](request.calls)
    except TimeoutError:
        text = f"gave no answer within {request.deadline_s:g} s"
        outcomes = protocol.failed(request.calls, FailureCause.TIMEOUT, text)
    return protocol.CallResult(request.call_id, outcomes)


def _load(spec: protocol.Spec) -> LoadedScorer:
    if isinstance(spec, protocol.FunctionSpec):
        function = import_function(spec.path)
        return lambda calls: call_function(function, spec.signature, calls)
    if isinstance(spec, protocol.ScorerSpec):
        module, _, name = spec.path.partition(":")
        return _per_response(getattr(import_module(module), name)(**spec.arguments))
    if isinstance(spec, protocol.RewardModelSpec):
        # imported by name, because this layer does not import baton.policy
        of_policy = import_module("baton.policy.reward_model")
        return _batched(of_policy.RewardModel(spec.model, spec.device, spec.dtype, spec.batch_tokens))
    if isinstance(spec, protocol.GenerativeModelSpec):
        from baton.rewards.server import GenerativeModel

        return GenerativeModel(spec)
    from baton.rewards.mathematics import load, math_score

    load()
    return _per_response(lambda call: math_score(call.answer, call.prompt.answer))


def _per_response(score: Callable[[protocol.Call], protocol.Outcome]) -> LoadedScorer:
    async def scored(calls: tuple[protocol.Call, ...]) -> tuple[protocol.Outcome, ...]:
        try:
            return tuple(score(call) for call in calls)
        except Exception as error:  # noqa: BLE001 - a verifier may raise anything for some answers
            return protocol.failed(calls, FailureCause.RAISED, f"raised {describe_error(error)}")

    return scored


def _batched(model: Any) -> LoadedScorer:
    """Return a scorer that scores waiting calls in batches, in the order of their arrival. A batch blocks the event
    loop, so the run kills this process if a batch hangs. `model`: a `baton.policy.reward_model.RewardModel`."""
    waiting: deque[tuple[list[int], asyncio.Future[protocol.Outcome]]] = deque()

    async def scored(calls: tuple[protocol.Call, ...]) -> tuple[protocol.Outcome, ...]:
        return tuple(await asyncio.gather(*(score(call) for call in calls)))

    async def score(call: protocol.Call) -> protocol.Outcome:
        turns = call.turns or (Message("assistant", call.response),)
        try:
            ids = model.ids((*call.prompt.messages, *turns))
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything for some conversations
            return protocol.CallFailure(FailureCause.RAISED, f"has a chat template that raised {describe_error(error)}")
        if model.max_positions is not None and len(ids) > model.max_positions:
            text = f"reads at most {model.max_positions} tokens, but prompt and response have {len(ids)}"
            return protocol.CallFailure(FailureCause.MALFORMED, text)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[protocol.Outcome] = loop.create_future()
        if not waiting:
            loop.call_soon(score_batch)
        waiting.append((ids, future))
        return await future

    def score_batch() -> None:
        batch = [waiting.popleft()]
        longest = len(batch[0][0])
        while waiting and (len(batch) + 1) * (longest := max(longest, len(waiting[0][0]))) <= model.batch_tokens:
            batch.append(waiting.popleft())
        outcomes: Sequence[protocol.Outcome]
        try:
            outcomes = [number(value) for value in model.scores([ids for ids, _ in batch])]
        except Exception as error:  # noqa: BLE001 - such as a device without free memory; the run repeats the call
            detail = f"raised {describe_error(error)}"
            outcomes = [protocol.CallFailure(FailureCause.CRASHED, detail)] * len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if not future.done():  # a call may have reached its deadline
                future.set_result(outcome)
        if waiting:
            asyncio.get_running_loop().call_soon(score_batch)

    return scored


def _receive(inbox: Connection, kind: type[Received]) -> Received | None:
    """Return the next message; None if the run has closed the pipe."""
    try:
        return msgspec.msgpack.decode(inbox.recv_bytes(), type=kind)
    except (EOFError, OSError):
        return None


def _send(outbox: Connection, message: msgspec.Struct) -> None:
    outbox.send_bytes(msgspec.msgpack.encode(message))


if __name__ == "__main__":
    main()
