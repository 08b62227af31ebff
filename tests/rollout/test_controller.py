"""The runner with a scripted engine: what is trained is what the engine wrote, once, through any number of resumes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import EngineFault, UserError
from baton.records.journal import IssuedGroup, Journal, StreamCursor
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import END_ID, FakeEngine, fake_token
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import SHORT_WAIT_S, SeededSampling, WorkerClient
from baton.stop import Stopped, StopRequest
from baton.types import (
    FinishReason,
    FromHub,
    FromWorker,
    Group,
    Lease,
    Message,
    PolicyVersion,
    Prompt,
    Retry,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
    WorkRevoked,
)

MAX_NEW_TOKENS = 24


def length(group_id: int, sample_index: int) -> int:
    """Mostly short, some long, some longer than the budget."""
    return 1 + min(40, int(random.Random(f"{group_id}/{sample_index}").expovariate(1 / 9)))


class Prompts:
    """A stream of numbered prompts."""

    def __init__(self, taken: int = 0) -> None:
        self.position = {"numbers": taken}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        number = self.position["numbers"]
        self.position["numbers"] += 1
        return Prompt(str(number), "numbers", (Message("user", str(number)),)), (7, 1000 + number)

    def take_counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class LateJudges:
    """Judges in any order, some calls late, and counts."""

    sees_groups = False

    def __init__(self, seed: int = 0) -> None:
        self.asked: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._waiting: list[Trajectory] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        for trajectory in trajectories:
            assert prompt.prompt_id == str(trajectory.prompt_ids[-1] - 1000)
            assert trajectory.finish_reason is not None
            self.asked[trajectory.name] += 1
            self._waiting.append(trajectory)

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        ready = [t for t in self._waiting if timeout_s or self._rng.random() < 0.3]
        self._waiting = [t for t in self._waiting if t not in ready]
        return [ScoredTrajectory(t, RewardResult(float(t.sample_index), {}, False)) for t in ready]


class Bench:
    """A runner over a scripted engine, and the trainer's side of the conversation."""

    def __init__(
        self,
        mode: str,
        port: LocalTransport | None = None,
        journal: Journal | None = None,
        *,
        judges: LateJudges | None = None,
        source: Prompts | None = None,
        clock: Callable[[], float] = time.monotonic,
        may_pause: bool = False,
        is_swarm: bool = False,
        stop: StopRequest | None = None,
        **values: Any,
    ) -> None:
        recipe = RolloutSettings.model_validate({"mode": mode, "batch_groups": 4, "group_size": 3, **values})
        rules = replace(recipe.rules(), may_pause=may_pause, is_swarm=is_swarm)
        settings = EngineSettings(slots=8, max_context_tokens=64, report_every_tokens=5)
        self.engine = FakeEngine(settings, PolicyVersion("a", 0), length)
        self.port = port or LocalTransport(self.engine)
        if port is not None:
            port.engine = self.engine
        self.judges, self.source = judges or LateJudges(), source or Prompts()
        self.journal = journal
        worker = WorkerClient(self.port, 5.0, max_context_tokens=64, clock=clock, stop=stop)
        sampling = SeededSampling(SamplingParams(MAX_NEW_TOKENS), noise_seed=1)
        self.controller = RolloutController(worker, rules, self.source, self.judges, sampling, journal)
        self.version = 0
        self.batches: list[list[Group]] = []

    def begin(self, version: int = 0, *, place: StreamCursor | None = None, num_batches: float = 1e9) -> None:
        carried = self.journal.open_groups() if self.journal is not None else []
        self.version = version
        if place is not None:
            self.source.position = dict(place.position)
        self.controller.begin(version, place or StreamCursor(0, {}), carried, num_batches=num_batches)
        self.publish()

    def live(self) -> None:
        """Until death."""
        self.begin()
        while True:
            self.step()

    def publish(self) -> None:
        self.controller.publish({}, PolicyVersion("a", self.version))

    def step(self, ticks: int = 6) -> list[Group]:
        """One train step, during which the worker has so many rounds where the mode lets it."""
        groups = self.controller.next_batch()
        if self.journal is not None:
            self.journal.consumed(self.version + 1, [g.group_id for g in groups])
        self.batches.append(groups)
        left = iter(range(ticks))
        self.controller.run_until(lambda timeout_s: next(left, None) is None)
        self.version += 1
        self.publish()
        return groups


