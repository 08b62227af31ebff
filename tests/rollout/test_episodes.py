"""Multi-turn episodes with a scripted engine and scripted environments: exact tokens, no repeated action."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation
from baton.errors import EnvironmentFault
from baton.records.journal import Journal, StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.episodes import (
    EnvironmentInbox,
    EpisodePlayer,
    EpisodeRules,
    EpisodeSetup,
    ErrorBudget,
    path_seeds,
)
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.scheduler_state import TrajectoryState
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.samples import training_samples
from baton.types import (
    Author,
    Episode,
    EpisodeFinish,
    FailureCause,
    FinishReason,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    ScoredTrajectory,
    WorkRevoked,
)

MAX_NEW_TOKENS = 60
CONTEXT = 160


def turn_length(group_id: int, sample_index: int) -> int:
    return 2 + random.Random(f"{group_id}/{sample_index}").randrange(9)


def num_turns(seed: int, sample_index: int) -> int:
    return 1 + random.Random(f"turns {seed}/{sample_index}").randrange(5)


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class PlainBridge:
    """Encodes an observation by its length: 900, then 901 for each character."""

    def __init__(self, *, new_path_every: int = 0) -> None:
        self._new_path_every = new_path_every

    def text(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids)

    def role(self, tool: str | None) -> str:
        return "user" if tool is None else "tool"

    def cut(self, observation: str, max_tokens: int) -> str:
        return observation[:max_tokens]

    def begins_path(self, turns: Iterable[str], role: str) -> bool:
        assert role == "tool"
        return self._new_path_every == len(list(turns))

    def suffix(self, turn_ids: Sequence[int], observation: Message) -> tuple[int, ...]:
        assert turn_ids
        return (900, *[901] * len(observation.content))

    def prompt(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> tuple[int, ...]:
        assert [m.role for m in messages[-3:]] in (["user", "assistant", "tool"], ["tool", "assistant", "tool"])
        turn = sum(message.role == "assistant" for message in messages)
        return (7, 8, turn, 900, *[901] * len(messages[-1].content))


class ScriptedEnvironments:
    """Answers late and in any order; executes each (key, turn) once, and counts."""

    sockets = ()

    def __init__(self, seed: int = 0, fails: Any = lambda request: False) -> None:
        self.executed: Counter[tuple[Any, ...]] = Counter()
        self.requests: list[ActRequest] = []
        self.discarded: list[EpisodeKey] = []
        self._rng = random.Random(seed)
        self._waiting: list[ActRequest] = []
        self._fails = fails

    def submit(self, request: ActRequest) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def collect(self, timeout_s: float) -> list[Observation | ActFailure]:
        ready = [r for r in self._waiting if timeout_s or self._rng.random() < 0.4]
        self._waiting = [r for r in self._waiting if r not in ready]
        return [self.act(request) for request in ready]

    def discard(self, key: EpisodeKey) -> None:
        self.discarded.append(key)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    def act(self, request: ActRequest) -> Observation | ActFailure:
        key, turn = request.key, len(request.log) + 1
        if self._fails(request):
            return ActFailure(key, turn, FailureCause.TIMEOUT, "it hung")
        assert request.action is not None
        self.executed[key, turn] += 1
        is_over = turn >= num_turns(request.seed, key.sample_index)
        words = "x" * (turn + key.sample_index)
        return Observation(
            key, turn, words, turn / 10, is_over, False, f"{turn}", 0.01, tool="t", is_success=is_over or None,
            metrics={"moves": float(turn)},
        )  # fmt: skip


class Prompts:
    def __init__(self, taken: int = 0) -> None:
        self.position = {"rooms": taken}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        seed = self.position["rooms"]
        self.position["rooms"] += 1
        return prompt(seed), (7, 1000 + seed)


def prompt(seed: int) -> Prompt:
    metadata = {"environment": "rooms", "seed": seed, "row": {}}
    return Prompt(str(seed), "rooms", (Message("user", str(seed)),), metadata=metadata)


class NoScorer:
    sees_groups = scores_episodes = False

    def submit(self, *args: Any) -> None:
        raise AssertionError("environments give the reward")

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        return []


class LateFunctions:
    """Adds the number of an episode's turns to its reward; some calls are late."""

    scores_episodes = True

    def __init__(self, *, sees_groups: bool = False, seed: int = 0) -> None:
        self.sees_groups, self._rng = sees_groups, random.Random(seed)
        self._waiting: list[list[ScoredTrajectory]] = []

    def submit(self, finished: Sequence[ScoredTrajectory], prompt: Prompt) -> None:
        assert all(one.judgement.is_judged and one.episode for one in finished)
        assert all(one.judgement.parts.keys() == {"environment"} for one in finished), "nothing is added twice"
        assert len({one.trajectory.sample_index for one in finished}) == len(finished)
        self._waiting.append(list(finished))

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        ready = [call for call in self._waiting if timeout_s or self._rng.random() < 0.3]
        self._waiting = [call for call in self._waiting if call not in ready]
        return [self._scored(one) for call in ready for one in call]

    def _scored(self, one: ScoredTrajectory) -> ScoredTrajectory:
        assert one.episode is not None
        turns = float(len(one.episode.exchanges))
        parts = {**one.judgement.parts, "turns": turns}
        judgement = msgspec.structs.replace(one.judgement, reward=one.judgement.reward + turns, parts=parts)
        return msgspec.structs.replace(one, judgement=judgement)


