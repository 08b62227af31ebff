"""Reading the trajectories that a run kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from baton.errors import UserError
from baton.policy.tokenizer import load_tokenizer
from baton.runs import RunDirectory

ORDERS = ("best", "worst", "longest")


class ShownTrajectory(msgspec.Struct, frozen=True):
    """One trajectory as a person reads it."""

    step: int
    group_id: int
    sample_index: int
    task: str
    prompt: str
    """The exact text the engine saw, special tokens included."""
    response: str
    answer: str | None
    reference: str | None
    reward: float
    parts: dict[str, float]
    is_correct: bool
    failure: str | None
    """Why there is no score, where the scorer raised."""
    finish_reason: str
    num_tokens: int
    policy_versions: tuple[int, int]
    """Oldest and newest version among its tokens."""
    mean_logprob: float
    """Of its tokens, under the policy that sampled them."""


def shown_trajectories(
    path: Path, step: int | None, *, group: int | None, order: str | None, limit: int
) -> list[ShownTrajectory]:
    """Return trajectories of a step, the last one by default. Raises UserError for a step or group that is not kept."""
    run = RunDirectory.open(path)
    steps = run.recorded_steps()
    if step is None and not steps:
        raise UserError(f"{path} has no trajectories yet")
    step = steps[-1] if step is None else step
    groups = [g for g in run.groups(step) if group is None or g.group_id == group]
    if not groups:
        ids = [g.group_id for g in run.groups(step)]
        raise UserError(f"{path}, step {step} has no group {group}; there are {min(ids)} to {max(ids)}")
    tokenizer = load_tokenizer(str(run.tokenizer))
    found = []
    for g in groups:
        for member in g.members:
            trajectory, judgement = member.trajectory, member.judgement
            versions, logprobs = trajectory.policy_versions, trajectory.behavior_logprobs
            found.append(
                ShownTrajectory(
                    step,
                    g.group_id,
                    trajectory.sample_index,
                    g.prompt.task,
                    tokenizer.text(trajectory.prompt_ids, keep_special=True),
                    tokenizer.text(trajectory.token_ids, keep_special=True),
                    judgement.answer,
                    g.prompt.answer,
                    judgement.reward,
                    judgement.parts,
                    judgement.is_correct,
                    judgement.failure,
                    str(trajectory.finish_reason),
                    trajectory.num_tokens,
                    (min(versions), max(versions)),
                    sum(logprobs) / len(logprobs),
                )
            )
    match order:
        case "best":
            found.sort(key=lambda t: -t.reward)
        case "worst":
            found.sort(key=lambda t: t.reward)
        case "longest":
            found.sort(key=lambda t: -t.num_tokens)
    return found[:limit]


def print_trajectories(console: Console, trajectories: Sequence[ShownTrajectory]) -> None:
    """Print trajectories as panels."""
    for t in trajectories:
        oldest, newest = t.policy_versions
        version = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        verdict = "correct" if t.is_correct else "wrong" if t.failure is None else f"not scored ({t.failure})"
        body = Text()
        body.append(t.prompt, style="dim")
        body.append(t.response)
        console.print(
            Panel(
                body,
                title=f"step {t.step}, trajectory {t.group_id}/{t.sample_index}, {t.task}",
                title_align="left",
                subtitle=(
                    f"{verdict}: answer {t.answer!r}, reference {t.reference!r}; reward {t.reward:g}; "
                    f"{t.num_tokens} tokens, ended by {t.finish_reason}; version {version}; "
                    f"mean logprob {t.mean_logprob:.3f}"
                ),
                subtitle_align="left",
                border_style="green" if t.is_correct else "red",
            )
        )
