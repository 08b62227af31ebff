"""Reward functions that misbehave in every way, written to a file, and what they are called with."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.rewards import pool, scorer
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import AnswerSettings, JudgeSettings, RewardSettings
from baton.types import FinishReason, Message, Prompt, ScoredTrajectory, Segment, Trajectory

SOURCE = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path

def length(prompt, response, parsed):
    return len(response)

def sleeps(prompt, response, parsed):
    if response == "bad":
        time.sleep(1000)
    return 1

def notes_and_sleeps(prompt, response, parsed):
    if response != "good":
        Path(response).touch()
        time.sleep(1000)
    return 1

def spins(prompt, response, parsed):
    while response == "bad":
        pass
    return 1

def spins_in_c(prompt, response, parsed):
    return 9**9**9 if response == "bad" else 1

def exits(prompt, response, parsed):
    if response == "bad":
        os._exit(3)
    return 1

def always_exits(prompt, response, parsed):
    os._exit(3)

def exits_after_two(prompt, response, parsed):
    mark = Path(parsed)
    asked = mark.read_text() if mark.exists() else ""
    mark.write_text(asked + ".")
    if len(asked) >= 2:
        os._exit(3)
    return 1

def segfaults(prompt, response, parsed):
    if response == "bad":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1

def leaves(prompt, response, parsed):
    sys.exit("enough")

def eats(prompt, response, parsed):
    return len(bytearray(1 << 34)) if response == "bad" else 1

def raises_in_a_library(prompt, response, parsed):
    import json
    return json.loads(response)

def raises_with_escapes(prompt, response, parsed):
    raise ValueError("\\x1b[2J gone\\n2")

def raises(prompt, response, parsed):
    if response == "bad":
        raise KeyError("no such key")
    return 1

def notes_and_raises(prompt, response, parsed):
    with open(response, "a") as mark:
        mark.write("called\\n")
    raise KeyError("no such key")

def nothing(prompt, response, parsed):
    return None

def not_a_number(prompt, response, parsed):
    return float("nan")

def infinite(prompt, response, parsed):
    return float("-inf")

def a_text(prompt, response, parsed):
    return "much"

def a_dict(prompt, response, parsed):
    return {"format": 1, "length": "much"}

def huge(prompt, response, parsed):
    return 1e308

def huge_int(prompt, response, parsed):
    return 10**400

def beyond(prompt, response, parsed):
    return -1.0001e6

def a_decimal(prompt, response, parsed):
    from decimal import Decimal
    return Decimal("0.5")

def a_complex(prompt, response, parsed):
    return 1j

def of_numpy(prompt, response, parsed):
    import numpy
    return {"bool": numpy.bool_(True), "float": numpy.float32(0.5), "array": numpy.array(2), "true": True,
            "edge": 10**6, "vector": numpy.array([1.0])}[response]

def ranks(prompts, completions, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["answer"])
    order = sorted(completions, key=len)
    return [order.index(completion) / len(order) for completion in completions]

def scores_some(prompts, completions, **columns):
    return [None if c == "none" else float("nan") if c == "nan" else 1e7 if c == "huge" else 1.0 for c in completions]

def compute_score(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def verl_huge(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float("inf")}

def too_many(prompts, completions, **columns):
    return [1.0, 2.0]

def no_list(prompts, completions, **columns):
    return 1.0

def not_applicable(prompts, completions, **columns):
    return [None]

def crashes_once(prompt, response, parsed):
    mark = Path(response)
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return 1

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]

def starts_another_and_spins(prompt, response, parsed):
    subprocess.Popen([*SLEEP, response])
    Path(response).touch()
    return 9**9**9

def starts_escapees_and_spins(prompt, response, parsed):
    subprocess.Popen([*SLEEP, response], start_new_session=True)
    if os.fork() == 0:  # a daemon: in a session of its own, and an orphan
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [*SLEEP, response])
        os._exit(0)
    Path(response).touch()
    return 9**9**9

def starts_escapees_and_exits(prompt, response, parsed):
    subprocess.Popen([*SLEEP, response], start_new_session=True)
    Path(response).touch()
    os._exit(3)

def looks_around(prompt, response, parsed):
    import json, resource, socket
    def reach(address):
        with socket.socket() as s:
            s.settimeout(5)
            try:
                s.connect(address)
                return "connected"
            except OSError as error:
                return type(error).__name__
    def parent_secrets():
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += [str(file)] * (b"BATON_TEST_SECRET" in file.read_bytes())
            except OSError:
                pass
        return found
    Path("left-behind").write_text("x")
    Path(response.splitlines()[0]).write_text(json.dumps({
        "environ": dict(os.environ), "cwd": os.getcwd(), "secrets": parent_secrets(),
        "reach": reach(("127.0.0.1", int(parsed))), "files": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "uid": os.getuid(),
    }))
    return 1

def prints(prompt, response, parsed):
    print("hello from a judge")
    return 1

def threads(prompt, response, parsed):
    return int(os.environ["OMP_NUM_THREADS"])

together = asyncio.Barrier(20)
within = most_within = 0

async def waits_for_twenty(prompt, response, parsed):
    global within, most_within
    within += 1
    most_within = max(most_within, within)
    await together.wait()
    within -= 1
    return most_within

async def waits(prompt, response, parsed):
    return 1

async def waits_forever(prompt, response, parsed):
    if response == "bad":
        await asyncio.Event().wait()
    await asyncio.sleep(0.05)
    return 1

async def never_lets_go(prompt, response, parsed):
    await asyncio.sleep(0.05)
    if response == "bad":
        Path(__file__).with_name("spins").touch()
    while response == "bad":
        pass
    return 1

async def exits_async(prompt, response, parsed):
    await asyncio.sleep(0.05)
    if response == "bad":
        os._exit(4)
    return 1

class Awaited:
    async def __call__(self, prompt, response, parsed):
        return 0.25

awaited = Awaited()
"""

