"""A finished run to change, and trajectories put into it, for the tests of what reads runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.policy.tokenizer import load_tokenizer
from baton.records.run_directory import RunDirectory
from baton.types import FinishReason, Group, Message, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory


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
