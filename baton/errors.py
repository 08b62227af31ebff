"""All exceptions that Baton defines, and the message by which a process reports an error to another process.

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

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final, NamedTuple

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
    """The environments of multi-turn tasks failed repeatedly."""


class DeadlineExceeded(BatonError):
    """A wait timed out. The message names the process that did not respond, and the waiting time."""


class Suspect(NamedTuple):
    """The token of a trajectory at which engine and trainer differ most: `group/sample` of the episode, index of the
    path, position after the prompt."""

    name: str
    path: int
    token: int

    def __str__(self) -> str:
        return f"{self.name} (path {self.path}, token {self.token})"


class TrainingDiverged(BatonError):
    """A loss or gradient is not finite, or the logprobs of engine and trainer differ by more than [trainer] allows."""

    @property
    def suspects(self) -> list[Suspect]:
        """The token of each trajectory that the error names as its cause; empty if the error names none. The tokens are
        parsed from the error's text, because processes exchange errors as texts."""
        named = re.findall(r"(\d+/\d+) \(path (\d+), token (\d+)\)", str(self))
        return [Suspect(name, int(path), int(token)) for name, path, token in named]


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


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint for an error about an unknown name: the most similar known name, or `otherwise`."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


MAX_TEXT: Final = 2000
"""Maximum length of an error's text in a `Fault`, in characters; a longer text is cut."""


KINDS: Final[dict[str, type[BatonError]]] = {
    "UserError": UserError,
    "TaskExhausted": TaskExhausted,
    "TrainingDiverged": TrainingDiverged,
    "EngineFault": EngineFault,
}
"""Name of an error in a `Fault` → the exception class that the receiving process raises. For "OSError", the receiver
raises an OSError. For any other name, the receiver raises an error that names the failed process."""


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
"""Class of an error → its name in a `Fault`. If a class is renamed, this name must stay, because messages contain
it."""


class Fault(msgspec.Struct, frozen=True, tag="Fault", omit_defaults=True):
    """A message with which a process reports an error to another process. The sender of the message cannot continue, or
    it cannot answer a request."""

    kind: str
    """Name, in `NAMES`, of the error's class or of its nearest base class that `NAMES` contains. If `NAMES` contains
    none of them, the name of the nearest class that Baton does not define."""
    text: str
    errno: int = 0
    """Error number of an OSError; 0 for other errors."""

    def error(self) -> BatonError | OSError | None:
        """Return the exception that this message reports: an exception of `KINDS`, or an OSError if the message has an
        error number. Return None for any other error."""
        if self.kind in KINDS:
            return KINDS[self.kind](self.text)
        return OSError(self.errno, self.text) if self.kind == NAMES[OSError] and self.errno else None


def fault_of(error: BaseException) -> Fault:
    """Return the message that reports an error."""
    bases = type(error).__mro__
    named = (NAMES[base] for base in bases if base in NAMES)
    foreign = (base.__name__ for base in bases if not base.__module__.startswith("baton."))
    errno = (error.errno or 0) if isinstance(error, OSError) else 0
    return Fault(next(named, None) or next(foreign), str(error)[:MAX_TEXT], errno)
