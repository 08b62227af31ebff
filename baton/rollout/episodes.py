"""Decides how multi-turn episodes continue after each turn and each observation.

    turn ends ──action──▶ environment ──observation──▶ appended to the trajectory ──▶ next turn is leased
        │                      │
        │                      └─ terminated, truncated, max_turns, no room ─▶ episode over, rewarded
        └─ budget of tokens used up ─▶ episode over, rewarded

The controller and evaluations use `EpisodePlayer`. These callers own the trajectories and the leases; an
`EpisodePlayer` owns the actions and observations of open episodes. Environments are slow and may fail, so they run in
other processes (`EnvironmentClient`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation, Turn
from baton.environments.token_bridge import TokenBridge
from baton.errors import EnvironmentFault
from baton.frames import FrameSocket
from baton.rollout.worker_client import SeededSampling
from baton.types import (
    ENVIRONMENT,
    Author,
    Episode,
    EpisodeFinish,
    Exchange,
    FinishReason,
    Message,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)


class EnvironmentClient(Protocol):
    """Runs environments, for training and evaluations. `submit` does not block; `collect` returns answers later."""

    @property
    def sockets(self) -> Sequence[FrameSocket]:
        """Sockets to wait on: one becomes readable when an answer arrives. Without sockets, call `collect` every few
        ms."""

    def submit(self, request: ActRequest) -> None:
        """Send an action, without waiting."""

    def collect(self, timeout_s: float) -> Sequence[Observation | ActFailure]:
        """Return the answers received, waiting at most `timeout_s` for the first."""

    def discard(self, key: EpisodeKey) -> None:
        """Close the environment of an episode that has ended."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics collected since the last call."""

    def close(self) -> None:
        """End all environments."""


class EnvironmentInbox:
    """Gives each answer of an `EnvironmentClient` to the stream (training or an evaluation) that sent the request."""

    def __init__(self, client: EnvironmentClient) -> None:
        self.client = client
        self._kept: dict[int, list[Observation | ActFailure]] = {}

    def sockets(self, stream: int) -> Sequence[FrameSocket]:
        """Return the client's sockets. If the inbox already has answers for `stream`, return no sockets, because no
        wait is needed."""
        return () if self._kept.get(stream) else self.client.sockets

    def collect(self, stream: int, timeout_s: float) -> list[Observation | ActFailure]:
        """Return a stream's answers; wait at most `timeout_s` for the first. Answers for other streams are kept."""
        found = self._kept.pop(stream, [])
        for answer in self.client.collect(0.0 if found else timeout_s):
            own = found if answer.key.stream == stream else self._kept.setdefault(answer.key.stream, [])
            own.append(answer)
        return found


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """The limits of a multi-turn task. A limit counts only tokens that the policy writes, unless its name or docstring
    says otherwise."""

    max_turns: int
    max_turn_tokens: int
    max_observation_tokens: int
    """Maximum length of an observation in tokens; longer observations are truncated."""
    discount: float = 1.0
    """Discount factor: in the episode's reward, the reward of turn t is multiplied by `discount` to the power t."""
    may_replay: bool = True
    """Whether a resumed run replays the recorded actions of an open episode to rebuild its environment. If False, the
    episode starts again from its prompt, because it is unknown whether the environment executed the last action."""
    max_attempts: int = 3
    """Maximum number of attempts at an episode whose environment fails. If all attempts fail, the episode has no
    reward."""


@dataclass(frozen=True, slots=True)
class Continued:
    """The trajectory of an open episode. Its next turn can now be generated."""

    trajectory: Trajectory
    episode: Episode
    appended: tuple[Segment, ...]
    """The observation. Empty if a new path begins, because its prompt then contains the observation."""


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """An episode whose environment failed, to be generated again from its prompt."""

    group_id: int
    sample_index: int
    cause: str


@dataclass(slots=True)
class _Open:
    prompt: Prompt
    trajectory: Trajectory
    episode: Episode = field(default_factory=Episode)
    block: int | None = None
    """Number of the block of attempts in which this attempt began, as `ErrorBudget.begin` returned it; None before the
    attempt's first action."""


