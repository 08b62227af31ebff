"""Events and commands of the lease table. They contain counts and versions; the tokens stay in the lease broker.

`at_s` is the time of an event on the clock of the table's driver, which is the live hub or a simulator.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class WorkerJoined(msgspec.Struct, frozen=True, tag="WorkerJoined", gc=False):
    """A worker is ready to generate."""

    at_s: float
    worker: int
    slots: int
    """Number of trajectories that the worker generates at once."""
    weight: float = 1.0
    """Expected speed of one slot, relative to the mean of all workers. A plan sets it, never the worker."""
    kind: str | None = ""
    """Kind of the worker: workers of one kind generate the same tokens from the same noise. None means that the engine
    has noise of its own and generates different tokens each time."""
    owner: str | None = None
    """Owner of the worker: workers of one owner share the credit that limits their leases (`LeaseCredit`). None means a
    worker of the run itself, which may fill its slots at once."""


class WorkerWeightChanged(msgspec.Struct, frozen=True, tag="WorkerWeighed", gc=False):
    """A new plan changes the expected speed of a worker."""

    at_s: float
    worker: int
    weight: float


class WorkerSeen(msgspec.Struct, frozen=True, tag="WorkerHeard", gc=False):
    """A worker has sent a message. `LeaseProgressed` implies this event."""

    at_s: float
    worker: int
    version: int | None
    """Number of the version that the worker serves; None if it serves no version of this lineage."""
    decoded_tokens: int
    """Token counter of the worker's engine. If it does not change while the worker holds leases, the worker is
    stuck."""


class WorkerLeft(msgspec.Struct, frozen=True, tag="WorkerLeft", gc=False):
    """A worker has left; tokens that it has not reported are lost."""

    at_s: float
    worker: int
    cause: str


class TaskSubmitted(msgspec.Struct, frozen=True, tag="TaskWanted", gc=False):
    """The controller requests a trajectory."""

    at_s: float
    task: int
    version: int
    is_exact: bool
    num_tokens: int
    """Number of tokens that the trajectory already has after its prompt."""
    max_tokens: int
    """Maximum number of tokens after the prompt."""


class TaskAborted(msgspec.Struct, frozen=True, tag="TaskAborted", gc=False):
    """The controller aborts a trajectory."""

    at_s: float
    task: int


class TaskRevoked(msgspec.Struct, frozen=True, tag="TaskRevoked", gc=False):
    """A trajectory's tokens are not trusted. Its leases end, and the caller handles the trajectory."""

    at_s: float
    task: int


class LeaseProgressed(msgspec.Struct, frozen=True, tag="LeaseGrew", gc=False):
    """New tokens of a lease have arrived, checked and in order."""

    at_s: float
    lease: int
    num_tokens: int
    version: int = 0
    """Version of the last new token; a later lease must serve at least this version."""


class LeaseFinished(msgspec.Struct, frozen=True, tag="LeaseFinished", gc=False):
    """The worker has finished the trajectory. Its tokens arrived in earlier `LeaseProgressed` events."""

    at_s: float
    lease: int


class LeaseReturned(msgspec.Struct, frozen=True, tag="LeasePutDown", gc=False):
    """The worker has aborted the trajectory, or refused the lease.

    A worker that refuses a lease whose version it should serve is granted no lease before its next message. Otherwise
    the table would grant it the same task again at once, in an endless loop.
    """

    at_s: float
    lease: int


class LeaseTick(msgspec.Struct, frozen=True, tag="Tick", gc=False):
    """Time has passed."""

    at_s: float
    delay_s: float = 0.0
    """Delay of this tick. The delay is the hub's, so it does not count against the workers."""


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
    """Grant a task to a worker."""

    worker: int
    lease: int
    task: int
    base: int
    """Number of tokens after the prompt that the worker starts from."""


class RecallLease(msgspec.Struct, frozen=True, tag="Recall", gc=False):
    """Ask a worker to abort a lease. The worker then reports its last tokens and returns the lease."""

    worker: int
    lease: int


class DropLease(msgspec.Struct, frozen=True, tag="Drop", gc=False):
    """End a lease: further reports are ignored, and the worker may stop."""

    worker: int
    lease: int


class CommitTokens(msgspec.Struct, frozen=True, tag="Commit", gc=False):
    """Append tokens of a lease to the trajectory, up to `length`."""

    task: int
    lease: int
    length: int


class FinishTask(msgspec.Struct, frozen=True, tag="Finish", gc=False):
    """Finish a task with the tokens of a lease, all of which are committed."""

    task: int
    lease: int


class ReplaceTokens(msgspec.Struct, frozen=True, tag="Replace", gc=False):
    """Finish a task with the tokens of a lease, which replace the committed tokens."""

    task: int
    lease: int


class ReturnTask(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """Return an aborted task that has no lease any more."""

    task: int


class DiscardTokens(msgspec.Struct, frozen=True, tag="Waste", gc=False):
    """Count tokens that were generated and are not used."""

    cause: str
    num_tokens: int


class DisconnectWorker(msgspec.Struct, frozen=True, tag="Expel", gc=False):
    """End the connection of a worker that is considered dead. The worker may join again."""

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
