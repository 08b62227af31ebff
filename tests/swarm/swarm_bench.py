"""A swarm in one process: a real hub on a free port, workers with scripted engines, wires that can be cut, a trainer.

    RolloutController ─▶ SwarmTransport ─▶ Hub ═ HTTP, WebSocket ═ Wire ═ SwarmWorker ─▶ ScriptedEngine

All but the tokens is real: the connections, the messages, the weights that are published, fetched and verified. A
token is a pure function of (group, sample, position, version), so every trajectory that is trained can be checked.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import torch

import baton.swarm.hub.hub
import baton.swarm.worker.session
from baton.policy.tensors import weights_digest
from baton.records.journal import StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import END_ID, FakeEngine, fake_token
from baton.rollout.settings import RolloutSettings
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import Authenticator, Role, TokenFile, digest_of
from baton.swarm.background_publisher import BackgroundPublisher, VersionRetention
from baton.swarm.hub.access import AccessControl
from baton.swarm.hub.http_routes import HttpRoutes
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.overview import hub_status
from baton.swarm.identity import WorkerKeys
from baton.swarm.lease_broker import LeaseBroker
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.swarm.listen import ListenAddress
from baton.swarm.messages import PROTOCOL, Hello, Welcome
from baton.swarm.provisioning import TrainingProgress
from baton.swarm.supervisor import WorkerSupervisor
from baton.swarm.temporary_directories import TemporaryDirectories
from baton.swarm.transfer import model_digest
from baton.swarm.transport import SwarmTransport
from baton.swarm.verification.checks import ReportLimits, check_report
from baton.swarm.verification.policy import InspectionSettings, QuarantineRecord, SegmentAuthor, VerificationPolicy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.service import VerificationService
from baton.swarm.verification.verify import Calibration, WorkerClass
from baton.swarm.worker.worker import SwarmWorker, WorkerOptions
from baton.types import (
    FinishReason,
    FromPort,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
)
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store

MAX_NEW_TOKENS = 24
CONTEXT = 64
LINEAGE = "bench"
MODEL = msgspec.msgpack.encode({"config.json": b"{}"})
SETTINGS = EngineSettings(slots=8, max_context_tokens=CONTEXT, report_every_tokens=5, dtype="float32")
LIMITS = ReportLimits(vocabulary=100, max_context_tokens=CONTEXT, end_ids=(END_ID,))
PATIENCE_S = 60.0
"""No wait of a test is longer, however busy the machine is."""


def length(group_id: int, sample_index: int) -> int:
    """Mostly short, some long, some longer than the budget."""
    return 1 + min(40, int(random.Random(f"{group_id}/{sample_index}").expovariate(1 / 9)))


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    """A version's weights, which tell its number."""
    return {"model.weight": torch.full((64,), float(number)), "model.bias": torch.arange(8.0) + number}


def version_of(number: int) -> PolicyVersion:
    """A version's identity."""
    return PolicyVersion(LINEAGE, number, weights_digest(tensors_of(number)))


def assert_whole(trajectory: Trajectory) -> None:
    """Ids, logprobs, versions, budget and ending are those of the script, whatever it went through."""
    wanted = length(trajectory.group_id, trajectory.sample_index)
    assert trajectory.num_tokens == min(wanted, MAX_NEW_TOKENS), "the budget counts over all resumes"
    versions = trajectory.policy_versions
    assert versions == sorted(versions)
    assert trajectory.finish_reason is (FinishReason.STOP if wanted <= MAX_NEW_TOKENS else FinishReason.LENGTH)
    ids = [
        fake_token(trajectory.group_id, trajectory.sample_index, place, version, length=wanted)
        for place, version in enumerate(versions)
    ]
    assert trajectory.token_ids == ids
    assert trajectory.behavior_logprobs == [-(1 + token % 8) / 8 for token in ids]
    assert trajectory.token_ids.count(END_ID) == (wanted <= MAX_NEW_TOKENS)


def wait_until(is_so: Callable[[], Any], what: str) -> None:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"waited {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.005)


class Prompts:
    """A stream of numbered prompts."""

    def __init__(self) -> None:
        self.position = {"numbers": 0}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        number = self.position["numbers"]
        self.position["numbers"] += 1
        return Prompt(str(number), "numbers", (Message("user", str(number)),)), (7, 1000 + number)


