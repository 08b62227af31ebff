"""What the lease table hears and what it says. Counts and versions, never tokens: those stay with the hub.

A *task* is one trajectory that somebody wants grown; a *lease* is one attempt at it by one worker. `at_s` is the time
of an event on the clock of whoever drives the table: the live hub's, or a simulator's.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class WorkerJoined(msgspec.Struct, frozen=True, tag="WorkerJoined", gc=False):
    """A worker offers places."""

    at_s: float
    worker: int
    slots: int
    """Trajectories it generates at once."""
    weight: float = 1.0
    """What is expected of one of its slots, against the mean of the others': by a plan, never by the worker itself."""
    kind: str | None = ""
    """Workers of one kind make the same tokens from the same noise. None: its engine has noise of its own, and not even
    the worker itself makes the same tokens twice."""
    owner: str | None = None
    """Whose workers together earn what they may hold: see `credit.py`. None: the run's own, which may fill their slots
    at once."""


class WorkerWeightChanged(msgspec.Struct, frozen=True, tag="WorkerWeighed", gc=False):
    """Another plan expects something else of a worker."""

    at_s: float
    worker: int
    weight: float


class WorkerSeen(msgspec.Struct, frozen=True, tag="WorkerHeard", gc=False):
    """A sign of life, with what the worker serves; `LeaseProgressed` is one too."""

    at_s: float
    worker: int
    version: int | None
    """The version it serves; None while it has none of this lineage."""
    decoded_tokens: int
    """Its engine's counter: a worker that is heard of and does not move is wedged."""


class WorkerLeft(msgspec.Struct, frozen=True, tag="WorkerLeft", gc=False):
    """A worker is gone, with whatever it had not reported."""

    at_s: float
    worker: int
    cause: str


class TaskSubmitted(msgspec.Struct, frozen=True, tag="TaskWanted", gc=False):
    """A trajectory is to be grown."""

    at_s: float
    task: int
    version: int
    is_exact: bool
    num_tokens: int
    """What it has already, after its prompt."""
    max_tokens: int
    """What it may have at the end."""


class TaskAborted(msgspec.Struct, frozen=True, tag="TaskAborted", gc=False):
    """A trajectory is to be put down."""

    at_s: float
    task: int


class TaskRevoked(msgspec.Struct, frozen=True, tag="TaskRevoked", gc=False):
    """What a trajectory has so far is not to be trusted: nobody grows it any more, and its owner knows."""

    at_s: float
    task: int


class LeaseProgressed(msgspec.Struct, frozen=True, tag="LeaseGrew", gc=False):
    """Tokens have come in, checked and in order."""

    at_s: float
    lease: int
    num_tokens: int
    version: int = 0
    """Of the last of them: whoever goes on must serve at least this one."""


class LeaseFinished(msgspec.Struct, frozen=True, tag="LeaseFinished", gc=False):
    """The worker has finished the trajectory; its tokens have been heard of before."""

    at_s: float
    lease: int


class LeaseReturned(msgspec.Struct, frozen=True, tag="LeasePutDown", gc=False):
    """The worker has put the trajectory down, or refused it.

    Who refuses what it should be able to serve is given nothing before it is heard of again: else it would get the same
    task at once, and hold it for ever.
    """

    at_s: float
    lease: int


class LeaseTick(msgspec.Struct, frozen=True, tag="Tick", gc=False):
    """Time has passed."""

    at_s: float
    delay_s: float = 0.0
    """How late the tick is: what the hub itself was held up by is no fault of the workers."""


Event = (
    WorkerJoined
    | WorkerWeightChanged
    | WorkerSeen
    | WorkerLeft
    | TaskSubmitted
    | TaskAborted
    | TaskRevoked
    | LeaseProgressed
    | LeaseFinished
    | LeaseReturned
    | LeaseTick
)


# ---- commands --------------------------------------------------------------------------------------------------------


class GrantLease(msgspec.Struct, frozen=True, tag="Grant", gc=False):
    """Lease a task to a worker."""

    worker: int
    lease: int
    task: int
    base: int
    """Tokens that the worker is given; it grows the trajectory from there."""


class RecallLease(msgspec.Struct, frozen=True, tag="Recall", gc=False):
    """Have a worker put a lease down; it answers with what it has."""

    worker: int
    lease: int


class DropLease(msgspec.Struct, frozen=True, tag="Drop", gc=False):
    """A lease is no longer valid: whatever still comes for it is ignored, and its worker may stop."""

    worker: int
    lease: int


class CommitTokens(msgspec.Struct, frozen=True, tag="Commit", gc=False):
    """Tokens of a lease become the trajectory's, up to a length."""

    task: int
    lease: int
    length: int


class FinishTask(msgspec.Struct, frozen=True, tag="Finish", gc=False):
    """A task is done; all of the lease's tokens are committed."""

    task: int
    lease: int


class ReplaceTokens(msgspec.Struct, frozen=True, tag="Replace", gc=False):
    """A task is done, by a lease that made other tokens than those that are committed: its tokens take their place."""

    task: int
    lease: int


class ReturnTask(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """A task that was aborted is nobody's now."""

    task: int


class DiscardTokens(msgspec.Struct, frozen=True, tag="Waste", gc=False):
    """Tokens that were made for nothing."""

    cause: str
    num_tokens: int


class DisconnectWorker(msgspec.Struct, frozen=True, tag="Expel", gc=False):
    """A worker is taken for dead: hang up, it may come back."""

    worker: int
    cause: str


Command = (
    GrantLease
    | RecallLease
    | DropLease
    | CommitTokens
    | FinishTask
    | ReplaceTokens
    | ReturnTask
    | DiscardTokens
    | DisconnectWorker
)
