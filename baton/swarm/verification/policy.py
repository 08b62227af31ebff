"""Decides which finished trajectories are checked, and which workers are quarantined because of the results. Receives
events and returns commands.

    TrajectoryFinished ─┬─▶ not selected: nothing
                        └─▶ CheckTrajectory ─▶ held ──TrajectoryJudged──▶ ReleaseTrajectory, QuarantineWorker
                                                └──CheckFailed, too late──▶ RemakeTrajectory or ReleaseTrajectory

Suppose that the share p of the trajectories is checked, and that a worker falsifies the share c of its trajectories.
The worker is then undetected after n trajectories with probability (1 − p·c)^n. The worker cannot predict which
trajectories are checked, because the random selection depends on a secret.

Each turn of a multi-turn episode counts as a finished trajectory: the policy selects, holds back and counts each turn
separately, and a check compares only the tokens of its turn. A trajectory with several authors counts for each author.

A trajectory that is held back for a check is not used for training before the check has a result. If the trajectory
cannot be checked, it is generated again, at most `MAX_REMADE` times. After that, or if all its authors are trusted, the
trajectory is released unchecked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from pydantic import Field

from baton.rollout.rescoring import Claim
from baton.settings import Settings
from baton.swarm.auth import AccessGrant
from baton.swarm.lease_broker import Key
from baton.swarm.verification.verify import CheckOutcome, Tolerance, VerificationResult, WorkerClass, pooled, violation

PATIENCE_S, PATIENCE_S_PER_TOKEN = 120.0, 0.02
"""A check is late if it waits longer than its limit, and no check has had a result for that time. The limit is the
first number, in seconds, plus the second number, in seconds, for each token of the trajectory."""
MAX_HELD = 256
"""While this many trajectories wait for their checks, no further trajectory is selected at random. Trajectories that
must always be checked are still held back: the batch waits for them, and the scheduler limits their number."""
MAX_REMADE = 2
"""Maximum number of times that an uncheckable trajectory is generated again."""
REMEMBERED_REMADE = 10_000
"""Maximum number of trajectories for which the policy stores how often they were generated again. This count is kept
after a release, because a later turn of the same trajectory may be uncheckable too."""
REMEMBERED_OPEN = 100_000
"""Maximum number of finished trajectories of a worker that the policy tracks until they are trained on."""
REMEMBERED_TRAINED = 10_000
"""Maximum number of trajectories in `QuarantineRecord.trained`."""
AFTER_SUSPECT = 16
"""After a check has found a trajectory suspect, this number of the worker's next trajectories are checked without
exception."""
EVALUATED_TOGETHER = 64
"""After each check, the newest results of the worker are also evaluated together. This is the maximum number of these
results."""


class InspectionSettings(Settings):
    """[inspection] Checks of workers: which of their finished trajectories are scored again."""

    share: float = Field(default=0.05, ge=0, le=1)
    """Share of each untrusted worker's finished trajectories that is checked."""
    trusted_share: float = Field(default=0.01, ge=0, le=1)
    """Share of each trusted worker's finished trajectories that is checked. The results calibrate the tolerances of the
    worker's class."""
    first: int = Field(default=8, ge=0)
    """This number of each new worker's first finished trajectories are checked without exception. For later
    trajectories, `share` or `trusted_share` applies."""
    own: bool = False
    """True: workers that the run itself started, with `--workers` or on a cluster, are also checked."""
    device: str = "cpu"
    """Device on which trajectories are scored again. The default leaves the trainer's accelerator free."""


class QuarantineRecord(msgspec.Struct, frozen=True):
    """The record of a worker's quarantine, with the evidence."""

    worker: str
    """Id of the worker, from `identity.WorkerKeys`."""
    name: str
    """Name of the trajectory whose check was decisive, or `a report of worker N` for an invalid report."""
    verdict: VerificationResult
    requeue: tuple[str, ...]
    """Names of the worker's finished trajectories that were not trained on. They are generated again, or excluded from
    the batch that contains them."""
    trained: tuple[tuple[str, int], ...]
    """Pairs (trajectory, train step) of the trajectories that were trained on last; at most `REMEMBERED_TRAINED`
    pairs."""
    num_trained: int
    num_checked: int
    num_finished: int
    token: str = ""
    """Digest of the worker's access token."""
    label: str = ""
    """Name of the worker that is shown to users."""

    @property
    def shown(self) -> str:
        """Text that names the worker to users: its label, and the id with which a user ends the quarantine."""
        return f"{self.label} ({self.worker})" if self.label else self.worker


