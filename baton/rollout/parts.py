"""What a `RolloutController` is constructed from: the worker, the prompt source, the scorer, the journal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.records.journal import Journal
from baton.rollout.transport import WorkerTransport
from baton.stop import StopRequest
from baton.types import Prompt, SamplingParams, ScoredTrajectory, Trajectory


class PromptSource(Protocol):
    """A stream of prompts."""

    @property
    def position(self) -> dict[str, int]:
        """The position in the stream, for a resume."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts and advance the position."""


class TrajectoryScorer(Protocol):
    """Scores finished trajectories concurrently with generation."""

    sees_groups: bool
    """Whether all trajectories of a group must be submitted together, once the last has finished."""

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, responses: Sequence[str]) -> None:
        """Queue finished trajectories of one prompt for scoring. responses: their text."""

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        """Return the trajectories scored since the last call, waiting at most `timeout_s` for the first."""


@dataclass(slots=True)
class RolloutParts:
    """The collaborators and limits of a `RolloutController`."""

    port: WorkerTransport
    source: PromptSource
    judges: TrajectoryScorer
    prompt_ids: Callable[[Prompt], tuple[int, ...]]
    text: Callable[[Sequence[int]], str]
    sampling: Callable[[int, int], SamplingParams]
    """(group id, sample index) → sampling parameters."""
    noise_seed: int
    journal: Journal | None = None
    max_context_tokens: int | None = None
    stall_timeout_s: float = 300.0
    stop: StopRequest = field(default_factory=StopRequest)
    """A stop request ends every wait of the controller."""
    lease_ids: Iterator[int] = field(default_factory=itertools.count)
    """Shared by all that lease to the worker, so that ids are unique."""