class Bench:
    """A controller over a scripted engine and scripted environments."""

    def __init__(
        self,
        mode: str,
        environments: ScriptedEnvironments | None = None,
        journal: Journal | None = None,
        rules: EpisodeRules | None = None,
        bridge: PlainBridge | None = None,
        port: LocalTransport | None = None,
        source: Prompts | None = None,
        scorer: NoScorer | LateFunctions | None = None,
        max_failed_share: float = 1.0,
        **values: Any,
    ) -> None:
        recipe = RolloutSettings.model_validate({"mode": mode, "batch_groups": 3, "group_size": 2, **values})
        settings = EngineSettings(slots=8, max_context_tokens=CONTEXT, report_every_tokens=4)
        self.environments = environments or ScriptedEnvironments()
        self.source, self.journal = source or Prompts(), journal
        rules = rules or EpisodeRules(max_turns=8, max_turn_tokens=20, max_observation_tokens=50)
        self.setup = EpisodeSetup(
            EnvironmentInbox(self.environments), bridge or PlainBridge(), {"rooms": rules}, CONTEXT,
            ErrorBudget(max_failed_share),
        )  # type: ignore[arg-type]  # fmt: skip
        self.port = port or LocalTransport(FakeEngine(settings, PolicyVersion("a", 0), turn_length))
        self.worker = WorkerClient(self.port, 20.0, max_context_tokens=CONTEXT)
        sampling = SeededSampling(SamplingParams(MAX_NEW_TOKENS), 1)
        self.controller = RolloutController(
            self.worker,
            recipe.rules(),
            self.source,
            scorer or NoScorer(),  # type: ignore[arg-type]
            sampling,
            journal,
            EpisodePlayer(self.setup, sampling),
        )
        self.version = 0
        self.batches: list[list[Group]] = []

    def begin(self, version: int = 0, place: StreamCursor | None = None) -> None:
        carried = self.journal.open_groups() if self.journal is not None else []
        self.version = version
        if place is not None:
            self.source.position = dict(place.position)
        self.controller.begin(version, place or StreamCursor(0, {}), carried)
        self.publish()

    def run(self, steps: int) -> None:
        self.begin()
        for _ in range(steps):
            self.step()

    def publish(self) -> None:
        self.controller.publish({}, PolicyVersion("a", self.version))

    def step(self, num_rounds: int = 6) -> list[Group]:
        groups = self.controller.next_batch()
        if self.journal is not None:
            self.journal.consumed(self.version + 1, [g.group_id for g in groups])
        self.batches.append(groups)
        rounds = iter(range(num_rounds))
        self.controller.run_until(lambda timeout_s: next(rounds, None) is None)
        self.version += 1
        self.publish()
        return groups


MODES: dict[str, dict[str, Any]] = {"sync": {}, "partial": {"max_staleness": 3}, "async": {"max_staleness": 2}}


def members(batches: Sequence[Sequence[Group]]) -> list[ScoredTrajectory]:
    return [member for groups in batches for group in groups for member in group.members]


def assert_whole(member: ScoredTrajectory) -> None:
    """Turns and observations alternate, and each observation has the version of the turn before it."""
    episode = member.episode
    assert episode is not None
    for place, path in enumerate(member.paths):
        offset = 0
        ends = {e.token_offset for e in episode.exchanges if e.path == place}
        before = None
        for segment in path.segments:
            if segment.author is Author.ENVIRONMENT:
                assert before is not None
                assert before.author is Author.POLICY
                assert offset in ends, "an observation follows an exchange"
                assert segment.policy_version == before.policy_version
                assert set(segment.behavior_logprobs) == {0.0}
            offset += len(segment.token_ids)
            before = segment
        assert before is not None
        assert before.author is Author.POLICY, "an episode ends with a turn"
    for exchange in episode.exchanges:
        path = member.paths[exchange.path]
        ids = path.token_ids[: exchange.token_offset]
        assert text_of(ids).endswith(exchange.action)


