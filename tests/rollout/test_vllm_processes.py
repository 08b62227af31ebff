"""The processes that vLLM spawns end with their parent. Tested without vLLM: the value that carries this is Baton's."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

from baton.rollout.engines.vllm.worker import EndWithParent

DEADLINE_S = 60.0


def spawn(depth: int, config: dict[str, str]) -> None:
    """Say this process's id, spawn `depth` generations of children with the same configuration, and wait."""
    print(os.getpid(), flush=True)
    if depth:
        multiprocessing.get_context("spawn").Process(target=spawn, args=(depth - 1, config)).start()
    time.sleep(600)


def test_every_generation_of_spawned_processes_ends_with_the_first() -> None:
    code = (
        "from baton.rollout.engines.vllm.worker import EndWithParent\n"
        "from tests.rollout.test_vllm_processes import spawn\n"
        "spawn(2, {'baton': EndWithParent()})"
    )
    paths = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert first.stdout is not None
    pids = [int(first.stdout.readline()) for _ in range(3)]
    first.kill()
    first.wait(DEADLINE_S)
    until_s = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until_s, f"processes {left} did not end"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_the_value_is_a_string_that_does_nothing_elsewhere() -> None:
    assert json.dumps({"baton": EndWithParent()}) == '{"baton": ""}'
    assert isinstance(pickle.loads(pickle.dumps(EndWithParent())), EndWithParent)
