"""A swarm of real processes on real sockets: a training process with its hub, and workers that join it by its URL.

`tests/fork_server.py` forks the processes. Apart from that, they behave like `baton train --serve` and `baton worker`,
including signals and exit codes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
import tomli_w

from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.swarm.auth import Role, TokenFile, write_private
from baton.swarm.hub.status import HubStatus, WorkerStatus
from baton.swarm.temporary_directories import TemporaryDirectories
from baton.types import plain
from tests.fork_server import run_cli, start_process, stop_process

DEADLINE_S = 120.0
"""For anything that is waited for: only a failure takes so long."""
T = TypeVar("T")


def await_(what: str, found: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """Wait until something is there, and return it. Raises AssertionError naming it."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        value = found()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not in {deadline_s:.0f} s")


def scratch_model_at(path: Path) -> Path:
    """Write a random two-layer model."""
    from baton.policy.new_model import scratch_model, scratch_tokenizer
    from baton.policy.settings import ScratchSettings

    tokenizer = scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def recipe_tree(model: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    """Six steps of 32 trajectories on 16 slots a worker, reported in small pieces.

    changes: section__key = value, or section = list.
    """
    tree: dict[str, Any] = {
        "run": {"name": "r", "directory": str(directory), "steps": 6, "threads": 1, "seed": 3},
        "model": {"path": str(model), "device": "cpu"},
        "task": [{"name": "chain_sum", "form": "compact", "params": {"max_terms": 3, "max_digits": 1}}],
        "answer": {"format": "last_line", "instruct": False},
        "reward": [{"kind": "function", "function": "tests.small_reward:evenness", "isolate": False}],
        "rollout": {"batch_groups": 8, "group_size": 4, "max_new_tokens": 24},
        "engine": {"slots": 16, "max_context_tokens": 64, "report_every_tokens": 4},
        "trainer": {"lr": 1e-3},
        "eval": {"every": 100, "num_prompts": 2, "greedy": False},
        "checkpoint": {"every": 2},
        "swarm": {"heartbeat_timeout_s": 5.0, "report_every_s": 0.1, "token_file": str(directory / "tokens.json")},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree.get(section, {}), name: value} if name else value
    return tree


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """One process and what it says."""

    process: Any
    log: Path
    name: str

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self.process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return bool(self.process.is_alive())

    def said(self) -> str:
        """All its output."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def await_said(self, text: str, deadline_s: float = DEADLINE_S) -> str:
        """Wait until its output matches, and return the match's first group or the match."""
        try:
            found = await_(f"{self.name} to say {text!r}", lambda: re.search(text, self.said()), deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said()[-3000:]}") from None
        return found[found.re.groups and 1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and see it gone."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        stop_process(self.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end and return its exit code. Raises AssertionError with its last words."""
        self.process.join(deadline_s)
        assert not self.is_alive, f"{self.name} has not ended in {deadline_s:.0f} s; it said:\n{self.said()[-3000:]}"
        return int(self.process.exitcode)

    def open_files(self) -> int:
        """Number of its file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - not a directory of files

    def resident_bytes(self) -> int:
        """Memory that is its own; pages shared with others do not count."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", text)[1])  # type: ignore[index]


@dataclass(slots=True)
class WorkerFaults:
    """What is wrong with a worker's machine."""

    is_elsewhere: bool = True
    """It does not see the hub's shared memory, so that weights cross the network."""
    token_delay_s: float = 0.0
    """Its engine takes so much longer for every token."""

    def apply(self) -> None:
        """In the worker's process."""
        from baton.rollout.engines.embedded.engine import EmbeddedEngine
        from baton.weights.version_files import VersionFiles

        if self.is_elsewhere:
            VersionFiles.read = lambda self, version: None  # type: ignore[method-assign]
        if self.token_delay_s:
            step, delay_s = EmbeddedEngine.step, self.token_delay_s

            def slow(self: EmbeddedEngine) -> Any:
                time.sleep(delay_s)
                return step(self)

            EmbeddedEngine.step = slow  # type: ignore[method-assign]


class Inside(Protocol):
    """Changes a child process before it is `baton`."""

    def apply(self) -> None: ...


