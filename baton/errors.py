"""All exceptions that Baton defines, and the message in which one process sends an error to another.

BatonError
  ├─ UserError (also a ValueError)
  │    ├─ TaskExhausted
  │    └─ Damaged
  ├─ EngineFault
  ├─ EnvironmentFault
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
    """Invalid user input. The message names the input, the given value, and what is allowed."""


class TaskExhausted(UserError):
    """A task has fewer distinct problems than were requested."""


class Damaged(UserError):
    """A file is truncated or corrupted."""


class EngineFault(BatonError):
    """An engine or the worker that runs the engine failed."""


class EnvironmentFault(BatonError):
    """The environments of multi-turn tasks fail again and again."""


class DeadlineExceeded(BatonError):
    """A wait timed out. The message names the process that did not respond, and the time."""


class TrainingDiverged(BatonError):
    """A loss or a gradient is not finite."""


class RankLost(BatonError):
    """A rank of a sharded trainer has exited or does not respond. The other ranks have been terminated."""


class StorageFault(BatonError):
    """A file could not be written, for example because the disk is full."""


class RunTakenOver(BatonError):
    """Another process has taken over the run's directory. This process has written nothing since then."""


class WeightsFault(BatonError):
    """A policy version could not be published, or could not be fetched and verified. The previous version is kept."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class name if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


MAX_TEXT: Final = 2000
"""Maximum number of characters of an error's text that are sent."""


KINDS: Final[dict[str, type[BatonError]]] = {
    "UserError": UserError,
    "TaskExhausted": TaskExhausted,
    "TrainingDiverged": TrainingDiverged,
    "EngineFault": EngineFault,
}
"""Errors that the receiving process raises again with the same class. Any other error becomes an error of the receiver
that names the failed process."""


NAMES: Final[dict[type[BaseException], str]] = {kind: name for name, kind in KINDS.items()} | {
    BatonError: "BatonError",
    Damaged: "Damaged",
    DeadlineExceeded: "DeadlineExceeded",
    EnvironmentFault: "EnvironmentFault",
    RankLost: "RankLost",
    RunTakenOver: "RunTakenOver",
    StorageFault: "StorageFault",
    WeightsFault: "WeightsFault",
    OSError: "OSError",
}
"""Names under which errors are sent. They do not follow the class names: a renamed class must not change a message."""


class Fault(msgspec.Struct, frozen=True, tag="Fault", omit_defaults=True):
    """The message that reports an error: the sender cannot continue, or cannot answer a request."""

    kind: str
    """One of `NAMES`; otherwise the name of the error's class."""
    text: str
    errno: int = 0
    """Error number of an OSError; 0 for other errors."""

    def error(self) -> BatonError | OSError | None:
        """Return the error if its kind is in `KINDS` or it is an OSError with a number; otherwise None."""
        if self.kind in KINDS:
            return KINDS[self.kind](self.text)
        return OSError(self.errno, self.text) if self.kind == NAMES[OSError] and self.errno else None


def fault_of(error: BaseException) -> Fault:
    """Return the message that reports an error."""
    errno = (error.errno or 0) if isinstance(error, OSError) else 0
    return Fault(_name_of(type(error)), str(error)[:MAX_TEXT], errno)


def _name_of(kind: type[BaseException]) -> str:
    """Return the name of the nearest base class that is in `NAMES` or is not defined in Baton."""
    named = (NAMES[base] for base in kind.__mro__ if base in NAMES)
    foreign = (base.__name__ for base in kind.__mro__ if not base.__module__.startswith("baton."))
    return next(named, None) or next(foreign)
