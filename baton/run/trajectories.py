"""Select recorded trajectories of a run, and decode them for output.

The decoded texts are untrusted; the code that prints them must escape them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

import msgspec

from baton.errors import UserError
from baton.files import write_whole
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.records.run_directory import RunDirectory, Source
from baton.types import Author, Exchange, Group, ScoredTrajectory, Segment, Trajectory

ORDERS = ("best", "worst", "longest")
NUM_EXAMPLES = 2
"""Number of examples for each order (best, worst, longest) and train step."""


class TextPiece(msgspec.Struct, frozen=True):
    """A part of a text that contains either only special tokens or no special tokens."""

    text: str
    is_special: bool


class ShownTurn(msgspec.Struct, frozen=True):
    """A turn of a multi-turn episode: the policy's tokens, and the environment's answer."""

    turn: int
    """Number of the turn in its episode, from 1."""
    path: int
    """Index of the path to which the turn belongs. If the previous turn belongs to another path, this turn begins a new
    path."""
    path_prompt_tokens: int
    """Number of tokens of the path's prompt."""
    text: str
    num_tokens: int
    policy_versions: tuple[int, int]
    """Oldest and newest policy version of the turn's tokens."""
    mean_logprob: float
    """Mean behavior logprob of the turn's tokens, nats."""
    lowest_logprob: float
    observation: str | None
    """The observation as the policy reads it, decoded from tokens. If the path contains no token of the observation,
    this field has the environment's text instead. None if a token budget ended the episode with this turn, or if the
    environment failed."""
    num_observation_tokens: int
    """Number of the observation's tokens that were appended to the path. In two cases, it is 0: for the last
    observation of an episode, and for an observation that became part of the prompt of a new path."""
    reward: float | None
    tool: str | None
    latency_s: float | None
    """Time in seconds that the environment took."""

    @property
    def heading(self) -> str:
        """Return the facts of the turn in one line."""
        return (
            f"turn {self.turn}: {_tokens(self.num_tokens)}, version {_range(self.policy_versions)}, "
            f"logprob mean {self.mean_logprob:.3f}, lowest {self.lowest_logprob:.3f}"
        )

    @property
    def path_heading(self) -> str:
        """Return a line that marks the start of a new path with this turn."""
        return f"new path {self.path + 1}: the history is rewritten, {_tokens(self.path_prompt_tokens)} of prompt"

    @property
    def answer_heading(self) -> str:
        """Return the facts of the observation in one line."""
        assert self.latency_s is not None
        took = f"{self.latency_s:.2g} s" if self.latency_s >= 1 else f"{1000 * self.latency_s:.2g} ms"
        read = _tokens(self.num_observation_tokens) if self.num_observation_tokens else "not in this path"
        tool = f"tool {' '.join(self.tool.split())}, " if self.tool else ""  # one line: a model may choose the name
        return f"observation: reward {self.reward:g}, {read}, {tool}{took}"


class Sibling(msgspec.Struct, frozen=True):
    """A member of a multi-turn group, in one line."""

    sample_index: int
    reward: float
    verdict: str
    turn_rewards: tuple[float, ...]
    num_tokens: int
    finish_reason: str
    attempt: int


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trajectory with decoded texts, reward and metadata.

    Token counts and logprobs concern only the policy's tokens.
    """

    step: int
    group_id: int
    sample_index: int
    task: str
    prompt: str
    """Decoded prompt, including special tokens."""
    response: str
    parsed: str | None = msgspec.field(name="answer")
    """Answer extracted from the response; None if the response does not follow the answer format."""
    reference: str | None
    reward: float
    parts: dict[str, float]
    is_correct: bool
    failure: str | None
    """Cause of a failed scoring, or None. After a failure, the trajectory is neither correct nor wrong."""
    finish_reason: str
    num_tokens: int
    policy_versions: tuple[int, int]
    """Oldest and newest policy version of the response's tokens."""
    mean_logprob: float
    """Mean behavior logprob of the response's tokens, nats."""
    turns: tuple[ShownTurn, ...] = ()
    """Turns of a multi-turn episode; empty for a single-turn task."""
    attempt: int = 0
    """Number of earlier attempts at this episode (`Episode.attempt`)."""
    siblings: tuple[Sibling, ...] = ()
    """All members of a multi-turn group, this trajectory included."""

    @property
    def verdict(self) -> str:
        """Return `correct`, `wrong`, or `not scored` with the cause."""
        return _verdict(self.is_correct, self.failure)

    @property
    def versions(self) -> str:
        """Return the policy versions of the response's tokens, such as `3` or `3 to 5`."""
        return _range(self.policy_versions)


