"""Slots of an engine that are in use while environments work, on the live scheduler, controller and episode player.

The engine generates one scripted token per slot and step, and a step takes a fixed time. Time is virtual, or real: then
a step waits for its time, and the environments are those of real processes. The lengths of turns, the number of turns
and the latency of each call are functions of (seed, group, sample, turn), so runs with slow environments, with fast
ones, in virtual time and in real time have the same episodes.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import msgspec

from baton.environments.calls import ActRequest, EpisodeKey, Observation
from baton.records.journal import Journal, StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.episodes import EnvironmentClient, EnvironmentInbox, EpisodePlayer, EpisodeRules, EpisodeSetup
from baton.rollout.scheduler_state import TrajectoryState
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.simulator.clock import VirtualClock
from baton.types import FromWorker, Message, PolicyVersion, Prompt, SamplingParams, ScoredTrajectory

GROUP_SIZE = 8
SIGMA = 1.43
"""Of the log-normal latency: with a mean of 2 s, one call in a thousand takes more than 60 s."""


@dataclass(frozen=True)
class Load:
    """What is generated, and how long everything takes."""

    latency: str = "lognormal"
    """Of a call of an environment: `lognormal`, `constant` or `none`."""
    latency_s: float = 2.0
    """Mean latency."""
    open_per_slot: int = 4
    """Episodes that may be open at any time, divided by slots: in `async`, `max_staleness` batches beside the one that
    is trained."""
    slots: int = 64
    step_s: float = 0.05
    turn_tokens: int = 32
    """Mean length of a turn; lengths are uniform between a quarter and seven quarters of it."""
    max_turns: int = 8
    """An episode has 1 to 8 turns, each number as often."""
    train_s: float = 4.0
    """A batch takes longer to generate, so the trainer waits for batches."""
    load_s: float = 0.2
    max_concurrent: float = math.inf
    """Calls that run at once. Real processes have their own."""
    seed: int = 0

    @property
    def batch_groups(self) -> int:
        return self.slots // GROUP_SIZE

    def turn_length(self, group_id: int, sample_index: int) -> int:
        return random.Random(f"length {self.seed} {group_id} {sample_index}").randint(
            self.turn_tokens // 4, self.turn_tokens * 7 // 4
        )

    def num_turns(self, group_id: int, sample_index: int) -> int:
        return random.Random(f"turns {self.seed} {group_id} {sample_index}").randint(1, self.max_turns)

    def latency_of(self, group_id: int, sample_index: int, turn: int) -> float:
        draw = random.Random(f"latency {self.seed} {group_id} {sample_index} {turn}")
        if self.latency == "lognormal":
            return self.latency_s * math.exp(draw.gauss(-(SIGMA**2) / 2, SIGMA))
        return self.latency_s if self.latency == "constant" else 0.0


class Time(Protocol):
    """Virtual or real time."""

    @property
    def now_s(self) -> float: ...

    def wait(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a time, or until `is_over`."""


