"""The error of another process, as engine processes, trainer ranks and swarm workers send it."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.errors import (
    BatonError,
    Damaged,
    DeadlineExceeded,
    EngineFault,
    RankLost,
    RunTakenOver,
    StorageFault,
    TaskExhausted,
    TrainingDiverged,
    UserError,
    WeightsFault,
)

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
