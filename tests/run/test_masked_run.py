"""Runs whose rollouts are sampled with top-p and top-k: masks through journal, resume and engine processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.console import Console
from baton.recipe.recipe import Recipe
from baton.records.journal import Journal
from baton.records.metrics import read_metrics
from baton.run.assemble import build_loop
from baton.types import SamplingParams, Trajectory
from baton.views.terminal.progress import TerminalObserver
from tests.run.test_resume import assert_equal_runs, outcome, recipe, tiny_model  # noqa: F401  # a fixture
from tests.run.test_resume import train as finished

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

TRUNCATED = {"rollout__top_p": 0.9, "rollout__top_k": 40}


def steps_of(wanted: Recipe) -> list[dict[str, Any]]:
    return [row for row in read_metrics(wanted.run.path) if "policy/entropy" in row]


def recorded(journal: Journal, step: int) -> list[Trajectory]:
    """The trajectories of the groups that no batch up to this step has."""
    return [t for group in journal.open_groups(step) for t in group.members]


def is_begun(trajectory: Trajectory) -> bool:
    return bool(trajectory.segments) and trajectory.finish_reason is None


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_engine_and_trainer_agree_over_the_kept_tokens_and_a_killed_run_resumes(
    mode: str,
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rollouts that a kill interrupts keep their masks in the journal; in `sync` the resumed run has the bits of one
    that nothing happened to."""
    steps = 4 if mode == "sync" else 12
    changes = {**TRUNCATED, "run__steps": steps, "rollout__mode": mode}
    wanted = recipe(tiny_model, tmp_path / "killed", **changes)
    loop = build_loop(wanted, TerminalObserver(Console(quiet=True), 4), resume=False, overwrite=False)
    step = loop.trainer.step

    def dies(batch: Any) -> dict[str, float]:
        """In `partial`, die when the journal has an unfinished rollout with tokens, which half of the steps leave."""
        if batch.step >= 3 and (mode == "sync" or any(map(is_begun, recorded(loop.journal, batch.step - 1)))):
            raise RuntimeError("the process dies")
        return step(batch)

    monkeypatch.setattr(loop.trainer, "step", dies)
    with pytest.raises(RuntimeError, match="dies"):
        loop.train()
    loop.close()
    at_death = read_metrics(wanted.run.path)[-1]["step"]
    with closing(Journal(wanted.run.path / "journal.sqlite", keeps_partials=mode == "partial")) as journal:
        trajectories = recorded(journal, at_death)
    masks = [mask for t in trajectories for mask in t.kept]
    assert all(masks), "every recorded token has its mask"
    assert 1 < max(len(mask) // 2 for mask in masks) <= 40
    if mode == "partial":
        assert any(map(is_begun, trajectories)), "also those of unfinished ones"
    finished(wanted, resume=True)
    rows = steps_of(wanted)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    compared = [row["policy/logprob_diff_max"] for row in rows if "policy/logprob_diff_max" in row]
    assert compared, "in `partial`, a batch may have no token of the newest version, but not every batch"
    assert max(compared) <= 1e-4
    if mode == "sync":
        unbroken = recipe(tiny_model, tmp_path / "unbroken", **changes)
        finished(unbroken, resume=False)
        assert_equal_runs(unbroken, wanted)


def test_engine_processes_report_the_masks_of_one_engine(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    one = recipe(tiny_model, tmp_path / "one", **TRUNCATED, run__steps=2)
    two = recipe(tiny_model, tmp_path / "two", **TRUNCATED, run__steps=2, engine__processes=2)
    finished(one, resume=False)
    finished(two, resume=False)
    assert outcome(one)[3] == outcome(two)[3]
    assert all(row["policy/logprob_diff_max"] <= 1e-4 for row in steps_of(two))


def test_a_run_without_truncation_reports_none(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    wanted = recipe(tiny_model, tmp_path, run__steps=1, rollout__temperature=1.3)
    assert wanted.rollout.sampling() == SamplingParams(12, temperature=1.3)
    finished(wanted, resume=False)
    members = [member for group in outcome(wanted)[3][0] for member in group.members]
    assert not any(segment.kept for member in members for segment in member.trajectory.segments)