@pytest.mark.parametrize("mode", MODES)
def test_episodes_alternate_turns_and_observations_and_every_token_is_counted_once(mode: str) -> None:
    bench = Bench(mode, **MODES[mode])
    bench.run(6)
    trained = members(bench.batches)
    for member in trained:
        assert_whole(member)
        episode, seed = member.episode, int(bench_prompt(bench, member))
        assert episode is not None
        turns = len(episode.exchanges)
        assert episode.finish_reason in (EpisodeFinish.ENVIRONMENT, EpisodeFinish.LENGTH)
        if episode.finish_reason is EpisodeFinish.ENVIRONMENT:
            assert turns == num_turns(seed, member.trajectory.sample_index)
            assert member.judgement.is_correct
        assert member.judgement.reward == pytest.approx(sum((turn + 1) / 10 for turn in range(turns)))
    ledger = bench.controller.scheduler.ledger
    assert ledger.trained + ledger.masked == sum(m.num_policy_tokens for m in trained)
    assert ledger.generated == ledger.settled + bench.controller.scheduler.num_carried_tokens
    assert set(bench.environments.executed.values()) == {1}, "no action is executed twice"
    assert any(len(m.episode.exchanges) > 2 for m in trained if m.episode)
    assert len({m.trajectory.name for m in trained}) == len(trained)


def bench_prompt(bench: Bench, member: ScoredTrajectory) -> str:
    return str(member.trajectory.prompt_ids[-1] - 1000) if not (member.episode and member.episode.earlier) else "0"


def test_the_trainer_finds_the_turns_of_an_episode_whose_discounted_rewards_are_its_reward() -> None:
    rules = EpisodeRules(max_turns=8, max_turn_tokens=20, max_observation_tokens=50, discount=0.5)
    bench = Bench("sync", rules=rules, bridge=PlainBridge(new_path_every=2))
    bench.run(4)
    rows = training_samples([g for batch in bench.batches for g in batch], AlgorithmSettings(turn_rewards=True))
    rewards = {m.trajectory.name: m.judgement.reward for m in members(bench.batches)}
    assert {row.path for row in rows} >= {0, 1}
    for row in rows:
        assert row.turns is not None
        assert row.turns.discount == 0.5
        assert row.turns.total == rewards[row.name]
        assert row.reward == 0.0


def test_a_rewritten_history_begins_a_new_path_and_no_token_is_in_two() -> None:
    bench = Bench("sync", bridge=PlainBridge(new_path_every=2))
    bench.run(4)
    trained = members(bench.batches)
    split = [m for m in trained if len(m.paths) > 1]
    assert split
    for member in trained:
        assert_whole(member)
        assert member.episode is not None
        assert {e.path for e in member.episode.exchanges} <= set(range(len(member.paths)))
    ledger = bench.controller.scheduler.ledger
    assert ledger.trained == sum(m.num_policy_tokens for m in trained)