MODES = [
    ("sync", {}),
    ("partial", {"overprovision": 2.0}),
    ("partial", {"max_concurrency": 7}),
    ("partial", {"overprovision": "auto"}),
    ("partial", {"on_new_version": "keep"}),
    ("partial", {"on_new_version": "keep", "may_pause": True}),
    ("partial", {"on_new_version": "keep", "may_pause": True, "overprovision": "auto"}),
    ("async", {"on_new_version": "resume", "max_staleness": 2}),
    ("async", {"on_new_version": "keep", "max_staleness": 2}),
    ("async", {"on_new_version": "resume", "max_staleness": 1, "consume": "submission", "stale": "drop"}),
]


def assert_whole(trajectory: Trajectory) -> None:
    """Ids, logprobs, versions, budget and ending are those of the script, whatever it went through."""
    wanted = length(trajectory.group_id, trajectory.sample_index)
    assert trajectory.num_tokens == min(wanted, MAX_NEW_TOKENS), "the budget counts over all resumes"
    assert trajectory.finish_reason is (FinishReason.STOP if wanted <= MAX_NEW_TOKENS else FinishReason.LENGTH)
    versions = trajectory.policy_versions
    assert versions == sorted(versions)
    ids = [
        fake_token(trajectory.group_id, trajectory.sample_index, place, version, length=wanted)
        for place, version in enumerate(versions)
    ]
    assert trajectory.token_ids == ids
    assert trajectory.behavior_logprobs == [-(1 + token % 8) / 8 for token in ids]
    assert trajectory.token_ids.count(END_ID) == (wanted <= MAX_NEW_TOKENS)


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_every_batch_is_what_the_engine_wrote_and_nothing_is_generated_twice(mode, values):
    bench = Bench(mode, **values)
    bench.begin()
    for _ in range(12):
        bench.step()
    members = [m.trajectory for batch in bench.batches for group in batch for m in group.members]
    for trajectory in members:
        assert_whole(trajectory)
    assert [len(batch) for batch in bench.batches] == [4] * 12
    ids = [group.group_id for batch in bench.batches for group in batch]
    assert len(set(ids)) == len(ids)
    assert all(group.prompt.prompt_id == str(group.group_id) for batch in bench.batches for group in batch)
    assert set(bench.judges.asked.values()) == {1}, "judged once each, abort or not"
    with bench.controller.paused():
        carried = bench.controller.scheduler.num_carried_tokens
    assert bench.engine.stats.decoded_tokens == sum(t.num_tokens for t in members) + carried
    staleness = [bench_step - v for bench_step, b in enumerate(bench.batches) for g in b for v in _versions(g)]
    if mode == "sync":
        assert set(staleness) == {0}
    else:
        assert any(len(t.segments) > 1 for t in members), "some were carried on by another version"
        if values.get("stale") == "drop":
            assert max(staleness) <= 1


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_a_pause_leaves_nothing_with_the_judges_for_an_evaluation_to_take_for_its_own(mode, values):
    bench, in_flight = Bench(mode, **values), 0
    bench.begin()
    for _ in range(8):
        bench.step()
        in_flight += bool(bench.judges.num_waiting)
        with bench.controller.paused():
            assert bench.judges.num_waiting == 0
    assert in_flight or mode == "sync", "there was something to wait for"
    assert [len(batch) for batch in bench.batches] == [4] * 8


