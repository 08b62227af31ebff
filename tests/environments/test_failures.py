"""Each way in which an environment can fail ends at its deadline, with a named cause, and other episodes finish."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from environment_cases import WAIT_S, Turn, pool_of, request, results, running_with, spec, turns_of

from baton.environments.calls import ActFailure, EpisodeKey, Observation
from baton.environments.settings import EnvironmentSettings
from baton.types import FailureCause

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.timing,
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc"),
]

RAISED, MALFORMED, TIMEOUT, CRASHED = (
    FailureCause.RAISED,
    FailureCause.MALFORMED,
    FailureCause.TIMEOUT,
    FailureCause.CRASHED,
)

SILENT = "its process stopped responding and was killed, in each of 2 attempts"


@pytest.mark.parametrize(
    ("action", "cause", "message"),
    [
        ("raise", RAISED, r"step raised RuntimeError: no such door \(environment_cases.py, line \d+\)"),
        ("exit", RAISED, "step raised SystemExit: 3"),
        ("allocate", RAISED, "step raised MemoryError"),
        ("fill the disk", RAISED, "step raised OSError: .*No space left on device"),
        ("reward nan", MALFORMED, "the reward: returned nan"),
        ("reward inf", MALFORMED, "the reward: returned inf"),
        ("reward text", MALFORMED, "the reward: returned '1'"),
        ("reward none", MALFORMED, "the reward: returned None"),
        ("wrong shape", MALFORMED, r"step returned a str, not \(observation, reward, terminated"),
        ("abort", CRASHED, "its process ended, in each of 2 attempts"),
        ("kill", CRASHED, "its process ended, in each of 2 attempts"),
        ("sleep", TIMEOUT, "no observation within environments.timeout_s = 2 s; the process was killed"),
        ("start a child and sleep", TIMEOUT, "no observation within environments.timeout_s = 2 s"),
        pytest.param("hold the interpreter", TIMEOUT, SILENT, marks=pytest.mark.slow),
        pytest.param("stop", TIMEOUT, SILENT, marks=pytest.mark.slow),
    ],
)
def test_a_failure_has_a_cause_and_siblings_finish(action: str, cause: FailureCause, message: str) -> None:
    pool = pool_of(processes=1, retries=1, timeout_s=2.0, memory_gib=4.0)
    for number in range(4):
        pool.submit(request(number, "10"))
    first = results(pool, 4)
    for number in range(4):
        turns = turns_of("10", first[number])
        pool.submit(request(number, action if number == 2 else "10", turns=turns))
    found = results(pool, 4)
    failed = found.pop(2)
    assert isinstance(failed, ActFailure)
    assert (failed.cause, failed.turn) == (cause, 2)
    assert re.search(message, failed.message), failed.message
    assert {number: one.text for number, one in found.items()} == {n: f"value {n + 20}" for n in (0, 1, 3)}
    assert pool.metrics()[f"env/failures/{cause}"] == 1
    pool.close()


@pytest.mark.slow
def test_a_stopped_or_killed_process_is_replaced_and_its_episodes_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"BATON_TEST_{os.getpid()}"
    monkeypatch.setenv(mark, "1")
    pool = pool_of(processes=2, timeout_s=2.0, env=(mark,))
    for number in range(6):
        pool.submit(request(number, "10"))
    found = results(pool, 6)
    logs = {number: turns_of("10", one) for number, one in found.items()}
    for turn, kind in enumerate((signal.SIGSTOP, signal.SIGKILL), 2):
        for pid in running_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        for number in range(6):
            pool.submit(request(number, "10", turns=logs[number]))
        found = results(pool, 6)
        assert {number: one.text for number, one in found.items()} == {n: f"value {n + 10 * turn}" for n in range(6)}
        logs = {number: logs[number] + turns_of("10", one) for number, one in found.items()}
        metrics = pool.metrics()
        assert metrics["env/replays"] >= 6
        assert not any("failures" in name for name in metrics)
    pool.close()


@pytest.mark.slow
def test_the_time_in_which_nothing_was_asked_does_not_extend_the_deadline_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool was not used for ten minutes, as during a train step, and its process has stopped."""
    mark, idle_s = f"BATON_TEST_{os.getpid()}", 0.0
    monkeypatch.setenv(mark, "1")
    shifted = SimpleNamespace(monotonic=lambda: time.monotonic() + idle_s, sleep=time.sleep)
    monkeypatch.setattr("baton.environments.pool.time", shifted)
    pool = pool_of(processes=1, timeout_s=2.0, env=(mark,))
    pool.submit(request(0, "10"))
    log = turns_of("10", results(pool, 1)[0])
    for pid in running_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    idle_s = 600.0
    pool.submit(request(0, "10", turns=log))
    assert results(pool, 1)[0].text == "value 20"
    pool.close()


