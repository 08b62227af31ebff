"""The sections [run], [fleet], [eval] and [checkpoint]. Every other section is declared in the package that uses it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from baton.settings import Settings
from baton.tasks.stream import EvalTaskSettings


class RunSettings(Settings):
    """[run]: name, length and seed of the run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's directory."""
    directory: str = "runs"
    """Directory that contains the run directories."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompts and sampling noise. In `sync` with the embedded engine, runs with equal seeds and thread counts
    on one machine are identical."""
    steps: int = Field(default=100, ge=1)
    """Number of train steps."""
    threads: int = Field(default=0, ge=0)
    """Number of torch threads on the CPU; 0 uses all cores."""
    deterministic: bool | None = None
    """Use torch's deterministic algorithms, which are slower on CUDA. In the mode `sync`, the default is true, so that
    equal runs give equal bits. In the other modes, the default is true only without CUDA."""

    @property
    def path(self) -> Path:
        """Path of the run's directory."""
        return Path(self.directory) / self.name


class FleetSettings(Settings):
    """[fleet]: a run on a Ray cluster (`--plan`, `--ray`)."""

    ray: bool = False
    """Whether workers are started on a Ray cluster; set by `baton train --ray`, not by the user."""
    replan: bool = True
    """Whether a new plan is computed when machines join or leave. If false, the remaining workers continue without a
    new plan."""
    cluster: str | None = None
    """Cluster TOML with the links, prices and GPU types for replanning."""
    workload: str | None = None
    """Workload TOML, or a run's directory, for replanning and predictions. By default, replanning uses the measured
    workload of this run."""
    calibration: str | None = None
    """Calibration file for replanning and predictions, written by `baton profile`."""


class EvalSettings(Settings):
    """[eval]: evaluations on problems that are not trained on."""

    enabled: bool = True
    """Whether the run makes evaluations."""
    task: tuple[EvalTaskSettings, ...] = ()
    """Test sets, one block [[eval.task]] each."""
    at_start: bool = True
    """Evaluate the model before the first train step."""
    every: int = Field(default=20, ge=0)
    """Train steps between evaluations; 0 evaluates only at the start and after the last step."""
    num_prompts: int = Field(default=256, ge=1)
    """Number of distinct held-out prompts, divided among the tasks; a task with too few prompts uses all of them."""
    samples: int = Field(default=1, ge=1)
    """Number of sampled responses per prompt (k of pass@k)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled responses."""
    greedy: bool = True
    """Also evaluate a greedy response to each prompt."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum response length, tokens; default: rollout.max_new_tokens."""


class CheckpointSettings(Settings):
    """[checkpoint]: writing and removing checkpoints."""

    every: int = Field(default=50, ge=1)
    """Train steps between checkpoints; the last step always writes a checkpoint."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep; the checkpoint with the best accuracy is kept in addition."""
    background: bool = False
    """Copy a checkpoint into host memory (/dev/shm), and write it to disk while the run continues. Takes 12 bytes of
    host memory per trained parameter. At most one checkpoint is pending. The next checkpoint and the end of the run
    wait for it. Requires that all ranks are on one machine."""
