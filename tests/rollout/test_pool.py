"""Engine processes behind one port give what one engine gives, and their end is noticed, named and cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.frames import start_child
from baton.policy.load import end_ids, load_model
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.processes.lease_queue import returns_home
from baton.rollout.processes.pool import EnginePool
from baton.rollout.processes.protocol import Start
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.types import Abort, Author, Lease, PolicyVersion, SamplingParams, Segment, Trajectory
from tests.fork_server import stop_process

pytestmark = [pytest.mark.numerics, pytest.mark.slow, pytest.mark.timing]

SETTINGS = EngineSettings(slots=16, max_context_tokens=96)
VERSION = PolicyVersion("test", 0)
REQUESTS = [EvalGroup(group, (5, 6 + group, 7), 5) for group in range(9)]  # 45 trajectories for 2 × 16 slots


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = scratch_tokenizer(["one two three"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def save(tensors: Any, path: Path) -> Path:
    save_file(dict(tensors), path)
    return path


def start(model_path: Path) -> Start:
    return Start(str(model_path), "cpu", "sdpa", SETTINGS.model_dump(), VERSION)


@pytest.fixture
def pool(model_path: Path) -> Iterator[EnginePool]:
    pool = EnginePool(2, start(model_path), save, timeout_s=60)
    yield pool
    pool.close()


def local(model_path: Path) -> LocalTransport:
    model = load_model(str(model_path), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(str(model_path))
    return LocalTransport(EmbeddedEngine(model, tokenizer, SETTINGS, VERSION, end_ids(model, tokenizer)))


def rollout(port: Any, version: int = 0) -> list[Trajectory]:
    found = EvalRollout(WorkerClient(port)).rollout(REQUESTS, SamplingParams(40), noise_seed=1, version=version)
    return sorted(found, key=lambda t: (t.group_id, t.sample_index))


def test_two_processes_give_the_trajectories_of_one_engine_before_and_after_new_weights(
    pool: EnginePool, model_path: Path
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = local(model_path)
        assert rollout(pool) == rollout(one)
        dice = torch.Generator().manual_seed(1)
        model = load_model(str(model_path), dtype=torch.float32, device=torch.device("cpu"))
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=dice)
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"  # tied
        }
        before = rollout(one)
        for port in (pool, one):
            port.load_weights(tensors, PolicyVersion("test", 1))
        after = rollout(pool, version=1)
        assert after == rollout(one, version=1)
        assert [t.token_ids for t in after] != [t.token_ids for t in before]
    finally:
        torch.set_num_threads(threads)
    assert pool.stats().decoded_tokens > 0


def test_a_killed_process_is_noticed_and_named(pool: EnginePool) -> None:
    victim = pool.processes[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(EngineFault, match=rf"engine process 1 \(pid {victim.pid}\) ended with exit code -9"):
        rollout(pool)


def test_a_stopped_process_does_not_block_the_pool_whatever_it_is_sent(pool: EnginePool) -> None:
    """Neither sending to it nor loading a version; the wait for it ends with its name."""
    for process in pool.processes:
        stop_process(process.pid)
    for lease_id in range(64):  # of 1 MB each: more than a socket holds
        trajectory = Trajectory(lease_id, 0, tuple(range(300)) * 1000)
        pool.send(Lease(lease_id, trajectory, SamplingParams(10), noise_seed=1, version=0))
    assert pool.receive(0.1) == []  # hands 16 of them to each process
    assert all(process.socket.num_unsent_bytes for process in pool.processes)
    pool.timeout_s = 1.0
    with pytest.raises(DeadlineExceeded, match="engine process 0, engine process 1 did not serve version 1 in 1 s"):
        pool.load_weights({"x": torch.zeros(1)}, PolicyVersion("test", 1))


def test_a_stopped_process_is_waited_for_only_until_the_stall_timeout(pool: EnginePool) -> None:
    os.kill(pool.processes[1].pid, signal.SIGSTOP)
    found = EvalRollout(WorkerClient(pool, 2.0)).rollout(REQUESTS, SamplingParams(40), noise_seed=1, version=0)
    with pytest.raises(DeadlineExceeded, match="the 2 engine processes has made no progress for 2 s"):
        list(found)


def test_an_abort_reaches_running_and_waiting_leases(pool: EnginePool) -> None:
    for lease_id in range(48):
        trajectory = Trajectory(lease_id, 0, (5, 6, 7))
        pool.send(Lease(lease_id, trajectory, SamplingParams(90, stop_token_ids=()), noise_seed=1, version=0))
    pool.receive(0.0)  # hands over 32, 16 wait
    for lease_id in range(48):
        pool.send(Abort(lease_id))
    ended: set[int] = set()
    while len(ended) < 48:
        for message in pool.receive(10.0):
            if message.finish_reason is not None or message.is_aborted:
                assert message.lease_id not in ended
                ended.add(message.lease_id)


def test_a_waiting_turn_is_handed_over_before_trajectories_that_have_not_begun(pool: EnginePool) -> None:
    def send(lease_id: int, num_tokens: int, segments: tuple[Segment, ...] = ()) -> None:
        trajectory = Trajectory(lease_id, 0, (5, 6, 7), segments)
        pool.send(Lease(lease_id, trajectory, SamplingParams(num_tokens), noise_seed=1, version=0))

    for lease_id in range(34):  # for 32 slots
        send(lease_id, 10 + 2 * lease_id)
    send(34, 20, (Segment((8, 9), (-1.0, -1.0), 0, Author.POLICY),))
    assert not any({32, 33, 34} & process.leases for process in pool.processes)
    held: list[int] = []
    while 32 not in held:
        pool.receive(10.0)
        held += [i for process in pool.processes for i in process.leases if i > 31 and i not in held]
    assert 34 in held


def test_a_further_turn_returns_to_the_process_that_has_kept_its_keys_and_values(pool: EnginePool) -> None:
    """Two prompts of 40 on two processes: 39 tokens each, then those that a turn has added, whatever the order."""
    trajectories = [Trajectory(group, 0, tuple(range(5 + group, 45 + group))) for group in range(2)]
    added = 2 * 39
    for number, order in enumerate(((0, 1), (1, 0), (1, 0), (0, 1))):
        before, num_tokens = pool.stats().prefilled_tokens, sum(t.num_tokens for t in trajectories)
        for group in order:
            sampling = SamplingParams(trajectories[group].num_tokens + 6)
            pool.send(Lease(2 * number + group, trajectories[group], sampling, noise_seed=1, version=0))
        left = {2 * number + group for group in order}
        while left:
            for message in pool.receive(10.0):
                group = message.lease_id % 2
                observed = Segment(tuple(range(60, 69)), (0.0,) * 9, 0, Author.ENVIRONMENT)
                grown = trajectories[group].extended(message.segments)
                if message.finish_reason is not None:
                    left.discard(message.lease_id)
                    grown = grown.extended((observed,))
                trajectories[group] = grown
        assert pool.stats().prefilled_tokens - before == added
        added = sum(t.num_tokens for t in trajectories) - num_tokens


@pytest.mark.parametrize(
    ("num_home", "num_least", "returns"),
    [(0, 0, True), (4, 0, True), (5, 0, False), (15, 11, True), (15, 10, False), (16, 16, False), (16, 15, False)],
)
def test_a_busy_process_does_not_get_its_trajectories_back(num_home: int, num_least: int, returns: bool) -> None:
    """Of 16 slots: at most 4 leases more than the least busy process, and a free slot."""
    assert returns_home(num_home, num_least, 16) == returns


def test_closing_leaves_no_process_and_no_file(model_path: Path) -> None:
    pool = EnginePool(1, start(model_path), save, timeout_s=60)
    pid, directory = pool.processes[0].pid, pool.directory
    assert directory.is_dir()
    pool.close()
    pool.close()
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_parent_leaves_no_process_and_no_file(model_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.rollout import test_pool as t;"
        "pool = t.EnginePool(1, t.start(Path(sys.argv[1])), t.save, timeout_s=60);"
        "print(pool.processes[0].pid, pool.directory, flush=True); import time; time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(model_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        parent.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (Path(directory).exists() or Path(f"/proc/{pid}").exists()):
        time.sleep(0.05)
    assert not Path(directory).exists()
    assert not Path(f"/proc/{pid}").exists()


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.path: there is no directory"):
        EnginePool(1, start(tmp_path / "nothing"), save, timeout_s=60)


def test_a_process_that_cannot_be_started_leaves_none_behind(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start_one(*arguments: Any, **options: Any) -> Any:
        if started:
            raise OSError(12, "Cannot allocate memory")
        started.append(start_child(*arguments, **options))
        return started[0]

    monkeypatch.setattr("baton.rollout.processes.pool.start_child", start_one)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        EnginePool(2, start(model_path), save, timeout_s=60)
    _, process = started[0]
    assert process.returncode is not None, "the process that had started has ended"