class Recorded(LocalTransport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.sent: list[FromHub] = []

    def send(self, message: FromHub) -> None:
        self.sent.append(message)
        super().send(message)


def test_leases_that_pause_are_neither_aborted_nor_leased_again_and_all_their_tokens_are_journaled(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=True)
    bench = Bench("partial", port := Recorded(), journal, on_new_version="keep", may_pause=True)
    bench.begin()
    carried = 0
    for _ in range(6):
        groups = bench.controller.next_batch()
        scheduler, delivered = bench.controller.scheduler, {group.group_id for group in groups}
        kept = [t for g in journal.open_groups() if g.issued.group_id not in delivered for t in g.members]
        assert sum(t.num_tokens for t in kept) == scheduler.num_carried_tokens
        carried += any(t.segments and t.finish_reason is None for t in kept)
        decoded = bench.engine.stats.decoded_tokens
        journal.consumed(bench.version + 1, sorted(delivered))
        bench.controller.run_until(lambda timeout_s: True)
        bench.version += 1
        bench.publish()
        assert bench.engine.stats.decoded_tokens == decoded, "nothing is generated while no batch is requested"
    assert carried == 6, "some are unfinished after every batch"
    leases = [one.trajectory.name for one in port.sent if isinstance(one, Lease)]
    assert len(set(leases)) == len(leases) == len(port.sent), "each trajectory has one lease, and none is aborted"


def _versions(group: Group) -> list[int]:
    return [v for m in group.members for v in m.trajectory.policy_versions]


@pytest.mark.parametrize(("mode", "hidden_s"), [("sync", 0.0), ("async", 5.0)])
def test_a_train_step_counts_as_generation_while_trajectories_run_also_if_nothing_waits_for_them(mode, hidden_s):
    now_s, rounds = [0.0], iter(range(4))
    bench = Bench(mode, clock=lambda: now_s[0])
    bench.begin()
    bench.controller.next_batch()

    def is_over(timeout_s: float) -> bool:
        now_s[0] += timeout_s == 0
        return timeout_s == 0 and next(rounds, None) is None

    bench.controller.run_until(is_over)
    assert (bench.controller.scheduler.num_leased > 0) == (mode == "async")
    assert bench.controller.take_seconds()["hidden"] == hidden_s


def test_the_last_batch_leaves_nothing_behind():
    """No group is opened that the run will not train."""
    for mode, values in MODES:
        bench = Bench(mode, **values)
        bench.begin(num_batches=5)
        for _ in range(5):
            bench.step()
        assert bench.source.position["numbers"] == 20
        assert bench.controller.scheduler.num_open == 0


class Disturbed(LocalTransport):
    """Every message comes twice, and again after its lease has ended."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # the bench gives it its engine
        self._seen: list[FromWorker] = []

    def receive(self, timeout_s: float) -> list[FromWorker]:
        new = super().receive(timeout_s)
        late = self._seen[-6:]
        self._seen += new
        return [*late, *(message for each in new for message in (each, each))]


@pytest.mark.parametrize(("mode", "values"), MODES)
def test_repeated_and_late_messages_change_nothing(mode, values):
    bench = Bench(mode, Disturbed(), **values)
    bench.begin()
    for _ in range(6):
        for group in bench.step():
            for member in group.members:
                assert_whole(member.trajectory)
    assert set(bench.judges.asked.values()) == {1}


class Killed(Exception):
    """The process ends here."""


class Mortal(LocalTransport):
    """Dies after so many rounds."""

    def __init__(self, rounds: int) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._rounds, self.is_dead = rounds, False
        self.newest_group_id = -1

    def send(self, message: FromHub) -> None:
        super().send(message)
        if isinstance(message, Lease):
            self.newest_group_id = max(self.newest_group_id, message.trajectory.group_id)

    def receive(self, timeout_s: float) -> list[FromWorker]:
        if not self._rounds:
            self.is_dead = True
            raise Killed
        self._rounds -= 1
        return super().receive(timeout_s)


@pytest.mark.parametrize(("mode", "values"), MODES)
@pytest.mark.parametrize("rounds", [0, 1, 9, 23, 40, 77])
def test_what_a_killed_process_had_finished_is_trained_and_not_made_again(mode, values, rounds, tmp_path: Path):
    """Reopened from disk only. In sync the unfinished begin again at their prompts, else at their last report."""
    port = Mortal(rounds)

    def check() -> None:
        if port.is_dead:
            raise Killed  # what the journal has not committed before the kill is lost

    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=mode != "sync", before_commit=check)
    first = Bench(mode, port, journal, **values)
    with pytest.raises(Killed):
        first.live()
    with suppress(Killed):
        journal.close()

    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=mode != "sync")
    known = {t.name: t for g in journal.open_groups() for t in g.members}
    judged = {judged.trajectory.name for g in journal.open_groups() for judged in g.judged.values()}
    place = journal.place()
    assert place is not None
    assert place.next_group_id > port.newest_group_id, "the id of a group that was leased is not used again"
    second = Bench(mode, None, journal, **values)
    second.begin(len(first.batches), place=place)  # a recorded batch is trained first
    for _ in range(8):
        second.step()
    members = {m.trajectory.name: m.trajectory for b in second.batches for g in b for m in g.members}
    for trajectory in members.values():
        assert_whole(trajectory)
    for name, before in known.items():
        after = members[name]
        assert after.token_ids[: before.num_tokens] == before.token_ids, "append only, across processes too"
        if mode == "sync":
            assert before.finish_reason is not None or not before.segments
    assert not judged & set(second.judges.asked), "a replay does not judge again"
    with second.controller.paused():
        carried = second.controller.scheduler.num_carried_tokens
    made = sum(t.num_tokens for t in members.values()) - sum(t.num_tokens for t in known.values())
    assert second.engine.stats.decoded_tokens == made + carried, "no token is generated twice"
    prompts = [g.prompt.prompt_id for b in (*first.batches, *second.batches) for g in b]
    assert len(set(prompts)) == len(prompts), "no prompt is trained twice"
    if values.get("consume") == "submission" or mode == "sync":
        assert prompts == [str(i) for i in range(len(prompts))], "and none is skipped"


class Listening(Journal):
    """Remembers the order of records: a group and the number of its attempt, or None if it was discarded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keeps_partials=True)
        self.records: list[tuple[int, int | None]] = []

    def issued(self, group: IssuedGroup, cursor: StreamCursor) -> None:
        self.records.append((group.group_id, group.attempts))
        super().issued(group, cursor)

    def discarded(self, group_id: int, cause: str) -> None:
        self.records.append((group_id, None))
        super().discarded(group_id, cause)


