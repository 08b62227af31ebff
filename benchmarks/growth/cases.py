"""What `run.py` measures: each function takes a size and returns seconds of processor time, and bytes."""

from __future__ import annotations

import gc
import math
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Point = dict[str, float]


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_of(work: Callable[[], object], repetitions: int = 1) -> float:
    """Return the least processor time of one call."""
    found = math.inf
    gc.collect()
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        found = min(found, time.process_time() - begin)
    return found


# ---- controller, scheduler and journal -------------------------------------------------------------------------------


def controller(open_trajectories: int) -> Point:
    """Four train steps of mode `partial`: half of the open trajectories finish, the others are aborted and resumed.

    The engine is scripted: it returns two reports of 16 tokens for each trajectory.
    """
    from baton.profile.bench import NoJudges, NumberedPrompts
    from baton.records.journal import Journal, StreamCursor
    from baton.rollout.controller import RolloutController
    from baton.rollout.engine import EngineStats
    from baton.rollout.settings import RolloutSettings
    from baton.rollout.transport import WorkerTransport
    from baton.rollout.worker_client import SeededSampling, WorkerClient
    from baton.types import Abort, Author, FinishReason, Lease, PolicyVersion, Report, SamplingParams, Segment

    class Scripted(WorkerTransport):
        name, slots, version = "a script", 64, 0

        def __init__(self) -> None:
            self.leases: dict[int, Lease] = {}
            self.aborted: list[int] = []

        def send(self, message: Any) -> None:
            if isinstance(message, Abort):
                self.aborted.append(message.lease_id)
            else:
                self.leases[message.lease_id] = message

        def receive(self, timeout_s: float) -> list[Any]:
            ended = [self.leases.pop(lease_id) for lease_id in self.aborted if lease_id in self.leases]
            self.aborted.clear()
            found = [Report(one.lease_id, one.trajectory.num_tokens, (), None, True) for one in ended]
            for lease_id in list(self.leases)[:16]:
                trajectory = self.leases.pop(lease_id).trajectory
                for offset in range(trajectory.num_tokens, 32, 16):
                    part = Segment([7] * 16, [-1.0] * 16, self.version, Author.POLICY, [])
                    reason = FinishReason.LENGTH if offset == 16 else None
                    found.append(Report(lease_id, offset, (part,), reason))
            return found

        def load_weights(self, tensors: Any, version: PolicyVersion) -> None:
            self.version = version.number

        def stats(self) -> EngineStats:
            return EngineStats()

    before = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite", keeps_partials=True)
        rules = RolloutSettings(mode="partial", batch_groups=open_trajectories // 16, group_size=8).rules()
        sampling = SeededSampling(SamplingParams(32), noise_seed=1)
        own = RolloutController(WorkerClient(Scripted()), rules, NumberedPrompts(), NoJudges(), sampling, journal)
        own.begin(0, StreamCursor(0, {}))
        own.publish({}, PolicyVersion("a", 0))
        steps = []
        for number in range(1, 6):

            def step(number: int = number) -> None:
                groups = own.next_batch()
                journal.counted(number, {})
                journal.consumed(number, [group.group_id for group in groups])
                own.publish({}, PolicyVersion("a", number))
                own.scheduler.take_step_counts()

            steps.append(seconds_of(step))
            journal.checkpointed(max(0, number - 1), 0)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        journal.close()
    return {"step_s": sum(steps[1:]) / 4, "memory_bytes": peak_bytes() - before, "journal_bytes": size}


# ---- leases of workers -----------------------------------------------------------------------------------------------


def leases(workers: int, owner: str | None = None) -> Point:
    """Ten trajectories of each simulated worker of 8 slots: submitted, granted, reported eight times, and finished;
    then a tick. With an owner, all workers use one token, which is at its limit."""
    from baton.swarm import lease_events as ev
    from baton.swarm.leases import LeaseRules, LeaseTable

    table, grants = LeaseTable(LeaseRules()), deque[ev.GrantLease]()
    num_tokens = 100 if owner is None else 0

    def handle(event: ev.Event) -> None:
        grants.extend(command for command in table.handle(event) if isinstance(command, ev.GrantLease))

    for worker in range(workers):
        handle(ev.WorkerJoined(0.0, worker, 8, owner=owner))
        handle(ev.WorkerSeen(0.0, worker, 1, 0))
    for task in range(20 * workers):
        handle(ev.TaskSubmitted(0.0, task, 1, True, 0, 1000))

    def step() -> None:
        for _ in range(10 * workers):
            lease = grants.popleft().lease
            for _ in range(8 if num_tokens else 0):
                handle(ev.LeaseProgressed(0.0, lease, num_tokens))
            handle(ev.LeaseFinished(0.0, lease))

    step_s = seconds_of(step)
    return {"step_s": step_s, "tick_s": seconds_of(lambda: handle(ev.LeaseTick(1.0)), 5)}


def one_token(workers: int) -> Point:
    """The same with one token for all workers. No tokens are reported, so the token may hold eight leases only."""
    return leases(workers, "one")


def simulated_run(workers: int) -> Point:
    """A simulated train step of a run with a hub and these workers of 8 slots: heartbeats, reports, leases, ticks, and
    the engines' arithmetic. A step has two trajectories for each slot, so its simulated time, too, grows with
    `workers`. Settings, imports and the first step are not counted.
    """
    from baton.simulate import simulate

    def run(workers: int, steps: int) -> tuple[float, float]:
        keys = {"rollout.mode": "async", "rollout.batch_groups": 2 * workers, "rollout.group_size": 8}
        keys |= {"engine.slots": 8, "swarm.workers": workers}
        begin = time.process_time()
        result = simulate("recipes/quickstart.toml", [f"{key}={value}" for key, value in keys.items()], steps=steps)
        return time.process_time() - begin, result.seconds

    run(1, 1)
    (first_s, first), (all_s, simulated) = run(workers, 1), run(workers, 3)
    return {"step_s": (all_s - first_s) / 2, "worker_second_s": (all_s - first_s) / (simulated - first) / workers}


# ---- context ---------------------------------------------------------------------------------------------------------


def tiny_engine(context: int, slots: int) -> Any:
    """Return an embedded engine with random weights: 2 layers, width 64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from baton.policy.new_model import scratch_tokenizer
    from baton.rollout.engine import EngineSettings
    from baton.rollout.engines.embedded.engine import EmbeddedEngine
    from baton.types import PolicyVersion

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=context, attn_implementation="sdpa",
    )  # fmt: skip
    settings = EngineSettings(slots=slots, max_context_tokens=context, dtype="float32")
    tokenizer = scratch_tokenizer(["text"], 300)
    return EmbeddedEngine(LlamaForCausalLM(config).eval(), tokenizer, settings, PolicyVersion("a", 0), ())


def submit(engine: Any, lease_id: int, trajectory: Any, num_new: int) -> None:
    """Queue a lease for `num_new` more tokens."""
    from baton.types import Lease, SamplingParams

    sampling = SamplingParams(trajectory.num_tokens + num_new)
    engine.submit(Lease(lease_id, trajectory, sampling, 1, 0, is_exact=False))


def context(tokens: int) -> Point:
    """One sequence of this length in the embedded engine: prefill, one decode step, and what a resume costs whose 256
    tokens per turn are all kept."""
    from baton.types import Author, Segment, Trajectory

    engine = tiny_engine(tokens, 8)
    before = peak_bytes()
    submit(engine, 0, Trajectory(0, 0, tuple(range(1, 500)) * (tokens // 500)), 12)
    prefill_s = seconds_of(engine.step)
    memory = peak_bytes() - before
    step_s = seconds_of(engine.step, 8)
    engine.abort(0)
    engine.step()
    turns = [
        Segment([3 + i % 400] * 128, [-1.0] * 128 if author is Author.POLICY else [0.0] * 128, 0, author, [])
        for i in range(tokens // 256 - 1)
        for author in (Author.POLICY, Author.ENVIRONMENT)
    ]
    episode = Trajectory(1, 0, tuple(range(1, 200))).extended(tuple(turns))
    submit(engine, 1, episode, 12)
    engine.step()
    engine.abort(1)
    engine.step()
    submit(engine, 2, episode, 12)
    resume_s = seconds_of(engine.step)
    return {"prefill_s": prefill_s, "prefill_bytes": memory, "decode_step_s": step_s, "resume_s": resume_s}


def packing(rows: int, tokens: int = 512, group: int = 8) -> Point:
    """Cut these rows into packed microbatches that hold 8 rows of the mean length, and build their tensors."""
    import torch

    from baton.trainer.microbatches import cut
    from baton.trainer.samples import TrainingSample

    found = []
    for index in range(rows):
        size = tokens // 2 + (tokens * (index * 7919 % 1000)) // 1000
        ids = ((index // group * 31) % 500,) * (tokens // 4) + (1,) * (size - tokens // 4)
        rest = size - tokens // 4
        one = (True,) * rest
        found.append(TrainingSample(index, f"{index}/0", ids, tokens // 4, one, one, (-1.0,) * rest, (0,) * rest, 1.0))
    keys = {"max_tokens_per_microbatch": 8 * tokens, "device": torch.device("cpu"), "is_flat": False}
    return {"cut_s": seconds_of(lambda: cut(found, is_packed=True, shares_prompts=True, **keys))}


def packing_context(tokens: int) -> Point:
    """Cut 32 rows of this mean length."""
    return packing(32, tokens)


def group_size(size: int) -> Point:
    """One group of this size: 16 tokens for each member on 64 slots of the embedded engine, and packing 8 groups."""
    from baton.types import Trajectory

    engine = tiny_engine(256, 64)

    def generate(first: int = 0) -> None:
        for index in range(size):
            submit(engine, first + index, Trajectory(first, index, tuple(range(1, 100))), 16)
        left = size
        while left:
            left -= sum(report.finish_reason is not None for report in engine.step())

    generate()
    again = seconds_of(lambda: generate(size), 1)
    return {"generate_s": again, "cut_s": packing(8 * size, group=size)["cut_s"]}


CASES: dict[str, tuple[Callable[[int], Point], Sequence[int]]] = {
    "controller": (controller, (100, 1000, 10_000, 100_000)),
    "leases": (leases, (1, 5, 20, 100, 500)),
    "one_token": (one_token, (1, 5, 20, 100, 500)),
    "simulated_run": (simulated_run, (1, 5, 20, 100, 200)),
    "context": (context, (1024, 2048, 4096, 8192, 16384, 32768)),
    "packing_context": (packing_context, (1024, 4096, 16384, 32768)),
    "packing": (packing, (100, 1000, 10_000)),
    "group_size": (group_size, (4, 8, 16, 64, 256)),
}


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(CASES[sys.argv[1]][0](int(sys.argv[2]))))
