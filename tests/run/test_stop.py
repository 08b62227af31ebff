"""A request to stop ends every wait: real processes, SIGTERM in each state that a run can be waiting in."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.stop import Stopped, StopRequest
from baton.swarm.auth import Role, TokenFile, write_private
from tests.all_cases import chosen
from tests.fork_server import Forked, child_processes, run_baton, start_baton
from tests.swarm.swarm_processes import WorkerFaults, model, swarm

__all__ = ["model"]

pytestmark = pytest.mark.timing

PATIENCE_S = 300.0
"""For a busy machine; the waits that a request to stop must end are longer by far."""
SIGNALLED = 128 + signal.SIGTERM
ENDLESS = ["run.steps=100000", "eval.num_prompts=2", "eval.every=1000000", "rollout.stall_timeout_s=100000"]


@contextmanager
def baton(*arguments: Any) -> Iterator[Forked]:
    """A `baton` process; it does not outlive the block."""
    process = start_baton(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def wait_for(condition: Callable[[], Any], process: Forked, what: str) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert process.poll() is None, f"the process ended before {what}"
        assert time.monotonic() < until_s, f"there never was {what}"
        time.sleep(0.02)
    return found


def steps(run: Path) -> list[int]:
    """Train steps with metrics."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "reward/mean" in row]


def assert_goes_on(recipe: Path, tmp_path: Path, more: list[str], last: int) -> None:
    overrides = [f"run.directory={tmp_path}", *ENDLESS, *more, f"run.steps={last + 1}", "rollout.stall_timeout_s=100"]
    done = run_baton("train", recipe, *overrides, "--resume", "--json", timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == last + 1


def test_a_request_is_seen_by_whoever_checks_and_raises_only_where_it_may() -> None:
    said: list[str] = []
    stop = StopRequest(said.append)
    stop.check()
    stop.request(signal.SIGTERM)
    assert stop.is_requested
    assert said == ["stopping after the current train step; press Ctrl-C again to exit immediately"]
    with pytest.raises(Stopped):
        stop.check()
    entered = False
    with pytest.raises(Stopped), stop.interrupting():
        entered = True
    assert not entered
    stop.request(signal.SIGTERM)  # a scheduler may say it twice
    with pytest.raises(KeyboardInterrupt):
        stop.request(signal.SIGINT)
    assert len(said) == 1


def test_a_signal_interrupts_whatever_is_waited_for_where_that_is_allowed() -> None:
    never = threading.Event()
    with StopRequest() as stop:
        killer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        killer.start()
        with pytest.raises(Stopped), stop.interrupting():
            never.wait(PATIENCE_S)
        killer.join()
        assert stop.signal == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, SIGNALLED), (signal.SIGINT, 130)])
def test_a_run_whose_first_engine_does_not_start_stops(small: Any, tmp_path: Path, number: int, code: int) -> None:
    with baton("train", small.recipe, f"run.directory={tmp_path}", *ENDLESS, "engine.processes=1") as process:
        (engine,) = wait_for(lambda: child_processes("engine"), process, "an engine process")
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "number", "code"), chosen(
    [("async", signal.SIGTERM, SIGNALLED), ("partial", signal.SIGINT, 0)],
    [("sync", signal.SIGTERM, SIGNALLED), ("partial", signal.SIGTERM, SIGNALLED)],
))  # fmt: skip
def test_a_run_that_waits_for_its_engine_stops_with_a_checkpoint_and_goes_on(
    small: Any, tmp_path: Path, mode: str, number: int, code: int
) -> None:
    """The engine is stopped at any moment after a step: while a batch is generated, or a version loaded. The next
    tests stop runs in `sync`."""
    more = [f'rollout.mode="{mode}"', "engine.processes=1"]
    with baton("train", small.recipe, f"run.directory={tmp_path}", *ENDLESS, *more) as process:
        wait_for(lambda: steps(tmp_path / "small"), process, "a train step")
        (engine,) = child_processes("engine")
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code
    last = max(steps(tmp_path / "small"))
    assert (tmp_path / "small" / "checkpoints" / f"step_{last:06d}").is_dir()
    assert_goes_on(small.recipe, tmp_path, more, last)