@pytest.mark.parametrize("new_path_every", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_controller_that_is_killed_at_any_moment_resumes_its_episodes(
    mode: str, new_path_every: int, tmp_path: Path
) -> None:
    """The journal of each moment is what a killed process leaves; in sync the resumed run has the same tokens."""
    bridge = PlainBridge(new_path_every=new_path_every)
    whole = Bench(mode, bridge=bridge, **MODES[mode])
    whole.begin()
    for _ in range(3):
        whole.step()
    for kill in range(1, 40, 3):
        path = tmp_path / f"{mode}{kill}.sqlite"
        journal = Journal(path, keeps_partials=mode != "sync")
        first = Bench(mode, journal=journal, bridge=bridge, **MODES[mode])
        receive, calls = first.port.receive, iter(range(kill))

        def dying(timeout_s: float, receive: Any = receive, calls: Any = calls) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return receive(timeout_s)

        first.port.receive = dying  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            first.run(3)
        journal.close()
        journal = Journal(path, keeps_partials=mode != "sync")
        before = {
            (g.issued.group_id, t.sample_index): sum(
                path.num_policy_tokens for path in (*g.episodes.get(t.sample_index, Episode()).earlier, t)
            )
            for g in journal.open_groups()
            for t in g.members
        }
        second = Bench(mode, journal=journal, bridge=bridge, **MODES[mode])
        second.begin(journal.last_step(), journal.place())
        while second.version < 3:
            second.step()
        trained = members(second.batches)
        for member in trained:
            assert_whole(member)
            assert member.episode is not None
            if member.episode.finish_reason is EpisodeFinish.ENVIRONMENT:
                seed = member.paths[0].prompt_ids[-1] - 1000
                assert len(member.episode.exchanges) == num_turns(seed, member.trajectory.sample_index)
            key = (member.trajectory.group_id, member.trajectory.sample_index)
            assert member.num_policy_tokens >= before.get(key, 0), "no recorded token is lost"
        assert len({m.trajectory.name for m in trained}) == len(trained)
        if mode == "sync":
            same = {m.trajectory.name: m.trajectory.token_ids for m in members(whole.batches)}
            assert all(same[m.trajectory.name] == m.trajectory.token_ids for m in trained)
        journal.close()


def test_an_episode_that_may_not_be_replayed_begins_again_after_a_kill(tmp_path: Path) -> None:
    rules = EpisodeRules(8, 20, 50, may_replay=False)
    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=True)
    first = Bench("partial", journal=journal, rules=rules, **MODES["partial"])
    first.run(1)
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=True)
    carried = {
        (g.issued.group_id, t.sample_index): t.num_policy_tokens
        for g in journal.open_groups()
        for t in g.members
        if t.num_tokens and t.finish_reason is None
    }
    assert carried
    second = Bench("partial", journal=journal, rules=rules, **MODES["partial"])
    second.begin(journal.last_step(), journal.place())
    for _ in range(3):
        second.step()
    acted = {(r.key.group_id, r.key.sample_index): r.key.attempt for r in second.environments.requests}
    assert all(acted[key] == 1 for key in carried if key in acted)
    assert set(acted) & set(carried)
    first_of = {}
    for request in second.environments.requests:
        first_of.setdefault(request.key, request)
    assert not any(request.log for request in first_of.values()), "no action of the killed process is repeated"
    assert second.controller.scheduler.ledger.lost["environment_restarted"] == sum(carried.values())
    journal.close()


def test_a_failed_environment_restarts_the_episode_and_then_leaves_it_without_a_reward() -> None:
    def fails(request: ActRequest) -> bool:
        return (
            request.key.sample_index == 0 and request.seed % 3 == 0 and request.key.attempt < 1 + request.seed % 2 * 9
        )

    environments = ScriptedEnvironments(fails=fails)
    rules = EpisodeRules(8, 20, 50, max_attempts=3)
    bench = Bench("sync", environments, rules=rules)
    bench.run(4)
    found = {int(bench_prompt(bench, m)): m for m in members(bench.batches) if m.trajectory.sample_index == 0}
    once, never = found[6], found[3]
    assert once.judgement.is_judged
    assert once.episode is not None
    assert once.episode.attempt == 1
    assert never.judgement.cause is FailureCause.TIMEOUT
    assert not never.judgement.is_judged, "a failure is not a reward of zero"
    assert all(m.judgement.is_judged for seed, m in found.items() if seed % 3)
    metrics = bench.controller.take_episode_metrics()
    assert metrics["env/failed_episodes"] == sum(not m.judgement.is_judged for m in found.values())
    assert metrics["env/restarted_episodes"] >= 3
    lost = bench.controller.scheduler.ledger.lost
    assert set(lost) == {"environment_timeout"}
    assert lost["environment_timeout"] > 0


def test_a_run_whose_environments_always_fail_ends_with_a_sentence() -> None:
    bench = Bench("sync", ScriptedEnvironments(fails=lambda request: True), max_failed_share=0.1)
    bench.begin()
    said = (
        r"11 of 100 episode attempts failed because of their environment, more than environments.max_failed_share "
        r"= 0.1; the last one, \d/\d of task 'rooms', at turn 1: it hung; repair the environment or raise the share"
        r".*--resume"
    )
    with pytest.raises(EnvironmentFault, match=said):
        bench.step()


