"""Scores again what workers hand in, in a thread of its own, and says who is not to be believed.

    hub's thread: finished ─▶ Inspector: check it? ─▶ queue ─▶ this thread: score, judge ─▶ hub's thread: verdict
                                                                                             ├─ release it for training
                                                                                             └─ Conviction: quarantine

A trajectory that is being checked is held back from training until its verdict. Each segment is scored under its own
version, of which the last ones are kept here. Where scoring fails, takes too long or has no version to score by, the
trajectory is counted as not inspected, which a warning says. If a worker that is not trusted wrote in it, it is made
again, at most `MAX_REMADE` times; then, or if all its authors are trusted, it is released. `keep` exchanges weights
under running trajectories, whose tokens no single version explains: then only trusted workers are admitted, and nothing
is scored.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from baton.rollout.rescored import Claim, Rescored
from baton.swarm.auth import Grant
from baton.swarm.lease_broker import Key
from baton.swarm.serial_executor import Errands
from baton.swarm.verification.policy import Conviction, Inspector
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.verify import Calibration, Verdict, WorkerClass, judge, violation
from baton.types import Lease, PolicyVersion, Trajectory

MAX_BATCH = 64
"""Trajectories that are scored together."""
PATIENCE_S, PATIENCE_S_PER_TOKEN = 120.0, 0.02
"""The verdict on a trajectory is waited for so long, and so much longer for each of its tokens."""
MAX_REMADE = 2
"""Most times that a trajectory that cannot be checked is generated again."""
REMEMBERED_REMADE = 10_000
"""Trajectories whose repetitions are counted."""


class Scorer(Protocol):
    """Scores claims under one version at a time."""

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Take a version's weights."""
        ...

    def score(self, claims: Sequence[Claim]) -> list[Rescored]:
        """Score the claims' tokens of the loaded version."""
        ...


@dataclass(frozen=True, slots=True)
class Author:
    """Who wrote a part of a trajectory."""

    worker: str
    """Its id: see `identity.WorkerKeys`."""
    grant: Grant
    label: str
    """For people."""
    worker_class: WorkerClass


@dataclass(frozen=True, slots=True)
class _Case:
    key: Key
    claim: Claim
    parts: tuple[tuple[Author, int, int], ...]
    """(author, first token, end) to be judged."""
    is_trusted: bool
    """Whether all who wrote in it are trusted: only then may it set the tolerances by which others are judged."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict on one author's part of a trajectory."""

    key: Key
    author: Author
    verdict: Verdict


@dataclass(slots=True)
class ExaminerCounters:
    """Of the examiner's life."""

    checked: int = 0
    tokens: int = 0
    seconds: float = 0.0
    unchecked: int = 0
    """Wanted to be checked, and not: scoring failed, took too long, or had not all of the versions."""
    by_worker: dict[str, int] = field(default_factory=dict)