class SegmentAuthor(msgspec.Struct, frozen=True):
    """The author of a part of a trajectory: the worker that generated the part."""

    worker: str
    """Id of the worker, from `identity.WorkerKeys`."""
    grant: AccessGrant
    label: str
    """Name of the worker that is shown to users."""
    worker_class: WorkerClass


Part = tuple[SegmentAuthor, int, int]
"""(author, `first`, `end`): the author generated the tokens at positions `first` … `end` − 1 after the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A check of a finished trajectory."""

    key: Key
    claim: Claim
    parts: tuple[Part, ...]
    """Parts of the trajectory that are checked."""
    is_trusted: bool
    """True if all authors of the trajectory are trusted. Only such a trajectory may calibrate tolerances."""

    @property
    def name(self) -> str:
        """Name of the trajectory, which is shown to users and is an input of the random selection."""
        return name_of(self.key)


# ---- events ----------------------------------------------------------------------------------------------------------


class TrajectoryFinished(msgspec.Struct, frozen=True):
    """A trajectory is finished."""

    at_s: float
    key: Key
    claim: Claim
    parts: tuple[Part, ...]
    banned: frozenset[str] = frozenset()
    """Ids of the authors that are quarantined, or whose access token is quarantined."""


class TrajectoryJudged(msgspec.Struct, frozen=True):
    """A check of a trajectory has returned results for its parts."""

    case: Case
    verdicts: tuple[tuple[SegmentAuthor, VerificationResult, Tolerance], ...]
    """For each part: author, result, and the tolerance for the author's worker class (device, dtype, engine). The same
    tolerance applies when the author's newest results are evaluated together."""
    is_whole: bool = True
    """True if all tokens could be scored; False if the weights of some versions are no longer kept."""


class CheckFailed(msgspec.Struct, frozen=True):
    """Trajectories could not be scored, so they have no result."""

    cases: tuple[Case, ...]
    cause: str


class ReportViolated(msgspec.Struct, frozen=True):
    """A report violates a rule of `checks.py`. Its trajectory may be unfinished."""

    author: SegmentAuthor
    name: str
    sentence: str


class BatchConsumed(msgspec.Struct, frozen=True):
    """A train step has consumed finished trajectories."""

    names: tuple[str, ...]
    step: int


class QuarantineLifted(msgspec.Struct, frozen=True):
    """A user has ended the quarantine of workers. These workers then count as new workers."""

    workers: tuple[str, ...]


class VerificationTick(msgspec.Struct, frozen=True):
    """Periodic event that gives the current time."""

    at_s: float
    delay_s: float = 0.0
    """Delay of this tick in seconds, which extends the deadlines of all checks."""


VerificationEvent = (
    TrajectoryFinished | TrajectoryJudged | CheckFailed | ReportViolated
    | BatchConsumed | QuarantineLifted | VerificationTick
)  # fmt: skip

# ---- commands --------------------------------------------------------------------------------------------------------


class CheckTrajectory(msgspec.Struct, frozen=True):
    """Hold a trajectory back from training and score it."""

    case: Case


class ReleaseTrajectory(msgspec.Struct, frozen=True):
    """Make a trajectory that was held back available for training."""

    key: Key


class RemakeTrajectory(msgspec.Struct, frozen=True):
    """Discard a trajectory that was held back, so that it is generated again."""

    key: Key


class QuarantineWorker(msgspec.Struct, frozen=True):
    """Exclude a worker from the run."""

    record: QuarantineRecord


class WarnUser(msgspec.Struct, frozen=True):
    """Print a line for the user."""

    text: str


VerificationCommand = CheckTrajectory | ReleaseTrajectory | RemakeTrajectory | QuarantineWorker | WarnUser


@dataclass(slots=True)
class _CheckedWorker:
    checks_owed: int
    """While this number is above 0, each finished trajectory of the worker is checked. The number then decreases by 1.
    At 0, the random selection applies."""
    verdicts: deque[VerificationResult] = field(default_factory=lambda: deque(maxlen=EVALUATED_TOGETHER))
    num_finished: int = 0
    num_checked: int = 0
    open: dict[str, None] = field(default_factory=dict)
    """Names of the worker's finished trajectories that are neither trained on nor discarded."""
    trained: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TRAINED))
    num_trained: int = 0


