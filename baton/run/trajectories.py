"""Select recorded trajectories of a run, and decode them for output. The texts are untrusted and not escaped yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from baton.errors import UserError
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.records.run_directory import RunDirectory
from baton.types import Group, ScoredTrajectory

ORDERS = ("best", "worst", "longest")
NUM_EXAMPLES = 2
"""Number of examples for each order and train step."""


class TextPiece(msgspec.Struct, frozen=True):
    """A part of a text that contains either only special tokens or no special tokens."""

    text: str
    is_special: bool


class ShownTrajectory(msgspec.Struct, frozen=True):
    """A trajectory with decoded texts, reward and metadata."""

    step: int
    group_id: int
    sample_index: int
    task: str
    prompt: str
    """Decoded prompt, including special tokens."""
    response: str
    answer: str | None
    reference: str | None
    reward: float
    parts: dict[str, float]
    is_correct: bool
    failure: str | None
    """Cause of a failed scoring; the trajectory is then neither correct nor wrong. None if it was scored."""
    finish_reason: str
    num_tokens: int
    policy_versions: tuple[int, int]
    """Oldest and newest policy version of the response's tokens."""
    mean_logprob: float
    """Mean behavior logprob of the response's tokens, nats."""

    @property
    def verdict(self) -> str:
        """Return `correct`, `wrong`, or `not scored` with the cause."""
        if self.is_correct:
            return "correct"
        return "wrong" if self.failure is None else f"not scored ({self.failure})"

    @property
    def versions(self) -> str:
        """Return the policy versions of the response's tokens, such as `3` or `3 to 5`."""
        oldest, newest = self.policy_versions
        return str(oldest) if oldest == newest else f"{oldest} to {newest}"


class ReadableTrajectory(msgspec.Struct, frozen=True):
    """A trajectory whose texts are split into special and other tokens."""

    shown: ShownTrajectory
    prompt: tuple[TextPiece, ...]
    response: tuple[TextPiece, ...]


def read_trajectories(
    path: Path,
    step: int | None,
    *,
    group: int | None = None,
    task: str | None = None,
    is_correct: bool | None = None,
    order: str | None = None,
    limit: int,
    skipped: bool = False,
) -> list[ReadableTrajectory]:
    """Return recorded trajectories of a train step, by default of the last step.

    With `skipped`, reads the batch that `--skip-batch` discarded. The list is empty if no trajectory matches
    `is_correct`. Raises UserError if the step, group or task is not recorded.
    """
    run = RunDirectory.open(path)
    steps = run.recorded_steps()
    if step is None and not steps:
        raise UserError(f"{path} has no trajectories yet")
    step = steps[-1] if step is None else step
    there = run.groups(step, skipped=skipped)
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
    return [_decoded(tokenizer, step, g, member) for g, member in _ordered(members, order)[:limit]]


def choose_examples(run: RunDirectory) -> Iterator[tuple[str, ReadableTrajectory]]:
    """Yield the best, worst and longest trajectories of the first and of the last recorded train step, with the order.

    No trajectory is yielded twice, and the examples of one order and step have different prompts.
    """
    steps = run.recorded_steps()
    tokenizer = load_tokenizer(str(run.tokenizer)) if steps else None
    for step in dict.fromkeys((steps[0], steps[-1]) if steps else ()):
        assert tokenizer is not None
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
                    yield order, _decoded(tokenizer, step, group, member)


def _ordered(
    members: Sequence[tuple[Group, ScoredTrajectory]], order: str | None
) -> list[tuple[Group, ScoredTrajectory]]:
    """Return trajectories sorted by reward (unscored trajectories last) or by length. Ties keep their order."""
    match order:
        case "best":
            return sorted(members, key=lambda m: (not m[1].judgement.is_judged, -m[1].judgement.reward))
        case "worst":
            return sorted(members, key=lambda m: (not m[1].judgement.is_judged, m[1].judgement.reward))
        case "longest":
            return sorted(members, key=lambda m: -m[1].trajectory.num_tokens)
        case _:
            return list(members)


def _decoded(tokenizer: Tokenizer, step: int, group: Group, member: ScoredTrajectory) -> ReadableTrajectory:
    """Decode one trajectory of a step."""
    trajectory, judgement = member.trajectory, member.judgement
    versions, logprobs = trajectory.policy_versions, trajectory.behavior_logprobs
    shown = ShownTrajectory(
        step,
        group.group_id,
        trajectory.sample_index,
        group.prompt.task,
        tokenizer.text(trajectory.prompt_ids, keep_special=True),
        tokenizer.text(trajectory.token_ids, keep_special=True),
        judgement.answer,
        group.prompt.answer,
        judgement.reward,
        judgement.parts,
        judgement.is_correct,
        judgement.failure,
        str(trajectory.finish_reason),
        trajectory.num_tokens,
        (min(versions), max(versions)),
        sum(logprobs) / len(logprobs),
    )
    return ReadableTrajectory(
        shown, _pieces(tokenizer, trajectory.prompt_ids), _pieces(tokenizer, trajectory.token_ids)
    )


def _is(member: ScoredTrajectory, is_correct: bool) -> bool:
    return member.judgement.is_judged and member.judgement.is_correct is is_correct


def _pieces(tokenizer: Tokenizer, token_ids: Iterable[int]) -> tuple[TextPiece, ...]:
    special = frozenset(tokenizer.hf.all_special_ids)
    runs = groupby(token_ids, key=lambda i: i in special)
    return tuple(TextPiece(tokenizer.text(list(ids), keep_special=True), is_special) for is_special, ids in runs)
