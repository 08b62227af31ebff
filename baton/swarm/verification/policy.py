"""Which finished trajectories are checked, and what follows from the verdicts. Decisions only: names in, names out.

    finished(worker, name) ─▶ check it? ──yes──▶ rescored and judged elsewhere ──▶ judged(worker, name, verdict)
          └─ forgotten once it is trained or lost                                      └─▶ Conviction, or nothing

A worker that cheats in the share c of its trajectories stays unseen through n of them with probability (1 − p·c)^n,
where p is the share that is checked. It cannot know which are: that follows from a secret, the worker and the name.

What is being checked should be held back from training until the verdict; then nothing that a check finds is trained.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from pydantic import Field

from baton.settings import Settings
from baton.swarm.auth import Grant
from baton.swarm.verification.verify import Outcome, Tolerance, Verdict, pooled


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


class Conviction(msgspec.Struct, frozen=True):
    """A worker is out. The record is kept as evidence."""

    worker: str
    """Its id: see `identity.WorkerKeys`."""
    name: str
    """The trajectory whose check decided."""
    verdict: Verdict
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


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker's account, for whoever shows it."""

    is_trusted: bool
    num_finished: int
    num_checked: int
    num_suspect: int
    is_quarantined: bool


REMEMBERED_OPEN = 100_000
"""Finished trajectories remembered of one worker until they are trained."""
REMEMBERED_TRAINED = 10_000
"""Trained trajectories listed of one worker."""


@dataclass(slots=True)
class _Worker:
    is_trusted: bool
    verdicts: deque[Verdict]
    num_finished: int = 0
    num_checked: int = 0
    num_suspect: int = 0
    checks_owed: int = 0
    """Next finished trajectories that are checked whatever the draw says."""
    open: dict[str, None] = field(default_factory=dict)
    """Finished and not yet trained or lost."""
    trained: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TRAINED))
    num_trained: int = 0


class Inspector:
    """The checks of one run. Names are the trajectories'."""

    def __init__(self, settings: InspectionSettings, secret: bytes) -> None:
        """secret: the run's own, known to no worker; with the same one a restarted hub decides the same."""
        self._settings = settings
        self._secret = secret
        self._workers: dict[str, _Worker] = {}
        self._owner: dict[str, str] = {}
        """Of each open trajectory."""
        self._quarantine: dict[str, Conviction] = {}

    @property
    def quarantine(self) -> dict[str, Conviction]:
        """Convicted workers, by name."""
        return dict(self._quarantine)

    def concerns(self, grant: Grant) -> bool:
        """Whether the workers of a token are checked at all: the run's own only where it asks for that."""
        return self._settings.own or not grant.is_own

    def joined(self, worker: str, *, is_trusted: bool = False) -> None:
        """A worker is here, for the first time or again; that neither clears its account nor its conviction."""
        self._of(worker).is_trusted = is_trusted

    def restore(self, conviction: Conviction) -> None:
        """Take over a conviction from before a restart."""
        self._quarantine[conviction.worker] = conviction

    def pardon(self, worker: str) -> None:
        """Its quarantine is lifted: it is a new worker."""
        self._quarantine.pop(worker, None)
        self._workers.pop(worker, None)

    def finished(self, worker: str, name: str) -> bool:
        """A worker has finished a trajectory; say whether it is to be checked."""
        assert worker not in self._quarantine, f"worker {worker} is in quarantine and finishes nothing"
        account = self._of(worker)
        self.lost([name])
        self._owner[name] = worker
        while len(account.open) >= REMEMBERED_OPEN:  # of groups that were filtered nobody tells
            self.lost([next(iter(account.open))])
        account.open[name] = None
        account.num_finished += 1
        share = self._settings.trusted_share if account.is_trusted else self._settings.share
        is_checked = account.checks_owed > 0 or self._draw(worker, name) < share
        account.checks_owed = max(0, account.checks_owed - 1)
        return is_checked

    def judged(self, worker: str, name: str, verdict: Verdict, tolerance: Tolerance) -> Conviction | None:
        """A check has its verdict; return the worker's conviction where this is the one that decides.

        tolerance: of the worker's class; its newest verdicts are judged together as well.
        """
        if worker in self._quarantine:
            return None
        account = self._of(worker)
        account.num_checked += 1
        account.verdicts.append(verdict)
        if verdict.outcome is Outcome.BAD:
            return self._convicted(worker, name, verdict)
        if verdict.outcome is Outcome.SUSPECT:
            account.num_suspect += 1
            account.checks_owed = max(account.checks_owed, self._settings.after_suspect)
        together = pooled(account.verdicts, tolerance)
        return self._convicted(worker, name, together) if together.outcome is Outcome.BAD else None

    def violated(self, worker: str, name: str, verdict: Verdict) -> Conviction | None:
        """A report broke a rule that no honest worker breaks; the trajectory need not be finished."""
        return None if worker in self._quarantine else self._convicted(worker, name, verdict)

    def consumed(self, names: Iterable[str], step: int) -> None:
        """A train step has consumed finished trajectories."""
        for name in names:
            if account := self._taken(name):
                account.trained.append((name, step))
                account.num_trained += 1

    def lost(self, names: Iterable[str]) -> None:
        """Finished trajectories will not be trained: filtered, too old, or grown again."""
        for name in names:
            self._taken(name)

    def standing(self, worker: str) -> Standing:
        """Return a worker's account."""
        account = self._workers.get(worker) or self._new(is_trusted=False)
        counts = account.num_finished, account.num_checked, account.num_suspect
        return Standing(account.is_trusted, *counts, worker in self._quarantine)

    def _convicted(self, worker: str, name: str, verdict: Verdict) -> Conviction:
        account = self._of(worker)
        conviction = Conviction(
            worker,
            name,
            verdict,
            requeue=tuple(account.open),
            trained=tuple(account.trained),
            num_trained=account.num_trained,
            num_checked=account.num_checked,
            num_finished=account.num_finished,
        )
        self.lost(conviction.requeue)
        self._quarantine[worker] = conviction
        return conviction

    def _taken(self, name: str) -> _Worker | None:
        owner = self._owner.pop(name, None)
        if owner is None:
            return None
        account = self._workers.get(owner)
        if account is not None:
            account.open.pop(name, None)
        return account

    def _of(self, worker: str) -> _Worker:
        if worker not in self._workers:
            self._workers[worker] = self._new(is_trusted=False)
        return self._workers[worker]

    def _new(self, *, is_trusted: bool) -> _Worker:
        return _Worker(is_trusted, deque(maxlen=self._settings.remembered), checks_owed=self._settings.first)

    def _draw(self, worker: str, name: str) -> float:
        """Return a number in [0, 1) that nobody without the secret can foretell."""
        digest = hashlib.blake2b(f"{worker}\n{name}".encode(), key=self._secret[:64], digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
