"""The nouns that flow: prompt → lease → segments → trajectory → group → batch, and the messages between hub and worker.

All are frozen msgspec structs, so the same object is passed in memory, sent over a wire and written to disk.
`L` is the number of tokens of one trajectory after its prompt; `G` is the group size.
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
    """Why a trajectory is complete; a partial one has none."""

    STOP = "stop"
    LENGTH = "length"
    ENVIRONMENT = "environment"


class FailureCause(StrEnum):
    """Why a trajectory has no judgement."""

    TIMEOUT = "timeout"
    """No answer within the deadline; killed where it could be."""
    CRASHED = "crashed"
    """The process that judged ended."""
    RAISED = "raised"
    """The judge raised, or refused the request."""
    MALFORMED = "malformed"
    """The judge gave something that is no judgement: None, NaN, a text, a list of another length."""
    UNREACHABLE = "unreachable"
    """A remote judge could not be reached, or was out of order."""


class PolicyVersion(msgspec.Struct, frozen=True):
    """Identity of one set of weights."""

    lineage: str
    """Changes when a run goes back to a checkpoint: work of a dead lineage is never mistaken for the new one's."""
    number: int
    """Train steps since the start of the run; +1 per train step."""
    digest: str = ""
    """blake3 over the published tensors, hexadecimal."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """One task given to the policy."""

    prompt_id: str
    """Digest of the canonical problem: equal for two wordings of the same problem."""
    task: str
    """Name under which the recipe lists the task."""
    messages: tuple[Message, ...]
    answer: str | None = None
    """Reference answer, as the task's scorer wants it."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """What judges need besides; plain JSON values. A file's row keeps all its columns here but the prompt."""
    is_conversation: bool = False
    """Whether the source gave messages; else it gave a text, which is the last message."""


class Segment(msgspec.Struct, frozen=True):
    """A maximal run of tokens from one engine call under one policy version, or one insertion by the environment."""

    token_ids: tuple[int, ...]
    """[L_segment]"""
    behavior_logprobs: tuple[float, ...]
    """[L_segment] log π(token) at the sampling temperature over the whole vocabulary; 0.0 for environment tokens."""
    policy_version: int
    """Number of the weights behind these tokens' logits."""
    author: Author = Author.POLICY
    routing: tuple[bytes, ...] = ()
    """[L_segment] of a mixture of experts, when the engine reports it: the experts that were chosen where each token's
    logits come from, one byte each, [routers × experts per token]. Empty when it does not."""

    def __post_init__(self) -> None:
        if self.routing and len(self.routing) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has the routing of {len(self.routing)}")
        if not self.token_ids or len(self.token_ids) != len(self.behavior_logprobs):
            raise ValueError(
                f"a segment needs as many behavior_logprobs as token_ids, and at least one: "
                f"got {len(self.behavior_logprobs)} and {len(self.token_ids)}"
            )


class Trajectory(msgspec.Struct, frozen=True):
    """One response being grown. `extended` is the only way it changes, and it only appends."""

    group_id: int
    """Unique within a run and never reused, also across restarts."""
    sample_index: int
    """0 ≤ sample_index < G; with the run's seed, group id and token position it keys the sampling noise."""
    prompt_ids: tuple[int, ...]
    """[prompt] the exact ids the engine saw."""
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None

    def extended(self, segments: tuple[Segment, ...], finish_reason: FinishReason | None = None) -> Trajectory:
        """Return this trajectory with whole segments appended.

        Adjacent policy segments of one version are merged, so that a segment stays maximal however often it was
        reported. Raises ValueError when the trajectory is finished, or when a version is older than the last one.
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
        """Return the segments of the tokens from `start` to `end`, counted after the prompt."""
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
        """L: tokens after the prompt."""
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
        """[L] experts behind each token, see `Segment`; empty bytes where they are not known."""
        return list(chain.from_iterable(s.routing or (b"",) * len(s.token_ids) for s in self.segments))

    @property
    def is_policy(self) -> list[bool]:
        """[L] whether the policy wrote each token."""
        return [s.author is Author.POLICY for s in self.segments for _ in s.token_ids]


class RewardResult(msgspec.Struct, frozen=True):
    """What the judges said of one finished trajectory."""

    reward: float
    """Weighted sum of `parts`; 0.0 and without meaning where there is a failure."""
    parts: dict[str, float]
    """Unweighted value of each reward part that applies, by name."""
    is_correct: bool
    """Whether the task's scorer gave the full score; partial credit is not correct."""
    answer: str | None = None
    """What was extracted from the response, or None when the answer format was not met."""
    failure: str | None = None
    """Why there is no judgement, in a sentence: the trajectory is then neither right nor wrong and is not trained."""
    cause: FailureCause | None = None
    """The kind of failure."""

    @property
    def is_judged(self) -> bool:
        """Whether reward and correctness mean anything."""
        return self.failure is None


class ScoredTrajectory(msgspec.Struct, frozen=True):
    """A finished trajectory with its judgement."""

    trajectory: Trajectory
    judgement: RewardResult


class Group(msgspec.Struct, frozen=True):
    """The G finished and judged trajectories of one prompt."""

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
    """The train step that consumes it, from 1; it makes version `step`."""
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All members, group by group."""
        return [member.trajectory for group in self.groups for member in group.members]


# ---- messages between the hub's side (runner) and a worker -----------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True):
    """How one trajectory is sampled. The budget counts all tokens after the prompt, whatever the number of resumes."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Strings that end a trajectory once its text contains them; the tokens that complete one are kept."""


class Lease(msgspec.Struct, frozen=True, tag="Lease"):
    """One trajectory given to one worker."""

    lease_id: int
    trajectory: Trajectory
    """Prompt ids and the segments so far: a resume sends ids, never text."""
    sampling: SamplingParams
    noise_seed: int
    """The run's seed for sampling noise; with group id, sample index and position it decides every draw."""
    version: int
    """Policy version asked for."""
    is_exact: bool = True
    """True: serve exactly this version or say retry. False: at least this version."""


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    """Stop a lease and report what there is. Harmless when the lease has already ended."""

    lease_id: int


class Report(msgspec.Struct, frozen=True, tag="Report"):
    """What a lease has grown since its last report."""

    lease_id: int
    token_offset: int
    """Tokens after the prompt that the trajectory had before `segments`; appended only where it equals the length."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None = None
    is_aborted: bool = False
    """The lease has ended without finishing the trajectory."""


class Retry(msgspec.Struct, frozen=True, tag="Retry"):
    """A worker's refusal of a lease whose version it does not hold."""

    lease_id: int
    has_version: int


class WorkLost(msgspec.Struct, frozen=True, tag="WorkLost"):
    """Tokens that workers made and that are part of no trajectory."""

    cause: str
    num_tokens: int


class WorkRevoked(msgspec.Struct, frozen=True, tag="WorkRevoked"):
    """What a trajectory has so far is not to be trusted; its lease, if there is one, has ended."""

    noise_seed: int
    """Of its lease: tells a run's own trajectories from those of an evaluation, which have group ids of their own."""
    group_id: int
    sample_index: int
    cause: str


FromHub = Lease | Abort
FromWorker = Report | Retry
FromPort = FromWorker | WorkLost | WorkRevoked
"""What the runner hears: a swarm says more than one engine does."""


def ends_lease(message: FromWorker) -> bool:
    """Whether a worker's message is the last of its lease."""
    return isinstance(message, Retry) or message.is_aborted or message.finish_reason is not None