def test_a_lost_process_whose_episodes_all_fail_at_once_does_not_end_the_run() -> None:
    """24 episodes run or wait in it; each of them is to blame for a part at most, and only one failure is counted."""

    class LostProcess(ScriptedEnvironments):
        def act(self, request: ActRequest) -> Observation | ActFailure:
            found = super().act(request)
            is_running = request.key.sample_index < 4
            return msgspec.structs.replace(found, blame=is_running / 12) if isinstance(found, ActFailure) else found

    lost = LostProcess(fails=lambda request: not request.key.attempt)
    bench = Bench("sync", lost, group_size=8, max_failed_share=0.01)
    bench.run(1)
    counted = {(m.episode.attempt, m.episode.num_failures) for m in members(bench.batches) if m.episode}
    assert counted == {(1, 1), (1, 0)}, "an episode that was not running has its attempts left"
    assert bench.controller.take_episode_metrics()["env/restarted_episodes"] == 24


def test_a_run_whose_environments_often_fail_late_ends_although_most_calls_succeed() -> None:
    """Each second group fails in its third turn: never twice in a row, and after two observations each."""

    def fails(request: ActRequest) -> bool:
        return len(request.log) == 2 and request.key.group_id % 2 == 0

    rules = EpisodeRules(8, 20, 50, max_attempts=1)
    for share, is_over in ((0.1, True), (1.0, False)):
        bench = Bench("sync", ScriptedEnvironments(fails=fails), rules=rules, max_failed_share=share)
        bench.begin()
        over = 0
        for _ in range(30):
            try:
                bench.step()
            except EnvironmentFault:
                over = 1
                break
        assert over == is_over


def test_the_error_budget_counts_failures_in_the_block_in_which_the_attempt_began() -> None:
    budget = ErrorBudget(0.5)
    blocks = [budget.begin() for _ in range(250)]
    assert Counter(blocks) == {0: 100, 1: 100, 2: 50}
    assert [budget.fail(block) for block in (0, 1) for _ in range(50)] == [None] * 100
    assert budget.fail(2) is None, "the share is of the whole block, while attempts of it are open"
    assert str(budget.fail(1)).startswith("51 of 100 episode attempts")
    never = ErrorBudget(1.0)
    assert [never.fail(never.begin()) for _ in range(300)] == [None] * 300


def test_a_turn_without_a_tool_call_ends_an_episode_as_the_policys_own_stop() -> None:
    class Tools(ScriptedEnvironments):
        """Ends the even groups by a turn without a call, and cuts the others."""

        def act(self, request: ActRequest) -> Observation | ActFailure:
            found = super().act(request)
            assert isinstance(found, Observation)
            if not found.is_terminated:
                return msgspec.structs.replace(found, metrics={"num_calls": 1.0})
            is_stop = request.key.group_id % 2 == 0
            return msgspec.structs.replace(
                found, is_terminated=is_stop, is_truncated=not is_stop, metrics={"num_calls": float(not is_stop)}
            )

    bench = Bench("sync", Tools())
    bench.run(4)
    for member in members(bench.batches):
        assert member.episode is not None
        if member.episode.finish_reason is not EpisodeFinish.LENGTH:
            is_stop = member.trajectory.group_id % 2 == 0
            assert member.episode.finish_reason is (EpisodeFinish.STOP if is_stop else EpisodeFinish.ENVIRONMENT)
            assert member.trajectory.finish_reason is (FinishReason.STOP if is_stop else FinishReason.ENVIRONMENT)
    assert bench.controller.take_episode_metrics()["env/finish/stop"] > 0


# ---- reward functions ------------------------------------------------------------------------------------------------


def assert_functions_added(batches: Sequence[Sequence[Group]]) -> None:
    for member in members(batches):
        if not member.judgement.is_judged:
            continue
        assert member.episode is not None
        turns = len(member.episode.exchanges)
        given = sum((turn + 1) / 10 for turn in range(turns))
        assert member.judgement.parts == {"environment": pytest.approx(given), "turns": turns}
        assert member.judgement.reward == pytest.approx(given + turns)


