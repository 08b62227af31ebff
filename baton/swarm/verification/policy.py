"""Which finished trajectories are checked, and what follows from the verdicts. Events in, commands out.

    TrajectoryFinished ─┬─▶ not drawn: nothing
                        └─▶ CheckTrajectory ─▶ held ──TrajectoryJudged──▶ ReleaseTrajectory, QuarantineWorker
                                                └──CheckFailed, too late──▶ RemakeTrajectory or ReleaseTrajectory

A worker that cheats in the share c of its trajectories stays unseen through n of them with probability (1 − p·c)^n,
where p is the share that is checked. It cannot know which are: that follows from a secret, the worker and the name.

A held trajectory is not trained before its verdict; so nothing that a check finds is trained. One that cannot be
checked is generated again, at most `MAX_REMADE` times; then, or if all its authors are trusted, it is released.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
from pydantic import Field

from baton.rollout.rescored import Claim
from baton.settings import Settings
from baton.swarm.auth import AccessGrant
from baton.swarm.lease_broker import Key
from baton.swarm.verification.verify import CheckOutcome, Tolerance, VerificationResult, WorkerClass, pooled, violation

PATIENCE_S, PATIENCE_S_PER_TOKEN = 120.0, 0.02
"""Longest wait for the verdict on a trajectory, and what each of its tokens adds."""
MAX_REMADE = 2
"""Most times that a trajectory that cannot be checked is generated again."""
REMEMBERED_REMADE = 10_000
"""Trajectories whose repetitions are counted."""
REMEMBERED_OPEN = 100_000
"""Finished trajectories remembered of one worker until they are trained."""
REMEMBERED_TRAINED = 10_000
"""Trained trajectories listed of one worker."""


class InspectionSettings(Settings):
    """[inspection] how much of the workers' output is scored again."""

    share: float = Field(default=0.05, ge=0, le=1)
    """Of an ordinary worker's finished trajectories."""
    trusted_share: float = Field(default=0.01, ge=0, le=1)
    """Of a trusted worker's; these calibrate its class."""
    first: int = Field(default=8, ge=0)
    """A new worker's first finished trajectories are all checked."""
    after_suspect: int = Field(default=16, ge=0)
    """And so are as many that follow a suspect one."""
    own: bool = False
    """Check also the workers that the run has started itself: `--workers`, and those of a cluster."""
    device: str = "cpu"
    """Where trajectories are scored again. By default not on the trainer's accelerator."""
    remembered: int = Field(default=64, ge=1)
    """Checked trajectories of a worker that are judged together: the newest."""


class QuarantineRecord(msgspec.Struct, frozen=True):
    """A worker is out. The record is kept as evidence."""

    worker: str
    """Its id: see `identity.WorkerKeys`."""
    name: str
    """The trajectory whose check decided."""
    verdict: VerificationResult
    requeue: tuple[str, ...]
    """Its finished trajectories that are not trained yet: to be lost and grown again elsewhere."""
    trained: tuple[tuple[str, int], ...]
    """(trajectory, train step) of those that were; the newest `REMEMBERED_TRAINED`."""
    num_trained: int
    num_checked: int
    num_finished: int
    token: str = ""
    """Digest of its token; empty in files of old, where `worker` is the token's name."""
    label: str = ""
    """For people: what the worker was called."""

    @property
    def shown(self) -> str:
        """For people: its label, and the id by which a quarantine is lifted."""
        return f"{self.label} ({self.worker})" if self.label else self.worker


class SegmentAuthor(msgspec.Struct, frozen=True):
    """Who wrote a part of a trajectory."""

    worker: str
    """Its id: see `identity.WorkerKeys`."""
    grant: AccessGrant
    label: str
    """For people."""
    worker_class: WorkerClass


Part = tuple[SegmentAuthor, int, int]
"""(author, first token, end)"""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A finished trajectory that is checked."""

    key: Key
    claim: Claim
    parts: tuple[Part, ...]
    """To be judged."""
    is_trusted: bool
    """Whether all its authors are trusted: only then may it set the tolerances by which others are judged."""

    @property
    def name(self) -> str:
        """For people and for the draw."""
        return name_of(self.key)


# ---- events ----------------------------------------------------------------------------------------------------------


class TrajectoryFinished(msgspec.Struct, frozen=True):
    """A trajectory is complete."""

    at_s: float
    key: Key
    claim: Claim
    parts: tuple[Part, ...]
    banned: frozenset[str] = frozenset()
    """Workers whose token is in quarantine."""


class TrajectoryJudged(msgspec.Struct, frozen=True):
    """A check has verdicts on the parts of a trajectory."""

    case: Case
    verdicts: tuple[tuple[SegmentAuthor, VerificationResult, Tolerance], ...]
    """The tolerance is that of the author's class: the newest verdicts on a worker are judged together as well."""
    is_whole: bool = True
    """Whether all versions in it could be scored."""


class CheckFailed(msgspec.Struct, frozen=True):
    """Trajectories could not be scored."""

    cases: tuple[Case, ...]
    cause: str


