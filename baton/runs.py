"""A run's directory: what it was started with, what it wrote, where it can go on.

runs/<name>/
  recipe.toml         resolved: every key, defaults included
  run.json            commit, versions, seed, hardware, command line
  metrics.jsonl       one row per step; tensorboard/ holds the same
  trace.jsonl         who did what when
  evaluations.jsonl   held-out results with their intervals
  journal.sqlite      rollouts that are in no checkpoint yet: issued, grown, finished, judged
  trajectories/       step_000012.jsonl.gz: each group of the step, prompts and judgements included
  checkpoints/        step_000050/: a Hugging Face directory, with what a resume needs in baton/
  tokenizer/          to read the trajectories with
  report.json         the end's summary
"""

from __future__ import annotations

import gzip
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

import baton
from baton.errors import UserError
from baton.evaluation import Evaluation
from baton.files import remove_leftovers, write_whole
from baton.types import Group

RECORDED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "reasoning-gym", "msgspec")


class RecordedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation and the step after which it was made."""

    step: int
    result: Evaluation


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.journal = path / "journal.sqlite"
        self._trajectories = path / "trajectories"
        self._evaluations = path / "evaluations.jsonl"

    @classmethod
    def check_free(cls, path: Path, *, overwrite: bool) -> None:
        """Raise UserError when there is a run already and it is not to be overwritten."""
        if (path / "run.json").exists() and not overwrite:
            raise UserError(
                f"{path} holds a run already: go on with --resume, begin again with --overwrite, "
                "or choose another run.name"
            )

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make a new run's directory, in place of one that is there."""
        if (path / "run.json").exists():
            shutil.rmtree(path)
        run = cls(path)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        run._trajectories.mkdir(exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run. Raises UserError when there is none."""
        if not (path / "run.json").is_file():
            raise UserError(f"{path} is not a run: there is no run.json in it")
        return cls(path)

    def write_start(self, recipe: dict[str, Any], *, seed: int, threads: int) -> None:
        """Write the resolved recipe and the circumstances, before anything starts."""
        write_whole(self.path / "recipe.toml", tomli_w.dumps(without_none(recipe)).encode())
        facts = {"seed": seed, **_circumstances(threads), "resumed": []}
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(facts)) + b"\n")

    def write_resume(self, recipe: dict[str, Any], *, step: int, threads: int) -> None:
        """Write the recipe that a resumed run goes on with, and add the circumstances to those of the start."""
        write_whole(self.path / "recipe.toml", tomli_w.dumps(without_none(recipe)).encode())
        facts = self.facts()
        facts["resumed"].append({"step": step, **_circumstances(threads)})
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(facts)) + b"\n")

    def cut_after(self, step: int) -> None:
        """Forget metrics and evaluations after a step, and what was left half-written: a resumed run makes them again.

        Recorded trajectories stay: the loop replays them, so that nothing is generated or judged twice.
        """
        for directory in (self.path, self.checkpoints, self._trajectories):
            remove_leftovers(directory)
        rows = [row for row in self.evaluations() if row.step <= step]
        write_whole(self._evaluations, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe the run goes by."""
        return tomllib.loads((self.path / "recipe.toml").read_text(encoding="utf-8"))

    def facts(self) -> dict[str, Any]:
        """What `write_start` recorded."""
        return msgspec.json.decode((self.path / "run.json").read_bytes(), type=dict[str, Any])

    def write_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Keep every trajectory of a step."""
        lines = b"".join(msgspec.json.encode(group) + b"\n" for group in groups)
        write_whole(self._groups_file(step), gzip.compress(lines, compresslevel=4, mtime=0))

    def groups(self, step: int) -> list[Group]:
        """Read back the groups of a step. Raises UserError when there are none, naming the steps there are."""
        file = self._groups_file(step)
        if not file.is_file():
            steps = self.recorded_steps()
            there = f"steps {steps[0]} to {steps[-1]}" if steps else "none yet"
            raise UserError(f"{self.path} has no trajectories of step {step}; there are: {there}")
        lines = gzip.decompress(file.read_bytes()).splitlines()
        return [msgspec.json.decode(line, type=Group) for line in lines]

    def has_groups(self, step: int) -> bool:
        """Whether the trajectories of a step are kept."""
        return self._groups_file(step).is_file()

    def recorded_steps(self) -> list[int]:
        """Steps whose trajectories are kept, in order."""
        return sorted(int(f.name[5:11]) for f in self._trajectories.glob("step_*.jsonl.gz"))

    def newest_group_ids(self) -> list[int]:
        """Ids of the groups of the last recorded step; none where no step is recorded."""
        steps = self.recorded_steps()
        return [group.group_id for group in self.groups(steps[-1])] if steps else []

    def write_evaluation(self, step: int, results: Sequence[Evaluation]) -> None:
        """Keep the evaluations of a step, intervals included; a step written again replaces what follows it."""
        kept = [r for r in self.evaluations() if r.step < step]
        rows = [*kept, *(RecordedEvaluation(step, result) for result in results)]
        write_whole(self._evaluations, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def evaluations(self) -> list[RecordedEvaluation]:
        """All evaluations so far, in order."""
        if not self._evaluations.exists():
            return []
        lines = self._evaluations.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=RecordedEvaluation) for line in lines]

    def write_report(self, report: dict[str, Any]) -> None:
        """Write the end's summary."""
        write_whole(self.path / "report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")

    def _groups_file(self, step: int) -> Path:
        return self._trajectories / f"step_{step:06d}.jsonl.gz"


def _circumstances(threads: int) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "baton": baton.__version__,
        "commit": _commit(),
        "threads": threads,
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
    }


def without_none(value: Any) -> Any:
    """TOML has no null: a key that is None is a key that is absent."""
    if isinstance(value, dict):
        return {key: without_none(v) for key, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, (list, tuple)) else value


def _commit() -> str | None:
    """Commit of the source tree Baton runs from, with `+changes` where files differ from it."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else commit + ("+changes" if git("status", "--porcelain") else "")


def processor_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    names: Iterator[str] = iter(())
    if info.exists():
        names = (line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line)
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
