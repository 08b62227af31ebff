"""The types that pass between modules: prompt → lease → segments → trajectory → group → batch, and the hub's and
workers' messages.

All are frozen msgspec structs: the same object is passed in memory, sent over the network and written to disk. `L` is
the number of tokens of one trajectory after its prompt; `G` is the group size.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import chain
from typing import Any

import msgspec


class Author(StrEnum):
    """Who wrote a segment. Only the policy's tokens are trained."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


class FinishReason(StrEnum):
    """Why a trajectory is complete. A partial trajectory has no finish reason."""

    STOP = "stop"
    LENGTH = "length"
    ENVIRONMENT = "environment"


class FailureCause(StrEnum):
    """Why a trajectory has no reward."""

    TIMEOUT = "timeout"
    """The scorer did not answer within the deadline; its process is killed where that is possible."""
    CRASHED = "crashed"
    """The scorer's process ended."""
    RAISED = "raised"
    """The scorer raised an exception, or refused the request."""
    MALFORMED = "malformed"
    """The scorer returned something that is no reward: None, NaN, a string, or a list of the wrong length."""
    UNREACHABLE = "unreachable"
    """A remote scorer could not be reached, or returned a server error."""


class PolicyVersion(msgspec.Struct, frozen=True):
    """Identity of one set of weights."""

    lineage: str
    """Changes when a run goes back to a checkpoint, so versions made before and after are never confused."""
    number: int
    """Train steps since the start of the run."""
    digest: str = ""
    """blake3 over the published tensors, hexadecimal."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """One task given to the policy."""

    prompt_id: str
    """Digest of the canonical problem; two wordings of one problem have the same id."""
    task: str
    """Name of the task in the recipe."""
    messages: tuple[Message, ...]
    answer: str | None = None
    """Reference answer, in the form that the task's scorer expects."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further input of reward scorers, as plain JSON values. For a dataset row: all columns except the prompt."""
    is_conversation: bool = False
    """Whether the source contained messages. If False, it contained one text, which is the last message."""


class Segment(msgspec.Struct, frozen=True):
    """A maximal run of tokens from one engine call under one policy version, or one insertion by the environment."""

    token_ids: tuple[int, ...]
    """[L_segment]"""
    behavior_logprobs: tuple[float, ...]
    """[L_segment] log π(token) at the sampling temperature over the whole vocabulary; 0.0 for environment tokens."""
    policy_version: int
    """Number of the version whose weights produced these tokens' logits."""
    author: Author = Author.POLICY
    routing: tuple[bytes, ...] = ()
    """[L_segment] experts that were selected where each token's logits were computed, one byte per expert, [routers ×
    experts per token]. Empty unless the model is a mixture of experts and the engine reports its routing."""

    def __post_init__(self) -> None:
        if self.routing and len(self.routing) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has the routing of {len(self.routing)}")
        if not self.token_ids or len(self.token_ids) != len(self.behavior_logprobs):
            raise ValueError(
                f"a segment needs as many behavior_logprobs as token_ids, and at least one: "
                f"got {len(self.behavior_logprobs)} and {len(self.token_ids)}"
            )


class Trajectory(msgspec.Struct, frozen=True):
    """One response. `extended` is the only way to change it, and it only appends."""

    group_id: int
    """Unique within a run and never reused, also across restarts."""
    sample_index: int
    """0 ≤ sample_index < G; with the run's seed, group id and token position it determines the sampling noise."""
    prompt_ids: tuple[int, ...]
    """[prompt] the exact ids that the engine received."""
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None

    def extended(self, segments: tuple[Segment, ...], finish_reason: FinishReason | None = None) -> Trajectory:
        """Return this trajectory with whole segments appended.

        Adjacent segments of one author and one version are merged, so a segment stays maximal however many reports it
        arrives in. Raises ValueError if the trajectory is finished, or if a segment is older than the last one.
        """
        if self.finish_reason is not None:
            raise ValueError(f"trajectory {self.name} is finished ({self.finish_reason}) and takes no more segments")
        merged = list(self.segments)
        for segment in segments:
            last = merged[-1] if merged else None
            if last is None:
                merged.append(segment)
                continue
            if segment.policy_version < last.policy_version:
                raise ValueError(
                    f"trajectory {self.name}: a segment of version {segment.policy_version} cannot follow one of "
                    f"version {last.policy_version}"
                )
            if (segment.author, segment.policy_version) == (last.author, last.policy_version):
                merged[-1] = Segment(
                    last.token_ids + segment.token_ids,
                    last.behavior_logprobs + segment.behavior_logprobs,
                    last.policy_version,
                    last.author,
                    last.routing + segment.routing if last.routing and segment.routing else (),
                )
            else:
                merged.append(segment)
        return msgspec.structs.replace(self, segments=tuple(merged), finish_reason=finish_reason)

    def segments_between(self, start: int, end: int) -> tuple[Segment, ...]:
        """Return the segments that cover tokens `start` to `end` (exclusive), counted after the prompt."""
        found, offset = [], 0
        for s in self.segments:
            first, last = max(start - offset, 0), min(end - offset, len(s.token_ids))
            if first < last:
                logprobs, routing = s.behavior_logprobs[first:last], s.routing[first:last]
                found.append(Segment(s.token_ids[first:last], logprobs, s.policy_version, s.author, routing))
            offset += len(s.token_ids)
        return tuple(found)

    @property
    def name(self) -> str:
        """`group/sample`, for messages and logs."""
        return f"{self.group_id}/{self.sample_index}"

    @property
    def num_tokens(self) -> int:
        """L."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def token_ids(self) -> list[int]:
        """[L]"""
        return list(chain.from_iterable(s.token_ids for s in self.segments))

    @property
    def behavior_logprobs(self) -> list[float]:
        """[L]"""
        return list(chain.from_iterable(s.behavior_logprobs for s in self.segments))

    @property
    def policy_versions(self) -> list[int]:
        """[L] version number of each token."""
        return [s.policy_version for s in self.segments for _ in s.token_ids]

    @property
    def routing(self) -> list[bytes]:
        """[L] experts of each token as in `Segment`; empty bytes where they are not known."""
        return list(chain.from_iterable(s.routing or (b"",) * len(s.token_ids) for s in self.segments))

    @property
    def is_policy(self) -> list[bool]:
        """[L] whether the policy wrote each token."""
        return [s.author is Author.POLICY for s in self.segments for _ in s.token_ids]


class RewardResult(msgspec.Struct, frozen=True):
    """The reward of one finished trajectory, or why it has none."""

    reward: float
    """Weighted sum of `parts`; 0.0 and meaningless if there is a failure."""
    parts: dict[str, float]
    """Unweighted value of each reward part that applies, by name."""
    is_correct: bool
    """Whether the task's scorer gave the full score; partial credit does not count."""
    answer: str | None = None
    """The answer extracted from the response; None if the response does not have the answer format."""
    failure: str | None = None
    """Why there is no reward, as a sentence. Such a trajectory counts as neither correct nor wrong and is not trained
    on."""
    cause: FailureCause | None = None
    """The kind of failure; None if there is none."""

    @property
    def is_judged(self) -> bool:
        """Whether reward and correctness are meaningful."""
        return self.failure is None


