"""Scores again what workers hand in, in a thread of its own, and says who is not to be believed.

    hub's thread: finished ─▶ Inspector: check it? ─▶ queue ─▶ this thread: score, judge ─▶ hub's thread: verdict
                                                                                             ├─ release it for training
                                                                                             └─ Conviction: quarantine

A trajectory that is being checked is held back from training until its verdict. Each segment is scored under its own
version, of which the last ones are kept here; what is older goes unchecked. `keep` exchanges weights under running
trajectories, whose tokens no single version explains: then only trusted workers are admitted, and nothing is scored.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from baton.rollout.rescored import Claim, Rescored
from baton.swarm.desk import Key
from baton.swarm.errands import Errands
from baton.swarm.inspector import Conviction, Inspector
from baton.swarm.quarantine import Quarantine
from baton.swarm.verify import Calibration, Verdict, WorkerClass, judge, violation
from baton.types import Lease, PolicyVersion, Trajectory

MAX_BATCH = 64
"""Trajectories that are scored together."""
PATIENCE_S = 120.0
"""A trajectory whose verdict does not come in so long is released unchecked, and counted."""


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

    name: str
    """Of the token: all its workers have one account."""
    worker_class: WorkerClass
    is_trusted: bool


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
    """Wanted to be checked, and not: too old, or too late."""
    by_name: dict[str, int] = field(default_factory=dict)


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
        on_conviction: Callable[[Conviction], None],
    ) -> None:
        """make_scorer: called in the examiner's thread, when there is something to score. to_hub: see `Hub.call`."""
        self.inspector, self.calibration, self.quarantine = inspector, calibration, quarantine
        self.counters = ExaminerCounters()
        self._on_release, self._on_conviction = on_release, on_conviction
        self._make_scorer, self._to_hub = make_scorer, to_hub
        self._keep = keep_versions
        self._tensors: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._held: dict[Key, tuple[_Case, float]] = {}
        """Trajectory → what is checked of it, until when its verdict is waited for."""
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
            if author.name not in chosen and self.quarantine.reason(author.name) is None:
                self.inspector.joined(author.name, is_trusted=author.is_trusted)
                chosen[author.name] = self.inspector.finished(author.name, _name(key))
        wanted = tuple(part for part in parts if chosen.get(part[0].name))
        if not wanted:
            return False
        is_trusted = all(author.is_trusted for author, _, _ in parts)
        case = _Case(key, Claim(trajectory, lease.sampling, lease.noise_seed), wanted, is_trusted)
        self._held[key] = case, time.monotonic() + PATIENCE_S
        self._cases.put(case)
        self._errands.submit(self._run)
        return True

    def violated(self, author: Author, sentence: str, name: str) -> Conviction | None:
        """A worker has said what no honest one says."""
        conviction = self.inspector.violated(author.name, name, violation(sentence))
        if conviction is not None:
            self._convict(conviction)
        return conviction

    def tick(self) -> None:
        """Release what has waited for its verdict too long, and forgive whose quarantine was lifted."""
        for worker in self.quarantine.follow():
            self.inspector.pardon(worker)
        now_s = time.monotonic()
        for case, until_s in list(self._held.values()):
            if now_s > until_s:
                self.counters.unchecked += 1
                self._release(case)

    def _rule(self, case: _Case, rulings: Sequence[Ruling]) -> None:
        """Take the verdicts on one trajectory."""
        for ruling in rulings:
            name = ruling.author.name
            self.counters.by_name[name] = self.counters.by_name.get(name, 0) + 1
            tolerance = self.calibration.tolerance(ruling.author.worker_class)
            conviction = self.inspector.judged(name, _name(case.key), ruling.verdict, tolerance)
            if conviction is not None:
                self._convict(conviction)
        self._release(case)

    def _convict(self, conviction: Conviction) -> None:
        self.quarantine.add(conviction)
        self._on_conviction(conviction)

    def _release(self, case: _Case) -> None:
        """Let it be trained, unless it was made again meanwhile: the new one waits for its own verdict."""
        held = self._held.get(case.key)
        if held is not None and held[0] is case:
            del self._held[case.key]
            self._on_release(case.key)

    # ---- in the examiner's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._examine_all()
        except Exception as error:  # noqa: BLE001  # unheard, it would end all checks without a word
            self._to_hub(lambda error=error: _raise(error))  # type: ignore[misc]

    def _examine_all(self) -> None:
        """Examine what waits, as many together as may be."""
        while cases := self._take():
            self._scorer = self._scorer or self._make_scorer()
            begin_s = time.monotonic()
            self._examine(self._scorer, cases)
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
            self.counters.checked += known > 0
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


def _raise(error: Exception) -> None:
    raise error


def _name(key: Key) -> str:
    """A trajectory's name, evaluations apart."""
    noise_seed, group_id, sample_index = key
    return f"{group_id}/{sample_index}@{noise_seed}"
