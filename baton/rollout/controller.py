"""Executes the scheduler's commands: sends leases, receives reports, and submits finished trajectories to the scorer.

      source ──prompt──▶ ┌────────────┐ ══ lease, abort ══▶ WorkerTransport ══▶ engine
                         │  Rollout-  │ ◀══ reports, retries ═══════════════════════┘
      scorer ◀─finished─ │ Controller │ ──events──▶ RolloutScheduler ──commands──▶ controller
        └────reward────▶ └────────────┘ ──▶ journal

The controller owns the payloads: prompts, token ids, logprobs and rewards. The scheduler receives only counts and
versions. The controller has no thread of its own: it makes progress only while the loop calls one of its methods.
`next_batch` returns when a batch is complete; `run_until` returns when the train step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.errors import EngineFault
from baton.records.journal import IssuedGroup, Journal, OpenGroup, StreamCursor
from baton.rollout import events as ev
from baton.rollout.episodes import BeginAgain, Continued, EpisodePlayer, environment_reward, path_seeds
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import TrackedGroup, TrackedTrajectory, TrajectoryState
from baton.rollout.settings import Rules
from baton.rollout.worker_client import SHORT_WAIT_S, SeededSampling, WorkerClient
from baton.stop import Stopped
from baton.types import (
    ENVIRONMENT,
    Author,
    Episode,
    FinishReason,
    FromPort,
    FromWorker,
    Group,
    PolicyVersion,
    Prompt,
    Retry,
    ScoredTrajectory,
    Segment,
    Trajectory,
    WorkLost,
    WorkRevoked,
    id_column,
)
from baton.types import Abort as AbortLease


class PromptSource(Protocol):
    """An endless stream of prompts."""

    @property
    def position(self) -> dict[str, int]:
        """Position in the prompt stream. A resumed run continues from this position."""

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        """Return the next prompt and its token ids, and advance the position."""


class TrajectoryScorer(Protocol):
    """Scores finished trajectories concurrently with generation."""

    sees_groups: bool
    """Whether all trajectories of a group must be submitted together, because rewards compare them."""
    scores_episodes: bool
    """Whether reward functions score multi-turn episodes, in addition to the environment."""

    def submit(self, finished: Sequence[Trajectory | ScoredTrajectory], prompt: Prompt) -> None:
        """Queue finished trajectories of one prompt for scoring. Episodes come with the reward of their environment."""

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        """Return the trajectories scored since the last call; wait at most `timeout_s` for the first one."""


@dataclass(slots=True)
class _Group:
    issued: IssuedGroup
    members: list[Trajectory]
    scored: dict[int, ScoredTrajectory]
    """By sample index."""
    episodes: dict[int, ScoredTrajectory] = field(default_factory=dict)
    """Finished multi-turn episodes, by sample index. Their rewards do not yet include the values of the reward
    functions."""


class RolloutController:
    """The training rollouts on one `WorkerTransport`. Before `begin` or `resume`, only `load_weights` may be called."""

    def __init__(
        self,
        worker: WorkerClient,
        rules: Rules,
        prompts: PromptSource,
        scorer: TrajectoryScorer,
        sampling: SeededSampling,
        journal: Journal | None = None,
        player: EpisodePlayer | None = None,
    ) -> None:
        """`player`: runs the multi-turn episodes; None without multi-turn tasks."""
        self._worker, self.rules, self._now_s = worker, rules, worker.clock
        self._prompts, self._scorer, self._sampling, self._journal = prompts, scorer, sampling, journal
        self._player = player or EpisodePlayer(None, sampling)
        self._groups: dict[int, _Group] = {}
        self._requeued: dict[int, IssuedGroup] = {}
        """Dropped groups whose prompts wait for their next attempt."""
        self._leases: dict[int, tuple[int, int]] = {}
        self._lease_of: dict[tuple[int, int], int] = {}
        self._num_scoring = 0
        self._most_leases = 0
        """Largest number of leases that were active at the same time."""
        self._tensors: Mapping[str, Any] = {}
        self._version: PolicyVersion | None = None
        self.is_stopping = False
        """True after a stop request has interrupted a command that takes a prompt or loads a version. The scheduler's
        later commands were not executed either, so only `abort_all` may then be called."""
        self._batch: list[Group] | None = None
        self._on_scored: Callable[[int], None] = lambda count: None
        self.make_scheduler: Callable[..., RolloutScheduler] = RolloutScheduler
        self.seconds: dict[str, float] = {"generate": 0.0, "judge": 0.0, "hidden": 0.0}
        """Seconds since the last `take_seconds`. `generate`: waiting for the worker between train steps. `judge`:
        waiting for the scorer. `environment`: waiting for environments while nothing is leased. `hidden`: the part of
        the train steps in which trajectories were running."""
        if player is not None:
            self.seconds["environment"] = 0.0

    def begin(
        self, version: int, cursor: StreamCursor, carried: Sequence[OpenGroup] = (), *, num_batches: float = math.inf
    ) -> None:
        """Start the rollouts. `version`: number of batches that earlier processes delivered. `cursor`: position in the
        prompt stream, from the journal. `carried`: groups that an earlier process left open. `num_batches`: number of
        batches of the whole run. No more groups are opened than these batches need."""
        self.scheduler = self.make_scheduler(
            self.rules, version=version, next_group_id=cursor.next_group_id, num_batches=num_batches
        )
        self._next_group_id = cursor.next_group_id
        tracked = []
        for group in carried:
            own = _Group(group.issued, list(group.members), dict(group.judged), _episodes_over(group))
            self._groups[group.issued.group_id] = own
            tracked.append(_tracked(own, group, may_replay=self._player.may_replay(group.issued.prompt)))
        self._apply_all(self.scheduler.restore(tracked))
        for own in list(self._groups.values()):
            finished = [t for t in own.members if t.finish_reason is not None and t.sample_index not in own.scored]
            self._submit(own, finished)
        for group in carried:
            self._restore_episodes(group)
        self._slots = 0
        self._update_capacity()

    def resume(
        self, version: int, cursor: StreamCursor, newest_group_id: int = -1, *, num_batches: float = math.inf
    ) -> list[OpenGroup]:
        """Start the rollouts as `begin` does, with the cursor and the open groups of the journal. Return the open
        groups. `cursor`: the checkpoint's cursor, used if there is no journal or if the journal's last entries are
        lost. `newest_group_id`: largest id in a recorded batch; new groups get larger ids."""
        place = None if self._journal is None else self._journal.place()
        if place is None or place.next_group_id < cursor.next_group_id:
            place = cursor
        self._prompts.position.update(place.position)
        for _ in range(place.next_group_id, newest_group_id + 1):
            self._prompts.take()
        place = StreamCursor(max(place.next_group_id, newest_group_id + 1), dict(self._prompts.position))
        carried = [] if self._journal is None else self._journal.open_groups(version)
        self.begin(version, place, carried, num_batches=num_batches)
        return carried

    @property
    def cursor(self) -> StreamCursor:
        """The next group id and the position of the prompt source, from which a resumed run continues."""
        return StreamCursor(self._next_group_id, dict(self._prompts.position))

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Load a version into the worker before `begin`. Raises Stopped."""
        self._worker.load_weights(tensors, version)

    def publish(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Load a new version into the worker, and return when the transport has loaded it. Raises DeadlineExceeded if
        the worker makes no progress, and Stopped on a stop request."""
        self._tensors, self._version = tensors, version
        self._dispatch(ev.VersionTrained(self._now_s(), version.number))
        self._pump_until(lambda: self._version is None)
        self._tensors = {}

    def next_batch(self, on_scored: Callable[[int], None] = lambda count: None) -> list[Group]:
        """Return the groups of the next train step. `on_scored`: receives the number of trajectories with a reward in
        open groups: the present number in the first call, and the increase in each later call. Raises DeadlineExceeded
        if the worker makes no progress, and Stopped on a stop request; in both cases, the journal contains all reported
        tokens."""
        self._on_scored = on_scored
        on_scored(sum(len(group.scored) for group in self._groups.values()))
        self._dispatch(ev.BatchRequested(self._now_s()))
        try:
            self._pump_until(lambda: self._batch is not None)
            if self.rules.pauses:  # the journal then has all tokens before the train step
                for message in self._worker.transport.flush():
                    self._on_message(message)
            elif self.rules.mode != "async":  # collect the last reports: the worker is idle during the step
                self._pump_until(lambda: not self.scheduler.num_leased)
        finally:
            self._on_scored = lambda count: None
        assert self._batch is not None
        groups, self._batch = self._batch, None
        return groups

    def run_until(self, is_over: Callable[[float], bool]) -> None:
        """Wait for the end of a train step. In mode `async`, also process messages. `is_over`: a function that waits at
        most the given number of seconds and returns whether the train step has ended."""
        begin_s = self.scheduler.running_s(self._now_s())
        while not is_over(0.0):
            if self.rules.mode == "async" and (self._is_busy or not self._slots):
                self._pump(SHORT_WAIT_S)
            else:
                is_over(1.0)
        if self.rules.is_swarm and not self.scheduler.num_leased:  # `_pump` reads no messages then
            for message in self._worker.transport.receive(0.0):  # a finished trajectory may have been revoked
                self._on_message(message)
        self.seconds["hidden"] += self.scheduler.running_s(self._now_s()) - begin_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Abort all rollouts, yield while worker and scorer are idle (for an evaluation), and resume the rollouts."""
        self._dispatch(ev.DispatchPaused(self._now_s()))
        self._pump_until(lambda: not (self.scheduler.num_leased or self._num_scoring))
        yield
        while self._worker.set_aside:
            self._on_revoked(self._worker.set_aside.pop())
        self._dispatch(ev.DispatchResumed(self._now_s()))

    def abort_all(self, longest_s: float) -> None:
        """Abort all leases before the process exits, and journal the tokens that are reported within `longest_s`."""
        until_s = self._now_s() + longest_s
        if not self.is_stopping:  # otherwise, as after a kill, only journaled tokens are kept
            self._dispatch(ev.DispatchPaused(self._now_s()))
            with suppress(Stopped):  # raised when the last lease has ended and a version would be loaded
                while self.scheduler.num_leased and (left_s := until_s - self._now_s()) > 0:
                    self._pump(min(1.0, left_s), "generate")
        if self._journal is not None:
            self._journal.commit()

    def take_seconds(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def take_episode_metrics(self) -> dict[str, float]:
        """Return the metrics of multi-turn episodes since the last call; empty without multi-turn tasks."""
        return self._player.take_metrics()

    def version_trained(self, version: int) -> None:
        """Record that the trainer has made a version that will not be published."""
        self._dispatch(ev.VersionTrained(self._now_s(), version, is_published=False))

    @property
    def _is_busy(self) -> bool:
        return bool(self.scheduler.num_leased or self.scheduler.num_acting or self._num_scoring)

    # ---- the pump ----------------------------------------------------------------------------------------------------

    def _pump_until(self, is_over: Callable[[], bool]) -> None:
        self._worker.begin_wait()
        while not is_over():
            self._worker.stop.check()
            if not self._is_busy and self._slots:
                raise EngineFault(
                    f"the scheduler is deadlocked at version {self.scheduler.version} with {self.scheduler.num_open} "
                    "open groups: no trajectory is leased, acting or being scored, and no batch is complete; "
                    "this is a bug in Baton, please report it with the journal of the run"
                )
            self._pump(1.0, "generate")

    def _pump(self, timeout_s: float, stage: str | None = None) -> None:
        """Wait at most `timeout_s`, and process what has arrived. If a lease is active or there are no slots, the wait
        is for the worker. Otherwise it is for the environments or, if no episode is acting, for the scorer. The seconds
        of waiting for the worker are added to `seconds[stage]`."""
        if self._journal is not None:
            self._journal.commit()  # otherwise, after a kill, a resumed run could use group ids twice
        if not self._slots or (self._num_scoring and (self.scheduler.num_leased or self.scheduler.num_acting)):
            timeout_s = min(timeout_s, SHORT_WAIT_S)  # neither a reward nor a first slot would end the wait
        begin_s = self._now_s()
        beside = self._player.sockets if self.scheduler.num_acting else None
        if self.scheduler.num_leased or not self._slots:
            num_waiting = len(self._lease_of) or int(not self._slots)
            messages = self._worker.receive(timeout_s, num_waiting, (f"{g}/{s}" for g, s in self._lease_of), beside)
            self._update_capacity()
            for message in messages:
                self._on_message(message)
            if stage is not None:
                self.seconds[stage] += self._now_s() - begin_s
            begin_s, timeout_s = self._now_s(), 0.0
        if self.scheduler.num_acting:
            for answer in self._player.collect(timeout_s):
                self._on_answer(answer)
            self.seconds["environment"] += self._now_s() - begin_s
            begin_s, timeout_s = self._now_s(), 0.0
        scored = self._scorer.collect(timeout_s) if self._num_scoring else []
        # repeated rewards first: a trajectory's first reward may complete the group, and the delivered group must
        # contain the newest reward of every member
        for one in sorted(scored, key=self._is_first):
            self._on_reward(one)
        self.seconds["judge"] += self._now_s() - begin_s
        if self._journal is not None:
            self._journal.commit()

    def _update_capacity(self) -> None:
        """Send the number of slots to the scheduler if it has changed, because workers have joined or left a swarm."""
        slots = self._worker.transport.slots
        if slots != self._slots:
            self._slots = slots
            queue = 2 * slots if self.rules.may_pause else slots  # the scheduler refills it when half of it is empty
            self._dispatch(ev.Capacity(self._now_s(), slots, queue=queue))

    def _on_message(self, message: FromPort) -> None:
        match message:
            case WorkLost(cause=cause, num_tokens=num_tokens):
                self._dispatch(ev.TokensLost(self._now_s(), cause, num_tokens))
            case WorkRevoked():
                self._on_revoked(message)
            case _:
                self._on_lease_message(message)

    def _on_revoked(self, revoked: WorkRevoked) -> None:
        """Restart a trajectory whose tokens are not trusted. If the trajectory is a path of an episode, restart the
        episode. Ignore the message if the group is already in a batch, or if the noise seed shows that the message is
        about an evaluation."""
        group, index = self._groups.get(revoked.group_id), revoked.sample_index
        if group is None:
            return
        key, over = (revoked.group_id, index), group.episodes.get(index)
        num_paths = self._player.num_paths(key) if over is None else len(over.paths)
        if revoked.noise_seed not in path_seeds(self._sampling.noise_seed, num_paths):
            return
        lease_id = self._lease_of.get(key)
        if lease_id is not None:
            self._worker.transport.send(AbortLease(lease_id))  # the lease may be for another path of the episode
            self._end_lease(lease_id)
        group.scored.pop(index, None)
        group.episodes.pop(index, None)
        if over is not None and over.episode is not None:
            # Restore the episode, so that `begin_again` counts a new attempt and no two actions have the same key.
            self._player.restore(group.issued.prompt, over.trajectory, over.episode)
        if self._journal is not None:
            self._journal.revoked(revoked.group_id, index)
        self._dispatch(ev.Revoked(self._now_s(), revoked.group_id, index, revoked.cause))

    def _on_lease_message(self, message: FromWorker) -> None:
        key = self._leases.get(message.lease_id)
        if key is None:
            return  # the lease has ended: the message was repeated or arrived late
        group_id, sample_index = key
        group = self._groups[group_id]
        trajectory = group.members[sample_index]
        if isinstance(message, Retry):
            self._worker.on_refused(trajectory, message, self._most_leases)
            self._end_lease(message.lease_id)
            self._dispatch(ev.LeaseEnded(self._now_s(), group_id, sample_index))
            return
        if message.token_offset != trajectory.num_tokens:
            return  # a repeated report, whose tokens have been appended already
        self._worker.on_accepted()
        ends_turn = message.finish_reason is not None and self._player.plays(group.issued.prompt)
        grown = trajectory.extended(message.segments, None if ends_turn else message.finish_reason)
        group.members[sample_index] = grown
        if message.finish_reason is not None or message.is_aborted:
            self._end_lease(message.lease_id)
        self._record(trajectory, grown, message.segments, ends_turn=ends_turn)
        for segment in message.segments:
            if segment.author is Author.POLICY:
                self._dispatch(ev.TokensReceived(self._now_s(), *key, segment.policy_version, len(segment.token_ids)))
        if ends_turn:
            assert message.finish_reason is not None
            self._dispatch(ev.TurnEnded(self._now_s(), *key))
            self._act(group, grown, message.finish_reason)
        elif grown.finish_reason is not None:
            self._submit(group, [grown])
            self._dispatch(ev.Finished(self._now_s(), *key))
        elif message.is_aborted:
            self._dispatch(ev.LeaseEnded(self._now_s(), *key))

    def _record(
        self, before: Trajectory, grown: Trajectory, segments: Sequence[Segment], *, ends_turn: bool = False
    ) -> None:
        if self._journal is None:
            return
        if grown.finish_reason is not None:
            self._journal.finished(grown)
        else:
            self._journal.grew(grown.group_id, grown.sample_index, before.num_tokens, segments)
            if ends_turn:
                self._journal.turn_ended(grown)

    # ---- multi-turn episodes -----------------------------------------------------------------------------------------

    def _restore_episodes(self, group: OpenGroup) -> None:
        """Continue the episodes of an earlier process. If an episode's turn had ended, send its action to the
        environment. An episode whose environment forbids replay starts again."""
        own = self._groups.get(group.issued.group_id)
        if own is None or not self._player.plays(group.issued.prompt):  # `own` is None if the group was filtered
            return
        for trajectory in group.members:
            index = trajectory.sample_index
            if not group.has_begun(index):
                continue
            episode = group.episodes.get(index, Episode())
            self._player.restore(group.issued.prompt, trajectory, episode)
            if not self._player.may_replay(group.issued.prompt):
                self._on_answer(BeginAgain(group.issued.group_id, index, "environment_restarted"))
            elif index in group.ended_turns:
                self._act(own, trajectory, FinishReason.STOP)

    def _act(self, group: _Group, trajectory: Trajectory, reason: FinishReason) -> None:
        """Send the action of a turn to the environment, unless the turn ends the episode."""
        over = self._player.end_turn(group.issued.prompt, trajectory, reason)
        if over is not None:
            self._end_episode(over)

    def _on_answer(self, answer: Continued | ScoredTrajectory | BeginAgain) -> None:
        match answer:
            case ScoredTrajectory():
                self._end_episode(answer)
            case BeginAgain(group_id=group_id, sample_index=index, cause=cause):
                if self._journal is not None:
                    self._journal.revoked(group_id, index)
                self._dispatch(ev.EnvironmentFailed(self._now_s(), group_id, index, cause))
            case Continued(trajectory=grown, episode=episode, appended=appended):
                members = self._groups[grown.group_id].members
                before, members[grown.sample_index] = members[grown.sample_index], grown
                if self._journal is not None:
                    self._journal.observed(grown, episode)
                self._record(before, grown, appended)
                self._dispatch(ev.Observed(self._now_s(), grown.group_id, grown.sample_index))

    def _end_episode(self, over: ScoredTrajectory) -> None:
        """Record a finished episode with the environment's reward, or without a reward if the environment failed."""
        trajectory = over.trajectory
        group = self._groups[trajectory.group_id]
        group.members[trajectory.sample_index] = trajectory
        group.episodes[trajectory.sample_index] = over
        if self._journal is not None:
            self._journal.finished(trajectory, over.episode)
        self._dispatch(ev.Finished(self._now_s(), trajectory.group_id, trajectory.sample_index))
        self._submit(group, [trajectory])

    # ---- leases and scores -------------------------------------------------------------------------------------------

    def _end_lease(self, lease_id: int) -> None:
        del self._lease_of[self._leases.pop(lease_id)]

    def _submit(self, group: _Group, finished: Sequence[Trajectory]) -> None:
        """Submit finished trajectories for scoring. If rewards depend on all members of a group, submit the whole group
        when all members are finished. Episodes that no reward function scores already have their reward."""
        whole = finished
        if self._scorer.sees_groups and finished:
            whole = group.members if all(t.finish_reason is not None for t in group.members) else ()
        ready = [one for t in whole if (one := self._to_score(group, t)) is not None]
        self._num_scoring += len(ready)
        for together in (ready,) if self._scorer.sees_groups else ([one] for one in ready):
            if together:
                self._scorer.submit(together, group.issued.prompt)
        for trajectory in finished:
            if self._to_score(group, trajectory) is None:
                self._take_reward(group, group.episodes[trajectory.sample_index])

    def _to_score(self, group: _Group, trajectory: Trajectory) -> Trajectory | ScoredTrajectory | None:
        """Return the object to submit to the scorer for a finished trajectory: the trajectory or its episode. Return
        None for an episode that no reward function scores, or whose environment failed."""
        over = group.episodes.get(trajectory.sample_index)
        if over is None:
            return trajectory
        return over if over.judgement.is_judged and self._scorer.scores_episodes else None

    def _on_reward(self, scored: ScoredTrajectory) -> None:
        self._num_scoring -= 1
        trajectory = scored.trajectory
        group = self._groups.get(trajectory.group_id)
        if group is None or group.members[trajectory.sample_index] is not trajectory:
            return  # the trajectory was revoked while it was being scored
        self._take_reward(group, scored)

    def _take_reward(self, group: _Group, scored: ScoredTrajectory) -> None:
        trajectory, result = scored.trajectory, scored.judgement
        self._on_scored(int(self._is_first(scored)))
        group.scored[trajectory.sample_index] = scored
        if self._journal is not None:
            self._journal.judged(scored)
        reward = result.reward if result.is_judged else None
        self.scheduler.step.failure = result.failure or self.scheduler.step.failure
        self._dispatch(ev.Rewarded(self._now_s(), trajectory.group_id, trajectory.sample_index, reward))

    def _is_first(self, scored: ScoredTrajectory) -> bool:
        """Return whether this is the first reward of its trajectory. A group that is scored as a whole is scored again
        after one of its members was revoked."""
        group = self._groups.get(scored.trajectory.group_id)
        return group is None or scored.trajectory.sample_index not in group.scored

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event) -> None:
        self._apply_all(self.scheduler.handle(event))

    def _apply_all(self, commands: Iterable[ev.Command]) -> None:
        try:
            for command in commands:
                self._apply_command(command)
        except Stopped:
            self.is_stopping = True
            raise

    def _apply_command(self, command: ev.Command) -> None:
        match command:
            case ev.Open(group_id=group_id, again=again):
                self._open(group_id, again)
            case ev.Assign():
                self._lease(command)
            case ev.AbortTrajectory(group_id=group_id, sample_index=sample_index):
                lease_id = self._lease_of.get((group_id, sample_index))
                if lease_id is not None:
                    self._worker.transport.send(AbortLease(lease_id))
            case ev.Restart(group_id=group_id, sample_index=sample_index):
                group = self._groups[group_id]
                group.members[sample_index] = Trajectory(group_id, sample_index, group.issued.prompt_ids)
                self._player.begin_again(group.issued.prompt, group.members[sample_index])
            case ev.Discard(group_id=group_id, cause=cause):
                self._discard(group_id, cause)
            case ev.Deliver(group_ids=group_ids):
                self._batch = [self._complete(self._groups.pop(group_id)) for group_id in group_ids]
            case ev.Load():
                assert self._version is not None, "the scheduler loads a version that was not published"
                version, self._version = self._version, None
                self._worker.load_weights(self._tensors, version)
                self._dispatch(ev.VersionServed(self._now_s(), version.number))

    def _open(self, group_id: int, again: int | None) -> None:
        if again is None:
            (prompt, ids), attempts = self._prompts.take(), 0
        else:
            before = self._requeued.pop(again)
            prompt, ids, attempts = before.prompt, before.prompt_ids, before.attempts + 1
        self._worker.check_room(group_id, ids)
        self._next_group_id = group_id + 1
        size, version = self.rules.group_size, self.scheduler.version
        issued = IssuedGroup(group_id, prompt, ids, size, version, attempts)
        shared = id_column(ids)
        self._groups[group_id] = _Group(issued, [Trajectory(group_id, index, shared) for index in range(size)], {})
        if self._journal is not None:
            self._journal.issued(issued, self.cursor)
            if again is not None:
                self._journal.discarded(again, "dropped")

    def _lease(self, command: ev.Assign) -> None:
        key, group = (command.group_id, command.sample_index), self._groups[command.group_id]
        trajectory = group.members[command.sample_index]
        sampling = self._player.sampling(group.issued.prompt, trajectory)
        lease_id = self._worker.lease(trajectory, sampling, command.version, is_exact=command.is_exact)
        self._leases[lease_id], self._lease_of[key] = key, lease_id
        self._most_leases = max(self._most_leases, len(self._leases))

    def _discard(self, group_id: int, cause: str) -> None:
        group = self._groups.pop(group_id)
        for trajectory in group.members:
            self._player.forget((group_id, trajectory.sample_index))
        if cause == "dropped" and group.issued.attempts < self.rules.max_requeues:
            self._requeued[group_id] = group.issued
            return  # if the run is resumed before the next attempt, it drops the group again
        if self._journal is not None:
            self._journal.discarded(group_id, cause)

    def _complete(self, group: _Group) -> Group:
        members = tuple(group.scored[index] for index in range(len(group.members)))
        return Group(group.issued.group_id, group.issued.prompt, members)


def _episodes_over(carried: OpenGroup) -> dict[int, ScoredTrajectory]:
    """Return the finished episodes of a restored group. The rewards do not yet include values of reward functions."""
    found = {}
    for trajectory in carried.members:
        scored = carried.judged.get(trajectory.sample_index)
        episode = carried.episodes.get(trajectory.sample_index) if scored is None else scored.episode
        if trajectory.finish_reason is None or episode is None:
            continue
        if scored is None or ENVIRONMENT in scored.judgement.parts:
            scored = ScoredTrajectory(trajectory, environment_reward(episode), episode)
        found[trajectory.sample_index] = scored
    return found


def _tracked(group: _Group, carried: OpenGroup, *, may_replay: bool) -> TrackedGroup:
    """Return the scheduler's view of a restored group."""
    members = []
    for trajectory in group.members:
        scored = group.scored.get(trajectory.sample_index)
        member = TrackedTrajectory(trajectory.group_id, trajectory.sample_index)
        if scored is not None:
            member.state = TrajectoryState.SCORED
        elif trajectory.finish_reason is not None:
            member.state = TrajectoryState.SCORING
        elif trajectory.sample_index in carried.ended_turns or (
            carried.has_begun(trajectory.sample_index) and not may_replay
        ):
            member.state = TrajectoryState.ACTING
        over = group.episodes.get(trajectory.sample_index)
        earlier = carried.episodes.get(trajectory.sample_index, Episode()).earlier
        paths = (*earlier, trajectory) if over is None else over.paths
        for segment in [segment for path in paths for segment in path.segments]:
            if segment.author is Author.POLICY:
                member.grow(segment.policy_version, len(segment.token_ids))
        if scored is not None and scored.judgement.is_judged:
            member.reward = scored.judgement.reward
        members.append(member)
    issued, waiting = group.issued, len(group.members) - len(group.scored)
    return TrackedGroup(issued.group_id, members, waiting, issued.opened_at, issued.attempts)