def test_dropped_groups_are_tried_again_under_a_new_id_and_counted(tmp_path: Path):
    journal = Listening(tmp_path / "journal.sqlite")
    values = {"overprovision": 1.75, "max_staleness": 1, "stale": "drop", "max_requeues": 1, "consume": "completion"}
    bench = Bench("partial", None, journal, **values)
    bench.begin()
    for _ in range(20):
        bench.step()
    counts = bench.controller.scheduler.step
    assert counts.requeued_groups + counts.dropped_groups > 0
    trained = [g.prompt.prompt_id for b in bench.batches for g in b]
    assert len(set(trained)) == len(trained), "a prompt that was tried again is trained once"
    assert bench.controller.scheduler.ledger.dropped > 0
    for step, batch in enumerate(bench.batches):
        assert all(step - v <= 1 for g in batch for v in _versions(g))
    attempts = {group_id: attempt for group_id, attempt in journal.records if attempt is not None}
    dropped = [index for index, (_, attempt) in enumerate(journal.records) if attempt is None]
    assert dropped
    for index in dropped:  # a run that is killed in between would lose the prompt
        is_last = attempts[journal.records[index][0]] == 1
        assert is_last or journal.records[index - 1][1] == 1, "discarded before its next attempt was issued"


class Revokes(LocalTransport):
    """Revokes the trajectories that `chosen` names at each look for messages."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.chosen: Callable[[], list[tuple[int, int]]] = list

    def receive(self, timeout_s: float) -> list[Any]:
        return [*(WorkRevoked(1, *key, "quarantine") for key in self.chosen()), *super().receive(timeout_s)]


def test_a_revoked_trajectory_of_a_dropped_group_that_waits_for_its_next_attempt_is_ignored() -> None:
    port = Revokes()
    bench = Bench("async", port, is_swarm=True, max_staleness=1, stale="drop", max_concurrency=7)
    num_waiting = 0

    def gone() -> list[tuple[int, int]]:
        """A trajectory of each group that the scheduler does not have any more: trained, or dropped."""
        nonlocal num_waiting
        scheduler = bench.controller.scheduler
        num_again = scheduler.next_group_id - bench.source.position["numbers"]
        num_waiting += scheduler.step.requeued_groups - num_again
        open_ids = {group.group_id for group in scheduler.groups()}
        return [(number, 0) for number in range(scheduler.next_group_id) if number not in open_ids]

    port.chosen = gone
    bench.begin()
    for _ in range(20):
        bench.step()
    assert num_waiting > 0
    trained = [g.prompt.prompt_id for b in bench.batches for g in b]
    assert len(set(trained)) == len(trained), "a prompt that was tried again is trained once"


def test_a_trajectory_that_is_revoked_during_a_train_step_is_not_in_the_next_batch() -> None:
    """Also if nothing is leased during the train step, so that nobody waits for messages."""
    port = Revokes()
    bench = Bench("async", port, is_swarm=True, on_new_version="keep", max_staleness=2)
    bench.begin()
    bench.controller.next_batch()
    ticks, scheduler = iter(range(400)), bench.controller.scheduler
    bench.controller.run_until(lambda timeout_s: next(ticks, None) is None)
    assert not scheduler.num_leased, "all groups that may be open are complete"
    waiting = [(group.group_id, 0) for group in scheduler.groups()]
    assert len(waiting) >= 4
    port.chosen = lambda: [waiting.pop() for _ in list(waiting)]
    bench.controller.run_until(lambda timeout_s: True)
    bench.version += 1
    bench.publish()
    before = scheduler.ledger.generated
    assert bench.controller.next_batch()
    assert scheduler.ledger.generated > before, "they were generated again"


def test_a_stop_during_a_train_step_in_async_still_collects_the_last_tokens() -> None:
    """The stop interrupts the publication, whose aborted leases then end in `abort_all`."""
    stop = StopRequest()
    bench = Bench("async", on_new_version="resume", max_staleness=2, stop=stop)
    bench.begin()
    for _ in range(3):
        bench.step()
    bench.controller.next_batch()
    stop.request(0)
    bench.version += 1
    with pytest.raises(Stopped):
        bench.publish()
    assert bench.controller.scheduler.num_leased
    bench.controller.abort_all(5.0)
    assert not bench.controller.scheduler.num_leased


@pytest.mark.parametrize("error", [OSError(), Stopped()])
def test_only_a_draw_that_a_stop_has_interrupted_makes_the_controller_stop(error: BaseException) -> None:
    class Source(Prompts):
        fails = False

        def take(self) -> tuple[Prompt, tuple[int, ...]]:
            assert not bench.controller.is_stopping
            if self.fails:
                raise error
            return super().take()

    def steps() -> None:
        for _ in range(9):
            bench.step()

    source = Source()
    bench = Bench("async", max_staleness=2, source=source)
    bench.begin()
    bench.step()
    source.fails = True
    with pytest.raises(type(error)):
        steps()
    assert bench.controller.is_stopping == isinstance(error, Stopped)


class Refusing(LocalTransport):
    """A worker that is always at another version."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._refused: list[FromWorker] = []

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            self._refused.append(Retry(message.lease_id, 99))

    def receive(self, timeout_s: float) -> list[FromWorker]:
        said, self._refused = self._refused, []
        return said