class VerificationPolicy:
    """Selects which trajectories of a run are checked, and decides from the results which workers are quarantined."""

    def __init__(self, settings: InspectionSettings, secret: bytes) -> None:
        """`secret`: random bytes that belong to the run and that workers do not know. After a restart with the same
        secret, the random selection gives the same results."""
        self.num_unchecked = 0
        """Number of trajectories that were selected for a check, but could not be checked completely."""
        self._settings = settings
        self._secret = secret
        self._workers: dict[str, _CheckedWorker] = {}
        self._owners: dict[str, dict[str, None]] = {}
        """Name of an open trajectory → ids of its authors."""
        self._quarantined: set[str] = set()
        self._was_full = False
        """True if a random selection was omitted because `MAX_HELD` trajectories were held back."""
        self._now_s = self._result_s = 0.0
        """Time of the last tick in seconds, and the same time when a check last had a result."""
        self._held: dict[Key, tuple[Case, float]] = {}
        """Trajectory that is held back → (check, time in seconds since which it is held back)."""
        self._remade: OrderedDict[Key, int] = OrderedDict()
        """Trajectory → number of times that it was generated again because it could not be checked."""

    def restore(self, workers: Iterable[str]) -> None:
        """Record the ids of workers that were quarantined before a restart. Must be called before the first event."""
        self._quarantined.update(workers)

    def handle(self, event: VerificationEvent) -> list[VerificationCommand]:
        """Apply one event and return the resulting commands in order."""
        return list(self._decide(event))

    def _decide(self, event: VerificationEvent) -> Iterator[VerificationCommand]:
        match event:
            case TrajectoryFinished():
                yield from self._finished(event)
            case TrajectoryJudged(case=case, verdicts=verdicts, is_whole=is_whole):
                self._result_s = self._now_s
                self.num_unchecked += not is_whole
                for author, verdict, tolerance in verdicts:
                    if author.worker not in self._quarantined:
                        yield from self._on_result(author, case.name, verdict, tolerance)
                if self.is_held(case):
                    yield self._release(case)
            case CheckFailed(cases=cases, cause=cause):
                self._result_s = self._now_s
                yield from self._give_up(cases, cause)
            case ReportViolated(author=author, name=name, sentence=sentence):
                if author.worker not in self._quarantined:
                    yield self._quarantine_worker(author, name, violation(sentence))
            case BatchConsumed(names=names, step=step):
                for name in names:
                    for account in self._taken(name):
                        account.trained.append((name, step))
                        account.num_trained += 1
            case QuarantineLifted(workers=workers):
                for worker in workers:
                    self._quarantined.discard(worker)
                    self._workers.pop(worker, None)
            case VerificationTick(at_s=at_s, delay_s=delay_s):
                self._now_s, self._result_s = at_s, self._result_s + delay_s
                for key, (case, since_s) in list(self._held.items()):
                    self._held[key] = case, since_s + delay_s
                    patience_s = PATIENCE_S + PATIENCE_S_PER_TOKEN * case.claim.trajectory.num_tokens
                    if at_s > max(since_s + delay_s, self._result_s) + patience_s:
                        yield from self._give_up([case], "the result did not arrive in time")

    # ---- trajectories ------------------------------------------------------------------------------------------------

    def _finished(self, event: TrajectoryFinished) -> Iterator[VerificationCommand]:
        key, excluded, before = event.key, self._quarantined | event.banned, self._was_full
        chosen: dict[str, bool] = {}
        turn = event.claim.trajectory.turn_offset
        if not turn:
            self._taken(name_of(key))  # the trajectory may have been generated again from its prompt
        for author, _, _ in event.parts:  # for an author of several parts, the trajectory is counted once
            is_exempt = author.grant.is_own and not self._settings.own
            if author.worker not in chosen and author.worker not in excluded and not is_exempt:
                chosen[author.worker] = self._is_drawn(author, name_of(key), turn) or key in self._remade
        wanted = tuple(part for part in event.parts if chosen.get(part[0].worker))
        if wanted:
            case = Case(key, event.claim, wanted, all(author.grant.is_trusted for author, _, _ in event.parts))
            self._held[key] = case, event.at_s
            yield CheckTrajectory(case)
        if self._was_full and not before:
            yield WarnUser(
                f"warning: the scorer is slower than the workers, so no trajectories are selected at random while "
                f"{MAX_HELD} wait for their check: lower inspection.share or set inspection.device to a GPU"
            )

    def _give_up(self, cases: Sequence[Case], cause: str) -> Iterator[VerificationCommand]:
        late = [case for case in cases if self.is_held(case)]
        if not late:
            return
        self.num_unchecked += len(late)
        remade = 0
        for case in late:
            times = self._remade.get(case.key, 0)
            if case.is_trusted or times >= MAX_REMADE:
                yield self._release(case)
                continue
            remade += 1
            self._remade[case.key] = times + 1
            self._remade.move_to_end(case.key)
            while len(self._remade) > REMEMBERED_REMADE:
                self._remade.popitem(last=False)
            del self._held[case.key]
            self._taken(case.name)
            yield RemakeTrajectory(case.key)
        names = ", ".join(case.name for case in late[:4])
        yield WarnUser(
            f"warning: {len(late)} trajectories ({names}) could not be checked: {cause}; {remade} of them are "
            f"generated again, {len(late) - remade} are used unchecked; {self.num_unchecked} so far ([inspection])"
        )

    def is_held(self, case: Case) -> bool:
        """Return whether the trajectory is still held back for this check. Otherwise the result of the check is
        ignored: the trajectory has been released, or was generated again and has a new check."""
        held = self._held.get(case.key)
        return held is not None and held[0] is case

    def _release(self, case: Case) -> ReleaseTrajectory:
        del self._held[case.key]
        return ReleaseTrajectory(case.key)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _is_drawn(self, author: SegmentAuthor, name: str, turn: int) -> bool:
        """Count a finished trajectory, and return whether to check it. `turn`: number of tokens before the trajectory's
        last turn. Each turn is selected independently, because a worker may notice that a turn was held back."""
        account = self._of(author.worker)
        self._owners.setdefault(name, {})[author.worker] = None
        # trajectories of filtered groups are never reported as consumed, so the oldest ones must be removed here
        while len(account.open) >= REMEMBERED_OPEN:
            self._taken(next(iter(account.open)))
        account.open[name] = None
        account.num_finished += 1
        share = self._settings.trusted_share if author.grant.is_trusted else self._settings.share
        drawn = f"{name}+{turn}" if turn else name
        is_owed, is_checked = account.checks_owed > 0, self._draw(author.worker, drawn) < share
        account.checks_owed = max(0, account.checks_owed - 1)
        if is_checked and not is_owed and len(self._held) >= MAX_HELD:
            self.num_unchecked, self._was_full = self.num_unchecked + 1, True
            return False
        return is_owed or is_checked

    def _on_result(
        self, author: SegmentAuthor, name: str, verdict: VerificationResult, tolerance: Tolerance
    ) -> Iterator[VerificationCommand]:
        account = self._of(author.worker)
        account.num_checked += 1
        account.verdicts.append(verdict)
        if verdict.outcome is CheckOutcome.SUSPECT:
            account.checks_owed = max(account.checks_owed, AFTER_SUSPECT)
        decisive = verdict if verdict.outcome is CheckOutcome.BAD else pooled(account.verdicts, tolerance)
        if decisive.outcome is CheckOutcome.BAD:
            yield self._quarantine_worker(author, name, decisive)

    def _quarantine_worker(self, author: SegmentAuthor, name: str, verdict: VerificationResult) -> QuarantineWorker:
        account = self._of(author.worker)
        record = QuarantineRecord(
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
        for one in record.requeue:
            self._taken(one)
        self._quarantined.add(author.worker)
        return QuarantineWorker(record)

    def _taken(self, name: str) -> list[_CheckedWorker]:
        """Stop tracking a trajectory that was trained on or discarded. Return its authors' `_CheckedWorker` records."""
        accounts = [self._workers[owner] for owner in self._owners.pop(name, ()) if owner in self._workers]
        for account in accounts:
            account.open.pop(name, None)
        return accounts

    def _of(self, worker: str) -> _CheckedWorker:
        return self._workers.setdefault(worker, _CheckedWorker(self._settings.first))

    def _draw(self, worker: str, name: str) -> float:
        """Return a number in [0, 1) that is unpredictable without the secret."""
        digest = hashlib.blake2b(f"{worker}\n{name}".encode(), key=self._secret[:64], digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def name_of(key: Key) -> str:
    """Return a trajectory's name. The name contains the noise seed, because training and evaluations may use equal
    group ids but have different noise seeds."""
    noise_seed, group_id, sample_index = key
    return f"{group_id}/{sample_index}@{noise_seed}"