class ScoredTrajectory(msgspec.Struct, frozen=True):
    """A finished trajectory with its reward."""

    trajectory: Trajectory
    judgement: RewardResult


class Group(msgspec.Struct, frozen=True):
    """The G finished trajectories of one prompt, with their rewards."""

    group_id: int
    prompt: Prompt
    members: tuple[ScoredTrajectory, ...]
    """[G] ordered by sample_index."""

    def __post_init__(self) -> None:
        for index, member in enumerate(self.members):
            trajectory = member.trajectory
            assert (trajectory.group_id, trajectory.sample_index) == (self.group_id, index), (
                f"group {self.group_id}, place {index} holds trajectory {trajectory.name}"
            )
            assert trajectory.finish_reason is not None, f"group {self.group_id} holds a partial, {trajectory.name}"


class Batch(msgspec.Struct, frozen=True):
    """What one train step consumes."""

    step: int
    """The train step that consumes the batch, from 1; it produces version `step`."""
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All members, group by group."""
        return [member.trajectory for group in self.groups for member in group.members]


# ---- messages between the hub (or controller) and a worker -----------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True):
    """How one trajectory is sampled.

    `max_new_tokens` counts all tokens after the prompt, however many times the trajectory is resumed.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 selects greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """A trajectory ends when its text contains one of these strings; the tokens that complete the string are kept."""


class Lease(msgspec.Struct, frozen=True, tag="Lease"):
    """One trajectory assigned to one worker."""

    lease_id: int
    trajectory: Trajectory
    """Prompt ids and the segments so far. A resume sends ids, never text."""
    sampling: SamplingParams
    noise_seed: int
    """Seed of the sampling noise; with group id, sample index and token position it determines every draw."""
    version: int
    """The requested policy version."""
    is_exact: bool = True
    """True: serve exactly this version or answer Retry. False: serve this version or a newer one."""


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    """Stop a lease and report its remaining tokens. Has no effect if the lease has already ended."""

    lease_id: int


class Report(msgspec.Struct, frozen=True, tag="Report"):
    """The tokens that a lease has generated since its last report."""

    lease_id: int
    token_offset: int
    """Tokens after the prompt before `segments`. The receiver appends only if this equals the trajectory's length."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None = None
    is_aborted: bool = False
    """The lease ended before the trajectory was finished."""


class Retry(msgspec.Struct, frozen=True, tag="Retry"):
    """A worker refuses a lease because it does not hold the requested version."""

    lease_id: int
    has_version: int


class WorkLost(msgspec.Struct, frozen=True, tag="WorkLost"):
    """Generated tokens that belong to no trajectory."""

    cause: str
    num_tokens: int


class WorkRevoked(msgspec.Struct, frozen=True, tag="WorkRevoked"):
    """The tokens that a trajectory has so far are not trusted. Its lease, if there was one, has ended."""

    noise_seed: int
    """Noise seed of the lease. It separates training from evaluation, whose group ids may be equal."""
    group_id: int
    sample_index: int
    cause: str


FromHub = Lease | Abort
FromWorker = Report | Retry
FromPort = FromWorker | WorkLost | WorkRevoked
"""What the controller receives; only a swarm sends WorkLost and WorkRevoked."""


def ends_lease(message: FromWorker) -> bool:
    """Whether a worker's message is the last of its lease."""
    return isinstance(message, Retry) or message.is_aborted or message.finish_reason is not None