def test_a_worker_that_refuses_everything_is_named():
    bench = Bench("partial", Refusing())
    bench.begin()
    with pytest.raises(EngineFault, match=r"has refused .* it serves version 99; look for errors"):
        bench.step()


class FailsOnce(LocalTransport):
    """Its only engine fails with all its leases. Another engine, without slots until the next call, gets them."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.refused: list[FromWorker] = []
        self.has_failed = self.is_starting = False

    @property
    def slots(self) -> int:
        return 0 if self.is_starting else super().slots

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease) and not self.has_failed:
            self.refused.append(Retry(message.lease_id, 0))
        else:
            super().send(message)

    def receive(self, timeout_s: float) -> list[FromWorker]:
        self.is_starting = bool(self.refused) and not self.has_failed
        if self.is_starting:
            self.has_failed = True
            return self.refused
        return list(super().receive(timeout_s))  # type: ignore[arg-type]


def test_an_engine_that_fails_with_more_leases_than_refusals_are_allowed_does_not_end_the_run():
    bench = Bench("sync", FailsOnce())
    bench.begin()
    assert len(bench.step()) == 4
    assert len(bench.port.refused) == 12


def test_a_prompt_that_leaves_no_room_is_refused_by_name():
    class LongPrompts(Prompts):
        def take(self) -> tuple[Prompt, tuple[int, ...]]:
            return super().take()[0], tuple(range(64))

    bench = Bench("sync", source=LongPrompts())
    bench.begin()
    with pytest.raises(UserError, match="the prompt of group 0 has 64 tokens, which leaves no room"):
        bench.step()


class SlowJudges(LateJudges):
    """Judges each trajectory within half a second, on a clock that only waits advance."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.delays_s: list[float] = []
        """Time from each reward to its collection."""
        self._due: list[tuple[float, Trajectory]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._due)

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        self._due += [(self.now_s + 0.5, trajectory) for trajectory in trajectories]

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        self.now_s = max(self.now_s, min(self._due[0][0], self.now_s + timeout_s))
        ready = [(at_s, t) for at_s, t in self._due if at_s <= self.now_s]
        self._due = self._due[len(ready) :]
        self.delays_s += [self.now_s - at_s for at_s, _ in ready]
        return [ScoredTrajectory(t, RewardResult(1.0, {}, False)) for _, t in ready]


