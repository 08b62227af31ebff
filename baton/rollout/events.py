"""What the scheduler hears and what it says. Counts and versions, never tokens: those stay with the runner.

A trajectory is named by (group_id, sample_index). `at_s` is the time of an event on the clock of whoever drives the
scheduler: the live run's, or a simulator's.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class Capacity(msgspec.Struct, frozen=True, tag="Capacity", gc=False):
    """The workers together have so many places."""

    at_s: float
    slots: int
    """Trajectories they generate at once."""
    queue: int = 0
    """Leases they want beyond that, so that a free slot never waits for one."""


class TokensLost(msgspec.Struct, frozen=True, tag="Lost", gc=False):
    """Tokens were generated that are part of no trajectory: a branch that another overtook, or a worker took away."""

    at_s: float
    cause: str
    num_tokens: int


class Revoked(msgspec.Struct, frozen=True, tag="Revoked", gc=False):
    """A trajectory that is in no batch is not to be trusted: it is generated again from its prompt."""

    at_s: float
    group_id: int
    sample_index: int
    cause: str


class TokensReceived(msgspec.Struct, frozen=True, tag="Grew", gc=False):
    """Tokens of one version have arrived."""

    at_s: float
    group_id: int
    sample_index: int
    version: int
    num_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="Finished", gc=False):
    """A trajectory is complete; its tokens have been heard of before."""

    at_s: float
    group_id: int
    sample_index: int


class LeaseEnded(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """A lease has ended without finishing its trajectory: aborted, or refused by the worker."""

    at_s: float
    group_id: int
    sample_index: int


class Rewarded(msgspec.Struct, frozen=True, tag="Rewarded", gc=False):
    """A finished trajectory is judged; without a reward where there is no judgement."""

    at_s: float
    group_id: int
    sample_index: int
    reward: float | None


class VersionTrained(msgspec.Struct, frozen=True, tag="VersionMade", gc=False):
    """The trainer has made a version."""

    at_s: float
    version: int
    is_published: bool = True
    """Whether workers are to serve it; with a publish period above 1 most are not."""


class VersionServed(msgspec.Struct, frozen=True, tag="Serving", gc=False):
    """The workers serve the version that was loaded."""

    at_s: float
    version: int


class BatchRequested(msgspec.Struct, frozen=True, tag="BatchWanted", gc=False):
    """The trainer can take a batch."""

    at_s: float


class DispatchPaused(msgspec.Struct, frozen=True, tag="Paused", gc=False):
    """The workers are wanted for something else: put down everything, start nothing."""

    at_s: float


class DispatchResumed(msgspec.Struct, frozen=True, tag="Resumed", gc=False):
    """They are free again."""

    at_s: float


Event = (
    Capacity
    | TokensReceived
    | Finished
    | LeaseEnded
    | TokensLost
    | Revoked
    | Rewarded
    | VersionTrained
    | VersionServed
    | BatchRequested
    | DispatchPaused
    | DispatchResumed
)

# ---- commands --------------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="Open", gc=False):
    """Begin a group with the next prompt, or with that of a group which was dropped."""

    group_id: int
    again: int | None = None
    """The dropped group whose prompt is tried once more."""


class Assign(msgspec.Struct, frozen=True, tag="Assign", gc=False):
    """Lease a trajectory; where to is not decided here."""

    group_id: int
    sample_index: int
    version: int
    is_exact: bool
    """Serve exactly this version, else at least it."""


class AbortTrajectory(msgspec.Struct, frozen=True, tag="Abort", gc=False):
    """Have a trajectory put down, and what there is of it reported."""

    group_id: int
    sample_index: int


class Restart(msgspec.Struct, frozen=True, tag="Restart", gc=False):
    """Forget a trajectory's tokens: it is generated again from its prompt."""

    group_id: int
    sample_index: int


class Discard(msgspec.Struct, frozen=True, tag="Discard", gc=False):
    """A group will not be trained."""

    group_id: int
    cause: str
    """`filtered` or `dropped`."""


class Deliver(msgspec.Struct, frozen=True, tag="Deliver", gc=False):
    """The batch of the next train step."""

    step: int
    group_ids: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, tag="Load", gc=False):
    """Have the workers switch to a version; nothing stands in the way."""

    version: int


Command = Open | Assign | AbortTrajectory | Restart | Discard | Deliver | Load
