"""Every error that Baton raises on purpose.

    BatonError
    ├── UserError (also a ValueError)   the user can mend it: printed as one sentence, without a traceback
    │   ├── TaskExhausted               a task holds fewer distinct problems than were asked for
    │   └── Damaged                     a file is not what was written; names it
    ├── EngineFault                     an engine or its worker failed; names the worker and the lease
    ├── DeadlineExceeded                something was waited for too long; names who
    ├── TrainingDiverged                a loss or gradient is not finite; names the step and the batch
    ├── RankLost                        a rank of a sharded trainer has ended or is silent; names it and its exit code
    ├── StorageFault                    a file could not be written; names it and where the run can go on from
    ├── RunTakenOver                    another process has taken over the run's directory; names it
    └── WeightsFault                    a policy version cannot be published or fetched; names it and who is at fault

Staleness, an abort and a full buffer are outcomes, not errors. Our own invariants are `assert` with a message.
"""


class BatonError(Exception):
    """Root of the tree above."""


class UserError(BatonError, ValueError):
    """A mistake in what the user gave: says what, what was got, what is allowed, and where."""


class TaskExhausted(UserError):
    """A task holds fewer distinct problems than were asked for."""


class Damaged(UserError):
    """A file is not what was written: it is cut short, or its bits have changed."""


class EngineFault(BatonError):
    """An engine or the worker that holds it failed."""


class DeadlineExceeded(BatonError):
    """A wait ran out; the message names who was waited for and for how long."""


class TrainingDiverged(BatonError):
    """A loss or a gradient is not finite."""


class RankLost(BatonError):
    """A rank of a sharded trainer has ended, or does not answer; the others have been ended too."""


class StorageFault(BatonError):
    """A file could not be written: the disk is full, say."""


class RunTakenOver(BatonError):
    """Another process has taken over the run's directory; this one has written nothing since."""


class WeightsFault(BatonError):
    """A policy version cannot be published, or not be had whole and verified; what was held before is untouched."""