HANGING = """
from pathlib import Path
import time

def wait(where):
    if Path(__file__).with_name(f"hang in {where}").exists():
        Path(__file__).with_name("hangs").touch()
        time.sleep(3600)

def evenness(response):
    wait("evenness")
    return len(response) % 5 / 5

class Evenness:
    def reset(self, *, seed):
        wait("reset")
        return f"{seed % 40} + 1"

    def step(self, action):
        wait("step")
        return "1 + 1", len(action) % 5 / 5, True, False, {}
"""
"""A reward function and an environment that hang as soon as a file lies beside them, and say so in `hangs`."""
GENERATED = 'name = "chain_sum"\nform = "compact"\nparams = { min_terms = 2, max_terms = 3, max_digits = 1 }'
PLAYED = 'name = "evenness"\nenvironment = "{file}:Evenness"\nmax_turns = 2\nmax_turn_tokens = 4'
LONG = ["environments.processes=1", "environments.timeout_s=100000", "engine.max_context_tokens=128"]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "before", "after", "more"), [
    ("evenness", "tests.small_reward:evenness", "{file}:evenness", ["judge.deadline_s=100000"]),
    ("step", GENERATED, PLAYED, LONG),
    ("reset", GENERATED, PLAYED, LONG),
], ids=["reward", "step", "reset"])  # fmt: skip
def test_a_run_whose_reward_or_environment_hangs_stops_with_a_checkpoint(
    small: Any, tmp_path: Path, where: str, before: str, after: str, more: list[str]
) -> None:
    """The deadlines of the calls are longer than the test's: a stop waits for none. A reset draws the next prompt."""
    (tmp_path / "hanging.py").write_text(HANGING)
    recipe, text = tmp_path / "small.toml", small.recipe.read_text()
    assert before in text
    recipe.write_text(text.replace(before, after.format(file=tmp_path / "hanging.py")))
    with baton("train", recipe, f"run.directory={tmp_path}", *ENDLESS, *more) as process:
        wait_for(lambda: steps(tmp_path / "small"), process, "a train step")
        (tmp_path / f"hang in {where}").touch()
        wait_for((tmp_path / "hangs").exists, process, "a call that hangs")
        process.terminate()
        assert process.wait(PATIENCE_S) == SIGNALLED
    last = max(steps(tmp_path / "small"))
    assert (tmp_path / "small" / "checkpoints" / f"step_{last:06d}").is_dir()
    if where == "reset":  # the stop interrupted the scheduler
        (tmp_path / f"hang in {where}").unlink()
        assert_goes_on(recipe, tmp_path, [*more, "environments.timeout_s=60"], last)


@pytest.mark.slow
def test_a_run_whose_worker_stands_still_stops_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """The worker is stopped with leases, which time out long after the test's own deadline."""
    endless = {"run__steps": 100_000, "rollout__stall_timeout_s": 100_000.0}
    silent = {"swarm__heartbeat_timeout_s": 100_000.0, "swarm__progress_timeout_s": 100_000.0}
    with swarm(tmp_path, model, **endless, **silent) as run:
        trainer = run.train()
        worker = run.joined(faults=WorkerFaults(token_delay_s=0.01))
        run.await_step(1)
        run.caught_at_work(worker, 0)
        trainer.signal(signal.SIGTERM)
        assert trainer.end(PATIENCE_S) == SIGNALLED
        last = max(steps(tmp_path / "r"))
        assert (tmp_path / "r" / "checkpoints" / f"step_{last:06d}").is_dir()


@pytest.mark.slow
def test_an_evaluation_that_a_stop_cut_is_made_when_the_run_goes_on(small: Any, tmp_path: Path) -> None:
    """Stopped at any moment: in an evaluation, before it or after it."""
    more = ["engine.processes=1", "eval.every=1"]
    with baton("train", small.recipe, f"run.directory={tmp_path}", *ENDLESS, *more) as process:
        wait_for(lambda: steps(tmp_path / "small"), process, "a train step")
        (engine,) = child_processes("engine")
        os.kill(engine, signal.SIGSTOP)
        process.terminate()
        assert process.wait(PATIENCE_S) == SIGNALLED
    last = max(steps(tmp_path / "small"))
    assert_goes_on(small.recipe, tmp_path, more, last)
    evaluations = (tmp_path / "small" / "evaluations.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in evaluations} == set(range(last + 2))


@pytest.mark.slow
def test_a_run_that_waits_for_workers_to_join_stops(small: Any, tmp_path: Path) -> None:
    TokenFile(tmp_path / "tokens.json").create(Role.WORKER, 86_400, name="worker")
    hub = ["--serve", "127.0.0.1:0", f"swarm.token_file={tmp_path / 'tokens.json'}"]
    with baton("train", small.recipe, f"run.directory={tmp_path}", *ENDLESS, *hub) as process:
        wait_for((tmp_path / "small" / "metrics.jsonl").exists, process, "the run's metrics")
        process.terminate()
        assert process.wait(PATIENCE_S) == SIGNALLED


@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "relay"])
def test_a_worker_or_relay_whose_hub_accepts_and_says_nothing_ends(tmp_path: Path, command: str) -> None:
    role = Role.WORKER if command == "worker" else Role.RELAY
    write_private(tmp_path / "token", TokenFile(tmp_path / "tokens.json").create(role, 86_400, name="it").encode())
    more = ["--device", "cpu"] if command == "worker" else ["--listen", "127.0.0.1:0", "--cache", tmp_path / "cache"]
    with socket.create_server(("127.0.0.1", 0)) as hub:
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        with baton(command, url, "--token-file", tmp_path / "token", *more) as process:
            wait_for(lambda: select.select([hub], [], [], 0.1)[0], process, "a connection")
            connection, _ = hub.accept()
            with connection:
                process.terminate()
                assert process.wait(PATIENCE_S) == 0
