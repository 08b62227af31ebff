"""Every error that Baton raises on purpose, and how an error travels from another process."""

from __future__ import annotations

from typing import Final

import msgspec


class BatonError(Exception):
    """Root of the tree above."""


class UserError(BatonError, ValueError):
    """A mistake in what the user gave: says what, what was got, what is allowed, and where."""


class TaskExhausted(UserError):
    """A task holds fewer distinct problems than were asked for."""


class Damaged(UserError):
    """A file is not what was written: it is cut short, or its bits have changed."""


class EngineFault(BatonError):
    """An engine or the worker that holds it failed."""


class DeadlineExceeded(BatonError):
    """A wait ran out; the message names who was waited for and for how long."""


class TrainingDiverged(BatonError):
    """A loss or a gradient is not finite."""


class RankLost(BatonError):
    """A rank of a sharded trainer has ended, or does not answer; the others have been ended too."""


class StorageFault(BatonError):
    """A file could not be written: the disk is full, say."""


class RunTakenOver(BatonError):
    """Another process has taken over the run's directory; this one has written nothing since."""


class WeightsFault(BatonError):
    """A policy version cannot be published, or not be had whole and verified; what was held before is untouched."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for our own sentence about it: some libraries' texts are pages long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


MAX_TEXT: Final = 2000
"""Characters of an error's text that are sent."""


KINDS: Final[dict[str, type[BatonError]]] = {
    "UserError": UserError,
    "TaskExhausted": TaskExhausted,
    "TrainingDiverged": TrainingDiverged,
    "EngineFault": EngineFault,
}
"""Errors that mean the same in the process that receives them; of any other, that process says who failed."""


NAMES: Final[dict[type[BaseException], str]] = {kind: name for name, kind in KINDS.items()} | {
    BatonError: "BatonError",
    Damaged: "Damaged",
    DeadlineExceeded: "DeadlineExceeded",
    RankLost: "RankLost",
    RunTakenOver: "RunTakenOver",
    StorageFault: "StorageFault",
    WeightsFault: "WeightsFault",
    OSError: "OSError",
}
"""Names under which errors are sent: fixed, so that renaming a class changes no message."""


class Fault(msgspec.Struct, frozen=True, tag="Fault", omit_defaults=True):
    """An error: the sender cannot go on, or cannot give the answer that was asked for."""

    kind: str
    """One of `NAMES`; of an error that is neither Baton's nor an OSError, the name of its class."""
    text: str
    errno: int = 0
    """Of an OSError that has one."""

    def error(self) -> BatonError | OSError | None:
        """Return the error, where it is one of `KINDS` or an OSError with its number."""
        if self.kind in KINDS:
            return KINDS[self.kind](self.text)
        return OSError(self.errno, self.text) if self.kind == NAMES[OSError] and self.errno else None


def fault_of(error: BaseException) -> Fault:
    """Return an error as it is sent."""
    errno = (error.errno or 0) if isinstance(error, OSError) else 0
    return Fault(_name_of(type(error)), str(error)[:MAX_TEXT], errno)


def _name_of(kind: type[BaseException]) -> str:
    """A class of Baton's that is not in `NAMES` is sent as its nearest base that is, or that is not Baton's."""
    named = (NAMES[base] for base in kind.__mro__ if base in NAMES)
    foreign = (base.__name__ for base in kind.__mro__ if not base.__module__.startswith("baton."))
    return next(named, None) or next(foreign)
