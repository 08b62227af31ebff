"""The types that pass between modules: prompt → lease → segments → trajectory → group → batch, and worker messages.

All types are frozen msgspec structs. The same object is passed in memory, sent over the network and written to disk.
Values per token are in a `TokenColumn`, for which a msgspec encoder needs `enc_hook=plain`. Shapes: `L` tokens of one
trajectory after its prompt, `G` trajectories of one group.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, SupportsIndex, TypeVar, overload

import msgspec

_T = TypeVar("_T")


class TokenColumn(Sequence[_T]):
    """One value per token: a read-only view of a buffer that only grows.

    `appended` adds values to the buffer and returns a longer view, so the views of a growing trajectory share one
    buffer. The length of a view never changes. If the buffer is an `array`, it takes 4 bytes per token id or 8 bytes
    per logprob, plus at most 1/16 of this size as room for growth.
    """

    __slots__ = ("_buffer", "_start", "_stop")

    def __init__(self, buffer: MutableSequence[_T], start: int = 0, stop: int | None = None) -> None:
        """`buffer`: an array or a list that no other code changes afterwards. start, stop: the part to view."""
        self._buffer, self._start = buffer, start
        self._stop = len(buffer) if stop is None else stop

    def appended(self, values: Sequence[_T]) -> TokenColumn[_T]:
        """Return a view of these values followed by `values`. If the buffer continues after this view, because a longer
        view exists, the viewed part of the buffer is copied first."""
        buffer, start = self._buffer, self._start
        if self._stop < len(buffer):
            buffer, start = self._part(), 0
        buffer.extend(values._part() if isinstance(values, TokenColumn) else values)
        return TokenColumn(buffer, start)

    def _part(self) -> MutableSequence[_T]:
        """Return a copy of the viewed part of the buffer."""
        return self._buffer[self._start : self._stop]

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: SupportsIndex) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> TokenColumn[_T]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> _T | TokenColumn[_T]:
        if not isinstance(index, slice):
            return self._buffer[range(self._start, self._stop)[index]]
        places = range(self._start, self._stop)[index]
        if places.step != 1:
            return TokenColumn(self._part()[index])
        return TokenColumn(self._buffer, places.start, places.start + len(places))

    def __iter__(self) -> Iterator[_T]:
        return iter(self._part())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, TokenColumn | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def id_column(ids: Sequence[int]) -> TokenColumn[int]:
    """Return token ids as a column; a column is returned unchanged. Raises ValueError for an id of 2^31 or more."""
    try:
        return ids if isinstance(ids, TokenColumn) else TokenColumn(array("i", ids))
    except OverflowError as error:
        wrong = next(i for i in ids if not -(2**31) <= i < 2**31)
        raise ValueError(f"a token id is {wrong}; allowed are ids below 2^31") from error


def plain(value: object) -> list[Any]:
    """Return the values of a `TokenColumn` as a list; used as `enc_hook` of all msgspec encoders of trajectories."""
    if isinstance(value, TokenColumn):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


class Author(StrEnum):
    """The author of a segment. Only tokens of the policy are trained."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


MAX_KEPT = 512
"""Maximum number of tokens in a sampling mask (the tokens that top-k and top-p keep)."""


def kept_dtype(vocabulary: int) -> str:
    """Return the numpy dtype of the ids in a sampling mask."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


class FinishReason(StrEnum):
    """The reason why a trajectory is complete. A partial trajectory has no finish reason."""

    STOP = "stop"
    LENGTH = "length"
    ENVIRONMENT = "environment"


class FailureCause(StrEnum):
    """The reason why a trajectory has no reward."""

    TIMEOUT = "timeout"
    """The scorer did not return before its deadline. If the scorer runs in its own process, the process is killed."""
    CRASHED = "crashed"
    """The scorer's process ended."""
    RAISED = "raised"
    """The scorer raised an exception or refused the request."""
    MALFORMED = "malformed"
    """The scorer returned a value that is not a reward: None, NaN, a string, or a list of the wrong length."""
    UNREACHABLE = "unreachable"
    """A remote scorer could not be reached, or returned a server error."""
    QUARANTINED = "quarantined"
    """An untrusted worker generated the trajectory, and reported logprobs that differ too much from the trainer's."""


ENVIRONMENT = "environment"
"""Name of the environment's reward part. A multi-turn episode lacks this part only if its environment failed."""


