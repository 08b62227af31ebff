"""What a runner works with: the worker, the source of prompts, the judges, the journal."""

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
    """Where prompts come from."""

    @property
    def position(self) -> dict[str, int]:
        """How far it has got."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts."""


class TrajectoryScorer(Protocol):
    """Who judges finished trajectories."""

    sees_groups: bool
    """Whether all trajectories of a group are to be submitted together, once the last has finished."""

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, responses: Sequence[str]) -> None:
        """Have finished trajectories of one prompt judged."""

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        """Return what has been judged, waiting at most `timeout_s` for the first."""


@dataclass(slots=True)
class RolloutParts:
    """What a runner works with."""

    port: WorkerTransport
    source: PromptSource
    judges: TrajectoryScorer
    prompt_ids: Callable[[Prompt], tuple[int, ...]]
    text: Callable[[Sequence[int]], str]
    sampling: Callable[[int, int], SamplingParams]
    """(group id, sample index) → how it is sampled."""
    noise_seed: int
    journal: Journal | None = None
    max_context_tokens: int | None = None
    stall_timeout_s: float = 300.0
    stop: StopRequest = field(default_factory=StopRequest)
    """Ends every wait of the runner."""
    lease_ids: Iterator[int] = field(default_factory=itertools.count)
    """Shared with whoever else leases to the worker."""
