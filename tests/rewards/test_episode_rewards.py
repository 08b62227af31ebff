"""Reward functions see the whole conversation of a multi-turn episode, and add to the reward of its environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import RewardSettings
from baton.rollout.episodes import environment_reward
from baton.tasks.gym import GymTask
from baton.types import (
    Episode,
    Exchange,
    FailureCause,
    FinishReason,
    Message,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

pytestmark = [pytest.mark.timeout(300)]
ROW = {"ground_truth": "4", "extra_info": {"level": 2}, "topic": "sums"}
PROMPT = Prompt(
    "0", "tools", (Message("user", "2+2?"),), metadata={"environment": "tools", "seed": 1, "row": ROW},
    is_conversation=True,
)  # fmt: skip
TURNS = (Message("assistant", "call"), Message("tool", "4"), Message("assistant", "<answer>4</answer>"))


def trajectory(index: int, ids: tuple[int, ...] = (5, 6)) -> Trajectory:
    return Trajectory(0, index, (1,), (Segment(ids, (-1.0,) * len(ids), 0),), FinishReason.STOP)


def played(index: int = 0, *, is_success: bool | None = None, rewards: tuple[float, ...] = (0.5, 1.0)) -> Any:
    """An episode of two paths and two turns, whose second reward counts half."""
    exchanges = tuple(Exchange(2, "a", reward, "o", "d", 0.0, path) for path, reward in enumerate(rewards))
    episode = Episode(exchanges, (trajectory(index, (3, 4)),), is_success=is_success, discount=0.5)
    return ScoredTrajectory(trajectory(index), environment_reward(episode), episode)


def plain(prompt: Any, response: str, parsed: str | None, answer: str, topic: str, episode: Episode) -> float:
    assert prompt == [{"role": "user", "content": "2+2?"}]
    assert (response, parsed, answer, topic) == ("call\n4\n<answer>4</answer>", "4", "4", "sums")
    assert not episode.earlier, "token ids of earlier paths are not sent"
    return float(len(episode.exchanges))


def without_episode(response: str) -> float:
    return float(response.count("\n"))


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    assert (data_source, ground_truth) == ("tools", "4")
    assert extra_info == {"level": 2, "num_turns": 4, "turn_scores": [0.5, 1.0]}
    return float(ground_truth in solution_str)


def compared(completions: Any, completion_ids: Any, prompts: Any, topic: Any) -> list[float | None]:
    assert set(topic) == {"sums"}
    assert prompts[0] == [{"role": "user", "content": "2+2?"}]
    assert completions[0] == [{"role": m.role, "content": m.content} for m in TURNS]
    assert completion_ids[0] == [3, 4, 5, 6], "of both paths"
    return [None if place == 2 else float(place) for place in range(len(completions))]


def raises(response: str) -> float:
    raise RuntimeError("no opinion")


def scorer_of(*parts: str | RewardSettings, isolate: bool = False, tasks: Any = None) -> RewardScorer:
    rewards = [
        RewardSettings(kind="function", function=f"{__name__}:{part}", isolate=isolate, weight=0.1)
        if isinstance(part, str)
        else part
        for part in parts
    ]
    return RewardScorer({} if tasks is None else tasks, rewards, {})


def score(scorer: RewardScorer, *members: Any) -> list[RewardResult]:
    with scorer:
        if scorer.sees_groups:
            scorer.submit(members, PROMPT, [TURNS] * len(members))
        else:
            for member in members:
                scorer.submit([member], PROMPT, [TURNS])
        found = {one.trajectory.sample_index: one for one in scorer.drain()}
    for member in members:
        scored = found[member.trajectory.sample_index]
        assert scored.trajectory is member.trajectory, "a reward is matched with its trajectory by identity"
        assert scored.episode is member.episode
    return [found[member.trajectory.sample_index].judgement for member in members]


@pytest.mark.parametrize("isolate", [False, True])
def test_functions_of_each_convention_get_the_conversation_and_add_to_the_environments_reward(isolate: bool) -> None:
    scorer = scorer_of("plain", "without_episode", "compute_score", isolate=isolate)
    assert scorer.scores_episodes
    (found,) = score(scorer, played())
    assert found.parts == {"environment": 1.0, "plain": 2.0, "without_episode": 2.0, "compute_score": 1.0}
    assert found.reward == pytest.approx(1.0 + 0.1 * 5)
    assert found.answer == "a", "the last action, as without functions"


def test_a_function_of_trls_convention_compares_the_episodes_of_a_group() -> None:
    scorer = scorer_of("compared")
    assert scorer.sees_groups
    found = score(scorer, played(0), played(1), played(2))
    assert [one.parts for one in found] == [
        {"environment": 1.0, "compared": 0.0},
        {"environment": 1.0, "compared": 1.0},
        {"environment": 1.0},
    ]
    assert [one.reward for one in found] == [1.0, pytest.approx(1.1), 1.0]


def test_parts_for_answers_of_one_turn_do_not_apply_to_episodes() -> None:
    gym = GymTask("chain_sum", "chain_sum", {}, is_compact=True)
    kinds = [RewardSettings(kind=kind) for kind in ("correct", "score", "format", "exact")]
    scorer = scorer_of(*kinds, "without_episode", tasks={"chain_sum": gym})
    (found,) = score(scorer, played())
    assert found.parts.keys() == {"environment", "without_episode"}
    assert not scorer_of(*kinds, tasks={"chain_sum": gym}).scores_episodes


@pytest.mark.parametrize(
    ("is_success", "function", "is_correct"),
    [(True, "without_episode", True), (False, "without_episode", False), (None, "without_episode", True)],
)
def test_an_episode_is_correct_as_the_environment_says_or_else_as_the_functions_say(
    is_success: bool | None, function: str, is_correct: bool
) -> None:
    (found,) = score(scorer_of(function), played(is_success=is_success))
    assert found.is_correct == is_correct
    (low,) = score(scorer_of("compared"), played(is_success=is_success))  # 0 for the first of a group
    assert low.is_correct == bool(is_success)


def test_a_function_that_fails_leaves_the_episode_without_a_reward_and_keeps_the_parts() -> None:
    (found,) = score(scorer_of("raises", "plain"), played())
    assert found.cause is FailureCause.RAISED
    assert not found.is_judged
    assert found.parts == {"environment": 1.0, "plain": 2.0}
    (large,) = score(scorer_of("plain"), played(rewards=(1e6, 1e6)))
    assert large.cause is FailureCause.MALFORMED
    assert "above 1e+06 in magnitude" in str(large.failure)


def test_parts_that_could_score_nothing_and_a_name_that_is_taken_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"'format' scores answers of single-turn tasks, but all tasks .* are multi-turn"
    ):
        scorer_of(RewardSettings(kind="format"), "plain")
    assert scorer_of(RewardSettings(kind="correct")).scores_episodes is False
    with pytest.raises(ValidationError, match="'environment' is the part that environments give"):
        RewardSettings(kind="function", function="a:b", name="environment")


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_whole = asked["turns"] == [{"role": m.role, "content": m.content} for m in TURNS]
            body = json.dumps(sum(asked["turn_rewards"]) if is_whole else -1).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_remote_scorer_gets_turns_and_their_rewards(url: str) -> None:
    (found,) = score(scorer_of(RewardSettings(kind="http", url=url, deadline_s=60.0)), played())
    assert found.parts == {"environment": 1.0, "http": 1.5}
