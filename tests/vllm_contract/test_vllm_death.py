"""However vLLM's processes end, or Baton's own, nothing waits for ever and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from engine_contract import PROMPT, V1

from baton.errors import EngineFault, UserError
from baton.policy.settings import ModelSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings
from baton.types import PolicyVersion

DEADLINE_S = 60.0
SETTINGS = {"slots": 8, "max_context_tokens": 1024}
SHAPE = {"enforce_eager": True, "answer_timeout_s": 30}


def family(pid: int) -> dict[int, str]:
    """Return the processes that stem from one, by their ids, with their names."""
    import psutil

    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            found[child.pid] = child.name()
    return found


def vllms(pid: int) -> dict[int, str]:
    return {number: name for number, name in family(pid).items() if name.startswith("VLLM")}


def await_gone(pids) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and " Z " not in _state(pid)]:
        assert time.monotonic() < until_s, f"processes {left} did not end"
        time.sleep(0.1)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return " Z "


def build(path: str, **changes: object):
    from baton.rollout.engines.factory import engine_of_model

    settings = EngineSettings(kind="vllm", vllm=SHAPE, **{**SETTINGS, **changes})
    return engine_of_model(ModelSettings(path=path, device="cpu"), settings, PolicyVersion("run", 0))


@pytest.mark.parametrize("victim", ["VLLM::EngineCor", "VLLM::Worker"])
def test_an_engine_whose_process_is_killed_says_so_and_can_be_closed(victim, vllm_paths, load, driver):
    before = vllms(os.getpid())
    engine = build(vllm_paths["qwen3"])
    own = {pid: name for pid, name in vllms(os.getpid()).items() if pid not in before}
    try:
        for i in range(4):
            engine.submit(driver.lease(i, PROMPT, 1000, is_exact=False))
        driver.grow(engine, 10)
        os.kill(next(pid for pid, name in own.items() if name.startswith(victim)), signal.SIGKILL)
        with pytest.raises(EngineFault, match="the core of the vLLM engine has exited"):
            driver.grow(engine, 10**9)
        with pytest.raises(EngineFault, match="vLLM"):
            engine.load_weights(policy_tensors(load("qwen3")), V1)
    finally:
        engine.close()
        engine.close()
    await_gone(own)


def hold(path: str, tmp_path: Path, mark: str = "") -> subprocess.Popen[str]:
    """Start a process that builds an engine, says "ready", and waits. All its processes have `mark` in their
    environment."""
    script = tmp_path / "held.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_vllm_death import build\n"
        "if __name__ == '__main__':\n"
        "    engine = build(sys.argv[1])\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "rollout")]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "BATON_TEST_MARK": mark}
    return subprocess.Popen([sys.executable, str(script), path], stdout=subprocess.PIPE, text=True, env=environment)


def test_what_it_started_ends_with_a_process_that_is_killed(vllm_paths, tmp_path):
    """A core whose client is gone would keep its GPU for ever."""
    held = hold(vllm_paths["qwen3"], tmp_path)
    try:
        assert any(line.strip() == "ready" for line in held.stdout)
        own = family(held.pid)
        assert len(vllms(held.pid)) == 2
    finally:
        held.kill()
        held.wait(DEADLINE_S)
    await_gone(own)


def marked(mark: str) -> list[int]:
    """Return the processes with a mark in their environment, also those whose parent has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"BATON_TEST_MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("generations", [1, 2])
def test_what_it_started_ends_with_a_process_that_is_killed_while_vllm_starts(vllm_paths, tmp_path, generations):
    """The core, and the worker that it starts, spend minutes on loading before they serve anybody."""
    import psutil

    def depth(pid: int) -> int:
        """Return how many generations of vLLM's processes are below a process."""
        own = []
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("VLLM") or "--multiprocessing-fork" in child.cmdline():
                    own.append(child.pid)
        return max((1 + depth(child) for child in own), default=0)

    mark = uuid.uuid4().hex
    held, until_s = hold(vllm_paths["qwen3"], tmp_path, mark), time.monotonic() + 2 * DEADLINE_S
    try:
        while depth(held.pid) < generations:
            assert held.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert len(marked(mark)) > generations
    finally:
        held.kill()
        held.wait(DEADLINE_S)
    until_s = time.monotonic() + DEADLINE_S
    try:
        while left := marked(mark):
            assert time.monotonic() < until_s, f"processes {left} did not end"
            time.sleep(0.1)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_a_shape_that_vllm_refuses_is_a_sentence(vllm_paths):
    with pytest.raises(UserError, match=r"vLLM refuses this model or these settings: .*max_model_len"):
        build(vllm_paths["qwen3"], max_context_tokens=4096)
