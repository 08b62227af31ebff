"""Find the state from which a run starts or resumes, and write the checkpoints for later resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from blake3 import blake3
from pydantic import ValidationError

from baton.errors import Damaged, UserError
from baton.files import atomic_directory, memory_directory, remove_leftovers, seal, writing
from baton.policy.load import device_type, dtype_here
from baton.policy.tokenizer import Tokenizer, check_model_path, model_directory
from baton.recipe.changes import changes_of, compare_for_resume, with_current_keys
from baton.recipe.load import FUNCTIONS, PATHS
from baton.recipe.recipe import Recipe, WarmStart
from baton.records.journal import Journal
from baton.records.run_directory import RunDirectory, without_none
from baton.records.run_lock import RunLock
from baton.run.loop import LoopState, Observer, SavedCheckpoint
from baton.tasks.rows import hub_revision, is_hub_name
from baton.trainer.checkpoint import (
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    newest_intact_checkpoint,
    prune_checkpoints,
    set_aside_checkpoints,
)
from baton.trainer.trainer import Trainer

Kind = TypeVar("Kind", Recipe, WarmStart)
LOOP_STATE = Path("baton") / "loop.json"
"""Path of the encoded LoopState within a checkpoint."""
OF_EVALUATIONS = "eval.task", "eval.num_prompts", "eval.temperature", "eval.max_new_tokens"
"""Keys, and sections, whose change makes accuracies incomparable with those of earlier evaluations."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state with which a run starts or resumes."""

    state: LoopState
    checkpoint: Path | None
    """Checkpoint to resume from; None if the run starts with its initial model."""
    is_new: bool = True
    """True if the run's directory must be created. False if the directory exists, possibly with recorded rollouts to
    reuse."""

    @property
    def resume_step(self) -> int:
        """Last train step whose metrics are kept. Without a checkpoint, it is -1: no metrics are kept, not even those
        of step 0."""
        return -1 if self.checkpoint is None else self.state.step


