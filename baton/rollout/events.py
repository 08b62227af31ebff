"""Events that the scheduler receives, and commands that it returns. They contain counts and versions, no token ids.

(group_id, sample_index) identifies a trajectory. `at_s` is the time of an event in seconds: on the monotonic clock in a
live run, on the virtual clock in the simulator.
"""

from __future__ import annotations

import msgspec

# ---- events ----------------------------------------------------------------------------------------------------------


class Capacity(msgspec.Struct, frozen=True, tag="Capacity", gc=False):
    """The total capacity of the workers has changed."""

    at_s: float
    slots: int
    """Number of trajectories that the workers generate concurrently."""
    queue: int = 0
    """Number of leases to send in addition, so that a worker has the next lease when a slot becomes free."""


class TokensLost(msgspec.Struct, frozen=True, tag="Lost", gc=False):
    """Generated tokens have been discarded, for example those of the slower of two leases of one trajectory."""

    at_s: float
    cause: str
    num_tokens: int


class Revoked(msgspec.Struct, frozen=True, tag="Revoked", gc=False):
    """The tokens of a trajectory are not trusted: it must be generated again. Its group is in no batch yet."""

    at_s: float
    group_id: int
    sample_index: int
    cause: str


class TokensReceived(msgspec.Struct, frozen=True, tag="Grew", gc=False):
    """A worker has reported tokens of one version for a leased trajectory."""

    at_s: float
    group_id: int
    sample_index: int
    version: int
    num_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="Finished", gc=False):
    """A leased or acting trajectory is complete. Earlier `TokensReceived` events have counted all its tokens."""

    at_s: float
    group_id: int
    sample_index: int


class TurnEnded(msgspec.Struct, frozen=True, tag="TurnEnded", gc=False):
    """A leased trajectory has ended a turn of a multi-turn episode, and its action is sent to the environment."""

    at_s: float
    group_id: int
    sample_index: int


class Observed(msgspec.Struct, frozen=True, tag="Observed", gc=False):
    """The environment's observation has been appended to a trajectory, whose next turn can be generated."""

    at_s: float
    group_id: int
    sample_index: int


class EnvironmentFailed(msgspec.Struct, frozen=True, tag="EnvironmentFailed", gc=False):
    """The environment of an acting trajectory failed: the episode starts again from its prompt."""

    at_s: float
    group_id: int
    sample_index: int
    cause: str


class LeaseEnded(msgspec.Struct, frozen=True, tag="PutDown", gc=False):
    """A lease has ended before its trajectory was complete: the lease was aborted, or the worker refused it."""

    at_s: float
    group_id: int
    sample_index: int


class Rewarded(msgspec.Struct, frozen=True, tag="Rewarded", gc=False):
    """A finished trajectory has been scored. The reward is None if scoring failed."""

    at_s: float
    group_id: int
    sample_index: int
    reward: float | None


class VersionTrained(msgspec.Struct, frozen=True, tag="VersionMade", gc=False):
    """The trainer has made a new version."""

    at_s: float
    version: int
    is_published: bool = True
    """Whether workers will serve this version. If versions are published every n > 1 steps, most are not published."""


class VersionServed(msgspec.Struct, frozen=True, tag="Serving", gc=False):
    """The workers serve the version of the last `Load`."""

    at_s: float
    version: int


class BatchRequested(msgspec.Struct, frozen=True, tag="BatchWanted", gc=False):
    """The trainer is ready for a batch."""

    at_s: float


class DispatchPaused(msgspec.Struct, frozen=True, tag="Paused", gc=False):
    """The workers are needed for other work: abort all leases and assign no others."""

    at_s: float


class DispatchResumed(msgspec.Struct, frozen=True, tag="Resumed", gc=False):
    """The workers are available again."""

    at_s: float


Event = (
    Capacity
    | TokensReceived
    | Finished
    | TurnEnded
    | Observed
    | EnvironmentFailed
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
    """Id of the dropped group whose prompt is tried again; None for the next prompt."""


class Assign(msgspec.Struct, frozen=True, tag="Assign", gc=False):
    """Lease a trajectory. The transport chooses the worker."""

    group_id: int
    sample_index: int
    version: int
    is_exact: bool
    """True: the worker must serve exactly `version`. False: the worker may also serve a newer version."""


class AbortTrajectory(msgspec.Struct, frozen=True, tag="Abort", gc=False):
    """Abort the lease of a trajectory; the worker reports the remaining tokens."""

    group_id: int
    sample_index: int


class Restart(msgspec.Struct, frozen=True, tag="Restart", gc=False):
    """Discard the tokens of a trajectory, which is then generated again from its prompt."""

    group_id: int
    sample_index: int


class Discard(msgspec.Struct, frozen=True, tag="Discard", gc=False):
    """Discard a group without training on it."""

    group_id: int
    cause: str
    """`filtered` (dynamic sampling) or `dropped` (too old)."""


class Deliver(msgspec.Struct, frozen=True, tag="Deliver", gc=False):
    """Deliver the batch of the next train step."""

    step: int
    group_ids: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, tag="Load", gc=False):
    """Switch the workers to a version."""

    version: int


Command = Open | Assign | AbortTrajectory | Restart | Discard | Deliver | Load
