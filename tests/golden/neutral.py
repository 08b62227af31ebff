"""Decision logs without class names: the one place of the golden tests that names events, commands and causes.

A log line is `>` (event) or `<` (command), a neutral name and the field values in their declared order. A rename
changes the left side of the tables below and no golden file. Texts written for people are not logged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from baton.cluster import placement as pl
from baton.cluster import supervision as sv
from baton.errors import UserError
from baton.rollout import events as ro
from baton.swarm import lease_events as ev
from baton.swarm import version_sync as hw
from baton.types import PolicyVersion

T = TypeVar("T")


@dataclass(frozen=True)
class Dialect:
    """How the messages of one state machine are called in its log."""

    events: dict[type[Any], str]
    commands: dict[type[Any], str]
    nested: type[Any] | None = None
    """Made of each `Record` among an event's values."""
    texts: frozenset[tuple[str, int]] = frozenset()
    """(neutral name, index of a field) of what is written for people."""
    later: frozenset[tuple[str, int]] = frozenset()
    """(neutral name, index of a field) of fields that are newer than the records: logged if they are set."""


SCHEDULER = Dialect(
    {
        ro.Capacity: "capacity",
        ro.TokensLost: "tokens-lost",
        ro.Revoked: "revoke",
        ro.TokensReceived: "grow",
        ro.Finished: "finish",
        ro.LeaseEnded: "release",
        ro.Rewarded: "reward",
        ro.VersionTrained: "version",
        ro.VersionServed: "serving",
        ro.BatchRequested: "want-batch",
        ro.DispatchPaused: "pause",
        ro.DispatchResumed: "unpause",
    },
    {
        ro.Open: "open",
        ro.Assign: "issue",
        ro.AbortTrajectory: "abort",
        ro.Restart: "restart",
        ro.Discard: "discard",
        ro.Deliver: "deliver",
        ro.Load: "load",
    },
)
LEASES = Dialect(
    {
        ev.WorkerJoined: "join",
        ev.WorkerWeightChanged: "weigh",
        ev.WorkerSeen: "beat",
        ev.WorkerLeft: "leave",
        ev.TaskSubmitted: "want",
        ev.TaskAborted: "abort",
        ev.TaskRevoked: "revoke",
        ev.LeaseProgressed: "grow",
        ev.LeaseFinished: "finished",
        ev.LeaseReturned: "released",
        ev.LeaseTick: "tick",
    },
    {
        ev.GrantLease: "grant",
        ev.RecallLease: "recall",
        ev.DropLease: "drop",
        ev.CommitTokens: "commit",
        ev.FinishTask: "finish",
        ev.ReplaceTokens: "replace",
        ev.ReturnTask: "release",
        ev.DiscardTokens: "waste",
        ev.DisconnectWorker: "expel",
    },
    texts=frozenset({("leave", 2), ("expel", 1)}),
    later=frozenset({("want", 6), ("want", 7)}),
)
VERSIONS = Dialect(
    {
        hw.VersionWanted: "want",
        hw.Fetched: "fetched",
        hw.FetchFailed: "failed",
        hw.Activated: "activated",
        hw.TimerFired: "woken",
    },
    {hw.Fetch: "fetch", hw.Activate: "activate", hw.SetTimer: "wake-at"},
    nested=PolicyVersion,
)
SUPERVISION = Dialect(
    {
        sv.ProcessStarted: "began",
        sv.ProcessEnded: "ended",
        sv.MachineLost: "machine-lost",
        sv.MachineJoined: "machine-joined",
        sv.Planned: "planned",
        sv.SupervisionTick: "tick",
    },
    {
        sv.StartProcess: "begin",
        sv.StopProcess: "end",
        sv.SetWorkerWeight: "weigh",
        sv.Replan: "replan",
        sv.TrainerLost: "trainer-lost",
        sv.Fail: "fail",
        sv.LogMessage: "say",
    },
    nested=pl.ProcessSpec,
    texts=frozenset({("ended", 2), ("planned", 2), ("end", 1), ("fail", 0), ("say", 0)}),
)
CAUSES = {"filtered": "equal-rewards", "dropped": "too-old", "overtaken": "lost-race", "regenerated": "made-again"}
"""Causes that a machine writes; others are logged as the story wrote them."""


