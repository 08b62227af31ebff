"""Events that the scheduler receives and commands that it returns. They hold counts and versions, no token ids.

(group_id, sample_index) identifies a trajectory. `at_s` is the time of an event in seconds, on the monotonic clock of a
live run or the virtual clock of a simulator.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class Capacity(msgspec.Struct, frozen=True, tag="Capacity", gc=False):
    """The capacity of all workers together has changed."""

    at_s: float
    slots: int
    """Trajectories generated concurrently."""
    queue: int = 0
    """Further leases to send ahead, so that a freed slot does not wait for one."""


class TokensLost(msgspec.Struct, frozen=True, tag="Lost", gc=False):
    """Tokens were generated but discarded: lost to a backup lease, with a worker, or produced by a quarantined one."""

    at_s: float
    cause: str
    num_tokens: int


class Revoked(msgspec.Struct, frozen=True, tag="Revoked", gc=False):
    """A trajectory that is in no batch is not trusted any more, and must be generated again from its prompt."""

    at_s: float
    group_id: int
    sample_index: int
    cause: str


class TokensReceived(msgspec.Struct, frozen=True, tag="Grew", gc=False):
    """Tokens of one version have arrived for a leased trajectory."""

    at_s: float
    group_id: int
    sample_index: int
    version: int
    num_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="Finished", gc=False):
    """A trajectory is complete. TokensReceived has counted all its tokens before."""

    at_s: float
    group_id: int
    sample_index: int


class LeaseEnded(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """A lease has ended before its trajectory finished: it was aborted, or the worker refused it."""

    at_s: float
    group_id: int
    sample_index: int


class Rewarded(msgspec.Struct, frozen=True, tag="Rewarded", gc=False):
    """A finished trajectory has been scored; the reward is None where scoring gave none."""

    at_s: float
    group_id: int
    sample_index: int
    reward: float | None


class VersionTrained(msgspec.Struct, frozen=True, tag="VersionMade", gc=False):
    """The trainer has made a new version."""

    at_s: float
    version: int
    is_published: bool = True
    """Whether workers will serve it; with a publish period above 1 most versions are not published."""


class VersionServed(msgspec.Struct, frozen=True, tag="Serving", gc=False):
    """The workers serve the version of the last Load."""

    at_s: float
    version: int


class BatchRequested(msgspec.Struct, frozen=True, tag="BatchWanted", gc=False):
    """The trainer is ready for a batch."""

    at_s: float


class DispatchPaused(msgspec.Struct, frozen=True, tag="Paused", gc=False):
    """The workers are needed for other work: abort all trajectories and assign none."""

    at_s: float


class DispatchResumed(msgspec.Struct, frozen=True, tag="Resumed", gc=False):
    """The workers are available again."""

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
    """Open a group with the next prompt, or with the prompt of a dropped group."""

    group_id: int
    again: int | None = None
    """The dropped group whose prompt is tried again."""


class Assign(msgspec.Struct, frozen=True, tag="Assign", gc=False):
    """Lease a trajectory. The transport chooses the worker."""

    group_id: int
    sample_index: int
    version: int
    is_exact: bool
    """True: the worker must serve exactly this version; False: this one or a newer one."""


class AbortTrajectory(msgspec.Struct, frozen=True, tag="Abort", gc=False):
    """Abort a leased trajectory; the worker reports its tokens."""

    group_id: int
    sample_index: int


class Restart(msgspec.Struct, frozen=True, tag="Restart", gc=False):
    """Discard a trajectory's tokens; it is generated again from its prompt."""

    group_id: int
    sample_index: int


class Discard(msgspec.Struct, frozen=True, tag="Discard", gc=False):
    """Discard a group, which will not be trained."""

    group_id: int
    cause: str
    """`filtered` or `dropped`."""


class Deliver(msgspec.Struct, frozen=True, tag="Deliver", gc=False):
    """Deliver the batch of the next train step."""

    step: int
    group_ids: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, tag="Load", gc=False):
    """Switch the workers to a version."""

    version: int


Command = Open | Assign | AbortTrajectory | Restart | Discard | Deliver | Load