PROMPT = Prompt("p", "some", (Message("user", "1+1"),), "2")


class SomeTask:
    """A task whose scorer is trusted: the answer has to be the reference."""

    name = "some"
    scorer = "inline"
    columns = ()

    def score(self, answer: str | None, reference: str | None, metadata: dict[str, Any]) -> float:
        return float(answer == reference)


def write_functions(directory: Path) -> str:
    """Path of the file with the functions."""
    file = directory / "judging_functions.py"
    file.write_text(SOURCE)
    return str(file)


def judge_with(path: str, name: str, **settings: Any) -> RewardScorer:
    """A judge with one own function, and a deadline that only a call that hangs reaches; keys of [[reward]] and
    [judge] alike."""
    keys = {key: settings.pop(key) for key in tuple(settings) if key in RewardSettings.model_fields}
    reward = RewardSettings(kind="function", function=f"{path}:{name}", **keys)
    judge = JudgeSettings(**{"deadline_s": 60.0, "retries": 0, **settings})
    return RewardScorer({"some": SomeTask()}, [reward], {"some": AnswerSettings(format="last_line")}, judge)  # type: ignore[dict-item]


class HandClock(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets: no deadline passes before it, however long a process stands still."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass in the loop's own thread, and so between two of its steps."""
        self.call_soon_threadsafe(self._pass, seconds)

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds


def hand_clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Have the next judge keep its deadlines by a clock that is set by hand."""
    clock = HandClock()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: clock)
    monkeypatch.setattr(pool, "KILL_S", 1e9)
    for module in (pool, scorer):
        monkeypatch.setattr(module, "LOAD_TIMEOUT_S", 1e9)
    return clock


def drain_past_deadlines(
    judge: RewardScorer, clock: HandClock, deadline_s: float, in_time: int, late: int
) -> list[ScoredTrajectory]:
    """Time stands still until `in_time` judgements are there; then `late` further calls outstay their deadline."""
    found: list[ScoredTrajectory] = []
    while len(found) < in_time:
        found += judge.collect(1.0)
    while len(found) < in_time + late:
        clock.advance(deadline_s)
        found += judge.collect(0.1)
    return found


def trajectory(group_id: int, sample_index: int) -> Trajectory:
    return Trajectory(group_id, sample_index, (1,), (Segment((2, 3), (0.0, 0.0), 0),), FinishReason.STOP)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    """Live children of this process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found


def running_with(text: str) -> set[int]:
    """Processes, but this one, whose command line has a text; whatever namespace they are in."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes()
        except OSError:
            continue
        if text.encode() in line and int(file.parent.name) != os.getpid() and is_running(int(file.parent.name)):
            found.add(int(file.parent.name))
    return found


def wait_until(is_so: Callable[[], bool], within_s: float = 90.0) -> bool:
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