class ErrorBudget:
    """Limits the share of episode attempts whose environment fails. Counts training and evaluations of a run together.

    Consecutive attempts form blocks of `BLOCK` attempts. A failure counts in the block in which its attempt began, even
    if it happens much later. The share of failures in a block therefore does not depend on how long attempts take or
    how many episodes are open. The exit of an environment process counts as one failure in total, even if several calls
    were running in the process.
    """

    BLOCK = 100

    def __init__(self, max_share: float = 0.5) -> None:
        self.max_share = max_share
        self._num_begun = 0
        self._failed: dict[int, float] = {}

    def begin(self) -> int:
        """Count a new attempt, and return the number of the block of `BLOCK` attempts that contains it."""
        self._num_begun += 1
        return (self._num_begun - 1) // self.BLOCK

    def fail(self, block: int, blame: float = 1.0) -> str | None:
        """Count a failed attempt. Return an error text if more than the allowed share of the block's attempts have
        failed, otherwise None. `blame`: if one failure ends n attempts, each of them counts as 1/n of a failure."""
        self._failed[block] = self._failed.get(block, 0.0) + blame
        if self._failed[block] <= self.max_share * self.BLOCK + 1e-6:
            return None
        return (
            f"{self._failed[block]:.0f} of {self.BLOCK} episode attempts failed because of their environment, more "
            f"than environments.max_failed_share = {self.max_share:g}"
        )


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """The objects that training and evaluations share to run multi-turn episodes."""

    inbox: EnvironmentInbox
    bridge: TokenBridge
    tasks: Mapping[str, EpisodeRules]
    """Name of a multi-turn task, which is also the name of its environment → its rules."""
    max_context_tokens: int
    budget: ErrorBudget = field(default_factory=ErrorBudget)

    def close(self) -> None:
        self.inbox.client.close()


