"""Events that the scheduler receives, and commands that it returns, with counts and versions but without token ids.

(group_id, sample_index) identifies a trajectory.
"""

from __future__ import annotations

import msgspec

from baton.clock import TimedEvent

# ---- events ----------------------------------------------------------------------------------------------------------


class TrajectoryEvent(TimedEvent, frozen=True):
    """An event of one trajectory."""

    group_id: int
    sample_index: int


class Capacity(TimedEvent, frozen=True, tag="Capacity"):
    """The total capacity of the workers has changed."""

    slots: int
    """Number of trajectories that the workers generate concurrently."""
    queue: int = 0
    """Number of leases to send beyond `slots`, so that a worker already has the next lease when a slot becomes free."""


class TokensLost(TimedEvent, frozen=True, tag="Lost"):
    """Generated tokens have been discarded, for example because another lease of the trajectory was faster."""

    cause: str
    num_tokens: int


class Revoked(TrajectoryEvent, frozen=True, tag="Revoked"):
    """A trajectory whose group is not in a batch yet must be generated again, because its tokens are not trusted."""

    cause: str


class TokensReceived(TrajectoryEvent, frozen=True, tag="Grew"):
    """A worker has reported tokens of one version for a leased trajectory."""

    version: int
    num_tokens: int


class Finished(TrajectoryEvent, frozen=True, tag="Finished"):
    """A leased trajectory, or one that waited for its environment, is complete. Earlier `TokensReceived` events have
    counted all its tokens."""


class TurnEnded(TrajectoryEvent, frozen=True, tag="TurnEnded"):
    """A leased trajectory has ended a turn of a multi-turn episode, and its action is sent to the environment."""


class Observed(TrajectoryEvent, frozen=True, tag="Observed"):
    """The environment's observation has been appended to a trajectory, whose next turn can be generated."""


class EnvironmentFailed(TrajectoryEvent, frozen=True, tag="EnvironmentFailed"):
    """The environment for which a trajectory waited has failed. The episode starts again from its prompt."""

    cause: str


class LeaseEnded(TrajectoryEvent, frozen=True, tag="PutDown"):
    """A lease has ended before its trajectory was complete: the lease was aborted, or the worker refused it."""


class Rewarded(TrajectoryEvent, frozen=True, tag="Rewarded"):
    """A finished trajectory has been scored. The reward is None if scoring failed."""

    reward: float | None


class VersionTrained(TimedEvent, frozen=True, tag="VersionMade"):
    """The trainer has made a new version."""

    version: int
    is_published: bool = True
    """Whether workers will serve this version. False for most versions if swarm.publish_every is above 1."""


class VersionServed(TimedEvent, frozen=True, tag="Serving"):
    """The workers serve the version of the last `Load`."""

    version: int


class BatchRequested(TimedEvent, frozen=True, tag="BatchWanted"):
    """The trainer is ready for a batch."""


class DispatchPaused(TimedEvent, frozen=True, tag="Paused"):
    """The workers are needed for other work: abort all leases and assign no others."""


class DispatchResumed(TimedEvent, frozen=True, tag="Resumed"):
    """The workers are available again."""


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
    """Abort the lease of a trajectory; the worker reports the tokens that it has not reported yet."""

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
