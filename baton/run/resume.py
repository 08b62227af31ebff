"""Where a run starts or resumes, and the checkpoints that it resumes from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.errors import Damaged, UserError
from baton.files import atomic_directory, seal, writing
from baton.policy.tokenizer import Tokenizer
from baton.recipe.changes import changes_of, compare_for_resume
from baton.recipe.recipe import Recipe
from baton.records.journal import Journal
from baton.records.run_directory import RunDirectory, without_none
from baton.records.run_lock import RunLock
from baton.run.loop import LoopState, Observer, SavedCheckpoint
from baton.trainer.checkpoint import (
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    newest_intact_checkpoint,
    prune_checkpoints,
    set_aside_checkpoints,
)
from baton.trainer.trainer import Trainer

LOOP_STATE = Path("baton") / "loop.json"
"""Path within a checkpoint of the encoded LoopState."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state that a run starts or resumes with."""

    state: LoopState
    checkpoint: Path | None
    """None if the run starts from the beginning."""
    is_new: bool = True
    """Whether the run's directory has to be created; False if it has rollouts to reuse."""

    @property
    def resume_step(self) -> int:
        """The last step whose metrics are kept; -1 from the beginning, which also drops metrics of step 0."""
        return -1 if self.checkpoint is None else self.state.step


def checkpoint_writer(recipe: Recipe, run: RunDirectory, trainer: Trainer) -> Callable[[LoopState], SavedCheckpoint]:
    """Return a function that writes a sealed checkpoint atomically and removes the checkpoints that are not kept."""
    keep = recipe.checkpoint.keep

    def save_checkpoint(state: LoopState) -> SavedCheckpoint:
        path = checkpoint_path(run.checkpoints, state.step)
        with atomic_directory(path, before_rename=run.check_held) as directory:
            trainer.save(directory)
            with writing(directory / LOOP_STATE):
                (directory / LOOP_STATE).write_bytes(msgspec.json.encode(state))
            seal(directory)
        prune_checkpoints(run.checkpoints, keep, keep_step=state.best_step)
        return SavedCheckpoint(path, checkpoint_step(list_checkpoints(run.checkpoints)[-keep:][0]))

    return save_checkpoint


def resume_point(recipe: Recipe, observer: Observer) -> ResumePoint:
    """Find the latest intact checkpoint; without one the run starts from the beginning."""
    path = recipe.run.path
    if not (path / "run.json").exists():
        observer.said(f"{path} does not exist yet: beginning it")
        return ResumePoint(LoopState(), None)
    run = RunDirectory.open(path)
    for warning in compare_for_resume(run.recipe(), without_none(recipe.model_dump(mode="json"))):
        observer.said(f"warning: {warning}")
    if recipe.trainer.compile:
        observer.said("warning: with trainer.compile the last bits may differ from those of a run never stopped")
    checkpoint = newest_intact_checkpoint(run.checkpoints, observer.said)
    if checkpoint is None:
        observer.said(f"{path} has no checkpoint yet: beginning it again, with the rollouts it has")
        return ResumePoint(LoopState(), None, is_new=False)
    try:
        state = msgspec.json.decode((checkpoint / LOOP_STATE).read_bytes(), type=LoopState)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise Damaged(f"{checkpoint / LOOP_STATE} cannot be read: {error}; remove {checkpoint}") from error
    if state.step > recipe.run.steps:
        raise UserError(
            f"run.steps = {recipe.run.steps}: {checkpoint} has {state.step} train steps already; allowed is "
            f"{state.step} or more, so resume with a larger run.steps, or begin another run under another run.name"
        )
    if state.step == recipe.run.steps and any(one.step == state.step for one in run.evaluations()):
        raise UserError(
            f"{path} is complete: {state.step} of run.steps = {recipe.run.steps} train steps are done; "
            f"to go on, resume with a larger run.steps"
        )
    observer.said(f"going on after step {state.step}, from {checkpoint}")
    return ResumePoint(state, checkpoint, is_new=False)


def open_run(
    recipe: Recipe, lock: RunLock, trainer: Trainer, tokenizer: Tokenizer, place: ResumePoint, threads: int
) -> RunDirectory:
    """Make the run's directory, or restore it and the trainer to the resume point. The last action of a start."""
    resolved = without_none(recipe.model_dump(mode="json"))
    if not place.is_new:
        run = RunDirectory.open(recipe.run.path, lock)
        if place.checkpoint is not None:
            trainer.restore(place.checkpoint)
            set_aside_checkpoints(run.checkpoints, place.state.step)
        run.cut_after(place.resume_step)
        changes = changes_of(run.recipe(), resolved)
        if any(key.startswith("reward.") for key in changes) and run.journal.exists():
            # before the recipe is written: if the start is interrupted here, the next one finds them changed again
            with closing(Journal(run.journal, keeps_partials=True)) as journal:
                journal.forget_judgements()
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
    """Remove a recorded batch from a run, for example one that the trainer cannot process. A resume generates another.

    Its groups are discarded in the journal with the cause "skipped"; its trajectories are kept under another name.
    Raises UserError if there is no such batch, or if a checkpoint was trained on it.
    """
    lock = RunLock.take(path, say)
    try:
        run = RunDirectory.open(path, lock)
        checkpoint = newest_intact_checkpoint(run.checkpoints, say)
        done = 0 if checkpoint is None else checkpoint_step(checkpoint)
        if step <= done:
            raise UserError(f"--skip-batch {step}: {checkpoint} has been trained on it; allowed is a later batch")
        if not run.has_groups(step):
            if run.has_skipped(step):
                say(f"the batch of step {step} was left out already")
                return
            later = [str(each) for each in run.recorded_steps() if each > done]
            raise UserError(
                f"--skip-batch {step}: {path} has no recorded batch of this step; allowed is {' or '.join(later)}"
                if later
                else f"--skip-batch {step}: {path} has no recorded batch that no checkpoint contains; leave it out"
            )
        journal = Journal(run.journal, keeps_partials=True, before_commit=lock.check)
        try:
            group_ids = set(journal.groups_of(step))
            with suppress(Damaged):
                group_ids |= {group.group_id for group in run.groups(step)}
            for group_id in group_ids:
                journal.discarded(group_id, "skipped")
            journal.settle()
        finally:
            journal.close()
        run.skip_groups(step)
        say(f"the batch of step {step} is left out: groups {', '.join(map(str, sorted(group_ids)))}")
    finally:
        lock.release()