class ReadableTrajectory(msgspec.Struct, frozen=True):
    """A trajectory whose texts are split into special and other tokens."""

    shown: Sample
    prompt: tuple[TextPiece, ...]
    response: tuple[TextPiece, ...]
    turns: tuple[tuple[tuple[TextPiece, ...], tuple[TextPiece, ...]], ...] = ()
    """Text and observation of each of the shown turns."""


def read_trajectories(
    path: Path,
    step: int | None,
    *,
    group: int | None = None,
    task: str | None = None,
    is_correct: bool | None = None,
    order: str | None = None,
    limit: int,
    source: Source = "batch",
) -> list[ReadableTrajectory]:
    """Return recorded trajectories of a train step, by default of the last recorded step. `order`: one of `ORDERS`; the
    default is the recorded order. The list is empty if no trajectory matches `is_correct`. Raises UserError if the
    step, group or task is not recorded."""
    run = RunDirectory.open(path)
    steps = run.recorded_steps(source)
    if step is None and not steps:
        raise UserError(f"{path} has no {'' if source == 'batch' else source + ' '}trajectories yet")
    step = steps[-1] if step is None else step
    there = run.groups(step, source)
    groups = [g for g in there if group is None or g.group_id == group]
    if not groups:
        ids = [g.group_id for g in there]
        raise UserError(f"{path}, step {step} has no group {group}; its groups are {min(ids)} to {max(ids)}")
    chosen = [g for g in groups if task is None or g.prompt.task == task]
    if not chosen:
        names = ", ".join(sorted({g.prompt.task for g in groups}))
        raise UserError(f"{path}, step {step} has no trajectory of task {task!r}; its tasks are {names}")
    members = [(g, m) for g in chosen for m in g.members if is_correct is None or _is(m, is_correct)]
    tokenizer = load_tokenizer(str(run.tokenizer))
    return [decode(tokenizer, step, g, member) for g, member in _ordered(members, order)[:limit]]


def write_responses(path: Path, tokenizer: Tokenizer, groups: Iterable[Group]) -> None:
    """Write the trajectories of groups that belong to no run as JSON lines, with the fields of `baton show --json`."""
    shown = (decode(tokenizer, 0, group, member).shown for group in groups for member in group.members)
    write_whole(path, b"".join(msgspec.json.encode(sample) + b"\n" for sample in shown))


def choose_examples(run: RunDirectory) -> Iterator[tuple[str, ReadableTrajectory]]:
    """Yield (order, trajectory) for the best, worst and longest trajectories of the first and last recorded train
    steps. No trajectory is yielded under two orders, and the examples of one order in one step have different
    prompts."""
    steps = run.recorded_steps()
    if not steps:
        return
    tokenizer = load_tokenizer(str(run.tokenizer))
    for step in dict.fromkeys((steps[0], steps[-1])):
        members = [(group, member) for group in run.groups(step) for member in group.members]
        taken: set[str] = set()
        for order in ORDERS:
            groups: set[int] = set()
            for group, member in _ordered(members, order):
                if len(groups) == NUM_EXAMPLES:
                    break
                if member.trajectory.name not in taken and group.group_id not in groups:
                    taken.add(member.trajectory.name)
                    groups.add(group.group_id)
                    yield order, decode(tokenizer, step, group, member)


def _ordered(
    members: Sequence[tuple[Group, ScoredTrajectory]], order: str | None
) -> list[tuple[Group, ScoredTrajectory]]:
    """Return trajectories sorted by length, or by reward with unscored trajectories last. Trajectories with equal
    rewards are sorted by sample index, so that trajectories of one prompt are not adjacent."""
    if order is None:
        return list(members)
    if order == "longest":
        return sorted(members, key=lambda m: -m[1].num_policy_tokens)
    sign = -1 if order == "best" else 1
    members = sorted(members, key=lambda m: m[1].trajectory.sample_index)
    return sorted(members, key=lambda m: (not m[1].judgement.is_judged, sign * m[1].judgement.reward))


def decode(tokenizer: Tokenizer, step: int, group: Group, member: ScoredTrajectory) -> ReadableTrajectory:
    """Return a trajectory of a step with its texts."""
    trajectory, judgement, episode = member.trajectory, member.judgement, member.episode
    prompt_ids = member.paths[0].prompt_ids
    sampled = _by_policy(chain.from_iterable(path.segments for path in member.paths))
    turns = list(_turns(tokenizer, member)) if episode is not None else []
    shown = Sample(
        step,
        group.group_id,
        trajectory.sample_index,
        group.prompt.task,
        tokenizer.text(prompt_ids, keep_special=True),
        tokenizer.text(trajectory.token_ids, keep_special=True),
        judgement.answer,
        group.prompt.answer,
        judgement.reward,
        judgement.parts,
        judgement.is_correct,
        judgement.failure,
        _finish_reason(member),
        member.num_policy_tokens,
        *_versions_and_mean(sampled),
        tuple(turn for turn, _, _ in turns),
        0 if episode is None else episode.attempt,
        () if episode is None else tuple(_sibling(m) for m in group.members),
    )
    return ReadableTrajectory(
        shown,
        _pieces(tokenizer, prompt_ids),
        _pieces(tokenizer, trajectory.token_ids),
        tuple((text, observation) for _, text, observation in turns),
    )


