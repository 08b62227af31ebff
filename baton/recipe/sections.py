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
    """Where run directories lie."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompts and sampling noise; the same seed on the same machine gives the same run."""
    steps: int = Field(default=100, ge=1)
    """Train steps."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch on the CPU; 0 takes all cores."""

    @property
    def path(self) -> Path:
        """`directory/name`."""
        return Path(self.directory) / self.name


class FleetSettings(Settings):
    """[fleet] a run that a plan places on a Ray cluster (`--plan`, `--ray`)."""

    max_restarts: int = Field(default=3, ge=0)
    """How often the trainer may be begun again from its last checkpoint after it lost a rank or a machine."""
    replan: bool = True
    """Plan anew when machines come or go; else workers on those that are left go on."""
    slack: float = Field(default=0.02, ge=0)
    """Share of the step time given up to move less when planning anew."""
    cluster: str | None = None
    """Cluster TOML whose links, prices and GPU types hold when planning anew."""
    workload: str | None = None
    """Workload TOML for planning anew; without it what this run has recorded."""
    calibration: str | None = None
    """Efficiencies for planning anew, as `baton profile` writes them."""


class EvalSettings(Settings):
    """[eval] the held-out evaluation."""

    at_start: bool = True
    """Whether the model is evaluated before the first train step."""
    every: int = Field(default=20, ge=0)
    """Train steps between evaluations; 0 evaluates none but the one at the start and the one after the last step."""
    num_prompts: int = Field(default=256, ge=1)
    """Distinct held-out prompts; all there are where a task has fewer than its share."""
    samples: int = Field(default=1, ge=1)
    """Sampled responses per prompt (k of pass@k)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled responses."""
    greedy: bool = True
    """Whether a greedy response per prompt is judged too."""
    max_new_tokens: int | None = None
    """Longest response, tokens; the default is that of [rollout]."""


class CheckpointSettings(Settings):
    """[checkpoint] what is kept to resume from and to use."""

    every: int = Field(default=50, ge=1)
    """Train steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints kept; the one with the best held-out accuracy is kept besides."""
