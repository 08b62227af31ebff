"""The error of another process, as engine processes, trainer ranks and swarm workers send it."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.errors import BatonError, EngineFault, TaskExhausted, TrainingDiverged, UserError

MAX_TEXT: Final = 2000
"""Characters of an error's text that are sent."""
KINDS: Final[dict[str, type[BatonError]]] = {
    "UserError": UserError,
    "TaskExhausted": TaskExhausted,
    "TrainingDiverged": TrainingDiverged,
    "EngineFault": EngineFault,
}
"""Errors that mean the same in the process that receives them; of any other, that process says who failed."""


class Fault(msgspec.Struct, frozen=True, tag="Fault", omit_defaults=True):
    """An error: the sender cannot go on, or cannot give the answer that was asked for."""

    kind: str
    """Name of the exception; OSError for any of its kinds."""
    text: str
    errno: int = 0
    """Of an OSError that has one."""

    def error(self) -> BatonError | OSError | None:
        """Return the error, where it is one of `KINDS` or an OSError with its number."""
        if self.kind in KINDS:
            return KINDS[self.kind](self.text)
        return OSError(self.errno, self.text) if self.kind == OSError.__name__ and self.errno else None


def fault_of(error: BaseException) -> Fault:
    """Return an error as it is sent."""
    if isinstance(error, OSError):
        return Fault(OSError.__name__, str(error)[:MAX_TEXT], error.errno or 0)
    return Fault(type(error).__name__, str(error)[:MAX_TEXT])
