"""A run of multi-turn Sokoban in real processes, whose controller, workers and environments are killed (SIGKILL) at
random moments.

The run has two tasks, which differ in `replay`. Both write each action to a file before they execute it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from baton.records.journal import Journal
from baton.records.metrics import read_metrics
from baton.rollout.settings import Mode
from baton.trainer.checkpoint import list_checkpoints
from baton.types import ScoredTrajectory
from tests.rollout.episode_laws import Token, recorded_tokens, tokens_of, version_changes
from tests.swarm.swarm_processes import Outcome, Swarm, assert_same, await_, outcome, swarm

GROUP_SIZE = 4
CLASSES = {"log": "CountedSokoban", "never": "UnrepeatableSokoban"}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. An undisturbed run has no kills."""

    mode: Mode
    seed: int
    num_steps: int
    batch_groups: int
    kills: dict[str, int] = field(default_factory=dict)
    """Kills of `controller`, `worker` and `environment`."""


@dataclass(slots=True)
class Report:
    """What happened in a run."""

    mode: str
    seed: int
    episodes: int = 0
    """Trained."""
    turns: int = 0
    tokens: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    """Environments that executed an action, evaluations included, by `replay`."""
    actions: Counter[str] = field(default_factory=Counter)
    """Executed actions, by `replay`."""
    repeated_actions: int = 0
    """Of one instance."""
    restarted_episodes: int = 0
    """Trained episodes whose earlier attempts failed."""
    unscored_episodes: int = 0
    """Trained batches contain them, but no gradient does: three attempts have failed."""
    resumed_episodes: int = 0
    """Episodes that a killed controller had recorded with tokens, and that were trained with these tokens."""
    version_changes: Counter[str] = field(default_factory=Counter)
    """New versions within a turn, and while an environment worked."""
    max_staleness: float = 0.0
    bits_equal: bool | None = None
    """Whether weights, tokens and rewards are those of the undisturbed run."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


def recipe_changes(plan: Plan, directory: Path) -> dict[str, Any]:
    """Episodes of three turns, in two tasks."""
    shape = {"size": 5, "search_depth": 20, "max_turns": 3, "actions_per_turn": 3}
    tasks = [
        {
            "name": f"sokoban_{replay}",
            "environment": f"tests.swarm.counted_sokoban:{name}",
            "params": {**shape, "log": str(directory / f"{replay}.jsonl")},
            "max_turns": 3,
            "max_turn_tokens": 4,
            "max_observation_tokens": 64,
        }
        for replay, name in CLASSES.items()
    ]
    rollout: dict[str, Any] = {"mode": plan.mode, "batch_groups": plan.batch_groups, "group_size": GROUP_SIZE}
    if plan.mode != "sync":
        rollout["max_staleness"] = 3
    return {
        "run__steps": plan.num_steps,
        "run__seed": plan.seed,
        "task": tasks,
        "reward": [{"kind": "correct"}],
        "rollout": {**rollout, "max_new_tokens": 16},
        "environments": {"processes": 2},
        "engine__max_context_tokens": 256,
        "checkpoint__every": 4,
        "swarm__heartbeat_timeout_s": 3.0,
    }


def play(plan: Plan, model: Path, directory: Path) -> tuple[Report, Outcome]:
    """Run a plan to its end, and check the laws. Raises AssertionError for a violated one."""
    began_s = time.monotonic()
    report = Report(plan.mode, plan.seed)
    directory = directory.resolve()
    with swarm(directory, model, **recipe_changes(plan, directory)) as run:
        if plan.kills:
            run.train()
            for _ in range(2):
                run.worker()
        else:
            run.engine_beside_trainer()
        recorded = _kill(plan, run, report)
        assert run.trainer is not None
        if run.trainer.process.exitcode != -signal.SIGKILL:  # else it was killed when nothing was left to do
            run.finish(deadline_s=1200.0)
        found = outcome(run.run)
        _check(plan, run, report, recorded)
    report.seconds = round(time.monotonic() - began_s, 1)
    return report, found


def have_equal_bits(one: Outcome, other: Outcome) -> bool:
    """Compare weights, tokens and rewards. The attempts and the instances of environments differ."""
    for found in (one, other):
        for member in (member for step in found.groups for group in step for member in group["members"]):
            member["episode"].pop("attempt", None)
            for exchange in member["episode"]["exchanges"]:
                exchange.pop("tool", None)
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


# ---- kills -----------------------------------------------------------------------------------------------------------


def _kill(plan: Plan, run: Swarm, report: Report) -> list[dict[tuple[int, int], tuple[int, list[Token]]]]:
    """Kill as planned; return what each killed controller had recorded."""
    dice = random.Random(plan.seed)
    kinds = [kind for kind, count in plan.kills.items() for _ in range(count)]
    dice.shuffle(kinds)
    due = sorted(dice.randrange(plan.num_steps) for _ in kinds)
    recorded = []
    began_s = time.monotonic()
    assert run.trainer is not None
    for kind, step in zip(kinds, due, strict=True):
        await_(f"step {step}", lambda step=step: _is_over(run) or _last_step(run) >= step)
        # anywhere within a train step, whose time so far is the mean of the others
        time.sleep(dice.random() * (time.monotonic() - began_s) / max(1, _last_step(run)))
        if _is_over(run):
            break
        if kind == "controller":
            run.trainer.kill()
            recorded.append(_recorded(run))
            if _is_complete(plan, run):
                break
            run.train(resume=True)
        elif kind == "worker":
            victim = dice.randrange(len(run.workers))
            run.workers[victim].kill()
            del run.workers[victim]
            run.worker()
        else:
            pids = await_("an environment process", lambda: _is_over(run) or _environments(run))
            if pids is not True:
                with suppress(ProcessLookupError):  # it has ended by itself meanwhile
                    os.kill(dice.choice(pids), signal.SIGKILL)
        report.kills[kind] += 1
    return recorded


def _recorded(run: Swarm) -> dict[tuple[int, int], tuple[int, list[Token]]]:
    """Read a copy of the journal of a killed controller."""
    files = list((run.directory / "r").glob("journal.sqlite*"))
    if not files:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            shutil.copy(file, scratch)
        journal = Journal(Path(scratch, "journal.sqlite"), keeps_partials=True)
        found = recorded_tokens(journal)
        journal.close()
    return found


def _last_step(run: Swarm) -> int:
    steps = [int(path.name[5:11]) for path in (run.directory / "r/trajectories").glob("step_*.jsonl.gz")]
    return max(steps, default=0)


def _is_over(run: Swarm) -> bool:
    assert run.trainer is not None
    return not run.trainer.is_alive


def _is_complete(plan: Plan, run: Swarm) -> bool:
    """Whether a killed controller had nothing left to do."""
    saved = list_checkpoints(run.directory / "r/checkpoints")
    return (
        bool(saved)
        and saved[-1].name.endswith(f"{plan.num_steps:06d}")
        and any(evaluation.step == plan.num_steps for evaluation in run.run.evaluations())
    )


def _environments(run: Swarm) -> list[int]:
    """Return the ids of the environment processes of a run, their supervisors included."""
    assert run.trainer is not None
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found, waiting = [], [run.trainer.pid]
    while waiting:
        for pid in children[waiting.pop()]:
            waiting.append(pid)
            with suppress(OSError):
                if b"baton.environments.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


# ---- laws ------------------------------------------------------------------------------------------------------------


def _check(
    plan: Plan, run: Swarm, report: Report, recorded: list[dict[tuple[int, int], tuple[int, list[Token]]]]
) -> None:
    directory = run.run
    assert directory.recorded_steps() == list(range(1, plan.num_steps + 1))
    batches = [directory.groups(step) for step in directory.recorded_steps()]
    assert {len(groups) for groups in batches} == {plan.batch_groups}
    ids = [group.group_id for groups in batches for group in groups]
    assert len(ids) == len(set(ids)), "a group is trained twice"
    members = [member for groups in batches for group in groups for member in group.members]
    report.episodes = len({member.trajectory.name for member in members})
    assert report.episodes == len(members) == len(ids) * GROUP_SIZE, "a trajectory is trained twice"
    tasks = {group.group_id: group.prompt.task.removeprefix("sokoban_") for groups in batches for group in groups}
    executed = {replay: _executed(run.directory / f"{replay}.jsonl", report, replay) for replay in CLASSES}
    last_instances: set[str] = set()
    for member in members:
        replay = tasks[member.trajectory.group_id]
        _check_episode(member, replay, executed[replay], report)
        if member.episode is not None and member.episode.exchanges:
            last = member.episode.exchanges[-1].tool
            assert last is not None
            assert last not in last_instances, "an environment has played two episodes"
            last_instances.add(last)
    trained = {(m.trajectory.group_id, m.trajectory.sample_index): m for m in members}
    for open_episodes in recorded:
        for key, (attempt, tokens) in open_episodes.items():
            member = trained.get(key)
            if member is None or not tokens or tasks[key[0]] == "never":
                continue
            assert member.episode is not None
            if member.episode.attempt == attempt:
                assert tokens_of(member.paths)[: len(tokens)] == tokens, f"recorded tokens of {key} are lost"
                report.resumed_episodes += 1
    rows = [row for row in read_metrics(directory.path) if "reward/mean" in row]
    assert len(rows) == plan.num_steps
    assert any(row["reward/std"] > 0 for row in rows), "the policy must have something to learn"
    report.max_staleness = max(row.get("staleness/max", 0.0) for row in rows)
    assert report.max_staleness <= (0 if plan.mode == "sync" else 3)


def _executed(file: Path, report: Report, replay: str) -> dict[str, list[str]]:
    """Return the actions of each instance, in the order in which they were executed."""
    found: dict[str, list[str]] = defaultdict(list)
    turns: Counter[tuple[str, int]] = Counter()
    for line in file.read_text().splitlines():
        instance, turn, action = json.loads(line)
        turns[instance, turn] += 1
        assert turn == len(found[instance]) + 1
        found[instance].append(action)
    report.instances[replay], report.actions[replay] = len(found), sum(turns.values())
    report.repeated_actions += sum(count - 1 for count in turns.values())
    return found


def _check_episode(member: ScoredTrajectory, replay: str, executed: dict[str, list[str]], report: Report) -> None:
    episode = member.episode
    assert episode is not None
    report.turns += len(episode.exchanges)
    report.tokens += member.num_policy_tokens
    report.restarted_episodes += episode.attempt > 0
    report.unscored_episodes += not member.judgement.is_judged
    report.version_changes += version_changes(member.paths)
    instances = [exchange.tool for exchange in episode.exchanges]
    if not instances or instances[-1] is None:
        return
    actions = [exchange.action for exchange in episode.exchanges]
    if member.judgement.is_judged:
        assert executed[instances[-1]] == actions, "the last environment executed each action of the episode once"
    if replay == "never":
        assert len(set(instances)) == 1, "an environment took over actions of another"