@pytest.mark.parametrize("sees_groups", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_reward_functions_add_to_the_environments_reward_also_after_a_kill(
    mode: str, sees_groups: bool, tmp_path: Path
) -> None:
    unscored = 0
    for kill in range(2, 40, 6):
        path = tmp_path / f"{kill}.sqlite"
        journal = Journal(path, keeps_partials=mode != "sync")
        first = Bench(mode, journal=journal, scorer=LateFunctions(sees_groups=sees_groups), **MODES[mode])
        receive, calls = first.port.receive, iter(range(kill))

        def dying(timeout_s: float, receive: Any = receive, calls: Any = calls) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return receive(timeout_s)

        first.port.receive = dying  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            first.run(9)
        journal.close()
        assert_functions_added(first.batches)
        journal = Journal(path, keeps_partials=mode != "sync")
        carried = journal.open_groups()
        unscored += sum(
            t.finish_reason is not None and t.sample_index not in g.judged for g in carried for t in g.members
        )
        tokens = {
            (g.issued.group_id, t.sample_index): t.num_tokens for g in carried for t in g.members if t.finish_reason
        }
        second = Bench(mode, journal=journal, scorer=LateFunctions(sees_groups=sees_groups, seed=1), **MODES[mode])
        second.begin(journal.last_step(), journal.place())
        while second.version < len(first.batches) + 3:
            second.step()
        assert_functions_added(second.batches)
        for member in members(second.batches):
            key = (member.trajectory.group_id, member.trajectory.sample_index)
            assert member.trajectory.num_tokens == tokens.get(key, member.trajectory.num_tokens), (
                "it is not played again"
            )
        journal.close()
    assert unscored, "some episodes were over and not scored when the run was killed"


@pytest.mark.parametrize("sees_groups", [False, True])
def test_an_episode_whose_environment_failed_is_not_submitted_and_its_siblings_are(sees_groups: bool) -> None:
    def fails(request: ActRequest) -> bool:
        return request.key.sample_index == request.seed % 2

    rules = EpisodeRules(8, 20, 50, max_attempts=2)
    scorer = LateFunctions(sees_groups=sees_groups)
    bench = Bench("sync", ScriptedEnvironments(fails=fails), rules=rules, scorer=scorer)
    bench.run(3)
    assert_functions_added(bench.batches)
    for group in [g for batch in bench.batches for g in batch]:
        assert sorted(m.judgement.is_judged for m in group.members) == [False, True]


def test_changed_functions_score_recorded_episodes_again_and_removed_ones_leave_the_environments_reward(
    tmp_path: Path,
) -> None:
    for scorer in (LateFunctions(), NoScorer()):
        path = tmp_path / f"{type(scorer).__name__}.sqlite"
        journal = Journal(path, keeps_partials=True)
        first = Bench("partial", journal=journal, scorer=LateFunctions(), **MODES["partial"])
        first.run(2)
        judged = sum(len(group.judged) for group in journal.open_groups())
        journal.delete_rewards()
        assert judged
        assert not any(group.judged for group in journal.open_groups())
        second = Bench("partial", journal=journal, scorer=scorer, **MODES["partial"])
        second.begin(journal.last_step(), journal.place())
        for _ in range(3):
            second.step()
        if scorer.scores_episodes:
            assert_functions_added(second.batches)
        else:
            assert all(m.judgement.parts.keys() == {"environment"} for m in members(second.batches))
        journal.close()


def test_budgets_of_turns_tokens_and_context_end_an_episode_with_their_reason() -> None:
    def finishes(**limits: int) -> set[EpisodeFinish | None]:
        rules = EpisodeRules(**{"max_turns": 8, "max_turn_tokens": 20, "max_observation_tokens": 50, **limits})
        bench = Bench("sync", rules=rules)
        bench.run(4)
        for member in members(bench.batches):
            assert member.num_policy_tokens <= MAX_NEW_TOKENS
            assert member.trajectory.num_tokens + 2 <= CONTEXT
        return {m.episode.finish_reason for m in members(bench.batches) if m.episode}

    assert EpisodeFinish.MAX_TURNS in finishes(max_turns=2)
    assert finishes(max_turn_tokens=3) == {EpisodeFinish.ENVIRONMENT}, "a turn that is cut is sent as it is"


def test_a_last_turn_with_its_own_budget_is_sent_where_the_episodes_budget_ends_too() -> None:
    rules = EpisodeRules(max_turns=5, max_turn_tokens=MAX_NEW_TOKENS // 5, max_observation_tokens=2)
    settings = EngineSettings(slots=8, max_context_tokens=CONTEXT, report_every_tokens=4)
    endless = LocalTransport(FakeEngine(settings, PolicyVersion("a", 0), lambda group_id, sample_index: 1000))
    bench = Bench("sync", rules=rules, port=endless)
    bench.run(4)
    found = members(bench.batches)
    assert {m.episode.finish_reason for m in found if m.episode} == {EpisodeFinish.ENVIRONMENT}
    assert max(m.num_policy_tokens for m in found) == MAX_NEW_TOKENS, "five turns, each of its own budget"


def test_metrics_by_turn_are_those_of_the_episodes_that_ended() -> None:
    rules = EpisodeRules(max_turns=2, max_turn_tokens=20, max_observation_tokens=2)
    bench = Bench("sync", rules=rules, bridge=PlainBridge(new_path_every=3))
    bench.run(3)
    ended = [m.episode for m in members(bench.batches) if m.episode]
    metrics = bench.controller.take_episode_metrics()
    turns = [len(episode.exchanges) for episode in ended]
    assert metrics["env/turns_mean"] == pytest.approx(sum(turns) / len(turns))
    shares = {name: value for name, value in metrics.items() if name.startswith("env/finish/")}
    reasons = Counter(episode.finish_reason for episode in ended)
    assert shares == {f"env/finish/{reason}": pytest.approx(n / len(ended)) for reason, n in reasons.items()}
    assert len(shares) > 1
    assert metrics["env/info/moves"] == pytest.approx(sum(turns) / len(turns)), "of the last observations"
    assert metrics["env/cut_observations"] == sum(
        len(e.exchanges) == 2 for e in ended if len(e.exchanges[0].observation) > 2
    )
    assert not any(name.startswith("env/") for name in bench.controller.take_episode_metrics()), "since the last call"


def test_an_evaluation_plays_episodes_while_training_waits() -> None:
    bench = Bench("async", **MODES["async"])
    bench.begin()
    bench.step()
    sweep = EvalRollout(bench.worker, bench.setup)
    requests = [EvalGroup(seed, (7, 1000 + seed), 2, prompt(seed)) for seed in range(5)]
    with bench.controller.paused():
        found = list(sweep.rollout(requests, SamplingParams(MAX_NEW_TOKENS), noise_seed=99, version=1))
    assert len(found) == 10
    for member in found:
        assert isinstance(member, ScoredTrajectory)
        assert_whole(member)
    bench.step()
    bench.step()
    assert set(bench.environments.executed.values()) == {1}


def test_tokens_that_are_revoked_during_an_evaluation_are_not_trained() -> None:
    bench = Bench("async", **MODES["async"])
    bench.begin()
    bench.step()
    scheduler, receive = bench.controller.scheduler, bench.port.receive
    with bench.controller.paused():
        carried = [member for group in scheduler.groups() for member in group.members if member.num_tokens]
        num_tokens = sum(member.num_tokens for member in carried)
        late = [WorkRevoked(1, member.group_id, member.sample_index, "quarantine") for member in carried]
        bench.port.receive = lambda timeout_s: [*receive(timeout_s), *late]  # type: ignore[method-assign]
        requests = [EvalGroup(0, (7, 1000), 1, prompt(0))]
        for _ in EvalRollout(bench.worker, bench.setup).rollout(
            requests, SamplingParams(MAX_NEW_TOKENS), noise_seed=99, version=1
        ):
            late.clear()
        bench.port.receive = receive  # type: ignore[method-assign]
    assert scheduler.ledger.lost["quarantine"] == num_tokens > 0
    bench.step()
    for member in members(bench.batches):
        assert_whole(member)


def test_an_answer_of_an_earlier_attempt_is_ignored() -> None:
    bench = Bench("sync")
    bench.begin()
    request = ActRequest(EpisodeKey(1, 0, 0, 5), "rooms", 0, {}, (), "a")
    bench.environments.submit(request)
    bench.environments.submit(msgspec.structs.replace(request, key=EpisodeKey(1, 77, 0, 0)))
    for _ in range(2):
        bench.step()
    for member in members(bench.batches):
        assert_whole(member)


def revoke_at(bench: Bench, turn: int, seed: int, attempt: int = 0) -> list[EpisodeKey]:
    """Have a swarm take back each episode whose sample index is 0 when this attempt acts in this turn."""
    receive, asked, revoked = bench.port.receive, bench.environments.requests, []

    def receive_with_revocations(timeout_s: float) -> Any:
        found = list(receive(timeout_s))
        for request in asked:
            key = request.key
            is_due = len(request.log) + 1 == turn and (key.attempt, key.sample_index) == (attempt, 0)
            if is_due and key not in revoked:
                revoked.append(key)
                found.append(WorkRevoked(seed, key.group_id, key.sample_index, "quarantine"))
        return found

    bench.port.receive = receive_with_revocations  # type: ignore[method-assign]
    return revoked


@pytest.mark.parametrize(("turn", "path"), [(1, 0), (2, 0), (3, 0), (3, 1)])
def test_an_episode_is_taken_back_as_a_whole_wherever_it_is(turn: int, path: int) -> None:
    """Its environment acts, or has just answered; the tokens that are not trusted are of any of its paths."""
    bench = Bench("sync", bridge=PlainBridge(new_path_every=2))
    revoked = revoke_at(bench, turn, path_seeds(1, 2)[path])
    bench.run(6)
    assert revoked
    trained = members(bench.batches)
    for member in trained:
        assert_whole(member)
    attempts = {
        m.trajectory.group_id: m.episode.attempt for m in trained if m.episode and not m.trajectory.sample_index
    }
    assert all(attempts[key.group_id] == 1 for key in revoked if key.group_id in attempts)
    ledger = bench.controller.scheduler.ledger
    assert set(ledger.lost) == {"quarantine"}
    assert ledger.generated == ledger.settled + bench.controller.scheduler.num_carried_tokens
    assert set(bench.environments.executed.values()) == {1}


def test_a_quarantine_does_not_use_up_an_attempt_of_the_environment() -> None:
    """Attempts 0 and 2 fail with their environment, attempt 1 is taken back: two failures of three."""
    environments = ScriptedEnvironments(fails=lambda request: request.key.attempt in (0, 2))
    bench = Bench("sync", environments, rules=EpisodeRules(8, 20, 50, max_attempts=3))
    revoked = revoke_at(bench, 1, 1, attempt=1)
    bench.run(4)
    taken_back = [
        m.episode
        for m in members(bench.batches)
        if m.episode and any(key.group_id == m.trajectory.group_id for key in revoked) and not m.trajectory.sample_index
    ]
    assert taken_back
    counted = {(episode.attempt, episode.num_failures) for episode in taken_back}
    assert (3, 2) in counted
    assert counted <= {(3, 2), (1, 1)}, "(1, 1) was in a batch before it was taken back"
    assert all(m.judgement.is_judged for m in members(bench.batches) if m.trajectory.sample_index == 0)


@pytest.mark.parametrize("sees_groups", [False, True])
def test_an_episode_that_waits_for_reward_functions_is_taken_back(sees_groups: bool) -> None:
    class Slow(LateFunctions):
        """Gives no reward before the bench has revoked."""

        def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
            return super().collect(timeout_s) if revoked else []

    revoked: list[str] = []
    bench = Bench("sync", scorer=Slow(sees_groups=sees_groups), bridge=PlainBridge(new_path_every=2))
    receive = bench.port.receive

    def receive_with_revocation(timeout_s: float) -> Any:
        found = list(receive(timeout_s))
        tracked = (member for group in bench.controller.scheduler.groups() for member in group.members)
        waiting = next((member for member in tracked if member.state is TrajectoryState.SCORING), None)
        if not revoked and waiting is not None:
            revoked.append(waiting.name)
            found.append(WorkRevoked(1, waiting.group_id, waiting.sample_index, "quarantine"))
        return found

    bench.port.receive = receive_with_revocation  # type: ignore[method-assign]
    bench.run(3)
    assert revoked
    assert_functions_added(bench.batches)
    (again,) = [m for m in members(bench.batches) if m.trajectory.name in revoked]
    assert again.episode is not None
    assert again.episode.attempt == 1
    assert set(bench.environments.executed.values()) == {1}
    ledger = bench.controller.scheduler.ledger
    assert ledger.generated == ledger.settled + bench.controller.scheduler.num_carried_tokens


def test_a_path_of_an_attempt_that_is_over_takes_nothing_back() -> None:
    bench = Bench("sync", bridge=PlainBridge(new_path_every=2))
    assert revoke_at(bench, 1, path_seeds(1, 2)[1]) is not None
    bench.run(3)
    assert not bench.controller.scheduler.ledger.lost


def test_an_evaluation_takes_back_an_episode_that_acts() -> None:
    bench = Bench("sync", bridge=PlainBridge(new_path_every=2))
    bench.begin()
    revoked = revoke_at(bench, 3, path_seeds(99, 2)[0])
    sweep = EvalRollout(bench.worker, bench.setup)
    requests = [EvalGroup(seed, (7, 1000 + seed), 2, prompt(seed)) for seed in range(9)]
    found = list(sweep.rollout(requests, SamplingParams(MAX_NEW_TOKENS), noise_seed=99, version=0))
    assert len(found) == 18
    again = {m.trajectory.name for m in found if isinstance(m, ScoredTrajectory) and m.episode and m.episode.attempt}
    assert again
    assert again <= {f"{key.group_id}/0" for key in revoked}
