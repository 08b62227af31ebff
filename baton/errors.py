"""Every error that Baton raises on purpose, and how errors are sent between processes.

BatonError
  ├─ UserError (also a ValueError)
  │    ├─ TaskExhausted
  │    └─ Damaged
  ├─ EngineFault
  ├─ DeadlineExceeded
  ├─ TrainingDiverged
  ├─ RankLost
  ├─ StorageFault
  ├─ RunTakenOver
  └─ WeightsFault
"""

from __future__ import annotations

from typing import Final

import msgspec


class BatonError(Exception):
    """Base class of all errors in this module."""


class UserError(BatonError, ValueError):
    """Invalid user input. The message says what is wrong, what was given, what is allowed, and where."""


class TaskExhausted(UserError):
    """A task has fewer distinct problems than were requested."""


class Damaged(UserError):
    """The content of a file is not what was written: it is truncated or corrupted."""


class EngineFault(BatonError):
    """An engine, or the worker that runs it, failed."""


class DeadlineExceeded(BatonError):
    """A wait timed out. The message names what was waited for and for how long."""


class TrainingDiverged(BatonError):
    """A loss or a gradient is not finite."""


class RankLost(BatonError):
    """A rank of a sharded trainer has ended or does not answer. The other ranks have been terminated."""


class StorageFault(BatonError):
    """A file could not be written, for example because the disk is full."""


class RunTakenOver(BatonError):
    """Another process has taken over the run's directory. This process has written nothing since."""


class WeightsFault(BatonError):
    """A policy version could not be published, or could not be fetched complete and verified. The version held before
    is unchanged."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: the texts of some libraries are pages long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


MAX_TEXT: Final = 2000
"""Maximum number of characters of an error's text that are sent."""


KINDS: Final[dict[str, type[BatonError]]] = {
    "UserError": UserError,
    "TaskExhausted": TaskExhausted,
    "TrainingDiverged": TrainingDiverged,
    "EngineFault": EngineFault,
}
"""Errors that the receiving process raises again with the same type. For others, the receiver names the failed process.
"""


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
"""Names under which errors are sent. They are fixed, so renaming a class changes no message."""


class Fault(msgspec.Struct, frozen=True, tag="Fault", omit_defaults=True):
    """An error as it is sent: the sender cannot continue, or cannot answer the request."""

    kind: str
    """One of `NAMES`; for an error that is neither Baton's nor an OSError, the name of its class."""
    text: str
    errno: int = 0
    """Error number of an OSError; 0 if it has none."""

    def error(self) -> BatonError | OSError | None:
        """Return the error if it is one of `KINDS`, or an OSError with a number; else None."""
        if self.kind in KINDS:
            return KINDS[self.kind](self.text)
        return OSError(self.errno, self.text) if self.kind == NAMES[OSError] and self.errno else None


def fault_of(error: BaseException) -> Fault:
    """Return an error in the form in which it is sent."""
    errno = (error.errno or 0) if isinstance(error, OSError) else 0
    return Fault(_name_of(type(error)), str(error)[:MAX_TEXT], errno)


def _name_of(kind: type[BaseException]) -> str:
    """Return the name of the nearest base class that is in `NAMES` or is not defined in Baton."""
    named = (NAMES[base] for base in kind.__mro__ if base in NAMES)
    foreign = (base.__name__ for base in kind.__mro__ if not base.__module__.startswith("baton."))
    return next(named, None) or next(foreign)