class Judges:
    """Judges at once, and counts."""

    sees_groups = False

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._waiting: list[Trajectory] = []

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        for trajectory in trajectories:
            self.asked[trajectory.name] += 1
            self._waiting.append(trajectory)

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        ready, self._waiting = self._waiting, []
        return [ScoredTrajectory(t, RewardResult(float(t.sample_index), {}, False)) for t in ready]


class ScriptedEngine(FakeEngine):
    """Takes its time over a token, and looks at the weights it is given."""

    def __init__(self, welcome: Welcome, token_s: float) -> None:
        super().__init__(welcome.engine_settings(), PolicyVersion("none", 0), length)
        self.token_s = token_s
        self.fails = False
        self.served: list[PolicyVersion] = []

    def step(self) -> list[Any]:
        if self.fails:
            raise RuntimeError("out of memory")
        time.sleep(self.token_s)
        return super().step()

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        wanted = tensors_of(version.number)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted), "never anything but what was verified"
        self.served.append(version)
        super().load_weights(tensors, version)


class Wire:
    """The network between one worker and the hub: it can be late, and cut."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection; new ones can be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Break every connection, and wait for its end."""
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        for one in (writer, far_writer):
            self._writers.discard(one)
            one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class BenchWorker:
    """One worker, in the event loop that all workers share; its engine has a thread of its own."""

    def __init__(self, bench: SwarmBench, token: str, token_s: float, kind: str = "fake") -> None:
        """kind: of its engine, as it says."""
        self._kind = kind
        self.wire = Wire(bench.port_number)
        self.engines: list[ScriptedEngine] = []
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.is_over = False
        self._bench, self._token, self._token_s = bench, token, token_s
        self._loop = bench.workers_loop
        self._future = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        url = await self.wire.open()
        options = WorkerOptions(url, self._token, engine=self._kind, say=self.said.append)
        self.worker = SwarmWorker(options, self.make_engine)
        self._task = asyncio.create_task(self.worker.run())
        try:
            await self._task
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # shown to the test
            self.error = error
        finally:
            await self.wire.close()
            self.is_over = True

    def make_engine(self, welcome: Welcome, directory: Path, base: Mapping[str, Any] | None) -> ScriptedEngine:
        assert (directory / "config.json").read_bytes() == b"{}"
        self.engines.append(ScriptedEngine(welcome, self._token_s))
        return self.engines[-1]

    @property
    def is_ready(self) -> bool:
        """Whether it has its place at the hub, or has come to an end."""
        if self.is_over or not hasattr(self, "worker"):
            return self.is_over
        own = self._bench.access.keys.worker(digest_of(self._token), self.worker.session.key)
        return own in {peer.worker for peer in list(self._bench.hub.members.peers.values())}

    @property
    def engine(self) -> ScriptedEngine:
        wait_until(lambda: self.engines, "an engine")
        return self.engines[-1]

    def cut(self) -> None:
        """Break its connections; it comes again."""
        self._loop.call_soon_threadsafe(self.wire.cut)

    def kill(self) -> None:
        """It is gone without a word."""
        self.cut()
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        wait_until(lambda: self.is_over, "a killed worker")

    def leave(self) -> None:
        """It goes on purpose."""
        self._loop.call_soon_threadsafe(lambda: self.worker.leave())
        wait_until(lambda: self.is_over, "a worker that leaves")


class TolerantExaminer(VerificationService):
    """Scores nothing, and notes whom the hub would quarantine."""

    def __init__(self, quarantine: Path) -> None:
        verification_policy = VerificationPolicy(InspectionSettings(), b"secret")
        super().__init__(
            self.make_scorer, verification_policy, Calibration(), Quarantine(quarantine), keep_versions=0, noise_seed=1
        )
        self.accused: list[tuple[SegmentAuthor, str]] = []
        """(worker, sentence) of reports that could not come from a correct worker."""
        self.malformed: list[tuple[SegmentAuthor, str]] = []
        """… and of what was no message."""

    def make_scorer(self) -> Any:
        raise AssertionError("nothing is scored here")

    def violated(self, author: SegmentAuthor, sentence: str, name: str) -> QuarantineRecord | None:
        kept = self.malformed if sentence.startswith("malformed: ") else self.accused
        kept.append((author, sentence))
        return None