def test_a_reset_is_repeated_even_where_no_action_may_be(tmp_path: Path) -> None:
    """Else a kill while a prompt is drawn would end the run."""
    pool = pool_of(spec(cls="DiesInItsFirstReset", mark=str(tmp_path / "mark")), processes=1)
    pool.submit(request(5, None))
    (found,) = results(pool, 1).values()
    assert isinstance(found, Observation), found
    assert found.text == "value 5"
    pool.close()


@pytest.mark.parametrize("action", ["kill", "sleep", "stop"])
def test_what_must_not_be_repeated_is_executed_at_most_once(tmp_path: Path, action: str) -> None:
    mark = tmp_path / "mark"
    pool = pool_of(spec(cls="Unrepeatable", mark=str(mark)), processes=1, retries=3, timeout_s=2.0)
    assert pool.never_replayed == ("counter",)
    for number in range(3):
        pool.submit(request(number, f"{number + 10}"))
    first = results(pool, 3)
    for number in range(3):
        pool.submit(request(number, action if number == 1 else "0", turns=turns_of(str(number + 10), first[number])))
    found = results(pool, 3)
    executed = mark.read_text().split()
    assert [executed.count(str(number + 10)) for number in range(3)] == [1, 1, 1]
    assert executed.count(action) == 1
    assert executed.count("0") <= 2
    assert isinstance(found[1], ActFailure)
    assert found[1].blame > 0
    for number in (0, 2):  # they had finished, or their instance is gone with the process
        result = found[number]
        assert isinstance(result, Observation) or result.cause is CRASHED
        pool.submit(request(number, "1", turns=(*turns_of(str(number + 10), first[number]), *done(result))))
    for number, result in results(pool, 2).items():
        assert isinstance(result, ActFailure), number
        assert result.cause is CRASHED
        assert "replay = 'never'" in result.message
        assert result.blame == 0, "it only lost its instance with the process"
    assert "1" not in mark.read_text().split()
    restarted = request(0, "5", key=EpisodeKey(0, 0, 0, attempt=1))
    pool.submit(restarted)
    (again,) = results(pool, 1).values()
    assert isinstance(again, Observation), "the next attempt of the episode is a new one"
    pool.close()


def done(result: Observation | ActFailure) -> tuple[Turn, ...]:
    return turns_of("0", result) if isinstance(result, Observation) else ()


def test_no_process_outlives_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"BATON_TEST_CLOSE_{os.getpid()}"
    monkeypatch.setenv(mark, "1")
    pool = pool_of(processes=1, env=(mark,))
    pool.submit(request(0, "start a child and sleep"))
    pool.collect(0.5)
    pool.close()
    assert running_with(mark) == []


def test_no_process_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    mark = f"BATON_TEST_RUN_{os.getpid()}"
    script = (
        "from environment_cases import *\n"
        f"pool = pool_of(processes=2, env=({mark!r},))\n"
        "pool.submit(request(0, 'start a child and sleep'))\n"
        "pool.collect(1.0)\n"
        "time.sleep(2.5)  # messages of the process stay unread, so its connection is reset\n"
        "print('running', flush=True)\n"
        "time.sleep(3600)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, mark: "1"}
    with (tmp_path / "stderr").open("w") as stderr:
        run = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert run.stdout is not None
    assert run.stdout.readline() == "running\n"
    assert len(running_with(mark)) > 4
    run.kill()
    run.wait(WAIT_S)
    run.stdout.close()
    deadline_s = time.monotonic() + WAIT_S
    while running_with(mark):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_the_defaults_are_those_of_the_documentation() -> None:
    settings = EnvironmentSettings()
    assert (settings.processes, settings.max_concurrent, settings.timeout_s, settings.retries) == (2, 64, 60.0, 2)