def _turns(
    tokenizer: Tokenizer, member: ScoredTrajectory
) -> Iterator[tuple[ShownTurn, tuple[TextPiece, ...], tuple[TextPiece, ...]]]:
    """Yield the turns of an episode, with the pieces of text and observation."""
    assert member.episode is not None
    exchanges = member.episode.exchanges
    start, latest_path = 0, 0
    for number, exchange in enumerate(exchanges, 1):
        path = member.paths[exchange.path]
        start = start if exchange.path == latest_path else 0
        latest_path = exchange.path
        following = exchanges[number] if number < len(exchanges) else None
        end = following.token_offset if following is not None and following.path == latest_path else path.num_tokens
        yield _turn(tokenizer, number, latest_path, path, (start, exchange.token_offset, end), exchange)
        start = exchange.token_offset
    last = len(member.paths) - 1
    start = start if last == latest_path else 0
    if _by_policy(member.trajectory.segments_between(start, member.trajectory.num_tokens)):
        # the environment did not receive this turn
        end = member.trajectory.num_tokens
        yield _turn(tokenizer, len(exchanges) + 1, last, member.trajectory, (start, end, end), None)


def _turn(
    tokenizer: Tokenizer,
    number: int,
    path_index: int,
    path: Trajectory,
    places: tuple[int, int, int],
    exchange: Exchange | None,
) -> tuple[ShownTurn, tuple[TextPiece, ...], tuple[TextPiece, ...]]:
    """Decode a turn. `places`: indices, within the path, of the turn's start, the turn's end and the observation's
    end."""
    start, middle, end = places
    sampled = _by_policy(path.segments_between(start, middle))
    token_ids = [token for segment in sampled for token in segment.token_ids]
    inserted = [s for s in path.segments_between(middle, end) if s.author is Author.ENVIRONMENT]
    observed_ids = [token for segment in inserted for token in segment.token_ids]
    if exchange is None:
        observation: tuple[TextPiece, ...] = ()
    elif observed_ids:
        observation = _pieces(tokenizer, observed_ids)
    else:
        observation = (TextPiece(exchange.observation, False),)
    versions, mean = _versions_and_mean(sampled)
    shown = ShownTurn(
        number,
        path_index,
        len(path.prompt_ids),
        tokenizer.text(token_ids, keep_special=True),
        len(token_ids),
        versions,
        mean,
        min(logprob for segment in sampled for logprob in segment.behavior_logprobs),
        None if exchange is None else "".join(piece.text for piece in observation),
        len(observed_ids),
        None if exchange is None else exchange.reward,
        None if exchange is None else exchange.tool,
        None if exchange is None else exchange.seconds,
    )
    return shown, _pieces(tokenizer, token_ids), observation


def _sibling(member: ScoredTrajectory) -> Sibling:
    judgement, episode = member.judgement, member.episode
    return Sibling(
        member.trajectory.sample_index,
        judgement.reward,
        _verdict(judgement.is_correct, judgement.failure),
        () if episode is None else tuple(exchange.reward for exchange in episode.exchanges),
        member.num_policy_tokens,
        _finish_reason(member),
        0 if episode is None else episode.attempt,
    )


def _finish_reason(member: ScoredTrajectory) -> str:
    episode = member.episode
    return str(member.trajectory.finish_reason if episode is None else episode.finish_reason)


def _verdict(is_correct: bool, failure: str | None) -> str:
    if is_correct:
        return "correct"
    return "wrong" if failure is None else f"not scored ({failure})"


def _range(versions: tuple[int, int]) -> str:
    oldest, newest = versions
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _by_policy(segments: Iterable[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment.author is Author.POLICY]


def _versions_and_mean(sampled: Sequence[Segment]) -> tuple[tuple[int, int], float]:
    logprobs = list(chain.from_iterable(segment.behavior_logprobs for segment in sampled))
    return (sampled[0].policy_version, sampled[-1].policy_version), sum(logprobs) / len(logprobs)


def _is(member: ScoredTrajectory, is_correct: bool) -> bool:
    return member.judgement.is_judged and member.judgement.is_correct is is_correct


def _pieces(tokenizer: Tokenizer, token_ids: Iterable[int]) -> tuple[TextPiece, ...]:
    special = frozenset(tokenizer.hf.all_special_ids)
    runs = groupby(token_ids, key=lambda i: i in special)
    return tuple(TextPiece(tokenizer.text(list(ids), keep_special=True), is_special) for is_special, ids in runs)