class EpisodePlayer:
    """The open episodes of one stream: of training, or of evaluations."""

    def __init__(self, setup: EpisodeSetup | None, sampling: SeededSampling) -> None:
        """`setup`: None without multi-turn tasks. `sampling`: `max_new_tokens` limits a whole episode; each stream has
        its own noise seed."""
        self._given, self._sampling, self._stream = setup, sampling, sampling.noise_seed
        self._tasks: Mapping[str, EpisodeRules] = {} if setup is None else setup.tasks
        self._open: dict[tuple[int, int], _Open] = {}
        self._acting: set[tuple[int, int]] = set()
        self._counts: Counter[str] = Counter()
        self._over: list[Episode] = []
        """Episodes that ended since the last call to `take_metrics`, except episodes whose environment failed."""

    @property
    def _setup(self) -> EpisodeSetup:
        assert self._given is not None, "no task is multi-turn"
        return self._given

    @property
    def num_acting(self) -> int:
        """Number of episodes whose environment has not answered yet."""
        return len(self._acting)

    @property
    def sockets(self) -> Sequence[FrameSocket]:
        """Sockets to wait on: one is readable when an environment answers. May be empty, see `EnvironmentClient`."""
        return self._setup.inbox.sockets(self._stream)

    def plays(self, prompt: Prompt) -> bool:
        """Whether a prompt belongs to a multi-turn task."""
        return prompt.task in self._tasks

    def is_acting(self, key: tuple[int, int]) -> bool:
        return key in self._acting

    def episode(self, key: tuple[int, int]) -> Episode:
        opened = self._open.get(key)
        return Episode() if opened is None else opened.episode

    def may_replay(self, prompt: Prompt) -> bool:
        """Whether a resumed run continues an open episode. Otherwise the episode starts again from its prompt."""
        return not self.plays(prompt) or self._tasks[prompt.task].may_replay

    def num_paths(self, key: tuple[int, int]) -> int:
        """Return the number of paths of an episode so far, at least 1."""
        return 1 + len(self.episode(key).earlier)

    def restore(self, prompt: Prompt, trajectory: Trajectory, episode: Episode) -> None:
        """Add an open episode that an earlier process of the run recorded."""
        self._open[_key(trajectory)] = _Open(prompt, trajectory, episode)

    def sampling(self, prompt: Prompt, trajectory: Trajectory) -> SeededSampling:
        """Return the sampling parameters for the rest of a turn, limited to the turn's remaining budget. Each path has
        its own noise, because the token positions of a new path start at 0 again. A single-turn trajectory gets the
        parameters of the stream."""
        if not self.plays(prompt):
            return self._sampling
        left = min(
            self._tasks[prompt.task].max_turn_tokens - (trajectory.num_tokens - trajectory.turn_offset),
            self._tokens_left(trajectory),
        )
        params = msgspec.structs.replace(self._sampling.params, max_new_tokens=trajectory.num_tokens + left)
        return SeededSampling(params, path_seeds(self._sampling.noise_seed, self.num_paths(_key(trajectory)))[-1])

    def end_turn(self, prompt: Prompt, trajectory: Trajectory, reason: FinishReason) -> ScoredTrajectory | None:
        """Send the action of a finished turn to the environment, or return the episode if it is over. A turn that has
        reached `max_turn_tokens` is sent as it is, even if it has also reached the token limit of the episode. A turn
        that is shorter than `max_turn_tokens`, because the token limit of the episode or the context has truncated it,
        is not sent; the episode is then over. `reason`: why the engine ended the turn."""
        key, rules = _key(trajectory), self._tasks[prompt.task]
        opened = self._open.setdefault(key, _Open(prompt, trajectory))
        opened.trajectory = trajectory
        is_cut = trajectory.num_tokens - trajectory.turn_offset < rules.max_turn_tokens
        if reason is FinishReason.LENGTH and is_cut and self._tokens_left(trajectory) <= 0:
            return self._finished(opened, EpisodeFinish.LENGTH)
        if reason is FinishReason.LENGTH and is_cut and self._context_left(trajectory) <= 0:
            return self._finished(opened, EpisodeFinish.CONTEXT)
        if opened.block is None:
            opened.block = self._setup.budget.begin()
        self._acting.add(key)
        log = tuple(Turn(exchange.action, exchange.digest) for exchange in opened.episode.exchanges)
        problem = opened.prompt.metadata
        seed, row, first_digest = problem["seed"], problem["row"], problem.get("first_digest", "")
        episode, action = self._episode_key(opened), self._action(trajectory)
        self._setup.inbox.client.submit(ActRequest(episode, prompt.task, seed, row, log, action, first_digest))
        return None

    def collect(self, timeout_s: float) -> list[Continued | ScoredTrajectory | BeginAgain]:
        """Process the answers of environments and return the results; wait at most `timeout_s` for the first answer.
        Raises EnvironmentFault if the error budget is used up."""
        found: list[Continued | ScoredTrajectory | BeginAgain] = []
        for answer in self._setup.inbox.collect(self._stream, timeout_s):
            key = (answer.key.group_id, answer.key.sample_index)
            opened = self._open.get(key)
            if opened is None or key not in self._acting:
                continue  # the episode was revoked or discarded meanwhile
            if answer.key.attempt != opened.episode.attempt or answer.turn != len(opened.episode.exchanges) + 1:
                continue  # the answer belongs to an earlier attempt
            self._acting.discard(key)
            if isinstance(answer, Observation):
                found.append(self._observed(opened, answer))
            else:
                found.append(self._failed(opened, answer))
        return found

    def forget(self, key: tuple[int, int]) -> None:
        """Close an open episode, because its group is discarded."""
        opened = self._open.pop(key, None)
        self._acting.discard(key)
        if opened is not None:
            self._setup.inbox.client.discard(self._episode_key(opened))

    def begin_again(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Start a new attempt at an episode from its prompt, with a new environment."""
        opened = self._open.get(_key(trajectory))
        if opened is not None:
            before = opened.episode
            self.forget(_key(trajectory))
            again = Episode(attempt=before.attempt + 1, num_failures=before.num_failures)
            self._open[_key(trajectory)] = _Open(prompt, trajectory, again)

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics collected since the last call, as docs/metrics.md defines them."""
        (counts, self._counts), (over, self._over) = (self._counts, Counter()), (self._over, [])
        found = {f"env/{name}": float(count) for name, count in sorted(counts.items())}
        if over:
            found["env/turns_mean"] = statistics.fmean(len(episode.exchanges) for episode in over)
            reasons = Counter(episode.finish_reason for episode in over)
            found |= {f"env/finish/{reason}": count / len(over) for reason, count in sorted(reasons.items())}
            for name in sorted({name for episode in over for name in episode.metrics}):
                values = [episode.metrics[name] for episode in over if name in episode.metrics]
                found[f"env/info/{name}"] = statistics.fmean(values)
        return found if self._given is None else {**found, **self._given.inbox.client.metrics()}

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _observed(self, opened: _Open, answer: Observation) -> Continued | ScoredTrajectory:
        trajectory, episode = opened.trajectory, opened.episode
        action, path = self._action(trajectory), len(episode.earlier)
        exchange = Exchange(
            trajectory.num_tokens, action, answer.reward, answer.text, answer.digest, answer.seconds, path, answer.tool
        )
        opened.episode = episode = msgspec.structs.replace(
            episode, exchanges=(*episode.exchanges, exchange), metrics=answer.metrics, is_success=answer.is_success
        )
        rules = self._tasks[opened.prompt.task]
        if answer.is_terminated or answer.is_truncated:
            return self._finished(opened, _ended_by(answer))
        if len(episode.exchanges) >= rules.max_turns:
            return self._finished(opened, EpisodeFinish.MAX_TURNS)
        if self._tokens_left(trajectory) <= 0:
            return self._finished(opened, EpisodeFinish.LENGTH)
        return self._continued(opened, rules)

    def _continued(self, opened: _Open, rules: EpisodeRules) -> Continued | ScoredTrajectory:
        trajectory, episode = opened.trajectory, opened.episode
        bridge, exchange = self._setup.bridge, episode.exchanges[-1]
        observation = self._observation(exchange, rules)
        self._counts["cut_observations"] += len(observation.content) < len(exchange.observation)
        appended: tuple[Segment, ...] = ()
        turns = (earlier.action for earlier in episode.exchanges if earlier.path == len(episode.earlier))
        if bridge.begins_path(turns, observation.role):
            ended = msgspec.structs.replace(trajectory, finish_reason=FinishReason.STOP)
            prompt_ids = bridge.prompt(self._history(opened, rules), opened.prompt.metadata.get("tools", ()))
            grown = Trajectory(trajectory.group_id, trajectory.sample_index, prompt_ids)
            episode = msgspec.structs.replace(episode, earlier=(*episode.earlier, ended))
        else:
            ids = bridge.suffix(trajectory.turn_ids, observation)
            version = trajectory.segments[-1].policy_version
            appended = (Segment(ids, (0.0,) * len(ids), version, Author.ENVIRONMENT),)
            grown = trajectory.extended(appended)
        if self._context_left(grown) <= 0:
            return self._finished(opened, EpisodeFinish.CONTEXT)
        self._counts["new_paths"] += not appended
        opened.trajectory, opened.episode = grown, episode
        return Continued(grown, episode, appended)

    def _failed(self, opened: _Open, answer: ActFailure) -> ScoredTrajectory | BeginAgain:
        assert opened.block is not None, "an attempt that acts has begun"
        if spent := self._setup.budget.fail(opened.block, answer.blame):
            raise EnvironmentFault(
                f"{spent}; the last one, {opened.trajectory.name} of task {opened.prompt.task!r}, at turn "
                f"{answer.turn}: {answer.message}; repair the environment or raise the share, then continue with "
                "--resume"
            )
        num_failures = opened.episode.num_failures + (answer.blame > 0)
        opened.episode = msgspec.structs.replace(opened.episode, num_failures=num_failures)
        if answer.blame and num_failures >= self._tasks[opened.prompt.task].max_attempts:
            return self._finished(opened, EpisodeFinish.ENVIRONMENT, answer)
        self._counts["restarted_episodes"] += 1
        return BeginAgain(*_key(opened.trajectory), f"environment_{answer.cause}")

    def _finished(self, opened: _Open, reason: EpisodeFinish, failure: ActFailure | None = None) -> ScoredTrajectory:
        key, rules = _key(opened.trajectory), self._tasks[opened.prompt.task]
        episode = msgspec.structs.replace(opened.episode, finish_reason=reason, discount=rules.discount)
        trajectory = msgspec.structs.replace(opened.trajectory, finish_reason=_FINISH.get(reason, FinishReason.STOP))
        self._setup.inbox.client.discard(self._episode_key(opened))
        del self._open[key]
        if failure is not None:
            self._counts["failed_episodes"] += 1
            failed = RewardResult(0.0, {}, False, None, failure.message, failure.cause)
            return ScoredTrajectory(trajectory, failed, episode)
        self._over.append(episode)
        return ScoredTrajectory(trajectory, environment_reward(episode), episode)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _episode_key(self, opened: _Open) -> EpisodeKey:
        return EpisodeKey(self._stream, *_key(opened.trajectory), opened.episode.attempt)

    def _action(self, trajectory: Trajectory) -> str:
        """Return the text of the last turn."""
        return self._setup.bridge.text(trajectory.turn_ids)

    def _history(self, opened: _Open, rules: EpisodeRules) -> tuple[Message, ...]:
        """Return the conversation so far, including the last observation; long observations are cut."""
        found = list(opened.prompt.messages)
        for exchange in opened.episode.exchanges:
            found += (Message("assistant", exchange.action), self._observation(exchange, rules))
        return tuple(found)

    def _observation(self, exchange: Exchange, rules: EpisodeRules) -> Message:
        bridge = self._setup.bridge
        return Message(bridge.role(exchange.tool), bridge.cut(exchange.observation, rules.max_observation_tokens))

    def _tokens_left(self, trajectory: Trajectory) -> int:
        """Tokens that the policy may still write in this episode."""
        earlier = sum(path.num_policy_tokens for path in self.episode(_key(trajectory)).earlier)
        return self._sampling.params.max_new_tokens - earlier - trajectory.num_policy_tokens

    def _context_left(self, trajectory: Trajectory) -> int:
        return self._setup.max_context_tokens - len(trajectory.prompt_ids) - trajectory.num_tokens


def path_seeds(noise_seed: int, num_paths: int) -> list[int]:
    """Return the noise seed of each path of an episode. The seed of the first path is `noise_seed`."""
    return [noise_seed, *((noise_seed + _PATH_SEED * path) % 2**63 for path in range(1, num_paths))]


_PATH_SEED = 0x9E3779B97F4A7C15
"""2^64 / golden ratio. Multiples of this number, added to the noise seed, give each path of an episode its own seed."""
_FINISH = {
    EpisodeFinish.ENVIRONMENT: FinishReason.ENVIRONMENT,
    EpisodeFinish.PARSE_ERROR: FinishReason.ENVIRONMENT,
    EpisodeFinish.LENGTH: FinishReason.LENGTH,
    EpisodeFinish.CONTEXT: FinishReason.LENGTH,
}


def _key(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.group_id, trajectory.sample_index


def _ended_by(answer: Observation) -> EpisodeFinish:
    """Return the finish reason of an episode that the environment ended, from the metrics of the last observation."""
    if answer.metrics.get("parse_error"):
        return EpisodeFinish.PARSE_ERROR
    if answer.is_terminated and answer.metrics.get("num_calls") == 0:
        return EpisodeFinish.STOP
    return EpisodeFinish.ENVIRONMENT


def environment_reward(episode: Episode) -> RewardResult:
    """Return the reward that the environment gave an episode: Σ discount^turn × reward of the turn."""
    rewards = [episode.discount**turn * exchange.reward for turn, exchange in enumerate(episode.exchanges)]
    total = math.fsum(rewards)
    action = episode.exchanges[-1].action if episode.exchanges else None
    return RewardResult(total, {ENVIRONMENT: total}, bool(episode.is_success), action)