class Silent(LocalTransport):
    """Reports nothing while the judges work."""

    def __init__(self, judges: SlowJudges) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._judges = judges

    def receive(self, timeout_s: float) -> Sequence[FromWorker]:
        if not self._judges.num_waiting:
            return super().receive(timeout_s)  # type: ignore[return-value]
        self._judges.now_s += timeout_s
        return []


def test_a_reward_is_collected_soon_although_no_report_arrives():
    judges = SlowJudges()
    bench = Bench("sync", Silent(judges), judges=judges, clock=lambda: judges.now_s)
    bench.begin()
    bench.step()
    assert len(judges.delays_s) == 12
    assert max(judges.delays_s) < SHORT_WAIT_S + 1e-6


class SilentJudges(LateJudges):
    """Takes calls and forgets them."""

    def collect(self, timeout_s: float = 0.0) -> Sequence[ScoredTrajectory]:  # type: ignore[override]
        raise EngineFault("the judges gave no judgement")


def test_a_judge_that_stalls_stops_the_run_with_its_own_error():
    bench = Bench("sync", judges=SilentJudges())
    bench.begin()
    with pytest.raises(EngineFault, match="the judges gave no judgement"):
        bench.step()


class GroupJudges(LateJudges):
    """Compares the members of a group: the reward is the place by length; each call counts."""

    sees_groups = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Trajectory]] = []

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        assert [t.sample_index for t in trajectories] == [0, 1, 2], "the whole group, in order"
        self.asked.update(t.name for t in trajectories)
        self.calls.append(list(trajectories))

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        calls, self.calls = self.calls, []
        return [
            ScoredTrajectory(t, RewardResult(float(sum(o.num_tokens < t.num_tokens for o in group)), {}, False))
            for group in calls
            for t in group
        ]