class Examiner:
    """The checks of one hub. All but `published`, `consumed` and `close` is called in the hub's thread."""

    def __init__(
        self,
        make_scorer: Callable[[], Scorer],
        inspector: Inspector,
        calibration: Calibration,
        quarantine: Quarantine,
        *,
        keep_versions: int,
        to_hub: Callable[[Callable[[], None]], None],
        on_release: Callable[[Key], None],
        on_remake: Callable[[Key], None],
        on_conviction: Callable[[Conviction], None],
        say: Callable[[str], None],
    ) -> None:
        """make_scorer: called in the examiner's thread, when there is something to score. to_hub: see `Hub.call`.

        on_release, on_remake: a trajectory that was held back may be trained, or is to be made again.
        """
        self.inspector, self.calibration, self.quarantine = inspector, calibration, quarantine
        self.counters = ExaminerCounters()
        self._on_release, self._on_remake, self._on_conviction = on_release, on_remake, on_conviction
        self._make_scorer, self._to_hub, self._say = make_scorer, to_hub, say
        self._keep = keep_versions
        self._tensors: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._held: dict[Key, tuple[_Case, float]] = {}
        """Trajectory → what is checked of it, until when its verdict is waited for."""
        self._remade: OrderedDict[Key, int] = OrderedDict()
        """Trajectory → how many times it was made again because it could not be checked."""
        self._cases: SimpleQueue[_Case] = SimpleQueue()
        self._errands = Errands("examiner")
        self._scorer: Scorer | None = None
        for conviction in quarantine.convictions:
            inspector.restore(conviction)

    # ---- from the runner's side --------------------------------------------------------------------------------------

    def published(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        """Keep a version to score by; the oldest beyond the bound is let go."""
        self._tensors[version.number] = tensors
        while len(self._tensors) > self._keep:
            self._tensors.popitem(last=False)

    def consumed(self, step: int, trajectories: Sequence[tuple[int, int]], noise_seed: int) -> None:
        """(group id, sample index) of the trajectories in a batch."""
        names = [_name((noise_seed, *pair)) for pair in trajectories]
        self._to_hub(lambda: self.inspector.consumed(names, step))

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._errands.close()

    # ---- in the hub's thread -----------------------------------------------------------------------------------------

    def finished(self, lease: Lease, trajectory: Trajectory, parts: Sequence[tuple[Author, int, int]]) -> bool:
        """A trajectory is complete; say whether it is held back to be checked."""
        key = (lease.noise_seed, trajectory.group_id, trajectory.sample_index)
        chosen: dict[str, bool] = {}
        for author, _, _ in parts:  # one may have written several parts: it has finished one trajectory
            worker, grant = author.worker, author.grant
            if worker in chosen or self.quarantine.reason(grant, worker) or not self.inspector.concerns(grant):
                continue
            self.inspector.joined(worker, is_trusted=grant.is_trusted)
            chosen[worker] = self.inspector.finished(worker, _name(key)) or key in self._remade
        wanted = tuple(part for part in parts if chosen.get(part[0].worker))
        if not wanted:
            return False
        is_trusted = all(author.grant.is_trusted for author, _, _ in parts)
        case = _Case(key, Claim(trajectory, lease.sampling, lease.noise_seed), wanted, is_trusted)
        self._held[key] = case, time.monotonic() + PATIENCE_S + PATIENCE_S_PER_TOKEN * trajectory.num_tokens
        self._cases.put(case)
        self._errands.submit(self._run)
        return True

    def violated(self, author: Author, sentence: str, name: str) -> Conviction | None:
        """A worker has said what no honest one says."""
        conviction = self.inspector.violated(author.worker, name, violation(sentence))
        return None if conviction is None else self._convict(conviction, author)

    def tick(self, delay_s: float = 0.0) -> None:
        """Look at what has waited for its verdict too long, and forgive whose quarantine was lifted.

        delay_s: what the hub was late by, which does not count.
        """
        for worker in self.quarantine.follow():
            self.inspector.pardon(worker)
        now_s = time.monotonic()
        for key, (case, until_s) in list(self._held.items()):
            self._held[key] = case, until_s + delay_s
            if now_s > until_s + delay_s:
                self._give_up([case], "its verdict has not come in time")

    def _rule(self, case: _Case, rulings: Sequence[Ruling]) -> None:
        """Take the verdicts on one trajectory."""
        for ruling in rulings:
            worker = ruling.author.worker
            self.counters.by_worker[worker] = self.counters.by_worker.get(worker, 0) + 1
            tolerance = self.calibration.tolerance(ruling.author.worker_class)
            conviction = self.inspector.judged(worker, _name(case.key), ruling.verdict, tolerance)
            if conviction is not None:
                self._convict(conviction, ruling.author)
        if self._is_held(case):
            self._release(case)

    def _convict(self, conviction: Conviction, author: Author) -> Conviction:
        known = msgspec.structs.replace(conviction, token=author.grant.digest, label=author.label)
        self.quarantine.add(known)
        self._on_conviction(known)
        return known

    def _give_up(self, cases: Sequence[_Case], cause: str) -> None:
        """Have trajectories made again that cannot be checked, or release them: see the top of this file."""
        late = [case for case in cases if self._is_held(case)]
        if not late:
            return
        self.counters.unchecked += len(late)
        remade = 0
        for case in late:
            times = self._remade.pop(case.key, 0)
            if case.is_trusted or times >= MAX_REMADE:
                self._release(case)
                continue
            remade += 1
            self._remade[case.key] = times + 1
            while len(self._remade) > REMEMBERED_REMADE:
                self._remade.popitem(last=False)
            del self._held[case.key]
            self.inspector.lost([_name(case.key)])
            self._on_remake(case.key)
        names = ", ".join(_name(case.key) for case in late[:4])
        self._say(
            f"warning: {len(late)} trajectories ({names}) were not inspected: {cause}; {remade} of them are made "
            f"again, {len(late) - remade} are used as they are; {self.counters.unchecked} so far ([inspection])"
        )

    def _is_held(self, case: _Case) -> bool:
        """Whether its verdict decides: what was made again meanwhile waits for a verdict of its own."""
        held = self._held.get(case.key)
        return held is not None and held[0] is case

    def _release(self, case: _Case) -> None:
        """Let it be trained."""
        del self._held[case.key]
        self._remade.pop(case.key, None)
        self._on_release(case.key)

    # ---- in the examiner's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Examine what waits, as many together as may be."""
        while cases := self._take():
            begin_s = time.monotonic()
            try:
                self._scorer = self._scorer or self._make_scorer()
                self._examine(self._scorer, cases)
            except Exception as error:  # noqa: BLE001  # such as a device without memory: no reason to end the run
                cause = f"scoring them again failed: {type(error).__name__}: {error}"[:500]
                self._to_hub(lambda cases=cases, cause=cause: self._give_up(cases, cause))  # type: ignore[misc]
            self.counters.seconds += time.monotonic() - begin_s

    def _take(self) -> list[_Case]:
        cases: list[_Case] = []
        with suppress(Empty):
            while len(cases) < MAX_BATCH:
                cases.append(self._cases.get_nowait())
        return cases

    def _examine(self, scorer: Scorer, cases: Sequence[_Case]) -> None:
        scores: list[list[Rescored]] = [[] for _ in cases]
        numbers = [set(case.claim.trajectory.policy_versions) for case in cases]
        for number in sorted(set().union(*numbers)):
            tensors = self._tensors.get(number)
            if tensors is None:
                continue
            concerned = [index for index, known in enumerate(numbers) if number in known]
            scorer.load(tensors, number)
            rescored = scorer.score([cases[index].claim for index in concerned])
            for index, one in zip(concerned, rescored, strict=True):
                scores[index].append(one)
        for case, found in zip(cases, scores, strict=True):
            known = len({rescored.version for rescored in found})
            if not known:
                cause = "none of their versions is kept any more"
                self._to_hub(lambda case=case, cause=cause: self._give_up([case], cause))  # type: ignore[misc]
                continue
            self.counters.checked += 1
            self.counters.unchecked += known < len(set(case.claim.trajectory.policy_versions))
            self.counters.tokens += sum(len(rescored.places) for rescored in found)
            rulings = self._judged(case, found)
            self._to_hub(lambda case=case, rulings=rulings: self._rule(case, rulings))  # type: ignore[misc]

    def _judged(self, case: _Case, scores: Sequence[Rescored]) -> list[Ruling]:
        rulings = []
        for author, first, end in case.parts:
            if case.is_trusted:
                self.calibration.observe(author.worker_class, scores)
            tolerance = self.calibration.tolerance(author.worker_class)
            rulings.append(Ruling(case.key, author, judge(scores, tolerance, first=first, end=end)))
        return rulings


def _name(key: Key) -> str:
    """A trajectory's name, evaluations apart."""
    noise_seed, group_id, sample_index = key
    return f"{group_id}/{sample_index}@{noise_seed}"
