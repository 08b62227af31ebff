"""Controls the environment processes of a run: queues calls, restarts processes, rebuilds episodes.

      submit ─▶ queue of the episode's process ─▶ running in the process ─▶ collect
                        ▲                              │ process ended, or does not respond
                        └──────────────────────────────┘ at most `retries` times, then alone in its process

All calls of an episode run in one process. This module starts no thread: it receives the messages of processes, and
kills and restarts processes, only within `submit`, `collect` and `discard`. Only one thread may call these methods.

If a process ends, each of its running calls may be the cause. These calls are retried one at a time, so that only the
call at fault exhausts its retries. If a call exceeds its deadline, the process reports the call and is killed. The
other running calls of this process are repeated, which does not count as a retry.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.clock import retry_wait_s
from baton.environments import calls
from baton.environments.settings import EnvironmentSettings
from baton.errors import UserError
from baton.frames import FrameSocket, frame_sockets, ready
from baton.rewards.isolation import environment as allowed_variables
from baton.types import FailureCause

LOAD_TIMEOUT_S = 300.0
"""Maximum time in which a process must start and import its environments."""
TICK_S = 0.25
"""Maximum interval between two checks of the deadlines while waiting."""
GRACE_S = 5.0
"""A process with running calls that sends nothing for `timeout_s` plus this number of seconds is killed."""
KILL_S = 5.0
"""Seconds from SIGTERM to SIGKILL of a process and of the processes that its environments started."""
FIRST_RESTART_S, LONGEST_RESTART_S = 0.5, 10.0


@dataclass(slots=True, eq=False)
class _QueuedCall:
    request: calls.ActRequest
    queued_at: float
    """Time since which the call has waited in the queue."""
    num_suspected: int = 0
    """Number of times that a process ended or stopped responding while it ran this call."""
    is_discarded: bool = False
    """Whether the episode was discarded while this call was running. The result of the call is dropped."""


@dataclass(slots=True, eq=False)
class _EnvironmentProcess:
    """A process and its successors. Calls and episodes stay assigned to this object when its process is restarted."""

    waiting: deque[_QueuedCall] = field(default_factory=deque)
    running: dict[calls.EpisodeKey, _QueuedCall] = field(default_factory=dict)
    episodes: dict[calls.EpisodeKey, str] = field(default_factory=dict)
    """Episodes that may have an instance in the current process → name of the environment."""
    executed: dict[calls.EpisodeKey, int] = field(default_factory=dict)
    """Episodes with an instance in the current process → number of actions that the instance has executed."""
    popen: subprocess.Popen[bytes] | None = None
    """The running process; None between the loss of a process and the start of its successor."""
    pipe: FrameSocket | None = None
    is_ready: bool = False
    seen_at: float = 0.0
    """Time since which the pool has waited for a message of the process. It is the latest of three times: the process
    started, the process sent a message, or a call started while no other call was running."""
    restart_at: float = 0.0
    num_failed_starts: int = 0


class EnvironmentPool:
    """Executes turns of episodes in environment processes."""

    def __init__(self, specs: Mapping[str, calls.EnvironmentSpec], settings: EnvironmentSettings) -> None:
        """Start the processes and wait until they have loaded. Raises UserError if a process cannot load."""
        self._specs, self._settings = dict(specs), settings
        self._setup = calls.EnvironmentSetup(
            tuple(specs.values()),
            tuple(sys.path),
            int(settings.memory_gib * 2**30),
            settings.timeout_s,
            settings.max_observation_chars,
        )
        self._max_running = max(1, settings.max_concurrent // settings.processes)
        self._processes = [_EnvironmentProcess() for _ in range(settings.processes)]
        self._homes: dict[calls.EpisodeKey, _EnvironmentProcess] = {}
        self._gone: set[calls.EpisodeKey] = set()
        """Episodes of environments with `replay = "never"` whose instance was lost."""
        self.never_replayed: tuple[str, ...] = ()
        """Environments with `replay = "never"`. A restarted run does not know whether such an environment executed the
        pending turn of an open episode, so the run must start a new attempt of the episode."""
        self._done: deque[calls.Observation | calls.ActFailure] = deque()
        self._ending: list[tuple[subprocess.Popen[bytes], float]] = []
        self._latencies_s: list[float] = []
        self._queue_s: list[float] = []
        self._counts: Counter[str] = Counter()
        self._polled_at = time.monotonic()
        self.description = ""
        """Line for the user that describes the isolation of the processes."""
        try:
            for process in self._processes:
                self._start(process)
            while not all(process.is_ready for process in self._processes):
                self._poll(TICK_S)
        except BaseException:
            self.close()
            raise

    @property
    def num_waiting(self) -> int:
        return sum(len(process.waiting) for process in self._processes)

    @property
    def sockets(self) -> Sequence[FrameSocket]:
        """Sockets of the processes, which become readable when a process sends a result for `collect`. If a result is
        available or a process is being restarted, `collect` must be called at once; the list of sockets is then
        empty."""
        pipes = [process.pipe for process in self._processes if process.pipe is not None and process.is_ready]
        return pipes if len(pipes) == len(self._processes) and not self._done else ()

    def submit(self, request: calls.ActRequest) -> None:
        """Queue a call. `collect` returns one result for each call, unless the call's episode is discarded first."""
        if request.environment not in self._specs:
            known = ", ".join(sorted(self._specs))
            raise UserError(f"environment {request.environment!r} is not one of this run's: {known}")
        key = request.key
        if key not in self._homes:
            self._homes[key] = min(self._processes, key=lambda p: (len(p.running) + len(p.waiting), len(p.episodes)))
        assert key not in self._homes[key].running, f"{key} has a running call"
        self._homes[key].waiting.append(_QueuedCall(request, time.monotonic()))
        self._dispatch(self._homes[key])

    def collect(self, timeout_s: float) -> list[calls.Observation | calls.ActFailure]:
        """Return the results; wait at most `timeout_s` for the first. Raises UserError if a restart fails."""
        deadline_s = time.monotonic() + timeout_s
        self._poll(0.0)
        while not self._done and (left_s := deadline_s - time.monotonic()) > 0:
            self._poll(min(left_s, TICK_S))
        found = list(self._done)
        self._done.clear()
        return found

    def discard(self, key: calls.EpisodeKey) -> None:
        """Close the instance of an episode and forget its calls. Must be called at the end of every episode. The key is
        never used again, because an episode that is restarted gets the next attempt number."""
        process = self._homes.pop(key, None)
        self._gone.discard(key)
        if process is None:
            return
        process.waiting = deque(call for call in process.waiting if call.request.key != key)
        self._done = deque(result for result in self._done if result.key != key)
        if key in process.running:
            process.running[key].is_discarded = True
        else:
            self._close_instance(process, key)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the environment calls that ended after the previous `metrics()`."""
        found = {f"env/{name}": float(count) for name, count in self._counts.items()}
        found["env/running"] = float(sum(len(process.running) for process in self._processes))
        found["env/waiting"] = float(self.num_waiting)
        for name, seconds in (("latency", self._latencies_s), ("queue", self._queue_s)):
            if seconds:
                ordered = sorted(seconds)
                found[f"env/{name}_mean"] = statistics.fmean(ordered)
                found[f"env/{name}_p95"] = ordered[int(0.95 * (len(ordered) - 1))]
                found[f"env/{name}_max"] = ordered[-1]
            seconds.clear()
        self._counts.clear()
        return found

    def close(self) -> None:
        for process in self._processes:
            self._end(process)
        deadline_s = time.monotonic() + 2 * KILL_S
        while self._ending and time.monotonic() < deadline_s:
            self._reap_ended()
            time.sleep(0.005)

    # ---- one poll ----------------------------------------------------------------------------------------------------

    def _poll(self, timeout_s: float) -> None:
        pipes = {p.pipe: p for p in self._processes if p.pipe is not None}
        if not pipes:
            time.sleep(timeout_s)
        for pipe in ready(pipes, timeout_s):
            self._receive(pipes[pipe])
        now_s = time.monotonic()
        if (gap_s := now_s - self._polled_at - timeout_s) > 1.0:  # the run did something else, or was stopped
            for process in self._processes:
                process.seen_at = min(now_s, process.seen_at + gap_s)
        self._polled_at = now_s
        for process in self._processes:
            self._check(process, now_s)
            self._dispatch(process)
        self._reap_ended()

    def _receive(self, process: _EnvironmentProcess) -> None:
        try:
            while process.pipe is not None and (frame := process.pipe.receive()) is not None:
                self._on_message(process, msgspec.msgpack.decode(frame, type=calls.FromEnvironment))
        except (EOFError, OSError, msgspec.DecodeError, UnicodeDecodeError):
            self._lose(process, FailureCause.CRASHED, "ended")

    def _on_message(self, process: _EnvironmentProcess, message: calls.FromEnvironment) -> None:
        process.seen_at = time.monotonic()
        match message:
            case calls.EnvironmentReady(error, isolation, never_replayed):
                if error is not None:
                    process.num_failed_starts = self._settings.retries
                    self._lose(process, FailureCause.CRASHED, error)
                else:
                    process.is_ready, process.num_failed_starts = True, 0
                    self.description, self.never_replayed = isolation, never_replayed
            case calls.Observation() | calls.ActFailure():
                call = process.running.pop(message.key, None)
                if call is None:
                    return
                process.executed.pop(message.key, None)
                if isinstance(message, calls.Observation):
                    process.executed[message.key] = message.turn
                    self._latencies_s.append(message.seconds)
                if call.is_discarded:
                    self._close_instance(process, message.key)
                else:
                    self._answer(message)
                if isinstance(message, calls.ActFailure) and message.cause is FailureCause.TIMEOUT:
                    self._lose(process, None, "was killed because of another episode's call")
            case _:
                pass

    def _answer(self, result: calls.Observation | calls.ActFailure) -> None:
        if isinstance(result, calls.ActFailure):
            self._counts[f"failures/{result.cause}"] += 1
        self._done.append(result)

    def _fail(self, call: _QueuedCall, cause: FailureCause, message: str, blame: float = 1.0) -> None:
        self._answer(calls.ActFailure(call.request.key, call.request.turn, cause, message, blame))

    def _check(self, process: _EnvironmentProcess, now_s: float) -> None:
        if process.popen is None:
            if now_s >= process.restart_at:
                self._start(process)
        elif not process.is_ready:
            if now_s - process.seen_at > LOAD_TIMEOUT_S:
                self._lose(process, FailureCause.TIMEOUT, f"did not load within {LOAD_TIMEOUT_S:g} s")
        elif process.running and now_s - process.seen_at > self._settings.timeout_s + GRACE_S:
            self._lose(process, FailureCause.TIMEOUT, "stopped responding and was killed")

    def _dispatch(self, process: _EnvironmentProcess) -> None:
        """Start the next calls of a process. If a process ended or stopped responding while it ran a call, this call is
        later retried without other calls in the process."""
        while process.is_ready and process.waiting and len(process.running) < self._max_running:
            call = process.waiting[0]
            request = call.request
            if process.running and any(each.num_suspected for each in (call, *process.running.values())):
                return
            process.waiting.popleft()
            now_s = time.monotonic()
            self._queue_s.append(now_s - call.queued_at)
            if request.key in self._gone:
                self._fail(call, FailureCause.CRASHED, "its instance ended with its process; replay = 'never'", 0.0)
                continue
            if request.log and request.key not in process.episodes:
                self._counts["replays"] += 1
            if not process.running:
                process.seen_at = now_s
            process.running[request.key] = call
            process.episodes[request.key] = request.environment
            is_known = process.executed.get(request.key) == len(request.log)
            self._post(process, request.without_executed_turns() if is_known else request)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start(self, process: _EnvironmentProcess) -> None:
        ours, theirs = frame_sockets(calls.MAX_FRAME_BYTES)
        variables = allowed_variables(self._settings.env, os.environ, key="environments.env")
        command = [sys.executable, "-m", "baton.environments.worker", *["--network"][: self._settings.allow_network]]
        with theirs:
            process.popen = subprocess.Popen(command, stdin=theirs.fileno(), env=variables, start_new_session=True)
        process.pipe, process.seen_at = ours, time.monotonic()
        self._post(process, self._setup)

    def _post(self, process: _EnvironmentProcess, message: calls.ToEnvironment) -> None:
        assert process.pipe is not None
        with contextlib.suppress(OSError):  # the process is gone: the next `receive` raises
            process.pipe.send(msgspec.msgpack.encode(message))

    def _close_instance(self, process: _EnvironmentProcess, key: calls.EpisodeKey) -> None:
        process.executed.pop(key, None)
        if process.episodes.pop(key, None) is not None:
            self._post(process, calls.CloseEpisode(key))

    def _lose(self, process: _EnvironmentProcess, cause: FailureCause | None, why: str) -> None:
        """End a process, and retry or fail its calls. `cause`: the cause to report for calls that have no retries left;
        None if no running call is at fault."""
        was_ready = process.is_ready
        resets = {key for key, call in process.running.items() if call.request.action is None}
        self._gone |= {key for key, name in process.episodes.items() if name in self.never_replayed} - resets
        self._end(process)
        running, process.running = list(process.running.values()), {}
        for call in reversed(running):
            key = call.request.key
            call.num_suspected += cause is not None
            if call.is_discarded:
                continue
            if key in self._gone:
                blame = 0.0 if cause is None else 1 / len(running)
                self._fail(call, FailureCause.CRASHED, f"its process {why}; replay = 'never' forbids a retry", blame)
            elif cause is not None and call.num_suspected > self._settings.retries:
                self._fail(call, cause, f"its process {why}, in each of {call.num_suspected} attempts")
            else:
                call.queued_at = time.monotonic()
                process.waiting.appendleft(call)
        if not was_ready:
            process.num_failed_starts += 1
            if process.num_failed_starts > self._settings.retries:
                raise UserError(f"an environment process cannot be started: {why}")
            pause_s = retry_wait_s(process.num_failed_starts, first_s=FIRST_RESTART_S, longest_s=LONGEST_RESTART_S)
            process.restart_at = time.monotonic() + pause_s

    def _end(self, process: _EnvironmentProcess) -> None:
        if process.popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.popen.terminate()  # the supervisor (`rewards/isolation.py`) then kills the worker's processes
        self._ending.append((process.popen, time.monotonic() + KILL_S))
        if process.pipe is not None:
            process.pipe.close()
        process.popen = process.pipe = None
        process.is_ready = False
        process.episodes.clear()
        process.executed.clear()

    def _reap_ended(self) -> None:
        for popen, kill_at in list(self._ending):
            if popen.poll() is not None:
                self._ending.remove((popen, kill_at))
            elif time.monotonic() > kill_at:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(popen.pid, signal.SIGKILL)