class EpisodeFinish(StrEnum):
    """The reason why a multi-turn episode is over."""

    STOP = "stop"
    """The policy ended the episode: in a task with tools, it wrote a turn without a tool call."""
    ENVIRONMENT = "environment"
    """The environment terminated or truncated the episode."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The episode's budget of policy tokens is used up."""
    CONTEXT = "context"
    """The next turn does not fit into the context."""
    PARSE_ERROR = "parse_error"
    """The environment could not parse an action and therefore ended the episode."""


class PolicyVersion(msgspec.Struct, frozen=True):
    """The identity of one set of weights."""

    lineage: str
    """Id that changes when a run resumes from a checkpoint; distinguishes versions with the same number."""
    number: int
    """Number of train steps since the start of the run."""
    digest: str = ""
    """Hexadecimal blake3 digest of the published tensors."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """One problem as the policy sees it."""

    prompt_id: str
    """Digest of the canonical problem. Different wordings of one problem have the same id."""
    task: str
    messages: tuple[Message, ...]
    answer: str | None = None
    """Reference answer in the form that the task's scorer expects."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """Additional input of reward scorers, as plain JSON values. For a dataset row: all columns except the prompt."""
    is_conversation: bool = False
    """True if the prompt in the data was a list of messages; False if it was a text, which became the last message."""


class Segment(msgspec.Struct, frozen=True):
    """A maximal run of tokens that one engine call generated under one policy version, or the tokens of one insertion
    by the environment."""

    token_ids: Sequence[int]
    """[L_segment] The constructor converts any sequence with one value per token to a `TokenColumn`."""
    behavior_logprobs: Sequence[float]
    """[L_segment] log π(token) at the sampling temperature, over the tokens in `kept`, or over the whole vocabulary if
    `kept` is empty; 0.0 for environment tokens."""
    policy_version: int
    """Number of the version whose weights computed the logits of these tokens."""
    author: Author = Author.POLICY
    routing: Sequence[bytes] = ()
    """[L_segment] For each token, the experts that were selected at the position that computed the token's logits:
    [routers × experts per token]. Each expert takes one byte, or two bytes if a router has more than 256 experts. Empty
    if the model is not a mixture of experts, or if the engine does not report its routing."""
    kept: Sequence[bytes] = ()
    """[L_segment] Sampling mask: ascending ids of the tokens that top-k and top-p kept, encoded by `kept_dtype`. Empty
    unless the lease has `SamplingParams.reports_kept`."""

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, TokenColumn):
            msgspec.structs.force_setattr(self, "token_ids", id_column(self.token_ids))
        if not isinstance(self.behavior_logprobs, TokenColumn):
            msgspec.structs.force_setattr(self, "behavior_logprobs", TokenColumn(array("d", self.behavior_logprobs)))
        for name in ("routing", "kept"):
            column: Sequence[bytes] = getattr(self, name)
            if not column:
                msgspec.structs.force_setattr(self, name, ())
            elif not isinstance(column, TokenColumn):
                msgspec.structs.force_setattr(self, name, TokenColumn(list(column)))
            if column and len(column) != len(self.token_ids):
                raise ValueError(
                    f"a segment of {len(self.token_ids)} tokens must have as many {name} entries or none: "
                    f"got {len(column)}"
                )
        if not self.token_ids or len(self.token_ids) != len(self.behavior_logprobs):
            raise ValueError(
                f"a segment needs at least one token and one behavior logprob per token: got {len(self.token_ids)} "
                f"tokens and {len(self.behavior_logprobs)} logprobs"
            )

    def followed_by(self, other: Segment, *, is_merged: bool) -> Segment:
        """Append another segment's tokens to this segment's buffers, and return the appended tokens as a segment. With
        `is_merged`, the returned segment begins with this segment's own tokens. The cost is linear in the length of the
        other segment (`TokenColumn.appended`)."""
        ids, logprobs = self.token_ids, self.behavior_logprobs
        assert isinstance(ids, TokenColumn)
        assert isinstance(logprobs, TokenColumn)
        start = 0 if is_merged else len(ids)

        def joined(own: Sequence[bytes], added: Sequence[bytes]) -> Sequence[bytes]:
            if not is_merged or not added:
                return added
            return own.appended(added) if isinstance(own, TokenColumn) else ()

        return Segment(
            ids.appended(other.token_ids)[start:],
            logprobs.appended(other.behavior_logprobs)[start:],
            other.policy_version,
            other.author,
            joined(self.routing, other.routing),
            joined(self.kept, other.kept),
        )

    def between(self, start: int, end: int) -> Segment:
        """Return the tokens from `start` to `end` (exclusive) as a segment."""
        part = slice(start, end)
        ids, logprobs = self.token_ids[part], self.behavior_logprobs[part]
        return Segment(ids, logprobs, self.policy_version, self.author, self.routing[part], self.kept[part])