class Inbox(SimpleQueue[FromPort]):
    """What the controller receives, and has received."""

    def __init__(self) -> None:
        self.all: list[FromPort] = []

    def put(self, message: FromPort, block: bool = True, timeout: float | None = None) -> None:
        self.all.append(message)
        super().put(message, block, timeout)


class SwarmBench:
    """Hub, port, runner, workers, and the trainer's side of the conversation."""

    def __init__(
        self,
        directory: Path,
        mode: str = "async",
        *,
        publish_every: int = 1,
        max_lag: int | None = None,
        stall_timeout_s: float = PATIENCE_S,
        no_worker_timeout_s: float = 0.0,
        lease_rules: Mapping[str, Any] | None = None,
        worker_supervisor: WorkerSupervisor | None = None,
        listen: ListenAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
        **values: Any,
    ) -> None:
        recipe = RolloutSettings.model_validate({"mode": mode, "batch_groups": 3, "group_size": 3, **values})
        self.rules = recipe.rules()
        if mode == "async":
            self.rules = replace(self.rules, is_swarm=True, max_lag=publish_every if max_lag is None else max_lag)
        self.directory, self.publish_every = directory, publish_every
        table = {
            "heartbeat_timeout_s": 1.0,
            "progress_timeout_s": 10.0,
            "backup_lease_factor": 0.0,
            **(lease_rules or {}),
        }
        check = partial(check_report, limits=LIMITS, text=str)
        self.broker = LeaseBroker(LeaseTable(LeaseRules(restarts=mode == "sync", **table)), check, time.monotonic)
        self.verifier = TolerantExaminer(directory / "quarantine.jsonl")
        self.tokens = TokenFile(directory / "tokens.json")
        self.worker_token = self.tokens.create(Role.WORKER, 3600, name="workers", trusted=True)
        self.admin_token = self.tokens.create(Role.ADMIN, 3600, name="admin")
        self.store = Store(directory / "weights")
        self.said: list[str] = []
        welcome = Welcome(
            PROTOCOL, "bench", f"hub-{id(self)}", model_digest(MODEL), False, None, "eager", SETTINGS.model_dump(),
            self.rules.on_new_version, relay_secret="secret", heartbeat_s=0.1, report_every_s=0.02,
        )  # fmt: skip
        authenticators = (Authenticator(self.tokens.path, is_own=worker_supervisor is not None),)
        self.access = AccessControl(
            HubListener(listen or ListenAddress.parse("127.0.0.1:0")), authenticators,
            AuditLog(directory / "audit.jsonl"), self.verifier.quarantine, WorkerKeys(b"secret"),
        )  # fmt: skip
        weight = () if worker_supervisor is None else (worker_supervisor.weight,)
        members = Membership(self.access, welcome, self.broker, self.verifier, self.said.append, *weight)
        self.hub = Hub(self.access, members)
        self.told = members.inbox = Inbox()
        retention = VersionRetention(fetchable=self.rules.max_staleness // publish_every + 2, stored=3)
        publication = BackgroundPublisher(self.hub, Publisher(self.store, WeightsSettings()), self.store, retention)
        progress = TrainingProgress(publish_every, trajectories_per_step=9)
        status = partial(hub_status, self.hub, publication, progress, LINEAGE)
        before = set(threading.enumerate())
        self.port_number = self.hub.start(HttpRoutes(self.hub, self.store, MODEL, status).routes())
        new = set(threading.enumerate()) - before
        (self._hub_thread,) = [thread for thread in new if thread.name == "hub"]
        self.url = self.hub.listen.url(self.port_number)
        scratch = TemporaryDirectories(directory / "scratch.txt")
        self.port = SwarmTransport(
            self.hub,
            publication,
            progress,
            [] if worker_supervisor is None else [worker_supervisor],
            scratch,
            no_worker_timeout_s,
        )
        self.judges, self.source = Judges(), Prompts()
        worker = WorkerClient(self.port, stall_timeout_s, max_context_tokens=CONTEXT, clock=clock)
        sampling = SeededSampling(SamplingParams(MAX_NEW_TOKENS), noise_seed=1)
        self.controller = RolloutController(worker, self.rules, self.source, self.judges, sampling)
        self.version = 0
        self.batches: list[list[Group]] = []
        self.workers: list[BenchWorker] = []
        self.workers_loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.workers_loop.run_forever, name="workers", daemon=True)
        self._thread.start()

    @property
    def convicted(self) -> list[tuple[SegmentAuthor, str]]:
        """Workers with a report that could not come from a correct one."""
        return self.verifier.accused

    # ---- workers -----------------------------------------------------------------------------------------------------

    def join(
        self,
        count: int = 1,
        *,
        token: str | None = None,
        token_s: float = 0.001,
        is_waited_for: bool = True,
        kind: str = "fake",
    ) -> list[BenchWorker]:
        """Start workers; they join when they are ready."""
        new = [BenchWorker(self, token or self.worker_token, token_s, kind) for _ in range(count)]
        self.workers += new
        if is_waited_for:
            wait_until(lambda: all(worker.is_ready for worker in new), "workers to join")
        return new

    def in_hub(self, look: Callable[[], Any]) -> Any:
        """Return what something is, as seen from the hub's thread."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self.hub.call(lambda: answer.put(look()))
        return answer.get(timeout=PATIENCE_S)

    # ---- the trainer -------------------------------------------------------------------------------------------------

    def begin(self, *, num_batches: float = 1e9) -> None:
        self.controller.begin(0, StreamCursor(0, {}), num_batches=num_batches)
        self.publish()

    def publish(self) -> None:
        self.controller.publish(tensors_of(self.version), version_of(self.version))

    def step(self, train_s: float = 0.01) -> list[Group]:
        """One train step."""
        groups = self.controller.next_batch()
        self.batches.append(groups)
        end_s = time.monotonic() + train_s

        def is_over(timeout_s: float) -> bool:
            time.sleep(max(0.0, min(timeout_s, end_s - time.monotonic())))
            return time.monotonic() >= end_s

        self.controller.run_until(is_over)
        self.version += 1
        if self.version % self.publish_every:
            self.controller.version_trained(self.version)
        else:
            self.publish()
        return groups

    def staleness(self) -> list[int]:
        """Of each token in a batch."""
        return [
            step - version
            for step, batch in enumerate(self.batches)
            for group in batch
            for member in group.members
            for version in member.trajectory.policy_versions
        ]

    def assert_sound(self) -> None:
        """What holds whatever happened: every trajectory whole, no group twice, no token unaccounted for."""
        trained = [group for batch in self.batches for group in batch]
        for group in trained:
            for member in group.members:
                assert_whole(member.trajectory)
        assert len({group.group_id for group in trained}) == len(trained)
        assert len({group.prompt.prompt_id for group in trained}) == len(trained)
        scheduler = self.controller.scheduler
        ledger = scheduler.ledger
        assert ledger.generated == ledger.settled + scheduler.num_carried_tokens
        tokens = sum(member.trajectory.num_tokens for group in trained for member in group.members)
        assert ledger.trained + ledger.masked == tokens
        assert not self.convicted, "an honest worker was accused"
        engines = [engine for worker in self.workers for engine in worker.engines]
        assert all(v.lineage == LINEAGE and v.digest for engine in engines for v in engine.served)
        for engine in engines:
            numbers = [version.number for version in engine.served]
            assert numbers == sorted(set(numbers)), "never back"

    def wait_for_said(self, text: str) -> None:
        """Wait for a line of the hub: a worker may be over before the hub has read its last message."""
        wait_until(lambda: any(text in line for line in self.said), f"the hub to say {text!r}")

    def close(self) -> None:
        for worker in self.workers:
            if not worker.is_over:
                worker.kill()
        self.port.close()
        self.port.close()
        self.workers_loop.call_soon_threadsafe(self.workers_loop.stop)
        self._thread.join(60.0)
        assert not self._hub_thread.is_alive(), "the hub's thread has ended"


@contextmanager
def quick() -> Iterator[None]:
    """Let hub and workers be impatient, so that a test need not wait for them."""
    known = baton.swarm.hub.hub.TICK_S, baton.swarm.worker.session.LONGEST_WAIT_S
    baton.swarm.hub.hub.TICK_S, baton.swarm.worker.session.LONGEST_WAIT_S = 0.05, 0.1
    try:
        yield
    finally:
        baton.swarm.hub.hub.TICK_S, baton.swarm.worker.session.LONGEST_WAIT_S = known


def hello(key: str = "", *, slots: int = 4, serves: PolicyVersion | None = None, leases: Sequence[int] = ()) -> Hello:
    """What a worker says that is ready."""
    kind = WorkerClass("cpu", "float32", "fake")
    return Hello(key, kind, model_digest(MODEL), slots, serves, tuple(leases))
