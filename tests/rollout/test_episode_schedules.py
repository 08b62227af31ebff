"""Episodes on random schedules: aborts in the middle of turns and of environment calls, new versions, failures, kills.

The scripted engine encodes the version in its tokens. BATON_SCHEDULES draws more schedules than the few of every run.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.environments.calls import ActRequest
from baton.records.journal import Journal
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.fake import fake_token
from baton.rollout.episodes import EpisodeRules
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.transport import LocalTransport
from baton.types import (
    Author,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
    WorkRevoked,
)
from tests.rollout.episode_laws import recorded_tokens, tokens_of, version_changes
from tests.rollout.test_episodes import (
    CONTEXT,
    MAX_NEW_TOKENS,
    Bench,
    PlainBridge,
    Prompts,
    ScriptedEnvironments,
    assert_whole,
    members,
    prompt,
    turn_length,
)

SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "60"))
STEPS = 5
EVALUATION = 99
"""Noise seed of evaluations."""


class Killed(BaseException):
    """The process of the controller is gone."""


class Plan:
    """The recipe and the kills of a schedule."""

    def __init__(self, mode: str, seed: int) -> None:
        self.mode, self.name = mode, f"{mode}{seed}"
        dice = random.Random(self.name)
        self.values: dict[str, Any] = {
            "max_staleness": dice.randint(0, 3),
            "batch_groups": dice.randint(1, 3),
            "group_size": dice.randint(1, 3),
            "max_concurrency": dice.choice([None, 3, 30]),
        }
        if mode != "sync":
            self.values["on_new_version"] = dice.choice(["resume", "keep"])
        self.rules = EpisodeRules(8, dice.choice([3, 20]), dice.choice([2, 50]), may_replay=dice.random() < 0.7)
        self.new_path_every = dice.choice([0, 0, 1, 2])
        self.num_kills = dice.choice([0, 1, 2])


class Life:
    """One process of the controller, from its start or resume to its kill or the end of the run."""

    def __init__(self, plan: Plan, journal: Journal, kills_left: int) -> None:
        self.failed: set[tuple[int, int]] = set()
        """Episodes that began again: their environment failed, or they were revoked."""
        self.evaluated = self.revoked = 0
        """Tokens of evaluations; revocations."""
        self._dice = dice = random.Random(f"{plan.name}/{kills_left}")
        self._moments = dice.randrange(120) if kills_left else 10**9
        environments = ScriptedEnvironments(dice.randrange(2**32), self._fails)
        bridge = PlainBridge(new_path_every=plan.new_path_every)
        self.bench = Bench(plan.mode, environments, journal, plan.rules, bridge, **plan.values)
        self._receive, self.bench.port.receive = self.bench.port.receive, self._received  # type: ignore[method-assign]

    def play(self) -> bool:
        """Continue the run; return whether it has ended, and not been killed."""
        bench, dice = self.bench, self._dice
        assert bench.journal is not None
        try:
            bench.begin(bench.journal.last_step(), bench.journal.place())
            self.carried = bench.controller.scheduler.ledger.generated
            while bench.version < STEPS:
                bench.step(dice.choice([0, 1, 6, 20]))
                if dice.random() < 0.2:
                    self._evaluate()
            bench.controller.abort_all(10.0)
        except Killed:
            return False
        return True

    def _fails(self, request: ActRequest) -> bool:
        is_failure = self._dice.random() < 0.04 and request.key.attempt < 3
        if is_failure:
            self.failed.add((request.key.group_id, request.key.sample_index))
        return is_failure

    def _received(self, timeout_s: float) -> Any:
        self._moments -= 1
        if self._moments < 0:
            raise Killed
        found = list(self._receive(timeout_s))
        asked = self.bench.environments.requests
        if asked and self._dice.random() < 0.01:
            key = asked[-1].key
            self.failed.add((key.group_id, key.sample_index))
            self.revoked += 1
            found.append(WorkRevoked(1, key.group_id, key.sample_index, "quarantine"))
        return found

    def _evaluate(self) -> None:
        bench = self.bench
        with bench.controller.paused():
            before = bench.port.stats().decoded_tokens
            requests = [EvalGroup(seed, (7, 1000 + seed), 1, prompt(seed)) for seed in range(3)]
            found = EvalRollout(bench.worker, bench.setup).rollout(
                requests, SamplingParams(MAX_NEW_TOKENS), noise_seed=EVALUATION, version=bench.version
            )
            assert len(list(found)) == 3
            self.evaluated += bench.port.stats().decoded_tokens - before


def assert_sampled_by_its_versions(path: Trajectory) -> None:
    """Each token of the policy is the one that the scripted engine samples under the token's version."""
    begin = position = 0
    for segment in path.segments:
        if segment.author is Author.ENVIRONMENT:
            begin = position = position + len(segment.token_ids)
            continue
        for token, logprob in zip(segment.token_ids, segment.behavior_logprobs, strict=True):
            group_id, sample_index = path.group_id, path.sample_index
            length = begin + turn_length(group_id, sample_index)
            assert token == fake_token(group_id, sample_index, position, segment.policy_version, length=length)
            assert logprob == -(1 + token % 8) / 8
            position += 1


