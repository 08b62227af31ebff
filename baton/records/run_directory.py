"""The directory of a run: recipe, environment, results, and the state from which it resumes (files: docs/runs.md)."""

from __future__ import annotations

import gzip
import math
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

import baton
from baton.errors import Damaged, UserError
from baton.files import flush_to_disk, make_directory, read_rows, remove_leftovers, write_whole
from baton.records.evaluation import Evaluation
from baton.records.run_lock import LOCK_FILES, RunLock
from baton.types import Group, plain

RECORDED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "reasoning-gym", "msgspec")
Source = Literal["batch", "evaluation", "greedy", "skipped"]
"""Kind of recorded groups of a train step. `batch`: the step's batch. `evaluation`, `greedy`: the sampled and the
greedy responses of the evaluation after the step. `skipped`: the last of the step's batches that `skip_groups`
removed."""
WANDB = "wandb"
"""Directory that Weights & Biases creates."""
_BEFORE_A_RUN = LOCK_FILES | {WANDB, "recipe.toml", ".recipe.toml.unfinished", ".run.json.unfinished"}
"""Files that a process may leave in the directory if it ends before its run has started."""
_WARM_START_KEYS = ("sft.steps",)
_TRAINING_KEYS = ("run.steps", "rollout.batch_groups", "rollout.group_size", "rollout.max_new_tokens", "algorithm.name")
"""Recipe keys that summaries and reports read. A recipe.toml without one of these keys was truncated: a file that ends
after a complete line is still valid TOML."""


class RecordedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation result, and the step after which the evaluation ran."""

    step: int
    result: Evaluation


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        """`lock`: the directory's lock. A process without the lock must only read; `check_held` then does nothing."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.journal = path / "journal.sqlite"
        self._lock = lock
        self._trajectories = path / "trajectories"
        self._evaluations = path / "evaluations.jsonl"

    @classmethod
    def check_free(cls, path: Path, *, overwrite: bool) -> None:
        """Raise UserError if the path contains a run and `overwrite` is False, or files that belong to no run."""
        if not path.exists():
            return
        if not path.is_dir():
            raise UserError(f"{path} is not a directory: choose another run.name")
        if (path / "run.json").exists():
            if not overwrite:
                raise UserError(
                    f"{path} already holds a run: continue it with --resume, replace it with --overwrite, "
                    f"or choose another run.name (in Python: baton.Run({str(path)!r}).resume(), or another name)"
                )
            cls(path).facts()
            return
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _BEFORE_A_RUN)
        if foreign:
            raise UserError(
                f"{path} is not empty and not a run ({', '.join(foreign[:3])}{' …' if foreign[3:] else ''}): "
                "choose another run.name, or empty it"
            )

    @classmethod
    def create(cls, path: Path, lock: RunLock) -> RunDirectory:
        """Delete an existing run, and start a new run in the directory. The directory must have passed `check_free`.
        `WANDB` stays: Weights & Biases has already started, and may not have uploaded the old run's files."""
        lock.check()
        last = path / "run.json"  # deleted last, because a directory with this file counts as a run
        for entry in sorted(path.iterdir(), key=lambda entry: entry == last):
            if entry.name in (*LOCK_FILES, WANDB):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, lock: RunLock | None = None) -> RunDirectory:
        """Open an existing run. Raises UserError if the directory is not a run."""
        if not (path / "run.json").is_file():
            raise UserError(f"{path} is not a run: it has no run.json")
        return cls(path, lock)

    def check_held(self) -> None:
        """Raise RunTakenOver if another process has taken over the directory. Called before each durable write."""
        if self._lock is not None:
            self._lock.check()

    def write_start(self, recipe: dict[str, Any], *, seed: int, threads: int) -> None:
        """Write the resolved recipe and the run's environment. Called before the run starts."""
        self._write_environment(recipe, {"seed": seed, **_environment(threads), "resumed": []})

    def write_resume(
        self, recipe: dict[str, Any], *, step: int, threads: int, changes: Mapping[str, tuple[Any, Any]]
    ) -> None:
        """Write the recipe of a resumed run, and append the new environment and the changes of the recipe to run.json.
        `changes`: key of the recipe → (old, new) value. The new values apply after `step`."""
        facts = self.facts()
        changed = {key: {"old": old, "new": new} for key, (old, new) in changes.items()}
        facts["resumed"].append({"step": step, "changed": changed, **_environment(threads)})
        self._write_environment(recipe, facts)

    def _write_environment(self, recipe: dict[str, Any], facts: dict[str, Any]) -> None:
        self.check_held()
        write_whole(self.path / "recipe.toml", tomli_w.dumps(without_none(recipe)).encode())
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        make_directory(self.checkpoints)
        make_directory(self._trajectories)

    def cut_after(self, step: int) -> None:
        """Delete incomplete files, and the evaluations of steps after `step` with their trajectories, because the
        resumed run repeats these evaluations. Recorded batches stay, because the loop uses them again."""
        self.check_held()
        for directory in (self.path, self.checkpoints, self._trajectories):
            remove_leftovers(directory)
        rows = [row for row in self.evaluations() if row.step <= step]
        write_whole(self._evaluations, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        for source in ("evaluation", "greedy"):
            for later in self.recorded_steps(source):
                if later > step:
                    self._groups_file(later, source).unlink()

    def recipe(self) -> dict[str, Any]:
        """Return the resolved recipe. Raises Damaged if recipe.toml cannot be read."""
        file = self.path / "recipe.toml"
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Damaged(f"{file} cannot be read: {error}") from error
        if not found:
            raise Damaged(f"{file} is empty")
        required = _WARM_START_KEYS if "sft" in found else _TRAINING_KEYS
        missing = [key for key in required if not _has_key(found, key)]
        if missing:
            raise Damaged(f"{file} is incomplete: it has no {missing[0]}")
        return found

    def facts(self) -> dict[str, Any]:
        """Return the content of run.json. Raises Damaged if run.json cannot be read."""
        file = self.path / "run.json"
        try:
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"{file} cannot be read: {error}") from error
        if not {"seed", "resumed", "command"} <= found.keys():
            raise Damaged(f"{file} is incomplete: it lacks seed, resumed or command")
        return found

    def write_groups(self, step: int, groups: Sequence[Group], source: Source = "batch") -> None:
        self.check_held()
        lines = b"".join(msgspec.json.encode(group, enc_hook=plain) + b"\n" for group in groups)
        write_whole(self._groups_file(step, source), gzip.compress(lines, compresslevel=4, mtime=0))

    def remove_groups_after(self, step: int) -> list[int]:
        """Remove the recorded batches of all steps after `step`, and return these steps."""
        later = [each for each in self.recorded_steps() if each > step]
        if later:
            self.check_held()
            for each in later:
                self._groups_file(each).unlink()
            flush_to_disk(self._trajectories)
        return later

    def skip_groups(self, step: int) -> None:
        """Remove a step's recorded batch by renaming its file. Earlier skipped batches of the step are kept."""
        self.check_held()
        self._groups_file(step).rename(self._groups_file(step, "skipped", self._num_skipped(step) + 1))
        flush_to_disk(self._trajectories)

    def groups(self, step: int, source: Source = "batch") -> list[Group]:
        """Return recorded groups of a step. Raises UserError, which names the recorded steps, if the step is not
        recorded. Raises Damaged if the file cannot be read."""
        file = self._groups_file(step, source, self._num_skipped(step) if source == "skipped" else 0)
        if not file.is_file():
            steps = self.recorded_steps(source)
            recorded = "none" if not steps else f"steps {steps[0]} to {steps[-1]}" if source == "batch" else f"{steps}"
            kind = "trajectories" if source == "batch" else f"{source} trajectories"
            raise UserError(f"{self.path} has no {kind} of step {step}; recorded: {recorded}")
        try:
            data = file.read_bytes()
            if not data:  # gzip decompresses an empty file without an error, although it is damaged
                raise EOFError("it is empty")
            return [_group(line) for line in gzip.decompress(data).splitlines()]
        except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "; to resume the run, remove the file: the batch is then generated again" * (source == "batch")
            raise Damaged(f"{file} is damaged: {error}{hint}") from error

    def has_groups(self, step: int) -> bool:
        return self._groups_file(step).is_file()

    def recorded_steps(self, source: Source = "batch") -> list[int]:
        """Return, in ascending order, the steps for which groups from this source are recorded."""
        names = (file.name for file in self._trajectories.glob(f"{_prefix(source)}_*.jsonl.gz"))
        return sorted({int(name.partition("_")[2].partition(".")[0]) for name in names})

    def write_evaluation(
        self, step: int, results: Sequence[Evaluation], groups: Mapping[Source, Sequence[Group]] = {}
    ) -> None:
        """Write a step's evaluations and their groups. Older results of this step and of later steps are deleted."""
        for source, evaluated in groups.items():
            self.write_groups(step, evaluated, source)
        self.check_held()
        kept = [r for r in self.evaluations() if r.step < step]
        rows = [*kept, *(RecordedEvaluation(step, result) for result in results)]
        write_whole(self._evaluations, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def evaluations(self) -> list[RecordedEvaluation]:
        return read_rows(self._evaluations, RecordedEvaluation)

    def write_report(self, report: dict[str, Any]) -> None:
        write_whole(self.path / "report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")

    def _num_skipped(self, step: int) -> int:
        return len(list(self._trajectories.glob(f"skipped_{step:06d}.*.jsonl.gz")))

    def _groups_file(self, step: int, source: Source = "batch", number: int = 0) -> Path:
        count = f".{number}" if source == "skipped" else ""
        return self._trajectories / f"{_prefix(source)}_{step:06d}{count}.jsonl.gz"


def _prefix(source: Source) -> str:
    return "step" if source == "batch" else source


def _has_key(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _group(line: bytes) -> Group:
    """Decode a recorded group. A reward of null is read as NaN, because JSON has no NaN."""
    try:
        return msgspec.json.decode(line, type=Group)
    except msgspec.ValidationError:
        tree = msgspec.json.decode(line)
        for result in (member["judgement"] for member in tree["members"]):
            parts = result["parts"]
            result["reward"] = math.nan if result["reward"] is None else result["reward"]
            result["parts"] = {name: math.nan if value is None else value for name, value in parts.items()}
        return msgspec.convert(tree, Group)


def _environment(threads: int) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "baton": baton.__version__,
        "commit": _commit(),
        "threads": threads,
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
    }


def without_none(value: Any) -> Any:
    """Return `value` without keys whose value is None, at any depth, because TOML has no null."""
    if isinstance(value, dict):
        return {key: without_none(v) for key, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, (list, tuple)) else value


def _commit() -> str | None:
    """Return the commit of Baton's source tree, with `+changes` if files differ; None outside a repository."""
    root = Path(baton.__file__).parents[1]
    if not (root / ".git").exists():  # an installed package may be inside the repository of another project
        return None

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
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
