"""Memory and time of the controller per token of long episodes.

    python benchmarks/token_storage/run.py                        # 1,000 episodes of 100,000 tokens
    python benchmarks/token_storage/run.py --episodes 104 --label before      # of a commit with 84 bytes a token

The scheduler, the controller, `EpisodePlayer` and the journal are those of a run. The engine, the environment and the
tokenizer are scripted: they return arbitrary tokens, and their time is subtracted. Each case runs in its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import machine

from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation
from baton.records.journal import Journal, StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineStats
from baton.rollout.episodes import EnvironmentInbox, EpisodePlayer, EpisodeRules, EpisodeSetup
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import WorkerTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.samples import training_samples
from baton.types import (
    Abort,
    FinishReason,
    FromHub,
    Group,
    Lease,
    Message,
    PolicyVersion,
    Prompt,
    Report,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

HERE = Path(__file__).parent
REPORT_TOKENS = 256
"""The default of engine.report_every_tokens."""
OBSERVATION_TOKENS = 100
TURN_TOKENS = {"one turn": 0, "turns of 400 + 100 tokens": 400, "turns of 60 + 40 tokens": 60}
GROUP_SIZE = 8
NO_LIMIT = 10**9
_IDS = array("i", (1000 + 7919 * i % 150_000 for i in range(REPORT_TOKENS)))
_LOGPROBS = array("d", (-1 / i for i in _IDS))


class ScriptedWorker(WorkerTransport):
    """Reports `REPORT_TOKENS` tokens of every lease per call, or fewer at the end of a turn."""

    name = "the script"
    slots = 64

    def __init__(self, turn_tokens: int) -> None:
        self._turn_tokens = turn_tokens
        self._leases: dict[int, tuple[int, int]] = {}
        self._decoded = 0
        self.seconds = 0.0

    def send(self, message: FromHub) -> None:
        match message:
            case Lease(lease_id=number, trajectory=trajectory):
                self._leases[number] = trajectory.num_tokens, trajectory.num_tokens + self._turn_tokens
            case Abort():
                raise AssertionError("nothing is aborted here")

    def receive(self, timeout_s: float) -> list[Report]:
        begin_s = time.process_time()
        reports = []
        for number, (offset, end) in list(self._leases.items()):
            count = min(REPORT_TOKENS, end - offset)
            # new objects, as an engine's messages have them
            segment = Segment(tuple(_IDS[:count].tolist()), tuple(_LOGPROBS[:count].tolist()), 0)
            self._decoded += count
            is_over = offset + count == end
            reports.append(Report(number, offset, (segment,), FinishReason.STOP if is_over else None))
            self._leases[number] = offset + count, end
            if is_over:
                del self._leases[number]
        self.seconds += time.process_time() - begin_s
        return reports

    def load_weights(self, tensors: Any, version: PolicyVersion) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(0, self._decoded, 0, 0)

    def close(self, *, is_over: bool = False) -> None:
        pass


class ScriptedEnvironment:
    """Answers each action at once, with an observation of four characters a token."""

    def __init__(self, num_turns: int, observation_tokens: int) -> None:
        self._num_turns, self._text = num_turns, "obs " * observation_tokens
        self._answers: deque[Observation | ActFailure] = deque()

    def submit(self, request: ActRequest) -> None:
        turn = len(request.log) + 1
        text = "".join([f"{turn:6}", self._text])  # an object of its own
        is_over, reward = turn == self._num_turns, float(request.key.sample_index % 2)
        self._answers.append(Observation(request.key, turn, text, reward, is_over, False, f"{turn:024}", 0.5 * turn))

    def collect(self, timeout_s: float) -> list[Observation | ActFailure]:
        found = list(self._answers)
        self._answers.clear()
        return found

    def discard(self, key: EpisodeKey) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class ScriptedBridge:
    """A tokenizer with four characters a token."""

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join([f"{token_ids[0]:8}", "act " * (len(token_ids) - 2)])

    def role(self, tool: str | None) -> str:
        return "user"

    def cut(self, observation: str, max_tokens: int) -> str:
        return observation

    def begins_path(self, turns: Iterable[str], role: str) -> bool:
        return False

    def suffix(self, turn_ids: Sequence[int], observation: Message) -> tuple[int, ...]:
        return tuple(1000 + 31 * i for i in range(len(observation.content) // 4))

    def prompt(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> tuple[int, ...]:
        raise AssertionError("no path begins here")


class Prompts:
    """One short prompt again and again."""

    def __init__(self) -> None:
        self.position: dict[str, int] = {}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        row = {"environment": "script", "seed": 0, "row": {}}
        return Prompt("0", "script", (Message("user", "go"),), metadata=row), (1, 2, 3)


class Scorer:
    """Gives every response a reward at once."""

    sees_groups = False

    def __init__(self) -> None:
        self._scored: list[ScoredTrajectory] = []

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        self._scored += [ScoredTrajectory(t, RewardResult(float(t.sample_index % 2), {}, True)) for t in trajectories]

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        found, self._scored = self._scored, []
        return found


def memory_bytes(kind: str) -> int:
    """Return VmRSS (resident now) or VmHWM (its peak) of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case."""
    turn_tokens, length = TURN_TOKENS[case["turns"]], case["tokens"]
    observation_tokens = 40 if turn_tokens == 60 else OBSERVATION_TOKENS
    num_turns = length // (turn_tokens + observation_tokens) if turn_tokens else 1
    worker = ScriptedWorker(turn_tokens or length)
    sampling = SeededSampling(SamplingParams(NO_LIMIT), 1)
    setup = EpisodeSetup(
        EnvironmentInbox(ScriptedEnvironment(num_turns, observation_tokens)),
        ScriptedBridge(),  # type: ignore[arg-type]
        {"script": EpisodeRules(NO_LIMIT, turn_tokens, NO_LIMIT)},
        NO_LIMIT,
    )
    player = EpisodePlayer(setup, sampling) if turn_tokens else None
    rules = RolloutSettings(mode="sync", batch_groups=case["episodes"] // GROUP_SIZE, group_size=GROUP_SIZE).rules()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite", keeps_partials=True) if case["journal"] else None
        client = WorkerClient(worker, 600.0, max_context_tokens=NO_LIMIT)
        controller = RolloutController(client, rules, Prompts(), Scorer(), sampling, journal, player)
        controller.begin(0, StreamCursor(0, {}), num_batches=1)
        controller.publish({}, PolicyVersion("a", 0))
        before_bytes = memory_bytes("VmRSS")
        begin_s = time.process_time()
        groups = controller.next_batch()
        seconds = time.process_time() - begin_s - worker.seconds
        if journal is not None:
            journal.close()
    num_tokens = sum(path.num_tokens for group in groups for m in group.members for path in m.paths)
    found = {
        **case,
        "num_tokens": num_tokens,
        "bytes_per_token": (memory_bytes("VmRSS") - before_bytes) / num_tokens,
        "peak_bytes_per_token": (memory_bytes("VmHWM") - before_bytes) / num_tokens,
        "seconds_per_episode": seconds / case["episodes"],
    }
    if case["samples"]:
        found["sample_bytes_per_token"] = sample_bytes(groups) / num_tokens
    return found


def sample_bytes(groups: list[Group]) -> int:
    """Return the resident bytes of the training samples of a batch."""
    before_bytes = memory_bytes("VmRSS")
    samples = training_samples(groups, AlgorithmSettings())
    assert samples
    return memory_bytes("VmRSS") - before_bytes


def main() -> None:
    """Run in turn the cases that the results file does not have, and add them to it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1000, help="of the cases that measure memory")
    parser.add_argument("--label", default="after")
    given = parser.parse_args()
    usual = {"turns": "one turn", "tokens": 100_000, "episodes": 104, "journal": False, "samples": False}
    cases: list[dict[str, Any]] = [
        usual | {"turns": turns, "episodes": given.episodes if tokens != 60 else min(given.episodes, 32)}
        for turns, tokens in TURN_TOKENS.items()
    ]
    cases += [
        usual | {"turns": turns, "tokens": tokens, "episodes": 16, "journal": True}
        for turns in TURN_TOKENS
        for tokens in (10_000, 30_000, 100_000)
    ]
    cases.append(usual | {"samples": True})
    file = HERE / "results" / f"{given.label}.json"
    result = json.loads(file.read_text()) if file.is_file() else {**machine(), "rows": []}
    measured = [{name: row[name] for name in cases[0]} for row in result["rows"]]
    context = multiprocessing.get_context("spawn")
    for case in (case for case in cases if case not in measured):
        with context.Pool(1) as process:
            result["rows"].append(process.apply_async(measure, (case,)).get(timeout=1800))
        print(json.dumps(result["rows"][-1]), flush=True)
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
