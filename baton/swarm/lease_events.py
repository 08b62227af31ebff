"""Events and commands of the lease table. Events and commands contain only counts of tokens and numbers of versions;
the lease broker stores the tokens."""

from __future__ import annotations

import msgspec

from baton.clock import TimedEvent

# ---- events ----------------------------------------------------------------------------------------------------------


class WorkerJoined(TimedEvent, frozen=True, tag="WorkerJoined"):
    """A worker is ready to generate."""

    worker: int
    slots: int
    """Number of trajectories that the worker generates concurrently."""
    weight: float = 1.0
    """Expected speed of one slot, relative to the mean over all workers. This value comes from a plan, never from the
    worker itself."""
    kind: str | None = ""
    """Kind of the worker. Workers of the same kind generate the same tokens from the same noise. None means that the
    worker's engine uses its own noise and generates different tokens each time."""
    owner: str | None = None
    """Owner of the worker. All workers of an owner share the credit that limits their leases (`LeaseCredit`). None
    means that the run itself started the worker, which may then fill all its slots immediately."""


class WorkerWeightChanged(TimedEvent, frozen=True, tag="WorkerWeighed"):
    """A new plan changes the expected speed of a worker."""

    worker: int
    weight: float


class WorkerSeen(TimedEvent, frozen=True, tag="WorkerHeard"):
    """A worker has sent a message. The events `LeaseProgressed` and `WorkerSeen` both show that a worker is alive."""

    worker: int
    version: int | None
    """Number of the version that the worker serves. None if it serves no version, or a version that this hub process
    has not published."""
    decoded_tokens: int
    """Number of tokens that the engine has decoded. A worker that holds leases is stuck if this number does not
    change."""


class WorkerLeft(TimedEvent, frozen=True, tag="WorkerLeft"):
    """A worker has left. Tokens that the worker has generated but not reported are lost."""

    worker: int
    cause: str


class TaskSubmitted(TimedEvent, frozen=True, tag="TaskWanted"):
    """The controller requests a trajectory."""

    task: int
    version: int
    is_exact: bool
    num_tokens: int
    """Number of tokens that the trajectory already has after its prompt."""
    max_tokens: int
    """Maximum number of tokens after the prompt."""
    start: int = 0
    """Number of tokens before the current turn of a multi-turn episode. No worker generates these tokens again."""
    preferred: int | None = None
    """Worker that gets the first lease if it has a free slot, because its KV cache may contain earlier turns."""


class TaskAborted(TimedEvent, frozen=True, tag="TaskAborted"):
    """The controller aborts a trajectory."""

    task: int


class TaskRevoked(TimedEvent, frozen=True, tag="TaskRevoked"):
    """The tokens of a trajectory are no longer trusted. The table ends the leases; the caller informs the
    controller."""

    task: int


class LeaseProgressed(TimedEvent, frozen=True, tag="LeaseGrew"):
    """New tokens of a lease have arrived and passed the checks. They directly follow the lease's earlier tokens."""

    lease: int
    num_tokens: int
    version: int = 0
    """Version of the last new token. The worker of a later lease must serve at least this version."""


class LeaseFinished(TimedEvent, frozen=True, tag="LeaseFinished"):
    """The worker has finished the trajectory, whose tokens all arrived in earlier `LeaseProgressed` events."""

    lease: int


class LeaseReturned(TimedEvent, frozen=True, tag="LeasePutDown"):
    """The worker has aborted the trajectory of a lease, or has refused the lease.

    Suppose that a worker refuses a lease although the table expects it to serve the lease's version. The table then
    grants the worker no lease until the worker has sent another message. This prevents an endless loop of grants and
    refusals.
    """

    lease: int


class LeaseTick(TimedEvent, frozen=True, tag="Tick"):
    """Periodic event that gives the current time."""

    delay_s: float = 0.0
    """Delay of this tick in seconds. The hub caused this delay, so the delay does not count towards time limits."""


Event = (
    WorkerJoined | WorkerWeightChanged | WorkerSeen | WorkerLeft | TaskSubmitted | TaskAborted | TaskRevoked
    | LeaseProgressed | LeaseFinished | LeaseReturned | LeaseTick
)  # fmt: skip


# ---- commands --------------------------------------------------------------------------------------------------------


class GrantLease(msgspec.Struct, frozen=True, tag="Grant", gc=False):
    """Grant a task to a worker."""

    worker: int
    lease: int
    task: int
    base: int
    """Number of tokens after the prompt that the trajectory has when the worker starts."""


class RecallLease(msgspec.Struct, frozen=True, tag="Recall", gc=False):
    """Ask a worker to abort a lease. The worker then reports its last tokens and returns the lease."""

    worker: int
    lease: int


class DropLease(msgspec.Struct, frozen=True, tag="Drop", gc=False):
    """End a lease: further reports are ignored, and the worker may stop."""

    worker: int
    lease: int


class CommitTokens(msgspec.Struct, frozen=True, tag="Commit", gc=False):
    """Append tokens of a lease to the trajectory, which then has `length` tokens after its prompt."""

    task: int
    lease: int
    length: int


class FinishTask(msgspec.Struct, frozen=True, tag="Finish", gc=False):
    """Finish a task. All tokens of the finished lease have been committed."""

    task: int
    lease: int


class ReplaceTokens(msgspec.Struct, frozen=True, tag="Replace", gc=False):
    """Finish a task. The tokens of the finished lease replace all committed tokens."""

    task: int
    lease: int


class ReturnTask(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """Tell the controller that an aborted task has no lease any more."""

    task: int


class DiscardTokens(msgspec.Struct, frozen=True, tag="Waste", gc=False):
    """Count tokens that were generated, but are not used."""

    cause: str
    num_tokens: int


class DisconnectWorker(msgspec.Struct, frozen=True, tag="Expel", gc=False):
    """Close the connection of a worker, for example because it is considered dead. The worker may join again."""

    worker: int
    cause: str


Command = (
    GrantLease | RecallLease | DropLease | CommitTokens | FinishTask | ReplaceTokens | ReturnTask | DiscardTokens
    | DisconnectWorker
)  # fmt: skip