class Record(NamedTuple):
    """A nested struct: its values."""

    values: tuple[object, ...]


class Message(NamedTuple):
    """An event or a command in neutral words."""

    name: str
    values: tuple[Any, ...]


class Draw:
    """Choices by a key. Only `random()` is used: its sequence is the same in every version of Python."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def below(self, number: int) -> int:
        return int(self._random.random() * number)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]


class Stopped(Exception):
    """The machine has refused to go on."""


class Log:
    """Gives events to a machine, and keeps both sides as text."""

    def __init__(self, dialect: Dialect, handle: Callable[[Any], Iterable[Any]]) -> None:
        self._dialect, self._handle = dialect, handle
        self._classes = {name: kind for kind, name in dialect.events.items()}
        self.lines: list[str] = []
        self.names: set[str] = set()
        """With `>` or `<` before them."""

    def tell(self, name: str, *values: object) -> list[Message]:
        """Return the commands that an event leads to."""
        event = self._classes[name](*(self._struct(value) for value in values))
        self.write(">", event)
        try:
            return self.commands(self._handle(event))
        except UserError as error:
            self.lines.append("! refused")
            raise Stopped from error

    def commands(self, commands: Iterable[Any]) -> list[Message]:
        return [self.write("<", command) for command in commands]

    def write(self, mark: str, message: msgspec.Struct) -> Message:
        """Append a line; return what it says."""
        found = row(self._dialect, message)
        self.names.add(f"{mark} {found.name}")
        self.lines.append(f"{mark} {text(self._dialect, found)}")
        return found

    def _struct(self, value: object) -> object:
        if isinstance(value, Record):
            assert self._dialect.nested is not None
            return self._dialect.nested(*value.values)
        return tuple(map(self._struct, value)) if isinstance(value, tuple) else value


def row(dialect: Dialect, message: msgspec.Struct) -> Message:
    """Return an event or a command in neutral words."""
    kind = type(message)
    name = dialect.events[kind] if kind in dialect.events else dialect.commands[kind]
    return Message(name, msgspec.structs.astuple(message))


def text(dialect: Dialect, message: Message, *, first: int = 0) -> str:
    """Return its line in a log, from one of its values on."""
    name, values = message
    hidden = dialect.texts | {(n, i) for n, i in dialect.later if n == name and not values[i]}
    logged = [canonical(v) for i, v in enumerate(values) if i >= first and (name, i) not in hidden]
    return " ".join([name, *logged])


def names_of(dialect: Dialect) -> set[str]:
    """Every line's beginning that a dialect allows."""
    return {f"> {name}" for name in dialect.events.values()} | {f"< {name}" for name in dialect.commands.values()}


def canonical(value: object) -> str:
    """One value as text: numbers as Python writes them, structs and tuples by their values alone."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return repr(value)
        case str():
            return CAUSES.get(value, value) or '""'
        case dict():
            return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
        case tuple() | list():
            return "[" + ",".join(map(canonical, value)) + "]"
    values = msgspec.structs.astuple(value)  # type: ignore[arg-type]
    if isinstance(value, pl.ProcessSpec):  # the last two fields are newer than the recorded logs
        values = values[:-2] + tuple(field for field in values[-2:] if field)
    return "(" + ",".join(map(canonical, values)) + ")"


def digest(lines: Iterable[str]) -> str:
    """16 hexadecimal digits."""
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def difference(recorded: str, now: str) -> str:
    """Return the first differing lines of two golden files, with what is around them."""
    found = unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=6)
    return "\n".join(islice(found, 400))