def assert_compared(batches: list[list[Group]]) -> None:
    for group in (g for batch in batches for g in batch):
        lengths = [m.trajectory.num_tokens for m in group.members]
        assert [m.judgement.reward for m in group.members] == [sum(o < n for o in lengths) for n in lengths]


@pytest.mark.parametrize(("mode", "values"), MODES)
@pytest.mark.parametrize("rounds", [9, 40])
def test_judges_that_compare_get_each_group_once_and_whole_also_after_a_kill(mode, values, rounds, tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=mode != "sync")
    first = Bench(mode, Mortal(rounds), journal, judges=GroupJudges(), **values)
    with pytest.raises(Killed):
        first.live()
    journal.commit()
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite", keeps_partials=mode != "sync")
    judged = {j.trajectory.name for g in journal.open_groups() for j in g.judged.values()}
    place = journal.place()
    assert place is not None
    again = GroupJudges()
    second = Bench(mode, None, journal, judges=again, **values)
    second.begin(len(first.batches), place=place)
    for _ in range(6):
        second.step()
    assert_compared([*first.batches, *second.batches])
    assert set(again.asked.values()) == {1}
    assert not judged & set(again.asked), "a replay does not judge again"


def test_a_group_whose_member_is_revoked_is_compared_again_as_a_whole():
    """Group 0 is judged; then its member 1 turns out not to be trustworthy and is made again."""

    class Revoking(LocalTransport):
        is_due = False

        def receive(self, timeout_s: float) -> Any:
            found: list[Any] = list(super().receive(timeout_s))
            is_judged = any(g.group_id == 0 and not g.num_unscored for g in bench.controller.scheduler.groups())
            if not self.is_due and is_judged:
                self.is_due = True
                found.append(WorkRevoked(1, 0, 1, "inspection"))
            return found

    judges = GroupJudges()
    bench = Bench("partial", Revoking(None), judges=judges, batch_groups=4, overprovision=2.0)  # type: ignore[arg-type]
    bench.begin()
    for _ in range(4):
        bench.step()
    assert judges.asked["0/1"] == 2
    assert judges.asked["0/0"] == 2
    assert_compared(bench.batches)


def test_dynamic_sampling_that_ends_the_run_names_the_failure_of_the_scorer():
    class Failing(LateJudges):
        def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
            failed = RewardResult(0.0, {}, False, failure="the function raised KeyError: 'x'")
            return [ScoredTrajectory(scored.trajectory, failed) for scored in super().collect(timeout_s)]

    bench = Bench("sync", judges=Failing(), dynamic_sampling=True)
    bench.begin()
    with pytest.raises(UserError, match=r"filtered 80 groups .* could be computed \(.*: the function raised KeyError"):
        bench.step()


def test_a_scorer_that_is_slower_than_generation_does_not_make_tokens_too_old():
    class Slow(LateJudges):
        num_calls = 0

        def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
            """One trajectory in every second call."""
            self.num_calls += 1
            ready = self._waiting[: self.num_calls % 2]
            self._waiting = self._waiting[len(ready) :]
            return [ScoredTrajectory(t, RewardResult(float(t.sample_index), {}, False)) for t in ready]

    bench = Bench("partial", judges=Slow(), max_concurrency=8, max_staleness=4)
    bench.begin()
    for _ in range(40):
        bench.step()
        counts = bench.controller.scheduler.take_step_counts()
        assert bench.controller.scheduler.num_open <= (4 + 1) * 4
        assert counts.masked_tokens < counts.consumed_tokens