class VirtualTime:
    """The clock of the simulator, which a wait advances."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def wait(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        if until_s > self.now_s:
            self.clock.at(until_s, lambda: None)
        while self.now_s < until_s and not is_over():
            self.clock.fire()


class RealTime:
    @property
    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        time.sleep(max(0.0, until_s - self.now_s))


class VirtualEnvironments:
    """Answers each call after its latency. Calls beyond `max_concurrent` wait; the first that came is the first
    served."""

    sockets = ()

    def __init__(self, load: Load, virtual: VirtualTime) -> None:
        self._load, self._virtual = load, virtual
        self._waiting: deque[tuple[ActRequest, float]] = deque()
        self._done: list[Observation] = []
        self.num_running = 0
        self.queue_s: list[float] = []

    def submit(self, request: ActRequest) -> None:
        self._waiting.append((request, self._virtual.now_s))
        self._start()

    def collect(self, timeout_s: float) -> Sequence[Observation]:
        self._virtual.wait(self._virtual.now_s + timeout_s, lambda: bool(self._done))
        found, self._done = self._done, []
        return found

    def discard(self, key: EpisodeKey) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    def _start(self) -> None:
        while self._waiting and self.num_running < self._load.max_concurrent:
            request, since_s = self._waiting.popleft()
            self.queue_s.append(self._virtual.now_s - since_s)
            self.num_running += 1
            key, turn = request.key, len(request.log) + 1
            seconds = self._load.latency_of(key.group_id, key.sample_index, turn)
            self._virtual.clock.after(seconds, self._answer, request, turn, seconds)

    def _answer(self, request: ActRequest, turn: int, seconds: float) -> None:
        key = request.key
        is_over = turn >= self._load.num_turns(key.group_id, key.sample_index)
        self._done.append(Observation(key, turn, f"turn {turn}", 1.0, is_over, False, f"{turn}", seconds))
        self.num_running -= 1
        self._start()


class SleepingEnvironment:
    """The same calls in an environment process, where they really take their time."""

    def __init__(self, **load: Any) -> None:
        self._load, self._turn = Load(**load), 0

    def reset(self, *, seed: int, group_id: int, sample_index: int) -> str:
        self._key = (group_id, sample_index)
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        time.sleep(self._load.latency_of(*self._key, self._turn))
        return f"turn {self._turn}", 1.0, self._turn >= self._load.num_turns(*self._key), False, {}


class NamedEpisodes:
    """A client that tells each environment its group and sample, on which its latencies depend."""

    def __init__(self, client: EnvironmentClient) -> None:
        self._client = client
        self.collect, self.discard = client.collect, client.discard
        self.metrics, self.close = client.metrics, client.close

    @property
    def sockets(self) -> Any:
        return self._client.sockets

    def submit(self, request: ActRequest) -> None:
        row = {"group_id": request.key.group_id, "sample_index": request.key.sample_index}
        self._client.submit(msgspec.structs.replace(request, row=row))


class PlainBridge:
    """Encodes an observation as one token per word."""

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def role(self, tool: str | None) -> str:
        return "user"

    def cut(self, observation: str, max_tokens: int) -> str:
        return observation

    def begins_path(self, turns: Iterable[str], role: str) -> bool:
        return False

    def suffix(self, turn_ids: Sequence[int], observation: Message) -> tuple[int, ...]:
        return (900, *[901 for _ in observation.content.split()])


class Prompts:
    def __init__(self) -> None:
        self.position = {"sleep": 0}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        seed = self.position["sleep"]
        self.position["sleep"] += 1
        metadata = {"environment": "sleep", "seed": seed, "row": {}}
        return Prompt(str(seed), "sleep", (Message("user", str(seed)),), metadata=metadata), (7, 100 + seed % 100)


class NoScorer:
    sees_groups = scores_episodes = False

    def submit(self, *args: Any) -> None:
        raise AssertionError("environments give the reward")

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        return []


class PacedTransport(LocalTransport):
    """An engine whose steps take `step_s`. A step begins at the end of the last one, if its leases come in time."""

    def __init__(self, load: Load, clock: Time) -> None:
        settings = EngineSettings(slots=load.slots, max_context_tokens=1024)
        super().__init__(FakeEngine(settings, PolicyVersion("a", 0), cache(load.turn_length)))
        self._load, self._clock = load, clock
        self._due_s = clock.now_s
        self.steps: list[tuple[float, int]] = []
        """(time, tokens generated so far) at the end of each step."""
        self.on_step: Callable[[], None] = lambda: None

    def receive(self, timeout_s: float) -> Sequence[FromWorker]:
        now_s, step_s = self._clock.now_s, self._load.step_s
        self._due_s = (self._due_s if now_s - self._due_s < step_s else now_s) + step_s
        self._clock.wait(self._due_s)
        found = super().receive(timeout_s)
        self.steps.append((self._clock.now_s, self.engine.stats.decoded_tokens))
        self.on_step()
        return found

    def load_weights(self, tensors: Any, version: PolicyVersion) -> None:
        self._clock.wait(self._clock.now_s + self._load.load_s)
        super().load_weights(tensors, version)

    def occupancy(self, begin_s: float, end_s: float) -> float:
        """Return busy slot-seconds / slot-seconds of an interval. A slot is busy for `step_s` per token: time in which
        the engine waits for the controller counts as empty."""
        begin = max((step for step in self.steps if step[0] <= begin_s), default=(begin_s, 0))
        end = max(step for step in self.steps if step[0] <= end_s)
        busy_s = (end[1] - begin[1]) * self._load.step_s
        return busy_s / (self._load.slots * (end_s - begin_s))


class OccupancyRun:
    """A run in mode `async` whose trainer takes time and trains nothing."""

    def __init__(
        self,
        load: Load,
        clock: Time,
        client: EnvironmentClient,
        *,
        bridge: Any = None,
        journal: Journal | None = None,
    ) -> None:
        self.load, self.clock, self._journal = load, clock, journal
        recipe = RolloutSettings(
            mode="async", batch_groups=load.batch_groups, group_size=GROUP_SIZE, max_staleness=load.open_per_slot
        )
        rules = EpisodeRules(load.max_turns, 2 * load.turn_tokens, 32)
        setup = EpisodeSetup(EnvironmentInbox(client), bridge or PlainBridge(), {"sleep": rules}, 1024)
        sampling = SeededSampling(SamplingParams(2 * load.turn_tokens * load.max_turns), 1)
        self.transport = PacedTransport(load, clock)
        self.transport.on_step = self._sample
        worker = WorkerClient(self.transport, max_context_tokens=1024)
        self.controller = RolloutController(
            worker, recipe.rules(), Prompts(), NoScorer(), sampling, journal, EpisodePlayer(setup, sampling)
        )
        self.version = 0
        self.samples: list[tuple[float, int, int]] = []
        """(time, unfinished episodes, those whose environment works), once a second."""
        self.waited_for_batch_s = 0.0

    def run(self, seconds: float) -> None:
        """Train for a time, from the first lease on."""
        end_s = self.clock.now_s + seconds
        self.controller.begin(0, StreamCursor(0, {}))
        self._publish()
        while self.clock.now_s < end_s:
            asked_s = self.clock.now_s
            groups = self.controller.next_batch()
            self.waited_for_batch_s += self.clock.now_s - asked_s
            if self._journal is not None:
                self._journal.consumed(self.version + 1, [group.group_id for group in groups])
            trained_s = self.clock.now_s + self.load.train_s
            self.controller.run_until(lambda timeout_s, trained_s=trained_s: self._is_trained(trained_s, timeout_s))
            self.version += 1
            self._publish()

    def _publish(self) -> None:
        self.controller.publish({}, PolicyVersion("a", self.version))

    def _is_trained(self, trained_s: float, timeout_s: float) -> bool:
        self.clock.wait(min(trained_s, self.clock.now_s + timeout_s))
        return self.clock.now_s >= trained_s

    def _sample(self) -> None:
        now_s = self.clock.now_s
        if not self.samples or now_s - self.samples[-1][0] >= 1.0:
            states = Counter(member.state for group in self.controller.scheduler.groups() for member in group.members)
            unfinished = sum(states[state] for state in UNFINISHED)
            self.samples.append((now_s, unfinished, states[TrajectoryState.ACTING]))


UNFINISHED = (TrajectoryState.PENDING, TrajectoryState.LEASED, TrajectoryState.ACTING)


def simulate(load: Load, seconds: float) -> tuple[OccupancyRun, VirtualEnvironments]:
    """Run in virtual time."""
    virtual = VirtualTime()
    environments = VirtualEnvironments(load, virtual)
    run = OccupancyRun(load, virtual, environments)
    run.run(seconds)
    return run, environments