def live(plan: Plan, path: Path, kills_left: int, counts: Counter[str]) -> tuple[bool, list[ScoredTrajectory]]:
    """Run a process of the controller; return whether it came to the end of the run, and what was trained."""
    journal = Journal(path, keeps_partials=True)
    recorded = recorded_tokens(journal)
    life = Life(plan, journal, kills_left)
    has_ended = life.play()
    journal.close()
    scheduler, environments = life.bench.controller.scheduler, life.bench.environments
    ledger, trained = scheduler.ledger, members(life.bench.batches)
    assert ledger.generated == ledger.settled + scheduler.num_carried_tokens
    if has_ended:  # a process that is killed may have taken a batch that it has not delivered
        assert ledger.trained + ledger.masked == sum(member.num_policy_tokens for member in trained)
    if has_ended and not life.revoked:  # else the engine had tokens that nobody received
        decoded = life.bench.port.stats().decoded_tokens - life.evaluated
        assert ledger.generated == life.carried + decoded, "no sampled token is lost"
    training = {count for (key, _), count in environments.executed.items() if key.stream != EVALUATION}
    assert training <= {1}, "no action is executed twice"
    for member in trained:
        key = (member.trajectory.group_id, member.trajectory.sample_index)
        if plan.rules.may_replay and key not in life.failed and key in recorded:
            _, before = recorded[key]
            assert tokens_of(member.paths)[: len(before)] == before, "no recorded token is lost"
            counts["resumed"] += bool(before)
    if not plan.rules.may_replay:
        logs = {request.key: bool(request.log) for request in reversed(environments.requests)}
        assert not any(logs.values()), "no action of a killed process is repeated"
    counts["killed"] += not has_ended
    counts["failed"] += len(life.failed)
    return has_ended, trained


@pytest.mark.parametrize("mode", ["partial", "async"])
def test_no_token_of_an_episode_is_lost_or_trained_twice_and_each_has_its_version(mode: str, tmp_path: Path) -> None:
    """Aborts within turns and environment calls, failures, revocations, evaluations, and kills of the controller."""
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        plan, trained = Plan(mode, seed), []
        for kills_left in reversed(range(plan.num_kills + 1)):
            has_ended, batches = live(plan, tmp_path / f"{seed}.sqlite", kills_left, counts)
            trained += batches
            if has_ended:
                break
        names = [member.trajectory.name for member in trained]
        assert len(set(names)) == len(names) == STEPS * plan.values["batch_groups"] * plan.values["group_size"]
        for member in trained:
            assert_whole(member)
            for path in member.paths:
                assert_sampled_by_its_versions(path)
            counts += version_changes(member.paths)
            counts["paths"] += len(member.paths) > 1
    happened = ("turn", "environment", "killed", "resumed", "paths", "failed")
    assert min(counts[name] for name in happened) >= SCHEDULES // 10, counts


# ---- a real model ----------------------------------------------------------------------------------------------------


class SmallBridge(PlainBridge):
    """Has ids of the small vocabulary."""

    def suffix(self, turn_ids: Sequence[int], observation: Message) -> tuple[int, ...]:
        return (70, *[71] * len(observation.content))


class SmallPrompts(Prompts):
    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        taken, (first, second) = super().take()
        return taken, (first, second % 60)


class RealBench(Bench):
    """Publishes the weights of two models in turn."""

    models: Sequence[PreTrainedModel] = ()

    def publish(self) -> None:
        weights = dict(self.models[self.version % 2].named_parameters())
        self.controller.publish(weights, PolicyVersion("a", self.version))


@pytest.mark.numerics
@pytest.mark.parametrize("mode", ["partial", "async"])
def test_each_token_of_an_episode_has_the_logprob_of_the_weights_of_its_version(
    mode: str, embedded: Callable[..., EmbeddedEngine], load: Callable[[str], PreTrainedModel]
) -> None:
    """Weights are replaced while turns are generated and while environments work."""
    engine = embedded("qwen3", slots=8, max_context_tokens=CONTEXT, report_every_tokens=2, end_ids=tuple(range(8)))
    bench = RealBench(
        mode,
        ScriptedEnvironments(5),
        rules=EpisodeRules(8, 12, 50),
        bridge=SmallBridge(),
        port=LocalTransport(engine),
        source=SmallPrompts(),
        max_staleness=3,
    )
    bench.models = [load(name) for name in ("qwen3", "qwen3_next")]
    bench.run(6)
    counts: Counter[str] = Counter()
    for member in members(bench.batches):
        assert_whole(member)
        counts += version_changes(member.paths)
        (path,) = member.paths
        with torch.inference_mode():
            ids = torch.tensor([[*path.prompt_ids, *path.token_ids]])
            scored = [torch.log_softmax(model(ids).logits[0].float(), -1) for model in bench.models]
        position = len(path.prompt_ids)
        for segment in path.segments:
            end = position + len(segment.token_ids)
            if segment.author is Author.POLICY:
                tokens, version = torch.tensor(segment.token_ids), segment.policy_version
                found = scored[version % 2][position - 1 : end - 1].gather(1, tokens[:, None])[:, 0]
                other = scored[1 - version % 2][position - 1 : end - 1].gather(1, tokens[:, None])[:, 0]
                behavior = torch.tensor(segment.behavior_logprobs)
                assert (found - behavior).abs().max() <= 1e-4
                counts["told apart"] += bool((other - behavior).abs().max() > 1e-3)
            position = end
    assert min(counts[name] for name in ("turn", "environment", "told apart")) > 3, counts
