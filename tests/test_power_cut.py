"""The power fails after any write, rename or flush of a run: no group is trained twice, none promised is lost.

A real loop, runner, journal and checkpoint writer, with a scripted engine and a trainer that remembers what it was
trained on; see `power_cut.py` for what a cut leaves.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.records.journal import Journal
from baton.records.metrics import MetricsWriter, read_metrics
from baton.records.predictions import RunPredictions
from baton.records.run_directory import RunDirectory
from baton.records.run_lock import RunLock
from baton.rollout.controller import RolloutController
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.run.evaluation import Evaluator
from baton.run.loop import Loop
from baton.run.resume import ResumePoint, checkpoint_writer, open_run, resume_point
from baton.run.tokenization import PromptEncoder
from baton.trainer import trainer as trainers
from baton.trainer.trainer import PublishedWeights
from baton.types import Batch, Group, PolicyVersion, SamplingParams
from tests.power_cut import KEEPS, Remains, recorded
from tests.rollout.test_controller import LateJudges, Prompts, length

STEPS, GROUPS = 5, 2
MODES = {
    "sync": {"mode": "sync"},
    "partial": {"mode": "partial", "overprovision": 2.0, "max_staleness": 4},
    "async": {"mode": "async", "max_staleness": 4},
}


class Trainer(trainers.Trainer):
    """Remembers the groups that it was trained on; its checkpoint is that list."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.num_steps = 0

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion("a", self.num_steps)

    def step(self, batch: Batch) -> dict[str, float]:
        self.trained += [group.group_id for group in batch.groups]
        self.num_steps = batch.step
        return {"policy/loss": 0.5}

    def publish(self) -> PublishedWeights:
        return PublishedWeights(self.version, {})

    def save(self, directory: Path) -> None:
        (directory / "baton").mkdir()
        (directory / "model.safetensors").write_bytes(bytes(self.trained))
        (directory / "baton" / "state.json").write_bytes(msgspec.json.encode([self.num_steps, self.trained]))

    def restore(self, directory: Path) -> None:
        self.num_steps, self.trained = msgspec.json.decode((directory / "baton" / "state.json").read_bytes())

    def close(self) -> None:
        pass