class ReportViolated(msgspec.Struct, frozen=True):
    """A report broke a rule that no correct worker breaks; the trajectory need not be finished."""

    author: SegmentAuthor
    name: str
    sentence: str


class BatchConsumed(msgspec.Struct, frozen=True):
    """A train step has consumed finished trajectories."""

    names: tuple[str, ...]
    step: int


class QuarantineLifted(msgspec.Struct, frozen=True):
    """A person has ended the quarantine of workers: they count as new."""

    workers: tuple[str, ...]


class VerificationTick(msgspec.Struct, frozen=True):
    """Time has passed."""

    at_s: float
    delay_s: float = 0.0
    """How late the tick is, which counts against no trajectory."""


VerificationEvent = (
    TrajectoryFinished
    | TrajectoryJudged
    | CheckFailed
    | ReportViolated
    | BatchConsumed
    | QuarantineLifted
    | VerificationTick
)

# ---- commands --------------------------------------------------------------------------------------------------------


class CheckTrajectory(msgspec.Struct, frozen=True):
    """Hold a trajectory back from training, and score it."""

    case: Case


class ReleaseTrajectory(msgspec.Struct, frozen=True):
    """A held trajectory may be trained."""

    key: Key


class RemakeTrajectory(msgspec.Struct, frozen=True):
    """Generate a held trajectory again."""

    key: Key


class QuarantineWorker(msgspec.Struct, frozen=True):
    """A worker is excluded."""

    quarantine_record: QuarantineRecord


class WarnUser(msgspec.Struct, frozen=True):
    """A line for people."""

    text: str


VerificationCommand = CheckTrajectory | ReleaseTrajectory | RemakeTrajectory | QuarantineWorker | WarnUser


@dataclass(slots=True)
class _CheckedWorker:
    verdicts: deque[VerificationResult]
    checks_owed: int
    """Next finished trajectories that are checked whatever the draw says."""
    num_finished: int = 0
    num_checked: int = 0
    open: dict[str, None] = field(default_factory=dict)
    """Finished and not yet trained or lost."""
    trained: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TRAINED))
    num_trained: int = 0