def _as_command(arguments: list[str], log: str, faults: Inside | None, namespace: str) -> None:
    """In the child: run the `baton` command with these arguments."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if namespace:
        _enter(namespace)
    if faults is not None:
        faults.apply()
    run_cli(arguments, file, file)


def _enter(namespace: str) -> None:
    """What `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Swarm:
    """One run: its training process, which may be several one after another, and its workers."""

    directory: Path
    recipe: Path
    trainer: Child | None = None
    host: str = "127.0.0.1"
    port: int = 0
    workers: list[Child] = field(default_factory=list)
    _lives: int = 0

    @property
    def run(self) -> RunDirectory:
        """What it writes."""
        return RunDirectory.open(self.directory / "r")

    @property
    def url(self) -> str:
        """Of the hub."""
        return f"http://{self.host}:{self.port}"

    def train(
        self, *overrides: str, resume: bool = False, local_workers: int = 0, faults: Inside | None = None
    ) -> Child:
        """Start the training process, and wait until it listens; again on the same port."""
        self._lives += 1
        arguments = ["train", str(self.recipe), "--serve", f"{self.host}:{self.port}", "--workers", str(local_workers)]
        arguments += [*overrides, *(["--resume"] if resume else [])]
        self.trainer = self._child(f"trainer-{self._lives}", arguments, faults)
        self.port = int(self.trainer.await_said(r"the hub listens at http://[0-9.]+:(\d+)"))
        return self.trainer

    def engine_beside_trainer(self, *, resume: bool = False, faults: Inside | None = None) -> Child:
        """Start the training process without a hub: what a swarm is compared with."""
        self._lives += 1
        arguments = ["train", str(self.recipe), *(["--resume"] if resume else [])]
        self.trainer = self._child(f"trainer-{self._lives}", arguments, faults)
        return self.trainer

    def worker(self, *arguments: str, url: str = "", faults: Inside | None = None, namespace: str = "") -> Child:
        """Start a worker; url: through a proxy; namespace: of the network."""
        name = f"worker-{len(self.workers)}"
        command = ["worker", url or self.url, "--token-file", str(self.directory / "worker.token"), "--device", "cpu"]
        child = self._child(name, [*command, *arguments], faults or WorkerFaults(), namespace)
        self.workers.append(child)
        return child

    def joined(self, *arguments: str, url: str = "", faults: Inside | None = None) -> Child:
        """Start a worker and wait until the hub has given it the next number."""
        assert self.trainer is not None
        number = self.trainer.said().count(" joined: ")
        child = self.worker(*arguments, url=url, faults=faults)
        self.trainer.await_said(f"#{number} joined: ")
        return child

    def status(self) -> HubStatus | None:
        """What the hub shows; None where it does not answer."""
        token = (self.directory / "admin.token").read_text()
        request = urllib.request.Request(f"{self.url}/status", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=10.0) as response:
                return msgspec.json.decode(response.read(), type=HubStatus)
        except OSError:
            return None

    def await_status(self, what: str, holds: Callable[[HubStatus], Any], deadline_s: float = DEADLINE_S) -> HubStatus:
        """Wait until the hub shows something."""

        def look() -> HubStatus | None:
            assert self.trainer is not None
            assert self.trainer.is_alive, f"the run ended while it was waited for {what}: {self.trainer.said()[-2000:]}"
            status = self.status()
            return status if status is not None and holds(status) else None

        try:
            return await_(what, look, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the hub shows {self.status()}") from None

    def await_step(self, step: int) -> None:
        """Wait until a train step is recorded."""
        await_(f"step {step}", lambda: (self.directory / f"r/trajectories/step_{step:06d}.jsonl.gz").exists())

    def caught_at_work(self, child: Child, number: int) -> None:
        """Stop a worker (SIGSTOP) while it holds leases, of which nothing can be heard from then on."""

        def caught() -> bool:
            if not _leases(self.status(), number):
                return False
            child.stop()
            time.sleep(0.2)  # what it has sent is heard
            if _leases(self.status(), number):
                return True
            child.go_on()
            return False

        await_(f"{child.name} to be caught at work", caught)

    def finish(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait for the run's end, which must be a good one."""
        assert self.trainer is not None
        code = self.trainer.end(deadline_s)
        assert code == 0, self.trainer.said()[-3000:]

    def _child(self, name: str, arguments: list[str], faults: Inside | None, namespace: str = "") -> Child:
        log = self.directory / f"{name}.log"
        process = start_process(_as_command, arguments, str(log), faults, namespace, name=name)
        return Child(process, log, name)


def _leases(status: HubStatus | None, number: int) -> int:
    found = worker_of(status, number)
    return 0 if found is None else found.leases


def worker_of(status: HubStatus | None, number: int) -> WorkerStatus | None:
    """A worker by the number that the hub gave it."""
    workers = () if status is None else status.workers
    return next((worker for worker in workers if worker.name.endswith(f"#{number}")), None)


@contextmanager
def swarm(directory: Path, model: Path, **changes: Any) -> Iterator[Swarm]:
    """A run that can be started, with its tokens; every process of it ends here."""
    directory.mkdir(parents=True, exist_ok=True)
    recipe = directory / "recipe.toml"
    recipe.write_text(tomli_w.dumps(recipe_tree(model, directory, **changes)))
    tokens = TokenFile(directory / "tokens.json")
    for role in (Role.WORKER, Role.ADMIN):
        write_private(directory / f"{role}.token", tokens.create(role, 86400, name=str(role)).encode())
    found = Swarm(directory, recipe)
    try:
        yield found
    finally:
        for child in [*found.workers, *([found.trainer] if found.trainer else [])]:
            child.kill()
        if (directory / "r").is_dir():
            TemporaryDirectories(directory / "r/scratch.txt").close()  # as its next process would have done


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model on disk."""
    return scratch_model_at(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that nothing happens to, with its engine in the trainer's process."""
    with swarm(tmp_path_factory.mktemp("unbroken"), model) as run:
        run.engine_beside_trainer()
        run.finish()
        return outcome(run.run)


# ---- outcomes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run made, for comparison to the bit."""

    weights: Mapping[str, Any]
    groups: list[Any]
    rewards: list[float]
    lost_tokens: int


def outcome(run: RunDirectory) -> Outcome:
    """Read a finished run."""
    from safetensors.torch import load_file

    from baton.trainer.checkpoint import list_checkpoints

    last = list_checkpoints(run.checkpoints)[-1]
    groups = [msgspec.to_builtins(run.groups(step), enc_hook=plain) for step in run.recorded_steps()]
    for member in (member for step in groups for group in step for member in group["members"]):
        for exchange in member.get("episode", {}).get("exchanges", ()):
            del exchange["seconds"]  # of an environment, which differ
    rows = [row for row in read_metrics(run.path) if "reward/mean" in row]
    lost = sum(int(row.get("tokens/lost", 0)) for row in rows)
    return Outcome(load_file(last / "model.safetensors"), groups, [row["reward/mean"] for row in rows], lost)


def assert_same(one: Outcome, other: Outcome) -> None:
    """Weights, trajectories and rewards are equal to the bit."""
    import torch

    assert json.dumps(one.groups) == json.dumps(other.groups)
    assert one.rewards == other.rewards
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