class Watcher:
    """Nobody."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Any]:
        yield lambda done: None

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def said(self, text: str) -> None:
        pass


class Scripted(Loop):
    """A loop without evaluations."""

    def evaluate(self) -> None:
        """Do nothing."""


class Later:
    """Writes a checkpoint of the background when the run waits for it, so after all that the run writes before."""

    def submit(self, write: Any) -> Any:
        return SimpleNamespace(done=lambda: False, result=lambda timeout_s: write())


def recipe(directory: Path, mode: str, *, background: bool = False) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r", "directory": str(directory), "steps": STEPS, "threads": 1},
            "model": {"path": "none", "device": "cpu"},
            "task": [{"name": "chain_sum"}],
            "rollout": {"batch_groups": GROUPS, "group_size": 2, "max_new_tokens": 6, **MODES[mode]},
            "engine": {"slots": 8, "max_context_tokens": 64, "processes": int(mode == "async")},
            "checkpoint": {"every": 2, "keep": 1, "background": background},
            "log": {"trace": False},
        }
    )


def build(wanted: Recipe) -> Scripted:
    """As `build.build_loop` does, with scripted parts."""
    path, watcher, trainer = wanted.run.path, Watcher(), Trainer()
    lock = RunLock.take(path)
    if not (path / "run.json").exists():
        RunDirectory.check_free(path, overwrite=False)
    point: ResumePoint = resume_point(wanted, watcher)  # type: ignore[arg-type]
    tokenizer: Any = SimpleNamespace(
        hf=SimpleNamespace(save_pretrained=lambda where: (where / "tokenizer.json").write_text("{}"))
    )
    run = open_run(wanted, lock, trainer, tokenizer, point, 1)
    metrics = MetricsWriter(path, resume_step=point.resume_step, before_write=lock.check)
    journal = Journal(run.journal, keeps_partials=wanted.rollout.mode != "sync", before_commit=lock.check)
    engine = FakeEngine(EngineSettings(slots=8, max_context_tokens=64, report_every_tokens=2), trainer.version, length)
    port, source = LocalTransport(engine), Prompts(point.state.position.get("numbers", 0))
    sampling = SeededSampling(SamplingParams(6), noise_seed=1)
    opened = ExitStack()
    for part in (trainer, metrics, journal):
        opened.callback(part.close)
    judge = MagicMock()
    judge.warnings.take.return_value = judge.warnings.stepped.return_value = []
    nothing: Any = None
    return Scripted(
        recipe=wanted,
        run=run,
        lock=lock,
        opened=opened,
        stream=source,  # type: ignore[arg-type]
        judge=judge,
        port=port,
        evaluator=Evaluator([], PromptEncoder(tokenizer), judge, nothing),
        controller=RolloutController(WorkerClient(port), wanted.rules(), source, LateJudges(), sampling, journal),
        journal=journal,
        trainer=trainer,
        save_checkpoint=checkpoint_writer(wanted, run, trainer),
        metrics=metrics,
        observer=watcher,  # type: ignore[arg-type]
        state=point.state,
        last_checkpoint=point.checkpoint,
        predictions=RunPredictions(path, None),
        writer=Later(),  # type: ignore[arg-type]
    )


class Promises:
    """What a run has promised, and since which entry of the log."""

    def __init__(self, loop: Scripted, log: list[Any], patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, str, Any]] = []
        write_groups, settle, save = loop.run.write_groups, loop.journal.settle, loop.save_checkpoint

        def wrote(step: int, groups: Any, source: Any = "batch") -> None:
            write_groups(step, groups, source)
            if source == "batch":
                self.made.append((len(log), "batch", (step, list(groups))))

        def settled() -> None:
            settle()
            kept = [t for g in loop.journal.open_groups() for t in g.members if t.finish_reason is not None]
            self.made.append((len(log), "finished", kept))

        def saved(state: Any) -> Any:
            write = save(state)

            def written() -> Any:
                made = write()
                self.made.append((len(log), "checkpoint", state.step))
                return made

            return written

        patch.setattr(loop.run, "write_groups", wrote)
        patch.setattr(loop.journal, "settle", settled)
        loop.save_checkpoint = saved

    def check(self, cut: int, resumed: dict[str, Any]) -> None:
        """Compare what had been promised when the power failed with what a resume made of it."""
        batches = resumed["batches"]
        members = {m.trajectory.name: m.trajectory for batch in batches.values() for g in batch for m in g.members}
        for at, kind, promised in self.made:
            if at > cut:
                continue
            if kind == "batch":
                assert batches[promised[0]] == promised[1], f"the batch of step {promised[0]} is another"
            elif kind == "finished":
                assert all(members[t.name].token_ids == t.token_ids for t in promised), "a finished one is lost"
            else:
                assert resumed["began_at"] >= promised, f"the checkpoint of step {promised} is lost"


def resume(wanted: Recipe) -> dict[str, Any]:
    """Resume to the end, and return what was made."""
    loop = build(wanted)
    began_at = loop.state.step
    loop.train()
    loop.close()
    trainer: Any = loop.trainer
    batches = {step: loop.run.groups(step) for step in loop.run.recorded_steps()}
    ids = [group.group_id for step in sorted(batches) for group in batches[step]]
    assert trainer.trained == ids, "it was trained on what is recorded, in that order"
    assert len(set(ids)) == len(ids) == STEPS * GROUPS, "each group once"
    prompts = {group.prompt.prompt_id for batch in batches.values() for group in batch}
    assert len(prompts) == STEPS * GROUPS, "each prompt once"
    rows = [row["step"] for row in read_metrics(loop.run.path) if "policy/loss" in row]
    assert rows == list(range(1, STEPS + 1)), "metrics have every step once"
    return {"began_at": began_at, "batches": batches}


@pytest.mark.parametrize("mode", ["partial", "async"])
def test_a_journal_that_ends_before_the_checkpoint_trains_no_group_twice(mode: str, tmp_path: Path) -> None:
    """The journal as it was before step 4, beside the checkpoint of step 4: what it calls open was trained since."""
    wanted = recipe(tmp_path, mode)
    loop, old = build(wanted), tmp_path / "old journal"
    draw, step, was_open = loop.controller.next_batch, loop.trainer.step, set[int]()

    def kept(on_scored: Any) -> list[Group]:
        drawn = draw(on_scored)
        groups = {group.issued.group_id for group in loop.journal.open_groups()}
        if groups and loop.state.step < 3:
            loop.journal.settle()
            shutil.copy(loop.run.journal, old)
            was_open.clear()
            was_open.update(groups)
        return drawn

    def stopping(batch: Batch) -> dict[str, float]:
        if batch.step == 4:
            loop.stop.request(0)
        return step(batch)

    loop.controller.next_batch = kept  # type: ignore[method-assign]
    loop.trainer.step = stopping  # type: ignore[method-assign]
    loop.train()
    loop.close()
    trained: list[int] = loop.trainer.trained  # type: ignore[attr-defined]
    assert len(trained) == 4 * GROUPS
    assert was_open & set(trained), "the old journal has open groups that the checkpoint was trained on"
    shutil.copy(old, loop.run.journal)
    assert resume(wanted)["began_at"] == 4


@pytest.fixture
def fast_disk() -> Iterator[Path]:
    """A directory in memory where there is one: the power fails in our books, so nothing need reach a disk."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="baton-test-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "background"), [*((mode, False) for mode in MODES), ("sync", True), ("partial", True)]
)
def test_a_power_cut_after_any_write_trains_no_group_twice_and_loses_none(
    mode: str, background: bool, fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else git is asked each time
    monkeypatch.setattr("baton.records.run_directory._environment", lambda threads: {"command": []})
    (fast_disk / "disk").mkdir()
    wanted = recipe(fast_disk / "disk", mode, background=background)
    with recorded(fast_disk / "disk") as recorder:
        loop = build(wanted)
        promises = Promises(loop, recorder.log, monkeypatch)
        loop.train()
        loop.close()
    num_cuts, seen = cut_everywhere(wanted, recorder.log, promises, range(len(recorder.log) + 1))
    print(f"{mode}: {num_cuts} power cuts at {len(recorder.log)} operations, {seen} of them different")
    assert len(recorder.log) > 200
    assert seen > 200


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_a_power_cut_during_a_resume_trains_no_group_twice_and_loses_none(
    mode: str, fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was stopped at step 3; the power fails in the process that resumes it."""
    monkeypatch.setattr("baton.records.run_directory._environment", lambda threads: {"command": []})
    disk = fast_disk / "disk"
    disk.mkdir()
    wanted = recipe(disk, mode)
    loop = build(wanted)
    step = loop.trainer.step

    def stopping(batch: Batch) -> dict[str, float]:
        if batch.step == 3:
            loop.stop.request(0)
        return step(batch)

    loop.trainer.step = stopping  # type: ignore[method-assign]
    loop.train()
    loop.close()
    with recorded(disk) as recorder:
        for path in [*disk.rglob("*"), disk]:  # what the first process left is on the disk
            recorder.flushed(str(path))
        begin = len(recorder.log)
        loop = build(wanted)
        assert loop.state.step == 3
        promises = Promises(loop, recorder.log, monkeypatch)
        loop.train()
        loop.close()
    num_cuts, seen = cut_everywhere(wanted, recorder.log, promises, range(begin, len(recorder.log) + 1))
    print(f"{mode}: {num_cuts} power cuts at {len(recorder.log) - begin} operations, {seen} of them different")
    assert seen > 100


def cut_everywhere(wanted: Recipe, log: list[Any], promises: Promises, cuts: range) -> tuple[int, int]:
    """Cut the power after these entries of the log, and resume; return the number of cuts and of different remains."""
    seen: dict[Any, dict[str, Any]] = {}
    disk = Path(wanted.run.directory)
    for cut in cuts:
        for keeps in KEEPS:
            remains = Remains(log[:cut], keeps, seed=cut)
            key = remains.key
            if key not in seen:
                shutil.rmtree(disk)
                remains.write(disk)
                try:
                    seen[key] = resume_or_complete(wanted)
                except Exception as error:
                    raise AssertionError(f"cut {cut} of {len(log)}, keeping {keeps}: {log[cut - 1]!s:.200}") from error
            promises.check(cut, seen[key])
    return len(cuts) * len(KEEPS), len(seen)


def resume_or_complete(wanted: Recipe) -> dict[str, Any]:
    """A run that had ended cannot be resumed, but what it recorded is there."""
    try:
        return resume(wanted)
    except UserError as error:
        if "is complete" not in str(error):
            raise
        run = RunDirectory(wanted.run.path)
        return {"began_at": STEPS, "batches": {step: run.groups(step) for step in run.recorded_steps()}}
