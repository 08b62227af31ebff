"""A finished run to change, and trajectories put into it, for the tests of what reads runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.policy.tokenizer import load_tokenizer
from baton.records.run_directory import RunDirectory
from baton.types import (
    Author,
    Episode,
    EpisodeFinish,
    Exchange,
    FinishReason,
    Group,
    Message,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)


@pytest.fixture(name="run")
def changeable_run(small: Any, tmp_path: Path) -> RunDirectory:
    """A copy of the small finished run, to be changed."""
    shutil.copytree(small.run, tmp_path / "copy")
    return RunDirectory.open(tmp_path / "copy")


def write_responses(run: RunDirectory, step: int, responses: Sequence[tuple[str, float]], task: str = "t") -> None:
    """Keep one group of (response, reward) as the step's trajectories; reward 1 is correct."""
    tokenizer = load_tokenizer(str(run.tokenizer))
    members = []
    for index, (response, reward) in enumerate(responses):
        ids = (*tokenizer.ids(response), tokenizer.hf.eos_token_id)
        segment = Segment(ids, (-0.5,) * len(ids), step - 1)
        prompt_ids = tokenizer.prompt_ids([Message("user", "1+1")])
        trajectory = Trajectory(step, index, prompt_ids, (segment,), FinishReason.STOP)
        members.append(
            ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0, answer=response))
        )
    run.write_groups(step, [Group(step, Prompt("p", task, (Message("user", "1+1"),), "2"), tuple(members))])


def write_episodes(run: RunDirectory, step: int, hostile: str = "") -> None:
    """Keep a group of two episodes: one of three turns, two versions and two paths; one that a budget ends."""
    tokenizer = load_tokenizer(str(run.tokenizer))
    prompt_ids = tokenizer.prompt_ids([Message("user", "1+1")])

    def said(text: str, version: int, *logprobs: float) -> Segment:
        ids = tuple(tokenizer.ids(text))
        return Segment(ids, (*logprobs, *(-1.0,) * (len(ids) - len(logprobs))), version)

    def seen(text: str, version: int) -> Segment:
        ids = tuple(tokenizer.ids(text))
        return Segment(ids, (0.0,) * len(ids), version, Author.ENVIRONMENT)

    first, second, third = said("11", 3, -0.25, -3.75), said("22", 3), said("33", 4)
    other = said(f"44{hostile}", 5)
    middle = seen("7=", 3)
    earlier = Trajectory(step, 0, prompt_ids, (first, middle, second, third), FinishReason.STOP)
    last = Trajectory(step, 0, (*prompt_ids, *prompt_ids), (other,), FinishReason.ENVIRONMENT)
    exchanges = (
        Exchange(len(first.token_ids), "11", 0.5, "7=", "a", 2.5),
        Exchange(earlier.num_tokens, "2233", -0.25, f"8={hostile}", "b", 0.004, tool=f"abacus{hostile}"),
        Exchange(last.num_tokens, "44", 1.0, "9=", "c", 0.01, path=1),
    )
    episode = Episode(exchanges, (earlier,), EpisodeFinish.PARSE_ERROR, attempt=1)
    cut = Trajectory(step, 1, prompt_ids, (said("55", 3), seen("6=", 3), said("66", 3)), FinishReason.LENGTH)
    unanswered = Episode(
        (Exchange(len(said("55", 3).token_ids), "55", -0.5, "6=", "d", 0.02),), (), EpisodeFinish.LENGTH
    )
    members = (
        ScoredTrajectory(last, RewardResult(1.25, {"environment": 1.25}, True), episode),
        ScoredTrajectory(cut, RewardResult(-0.5, {"environment": -0.5}, False), unanswered),
    )
    run.write_groups(step, [Group(step, Prompt("p", "rooms", (Message("user", "1+1"),), None), members)])