def with_revisions(recipe: Kind, recorded: Mapping[str, Any] | None = None) -> Kind:
    """Return a recipe in which the names of models and datasets on the Hugging Face hub include a commit, as in
    `owner/name@commit`. A name that states a revision is not changed.

    `recorded`: resolved recipe of the run to resume, whose commits are used. If both recipes start from checkpoints of
    the same run, the checkpoint of `recorded` is used. Downloads the model if it is not in the cache. Raises UserError
    if a model or dataset cannot be found.
    """

    def fixed(tasks: tuple[Any, ...], before: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        found = []
        for task, old in zip_longest(tasks, before[: len(tasks)]):
            path = task.path
            if recorded is not None:
                path = _as_recorded(path, (old or {}).get("path"))
            elif path is not None and "@" not in path and is_hub_name(path):
                path = f"{path}@{hub_revision(f'task {task.name!r}', path, task.config)}"
            found.append(task.model_copy(update={"path": path}))
        return tuple(found)

    before = recorded or {}
    tests = before.get("eval", {}).get("task", ())
    changes: dict[str, Any] = {
        "task": fixed(recipe.task, before.get("task", ())),
        "eval": recipe.eval.model_copy(update={"task": fixed(recipe.eval.task, tests)}),
    }
    if (model := recipe.model) is not None:
        path = model.path
        if recorded is not None:
            old = before.get("model", {}).get("path")
            path = _as_recorded(path, old) or path
            there, before_there = (Path(each or "").parent.resolve() for each in (path, old))
            if old is not None and there == before_there and there.name == "checkpoints":
                path = old  # the recipe may name a run that has newer checkpoints now
        elif "@" not in path and not Path(path).is_dir():
            check_model_path(path)
            path = f"{path}@{model_directory(path).name}"
        changes["model"] = model.model_copy(update={"path": path})
    return recipe.model_copy(update=changes)


def with_dtypes(recipe: Recipe, recorded: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe with each dtype "auto" replaced by the dtype that the run to resume has used or, for a new run,
    by the default for the recipe's device."""
    kind, changes = device_type(recipe.model.device), {}
    for name in ("trainer", "engine"):
        section = getattr(recipe, name)
        dtype = (recorded or {}).get(name, {}).get("dtype") if section.dtype == "auto" else section.dtype
        changes[name] = section.model_copy(update={"dtype": dtype_here(kind, dtype or "auto")})
    return recipe.model_copy(update=changes)


def _as_recorded(path: str | None, old: str | None) -> str | None:
    """Return the recorded name `old` if `path` is this name without its revision; otherwise return `path`."""
    return old if path is not None and old is not None and old.partition("@")[0] == path else path


def checkpoint_writer(
    recipe: Recipe, run: RunDirectory, trainer: Trainer
) -> Callable[[LoopState], Callable[[], SavedCheckpoint]]:
    """Return a function `take`. Each call to `take` takes a snapshot of the run, and returns a function `write`.
    `write` atomically writes the snapshot as a sealed checkpoint, and removes the checkpoints that are not kept. With
    `checkpoint.background`, the snapshot is a copy of the trainer's state in host memory, so `write` may run in another
    thread while the trainer continues. Without `checkpoint.background`, `write` saves the state that the trainer has
    during the call. With `checkpoint.background`, raises UserError if this system has no directory for files in host
    memory.
    """
    keep, staged = recipe.checkpoint.keep, _staging(run) if recipe.checkpoint.background else None

    def write(state: LoopState, save: Callable[[Path], None]) -> SavedCheckpoint:
        path = checkpoint_path(run.checkpoints, state.step)
        try:
            with atomic_directory(path, before_rename=run.check_held) as directory:
                save(directory)
                with writing(directory / LOOP_STATE):
                    (directory / LOOP_STATE).write_bytes(msgspec.json.encode(state))
                seal(directory)
        finally:  # a snapshot that could not be written must not stay in the host's memory either
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
        prune_checkpoints(run.checkpoints, keep, keep_step=state.best_step)
        return SavedCheckpoint(path, checkpoint_step(list_checkpoints(run.checkpoints)[-keep:][0]))

    def take(state: LoopState) -> Callable[[], SavedCheckpoint]:
        if staged is None:
            return partial(write, state, trainer.save)
        shutil.rmtree(staged, ignore_errors=True)
        with writing(staged):
            staged.mkdir(mode=0o700)
            (staged / "checkpoint").mkdir()
        try:
            trainer.save(staged / "checkpoint")
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return partial(write, state, partial(_copy_files, staged / "checkpoint"))

    return take


def _staging(run: RunDirectory) -> Path:
    """Return the path, in a directory in host memory, of a run's unwritten checkpoint. An existing directory at this
    path is removed."""
    memory = memory_directory()
    if memory is None:
        raise UserError("checkpoint.background: got true, but this system has no /dev/shm; allowed is false")
    name = blake3(str(run.checkpoints.absolute()).encode()).hexdigest()[:16]
    shutil.rmtree(memory / f"baton-checkpoint-{name}", ignore_errors=True)
    return memory / f"baton-checkpoint-{name}"


def _copy_files(source: Path, directory: Path) -> None:
    """Copy a directory's files. Unlike `shutil.copytree`, raises the OSError of the first file that cannot be
    copied."""
    for path in sorted(source.rglob("*")):
        target = directory / path.relative_to(source)
        with writing(target):
            if path.is_dir():
                target.mkdir()
            else:
                shutil.copyfile(path, target)


def resume_point(recipe: Recipe, observer: Observer) -> ResumePoint:
    """Return the state of the run's latest intact checkpoint, or the initial state if the run has no checkpoint. Raises
    UserError if the run is complete, if the checkpoint has more than `run.steps` train steps, or if the recipe changes
    a key that must not change. Raises Damaged if the checkpoint's `loop.json` cannot be read. The caller holds the
    run's lock."""
    path = recipe.run.path
    if not (path / "run.json").exists():
        observer.said(f"{path} does not exist yet: the run starts from the beginning")
        return ResumePoint(LoopState(), None)
    run = RunDirectory.open(path)
    remove_leftovers(run.checkpoints)  # restores a checkpoint whose replacement was interrupted
    resolved = without_none(recipe.model_dump(mode="json"))
    recorded = _recorded(run, resolved)
    for warning in compare_for_resume(recorded, resolved):
        observer.said(f"warning: {warning}")
    if recipe.trainer.compile:
        observer.said("warning: with trainer.compile the last bits may differ from those of an uninterrupted run")
    checkpoint = newest_intact_checkpoint(run.checkpoints, observer.said)
    if checkpoint is None:
        observer.said(f"{path} has no checkpoint yet: the run starts again, and reuses its recorded rollouts")
        return ResumePoint(LoopState(), None, is_new=False)
    try:
        state = msgspec.json.decode((checkpoint / LOOP_STATE).read_bytes(), type=LoopState)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{checkpoint / LOOP_STATE} cannot be read: {error}; remove {checkpoint}") from error
    if state.step > recipe.run.steps:
        raise UserError(
            f"run.steps = {recipe.run.steps}: {checkpoint} already has {state.step} train steps; resume with "
            f"run.steps above {state.step}, or start another run under another run.name"
        )
    is_evaluated = not recipe.eval.enabled or any(one.step == state.step for one in run.evaluations())
    if state.step == recipe.run.steps and is_evaluated:
        raise UserError(
            f"{path} is complete: {state.step} of run.steps = {recipe.run.steps} train steps are done; "
            f"to continue, resume with a larger run.steps"
        )
    if any(key.startswith(OF_EVALUATIONS) for key in changes_of(recorded, resolved)):
        state = msgspec.structs.replace(state, best_accuracy=LoopState().best_accuracy)
    observer.said(f"resuming after step {state.step}, from {checkpoint}")
    return ResumePoint(state, checkpoint, is_new=False)


def _recorded(run: RunDirectory, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved recipe of a run, to compare it with `resolved`. A key that did not exist when the recipe was
    written gets its default. A path has the form that it has in `resolved`, if both forms mean the same file."""
    recorded, facts = with_current_keys(run.recipe()), run.facts()
    with suppress(ValidationError):  # a value is no longer allowed; the later comparison of the recipes reports its key
        recorded = without_none(Recipe.model_validate(recorded).model_dump(mode="json"))
    directory = Path([facts, *facts["resumed"]][-1].get("directory", ""))
    return with_paths_of(resolved, recorded, directory)  # type: ignore[no-any-return]


def with_paths_of(new: Any, old: Any, directory: Path, key: str = "") -> Any:
    """Return a part of a recipe, `old`, with the paths of `new` that mean the same files. `directory`: directory to
    which relative paths of `old` are relative; those of `new` are relative to the current directory. `key`: dotted name
    of the part."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = {name: f"{key}.{name}".removeprefix(".") for name in old}
        return {name: with_paths_of(new.get(name), old[name], directory, part) for name, part in parts.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [with_paths_of(*pair, directory, key) for pair in zip(new, old, strict=True)]
    if not (isinstance(old, str) and isinstance(new, str)) or key not in (*PATHS, *FUNCTIONS):
        return old
    (file, name), (new_file, new_name) = (t.partition(":")[::2] if key in FUNCTIONS else (t, "") for t in (old, new))
    return new if name == new_name and os.path.realpath(directory / file) == os.path.realpath(new_file) else old


def open_run(
    recipe: Recipe, lock: RunLock, trainer: Trainer, tokenizer: Tokenizer, place: ResumePoint, threads: int
) -> RunDirectory:
    """Create the run's directory, or restore the directory and the trainer to the resume point. A starting run calls
    this function after all checks, so that a failed check leaves the directory unchanged."""
    resolved = without_none(recipe.model_dump(mode="json"))
    if not place.is_new:
        run = RunDirectory.open(recipe.run.path, lock)
        if place.checkpoint is not None:
            trainer.restore(place.checkpoint)
            set_aside_checkpoints(run.checkpoints, place.state.step)
        run.cut_after(place.resume_step)
        changes = changes_of(_recorded(run, resolved), resolved)
        if any(key.startswith("reward.") for key in changes) and run.journal.exists():
            # delete rewards before writing the new recipe: if the process is killed in between, the recorded recipe is
            # still the old one, so the next start detects the changed keys again and deletes the rewards
            with closing(Journal(run.journal, keeps_partials=True)) as journal:
                journal.delete_rewards()
        run.write_resume(resolved, step=place.state.step, threads=threads, changes=changes)
    else:
        run = RunDirectory.create(recipe.run.path, lock)
        run.write_start(resolved, seed=recipe.run.seed, threads=threads)
    if not run.tokenizer.is_dir():
        with atomic_directory(run.tokenizer, before_rename=run.check_held) as directory, writing(directory):
            tokenizer.hf.save_pretrained(directory)
            seal(directory)
    return run


def skip_batch(path: Path, step: int, say: Callable[[str], None]) -> None:
    """Remove the recorded batch of a train step, for example because the trainer cannot process it.

    A resume then generates a new batch. The journal records that the groups are discarded with the cause "skipped", and
    the file with their trajectories is renamed. Raises UserError if the batch does not exist, or if a checkpoint was
    trained on it.
    """
    with RunLock.take(path, say) as lock:
        run = RunDirectory.open(path, lock)
        remove_leftovers(run.checkpoints)
        checkpoint = newest_intact_checkpoint(run.checkpoints, say)
        done = 0 if checkpoint is None else checkpoint_step(checkpoint)
        if step <= done:
            raise UserError(
                f"--skip-batch {step}: {checkpoint} was trained on this batch; only later batches can be skipped"
            )
        if not run.has_groups(step):
            if step in run.recorded_steps("skipped"):
                say(f"the batch of step {step} is already skipped")
                return
            later = [str(each) for each in run.recorded_steps() if each > done]
            raise UserError(
                f"--skip-batch {step}: {path} has no recorded batch of this step; allowed is {' or '.join(later)}"
                if later
                else f"--skip-batch {step}: all recorded batches of {path} are in a checkpoint; remove --skip-batch"
            )
        with closing(Journal(run.journal, keeps_partials=True, before_commit=lock.check)) as journal:
            group_ids = set(journal.groups_of(step))
            with suppress(Damaged):  # the batch may be skipped because its file is damaged
                group_ids |= {group.group_id for group in run.groups(step)}
            for group_id in group_ids:
                journal.discarded(group_id, "skipped")
            journal.settle()
        run.skip_groups(step)
        say(f"the batch of step {step} is skipped: groups {', '.join(map(str, sorted(group_ids)))}")