class Trajectory(msgspec.Struct, frozen=True, dict=True):
    """One response to a prompt. Only `extended` appends tokens."""

    group_id: int
    """Id that is unique within a run. An id is never reused, not even after a restart."""
    sample_index: int
    """Index within the group, from 0. Run seed, group id, this index and the token position determine the noise."""
    prompt_ids: Sequence[int]
    """[prompt] Exactly the token ids that the engine received. The constructor takes any sequence."""
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_ids, TokenColumn):
            msgspec.structs.force_setattr(self, "prompt_ids", id_column(self.prompt_ids))

    def extended(self, segments: tuple[Segment, ...], finish_reason: FinishReason | None = None) -> Trajectory:
        """Return this trajectory with whole segments appended. Adjacent segments of one author and one version are
        merged, so the result does not depend on how reports divided the tokens. Raises ValueError if the trajectory is
        finished, or if a segment has an older version than the segment before it."""
        if self.finish_reason is not None:
            raise ValueError(f"trajectory {self.name} is finished ({self.finish_reason}): no segment can be appended")
        merged, length, num_policy = list(self.segments), self.num_tokens, self.num_policy_tokens
        for segment in segments:
            length += len(segment.token_ids)
            num_policy += len(segment.token_ids) if segment.author is Author.POLICY else 0
            last = merged[-1] if merged else None
            if last is None:
                merged.append(segment)
                continue
            if segment.policy_version < last.policy_version:
                raise ValueError(
                    f"trajectory {self.name}: a segment of version {segment.policy_version} cannot follow one of "
                    f"version {last.policy_version}"
                )
            is_merged = (segment.author, segment.policy_version) == (last.author, last.policy_version)
            merged[len(merged) - is_merged :] = [last.followed_by(segment, is_merged=is_merged)]
        grown = msgspec.structs.replace(self, segments=tuple(merged), finish_reason=finish_reason)
        grown.__dict__["num_tokens"], grown.__dict__["num_policy_tokens"] = length, num_policy
        return grown

    def segments_between(self, start: int, end: int) -> tuple[Segment, ...]:
        """Return the segments of the tokens from `start` to `end` (exclusive), counted after the prompt."""
        found, last = [], self.num_tokens
        for s in reversed(self.segments):
            first = last - len(s.token_ids)
            if max(first, start) < min(last, end):
                found.append(s.between(max(first, start) - first, min(last, end) - first))
            if first <= start:
                break
            last = first
        return tuple(reversed(found))

    def ids_between(self, start: int, end: int) -> list[int]:
        """Return the token ids from `start` to `end` (exclusive), counted after the prompt."""
        return [token for s in self.segments_between(start, end) for token in s.token_ids]

    @property
    def name(self) -> str:
        """Name for messages and logs: `group/sample`."""
        return f"{self.group_id}/{self.sample_index}"

    @cached_property
    def num_tokens(self) -> int:
        """L: number of tokens after the prompt."""
        return sum(len(s.token_ids) for s in self.segments)

    @cached_property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote, at most L."""
        return sum(len(s.token_ids) for s in self.segments if s.author is Author.POLICY)

    @property
    def turn_offset(self) -> int:
        """Number of tokens between the prompt and the current turn; 0 if the trajectory has no observation."""
        offset = self.num_tokens
        for s in reversed(self.segments):
            if s.author is Author.ENVIRONMENT:
                return offset
            offset -= len(s.token_ids)
        return 0

    @property
    def turn_ids(self) -> list[int]:
        """The policy's tokens of the current turn."""
        return self.ids_between(self.turn_offset, self.num_tokens)

    @property
    def token_ids(self) -> list[int]:
        """[L] Id of each token after the prompt."""
        return list(chain.from_iterable(s.token_ids for s in self.segments))

    @property
    def behavior_logprobs(self) -> list[float]:
        """[L] Behavior logprob of each token."""
        return list(chain.from_iterable(s.behavior_logprobs for s in self.segments))

    @property
    def policy_versions(self) -> list[int]:
        """[L] Version number of each token."""
        return [s.policy_version for s in self.segments for _ in s.token_ids]

    @property
    def routing(self) -> list[bytes]:
        """[L] Experts of each token as in `Segment`; empty bytes for tokens whose experts were not reported."""
        return list(chain.from_iterable(s.routing or (b"",) * len(s.token_ids) for s in self.segments))

    @property
    def kept(self) -> list[bytes]:
        """[L] Sampling mask of each token as in `Segment`; empty bytes for tokens without a mask."""
        return list(chain.from_iterable(s.kept or (b"",) * len(s.token_ids) for s in self.segments))

    @property
    def is_policy(self) -> list[bool]:
        """[L] Whether the policy wrote each token."""
        return [s.author is Author.POLICY for s in self.segments for _ in s.token_ids]


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One action of the policy in a multi-turn episode, and the environment's answer."""

    token_offset: int
    """Number of tokens in the path, without its prompt, at the end of the turn. The observation's tokens begin here."""
    action: str
    """Text of the turn."""
    reward: float
    observation: str
    """Complete text of the observation. The tokens of the path may contain less text, because long observations are
    truncated, and an episode's last observation is not added to a path."""
    digest: str
    """blake3 of the observation's text. A replay after a crash must give the same digest."""
    seconds: float
    """Time that the environment took."""
    path: int = 0
    tool: str | None = None


