"""Events and commands of the lease table: counts and versions, never tokens, which stay in the lease broker.

A *task* is one trajectory to be generated; a *lease* is one worker's attempt at it. `at_s` is the time of an event on
the clock of the table's driver, which is the live hub or a simulator.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class WorkerJoined(msgspec.Struct, frozen=True, tag="WorkerJoined", gc=False):
    """A worker is ready."""

    at_s: float
    worker: int
    slots: int
    """Trajectories that it generates at once."""
    weight: float = 1.0
    """Expected speed of one of its slots, relative to the mean of all workers; set by a plan, never by the worker."""
    kind: str | None = ""
    """Workers of one kind generate the same tokens from the same noise. None: the engine has noise of its own, and the
    same worker generates different tokens each time."""
    owner: str | None = None
    """Workers of one owner share the credit that limits their leases: see `credit.py`. None: the run's own worker,
    which may fill its slots at once."""


class WorkerWeightChanged(msgspec.Struct, frozen=True, tag="WorkerWeighed", gc=False):
    """A new plan changes the expected speed of a worker."""

    at_s: float
    worker: int
    weight: float


class WorkerSeen(msgspec.Struct, frozen=True, tag="WorkerHeard", gc=False):
    """A worker has sent a message, with the version that it serves. `LeaseProgressed` implies it."""

    at_s: float
    worker: int
    version: int | None
    """The version it serves; None while it has none of this lineage."""
    decoded_tokens: int
    """Its engine's counter: a worker that sends messages while this does not change is stuck."""


class WorkerLeft(msgspec.Struct, frozen=True, tag="WorkerLeft", gc=False):
    """A worker is gone; tokens that it has not reported are lost."""

    at_s: float
    worker: int
    cause: str


class TaskSubmitted(msgspec.Struct, frozen=True, tag="TaskWanted", gc=False):
    """A trajectory is to be generated."""

    at_s: float
    task: int
    version: int
    is_exact: bool
    num_tokens: int
    """Tokens that it already has, after its prompt."""
    max_tokens: int
    """Tokens that it may have at its end, after its prompt."""


class TaskAborted(msgspec.Struct, frozen=True, tag="TaskAborted", gc=False):
    """A trajectory is to be aborted."""

    at_s: float
    task: int


class TaskRevoked(msgspec.Struct, frozen=True, tag="TaskRevoked", gc=False):
    """A trajectory's tokens are not trusted: its leases end, and the caller handles the trajectory."""

    at_s: float
    task: int


class LeaseProgressed(msgspec.Struct, frozen=True, tag="LeaseGrew", gc=False):
    """Tokens have arrived, checked and in order."""

    at_s: float
    lease: int
    num_tokens: int
    version: int = 0
    """Version of the last of these tokens; a later lease must serve at least this one."""


class LeaseFinished(msgspec.Struct, frozen=True, tag="LeaseFinished", gc=False):
    """The worker has finished the trajectory; its tokens came in earlier `LeaseProgressed` events."""

    at_s: float
    lease: int


class LeaseReturned(msgspec.Struct, frozen=True, tag="LeasePutDown", gc=False):
    """The worker has aborted the trajectory, or refused it.

    A worker that refuses a lease whose version it should serve is granted nothing before its next message. Otherwise
    it would get the same task again at once, without end.
    """

    at_s: float
    lease: int


class LeaseTick(msgspec.Struct, frozen=True, tag="Tick", gc=False):
    """Time has passed."""

    at_s: float
    delay_s: float = 0.0
    """Delay of this tick. Delays of the hub itself do not count against the workers."""


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
    """Tokens after the prompt that the worker starts from."""


class RecallLease(msgspec.Struct, frozen=True, tag="Recall", gc=False):
    """Ask a worker to abort a lease; it reports its last tokens and returns it."""

    worker: int
    lease: int


class DropLease(msgspec.Struct, frozen=True, tag="Drop", gc=False):
    """A lease is no longer valid: further reports are ignored, and its worker may stop."""

    worker: int
    lease: int


class CommitTokens(msgspec.Struct, frozen=True, tag="Commit", gc=False):
    """Append tokens of a lease to the trajectory, up to a length."""

    task: int
    lease: int
    length: int


class FinishTask(msgspec.Struct, frozen=True, tag="Finish", gc=False):
    """A task is finished; all tokens of the lease are committed."""

    task: int
    lease: int


class ReplaceTokens(msgspec.Struct, frozen=True, tag="Replace", gc=False):
    """A task is finished by a lease whose tokens differ from the committed ones: they replace the committed ones."""

    task: int
    lease: int


class ReturnTask(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """An aborted task has no lease any more; the table forgets it."""

    task: int


class DiscardTokens(msgspec.Struct, frozen=True, tag="Waste", gc=False):
    """Tokens that were generated and are not used."""

    cause: str
    num_tokens: int


class DisconnectWorker(msgspec.Struct, frozen=True, tag="Expel", gc=False):
    """A worker is considered dead: end its connection. It may join again."""

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
