"""The sections [run], [fleet], [eval] and [checkpoint]. All other sections are declared by their owners."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from baton.settings import Settings


class RunSettings(Settings):
    """[run] name, length and seed."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's directory."""
    directory: str = "runs"
    """Directory that contains the run directories."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompts and sampling noise; the same seed on the same machine gives the same run."""
    steps: int = Field(default=100, ge=1)
    """Number of train steps."""
    threads: int = Field(default=0, ge=0)
    """Number of torch threads on the CPU; 0 takes all cores."""

    @property
    def path(self) -> Path:
        """`directory/name`."""
        return Path(self.directory) / self.name


class FleetSettings(Settings):
    """[fleet] a run that a plan places on a Ray cluster (`--plan`, `--ray`)."""

    max_restarts: int = Field(default=3, ge=0)
    """How many times the trainer may restart from its last checkpoint after it lost a rank or a machine."""
    replan: bool = True
    """Whether to compute a new plan when machines join or leave; otherwise the remaining workers continue."""
    slack: float = Field(default=0.02, ge=0)
    """When replanning, a plan that moves fewer GPUs is preferred if its step time is at most this fraction longer."""
    cluster: str | None = None
    """Cluster TOML with the links, prices and GPU types to use when replanning."""
    workload: str | None = None
    """Workload TOML for replanning; the default is what this run has recorded."""
    calibration: str | None = None
    """Efficiencies for replanning, as `baton profile` writes them."""


class EvalSettings(Settings):
    """[eval] the held-out evaluation."""

    at_start: bool = True
    """Whether to evaluate the model before the first train step."""
    every: int = Field(default=20, ge=0)
    """Train steps between evaluations; 0 evaluates only at the start and after the last step."""
    num_prompts: int = Field(default=256, ge=1)
    """Number of distinct held-out prompts; a task that has fewer than its share gives all it has."""
    samples: int = Field(default=1, ge=1)
    """Sampled responses per prompt (k of pass@k)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled responses."""
    greedy: bool = True
    """Whether to evaluate a greedy response per prompt too."""
    max_new_tokens: int | None = None
    """Longest response, tokens; the default is that of [rollout]."""


class CheckpointSettings(Settings):
    """[checkpoint] how often checkpoints are written, and how many are kept."""

    every: int = Field(default=50, ge=1)
    """Train steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints kept; the one with the best held-out accuracy is kept in addition."""