class Episode(msgspec.Struct, frozen=True, omit_defaults=True):
    """The turns of one attempt at a multi-turn task.

    While turns are only appended to the history, the episode has one trajectory (path). A rewritten history becomes the
    prompt of a new path. Each token of the policy is trained only in the path where it was sampled.
    """

    exchanges: tuple[Exchange, ...] = ()
    earlier: tuple[Trajectory, ...] = ()
    """Paths before the last one. The last path is `ScoredTrajectory.trajectory`."""
    finish_reason: EpisodeFinish | None = None
    attempt: int = 0
    """Number of earlier attempts, which ended because the environment failed or tokens were not trusted."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers that the environment reported with its last observation."""
    is_success: bool | None = None
    """Success or failure as the environment reported it with its last observation; None if it reported neither."""
    discount: float = 1.0
    """The task's discount factor per turn for the rewards of later turns."""
    num_failures: int = 0
    """Number of earlier attempts whose environment failed. Only these attempts count towards the limit of attempts."""


class RewardResult(msgspec.Struct, frozen=True):
    """The reward of one finished trajectory, or the reason why it has no reward."""

    reward: float
    """Weighted sum of `parts`. If scoring failed, the reward is 0.0 and must not be used."""
    parts: dict[str, float]
    """Unweighted value of each reward part that applies, by name."""
    is_correct: bool
    """Whether the task's scorer gave the full score; partial credit does not count."""
    answer: str | None = None
    """Answer extracted from the response; None if the response does not have the answer format."""
    failure: str | None = None
    """Sentence that explains why scoring failed; None if it succeeded. After a failure the trajectory counts as neither
    correct nor wrong, and it is not trained on."""
    cause: FailureCause | None = None
    """Kind of failure; None if scoring succeeded."""

    @property
    def is_judged(self) -> bool:
        """Whether scoring succeeded, so that `reward` and `is_correct` are valid."""
        return self.failure is None


class ScoredTrajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished trajectory with its reward."""

    trajectory: Trajectory
    """For a multi-turn episode, its last path."""
    judgement: RewardResult
    episode: Episode | None = None
    """The turns of a multi-turn task; None for a single-turn task."""

    @property
    def paths(self) -> tuple[Trajectory, ...]:
        """All paths of the episode: one, unless its history was rewritten."""
        return (*(self.episode.earlier if self.episode else ()), self.trajectory)

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote, summed over all paths of the episode."""
        return sum(path.num_policy_tokens for path in self.paths)