class VerificationPolicy:
    """The checks of one run."""

    def __init__(self, settings: InspectionSettings, secret: bytes) -> None:
        """secret: the run's own, known to no worker; with the same one a restarted hub decides the same."""
        self.num_unchecked = 0
        """Trajectories that should have been checked, and were not, or not whole."""
        self._settings = settings
        self._secret = secret
        self._workers: dict[str, _CheckedWorker] = {}
        self._owner: dict[str, str] = {}
        """Of each open trajectory."""
        self._quarantined: set[str] = set()
        self._held: dict[Key, tuple[Case, float]] = {}
        """Trajectory → what is checked of it, until when its verdict is waited for."""
        self._remade: OrderedDict[Key, int] = OrderedDict()
        """Trajectory → how many times it was generated again because it could not be checked."""

    def restore(self, workers: Iterable[str]) -> None:
        """Take over the quarantine from before a restart, before the first event."""
        self._quarantined.update(workers)

    def handle(self, event: VerificationEvent) -> list[VerificationCommand]:
        """Take one event; return what is to be done, in order."""
        return list(self._decide(event))

    def _decide(self, event: VerificationEvent) -> Iterator[VerificationCommand]:
        match event:
            case TrajectoryFinished():
                yield from self._finished(event)
            case TrajectoryJudged(case=case, verdicts=verdicts, is_whole=is_whole):
                self.num_unchecked += not is_whole
                for author, verdict, tolerance in verdicts:
                    if author.worker not in self._quarantined:
                        yield from self._judged(author, case.name, verdict, tolerance)
                if self._is_held(case):
                    yield self._release(case)
            case CheckFailed(cases=cases, cause=cause):
                yield from self._give_up(cases, cause)
            case ReportViolated(author=author, name=name, sentence=sentence):
                if author.worker not in self._quarantined:
                    yield self._convicted(author, name, violation(sentence))
            case BatchConsumed(names=names, step=step):
                for name in names:
                    if account := self._taken(name):
                        account.trained.append((name, step))
                        account.num_trained += 1
            case QuarantineLifted(workers=workers):
                for worker in workers:
                    self._quarantined.discard(worker)
                    self._workers.pop(worker, None)
            case VerificationTick(at_s=at_s, delay_s=delay_s):
                for key, (case, until_s) in list(self._held.items()):
                    self._held[key] = case, until_s + delay_s
                    if at_s > until_s + delay_s:
                        yield from self._give_up([case], "its verdict has not come in time")
            case _:
                assert_never(event)

    # ---- trajectories ------------------------------------------------------------------------------------------------

    def _finished(self, event: TrajectoryFinished) -> Iterator[VerificationCommand]:
        key, excluded = event.key, self._quarantined | event.banned
        chosen: dict[str, bool] = {}
        for author, _, _ in event.parts:  # one may have written several parts: it has finished one trajectory
            if author.worker not in chosen and author.worker not in excluded and self._concerns(author.grant):
                chosen[author.worker] = self._is_drawn(author, name_of(key)) or key in self._remade
        wanted = tuple(part for part in event.parts if chosen.get(part[0].worker))
        if wanted:
            case = Case(key, event.claim, wanted, all(author.grant.is_trusted for author, _, _ in event.parts))
            num_tokens = event.claim.trajectory.num_tokens
            self._held[key] = case, event.at_s + PATIENCE_S + PATIENCE_S_PER_TOKEN * num_tokens
            yield CheckTrajectory(case)

    def _give_up(self, cases: Sequence[Case], cause: str) -> Iterator[VerificationCommand]:
        late = [case for case in cases if self._is_held(case)]
        if not late:
            return
        self.num_unchecked += len(late)
        remade = 0
        for case in late:
            times = self._remade.pop(case.key, 0)
            if case.is_trusted or times >= MAX_REMADE:
                yield self._release(case)
                continue
            remade += 1
            self._remade[case.key] = times + 1
            while len(self._remade) > REMEMBERED_REMADE:
                self._remade.popitem(last=False)
            del self._held[case.key]
            self._taken(case.name)
            yield RemakeTrajectory(case.key)
        names = ", ".join(case.name for case in late[:4])
        yield WarnUser(
            f"warning: {len(late)} trajectories ({names}) were not inspected: {cause}; {remade} of them are made "
            f"again, {len(late) - remade} are used as they are; {self.num_unchecked} so far ([inspection])"
        )

    def _is_held(self, case: Case) -> bool:
        """Whether its verdict decides: what was made again meanwhile waits for a verdict of its own."""
        held = self._held.get(case.key)
        return held is not None and held[0] is case

    def _release(self, case: Case) -> ReleaseTrajectory:
        del self._held[case.key]
        self._remade.pop(case.key, None)
        return ReleaseTrajectory(case.key)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _concerns(self, grant: AccessGrant) -> bool:
        """Whether the workers of a token are checked at all: the run's own only where it asks for that."""
        return self._settings.own or not grant.is_own

    def _is_drawn(self, author: SegmentAuthor, name: str) -> bool:
        """Count a finished trajectory, and say whether it is to be checked."""
        account = self._of(author.worker)
        self._taken(name)
        self._owner[name] = author.worker
        while len(account.open) >= REMEMBERED_OPEN:  # of groups that were filtered nobody tells
            self._taken(next(iter(account.open)))
        account.open[name] = None
        account.num_finished += 1
        share = self._settings.trusted_share if author.grant.is_trusted else self._settings.share
        is_checked = account.checks_owed > 0 or self._draw(author.worker, name) < share
        account.checks_owed = max(0, account.checks_owed - 1)
        return is_checked

    def _judged(
        self, author: SegmentAuthor, name: str, verdict: VerificationResult, tolerance: Tolerance
    ) -> Iterator[VerificationCommand]:
        account = self._of(author.worker)
        account.num_checked += 1
        account.verdicts.append(verdict)
        if verdict.outcome is CheckOutcome.SUSPECT:
            account.checks_owed = max(account.checks_owed, self._settings.after_suspect)
        decisive = verdict if verdict.outcome is CheckOutcome.BAD else pooled(account.verdicts, tolerance)
        if decisive.outcome is CheckOutcome.BAD:
            yield self._convicted(author, name, decisive)

    def _convicted(self, author: SegmentAuthor, name: str, verdict: VerificationResult) -> QuarantineWorker:
        account = self._of(author.worker)
        quarantine_record = QuarantineRecord(
            author.worker,
            name,
            verdict,
            requeue=tuple(account.open),
            trained=tuple(account.trained),
            num_trained=account.num_trained,
            num_checked=account.num_checked,
            num_finished=account.num_finished,
            token=author.grant.digest,
            label=author.label,
        )
        for one in quarantine_record.requeue:
            self._taken(one)
        self._quarantined.add(author.worker)
        return QuarantineWorker(quarantine_record)

    def _taken(self, name: str) -> _CheckedWorker | None:
        """A finished trajectory is trained, or will never be; return the account of its author."""
        owner = self._owner.pop(name, None)
        account = None if owner is None else self._workers.get(owner)
        if account is not None:
            account.open.pop(name, None)
        return account

    def _of(self, worker: str) -> _CheckedWorker:
        if worker not in self._workers:
            self._workers[worker] = _CheckedWorker(deque(maxlen=self._settings.remembered), self._settings.first)
        return self._workers[worker]

    def _draw(self, worker: str, name: str) -> float:
        """Return a number in [0, 1) that nobody without the secret can foretell."""
        digest = hashlib.blake2b(f"{worker}\n{name}".encode(), key=self._secret[:64], digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def name_of(key: Key) -> str:
    """Return a trajectory's name, evaluations apart."""
    noise_seed, group_id, sample_index = key
    return f"{group_id}/{sample_index}@{noise_seed}"
