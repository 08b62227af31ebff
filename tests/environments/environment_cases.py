"""Environments of the tests, imported by path in environment processes, and a pool that runs them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from baton.environments.calls import ActFailure, ActRequest, EnvironmentSpec, EpisodeKey, Observation, Turn
from baton.environments.pool import EnvironmentPool
from baton.environments.settings import EnvironmentSettings

Result = Observation | ActFailure
WAIT_S = 120.0
"""Deadline of the tests' own waits. Generous: the machine may be busy."""


class Counter:
    """Adds the integers that it is given to its seed. Other actions misbehave."""

    def __init__(self, mark: str = "") -> None:
        self._mark = Path(mark) if mark else None

    def reset(self, *, seed: int, start: int = 0) -> str:
        self._value = seed + start
        return f"value {self._value}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._mark is not None and not self._mark.is_dir():
            with self._mark.open("a") as file:
                file.write(f"{action}\n")
        reward: Any = 1.0
        if action == "sleep":
            time.sleep(3600)
        elif action == "pause":
            time.sleep(0.4)
        elif action == "hold the interpreter":
            ctypes.PyDLL(None).sleep(3600)
        elif action == "raise":
            raise RuntimeError("no such door")
        elif action == "exit":
            raise SystemExit(3)
        elif action == "abort":
            os.abort()
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # another thread may take the signal, and this one return before it stops
        elif action == "start a child and sleep":
            subprocess.Popen(["sleep", "3600"])
            time.sleep(3600)
        elif action == "allocate":
            self._kept = bytearray(2**33)
        elif action == "fill the disk":
            with Path("/dev/full").open("w") as file:
                file.write("x" * 10**6)
        elif action.startswith("reward "):
            reward = {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None}[action.split()[1]]
        elif action == "long":
            return "x" * 100_000, 0.0, False, False, {}
        elif action == "surrogate":
            return "\ud800", 0.0, False, False, {"tool": "\ud800", "\ud800": 1.0}
        elif action == "wrong shape":
            return "text"  # type: ignore[return-value]
        elif action == "end":
            unset = {"ratio": float("nan"), "best": sys.float_info.max}
            return "over", 2.0, True, False, {"success": True, "tool": "door", "steps": 3, **unset}
        elif action == "time":
            return str(time.time_ns()), 0.0, False, False, {}
        elif action == "wait for the file":
            while not (Path(self._mark or "") / "go").exists():
                time.sleep(0.01)
        else:
            self._value += int(action)
        return f"value {self._value}", reward, False, False, {}


class Unrepeatable(Counter):
    """A counter whose actions must not be repeated."""

    replay = "never"


class DiesInItsFirstReset(Unrepeatable):
    """Ends its process in the first reset of all, which it marks in the file."""

    def reset(self, *, seed: int, start: int = 0) -> str:
        assert self._mark is not None
        if not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, start=start)


def spec(name: str = "counter", cls: str = "Counter", **args: Any) -> EnvironmentSpec:
    return EnvironmentSpec(name, f"{Path(__file__).resolve()}:{cls}", args)


def pool_of(*specs: EnvironmentSpec, **settings: Any) -> EnvironmentPool:
    return EnvironmentPool({one.name: one for one in specs or (spec(),)}, EnvironmentSettings(**settings))


def request(number: int, action: str | None, **fields: Any) -> ActRequest:
    """A request of episode `number`, after `turns`."""
    key = fields.pop("key", EpisodeKey(0, number, 0))
    fields = {"environment": "counter", "seed": number, **fields}
    return ActRequest(key, log=fields.pop("turns", ()), action=action, **fields)


def results(pool: EnvironmentPool, count: int) -> dict[int, Result]:
    """Wait for the results of `count` episodes, by group id."""
    found: dict[int, Result] = {}
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline_s, f"only {found} within {WAIT_S:g} s"
        for result in pool.collect(5.0):
            assert result.key.group_id not in found, "a call has one result"
            found[result.key.group_id] = result
    return found


def turns_of(action: str, result: Result) -> tuple[Turn, ...]:
    """The log of a turn."""
    assert isinstance(result, Observation), result
    return (Turn(action, result.digest),)


def play(pool: EnvironmentPool, number: int, actions: list[str], **fields: Any) -> list[Result]:
    """Execute actions turn after turn, as a run does; stop at a failure."""
    turns: tuple[Turn, ...] = ()
    found: list[Result] = []
    for action in actions:
        pool.submit(request(number, action, turns=turns, **fields))
        (result,) = results(pool, 1).values()
        found.append(result)
        if isinstance(result, ActFailure):
            break
        turns += (Turn(action, result.digest),)
    return found


def running_with(text: str) -> list[int]:
    """Ids of the processes whose command line or environment has a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