class Group(msgspec.Struct, frozen=True):
    """The G finished trajectories of one prompt, with their rewards."""

    group_id: int
    prompt: Prompt
    members: tuple[ScoredTrajectory, ...]
    """[G] Members ordered by sample_index."""

    def __post_init__(self) -> None:
        for index, member in enumerate(self.members):
            trajectory = member.trajectory
            assert (trajectory.group_id, trajectory.sample_index) == (self.group_id, index), (
                f"member {index} of group {self.group_id} is trajectory {trajectory.name}"
            )
            assert trajectory.finish_reason is not None, f"trajectory {trajectory.name} of a group is not finished"


class Batch(msgspec.Struct, frozen=True):
    """The groups that one train step consumes."""

    step: int
    """Number of the train step, from 1. The step produces version `step`."""
    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All paths of all members, group by group."""
        return [path for group in self.groups for member in group.members for path in member.paths]


# ---- messages between the hub (or controller) and a worker -----------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True):
    """The sampling parameters of one trajectory."""

    max_new_tokens: int
    """Maximum number of tokens after the prompt, summed over all resumes."""
    temperature: float = 1.0
    """Sampling temperature; 0 selects greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens that are kept; 0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a trajectory, in addition to the model's end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Strings that end a trajectory when its text contains one of them. The token that completes the string is kept."""
    reports_kept: bool = False
    """Report the kept tokens, and compute behavior logprobs over them. Requires top_k ≤ MAX_KEPT, temperature > 0."""

    @property
    def max_kept(self) -> int:
        """Maximum number of kept tokens to report for each sampled token; 0 if none are reported."""
        return self.top_k if self.reports_kept else 0


class Lease(msgspec.Struct, frozen=True, tag="Lease"):
    """One trajectory assigned to one worker."""

    lease_id: int
    trajectory: Trajectory
    """Prompt ids and the segments generated so far. A resume sends ids, never text."""
    sampling: SamplingParams
    noise_seed: int
    """Seed of the sampling noise. Seed, group id, sample index and token position determine the noise of a draw."""
    version: int
    """Number of the requested policy version."""
    is_exact: bool = True
    """True: serve exactly this version, or answer with `Retry`. False: serve this version or a newer one."""


def without_replay_data(lease: Lease) -> Lease:
    """Return a lease without the sampling masks and the routing of earlier tokens. Only the trainer needs them, and
    routing takes hundreds of bytes per token."""
    trajectory = lease.trajectory
    if not any(segment.kept or segment.routing for segment in trajectory.segments):
        return lease
    segments = tuple(msgspec.structs.replace(segment, kept=(), routing=()) for segment in trajectory.segments)
    return msgspec.structs.replace(lease, trajectory=msgspec.structs.replace(trajectory, segments=segments))


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    """A request to stop a lease and report its unreported tokens. It has no effect if the lease has ended."""

    lease_id: int


class Report(msgspec.Struct, frozen=True, tag="Report"):
    """The tokens that a worker has generated under a lease since its previous report."""

    lease_id: int
    token_offset: int
    """Number of response tokens before `segments`. A receiver that has another number does not append `segments`."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None = None
    is_aborted: bool = False
    """Whether the lease ended before the trajectory was finished."""


class Retry(msgspec.Struct, frozen=True, tag="Retry"):
    """The refusal of a lease by a worker that does not serve the requested version."""

    lease_id: int
    has_version: int
    """Number of the version that the worker serves."""


class WorkLost(msgspec.Struct, frozen=True, tag="WorkLost"):
    """Generated tokens were discarded, for example because another lease of the trajectory was faster."""

    cause: str
    num_tokens: int


class WorkRevoked(msgspec.Struct, frozen=True, tag="WorkRevoked"):
    """The revocation of a trajectory whose tokens are not trusted. Any lease of the trajectory has ended."""

    noise_seed: int
    """Noise seed of the lease. The seed distinguishes training from evaluations, whose group ids may be equal."""
    group_id: int
    sample_index: int
    cause: str


FromHub = Lease | Abort
FromWorker = Report | Retry
FromPort = FromWorker | WorkLost | WorkRevoked
"""Messages that the controller receives from its worker transport. Only a swarm sends `WorkLost` and `WorkRevoked`."""


def ends_lease(message: FromWorker) -> bool:
    """Return whether a worker's message is the last one of its lease."""
    return isinstance(message, Retry) or message.is_aborted or message.finish_reason is not None
