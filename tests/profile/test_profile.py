"""`baton profile`: the device is measured by the real engine and trainer, and planning reads what it wrote."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.cost.efficiency import CalibrationSettings
from baton.errors import UserError
from baton.profile.measure import catalogue_name, profile
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload
from baton.records.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_measured_device_predicts_a_run_of_it(small: Any, tmp_path: Path) -> None:
    calibration = tmp_path / "calibration.toml"
    found = json.loads(run("profile", small.recipe, "--steps", 4, "--out", calibration, "--json"))
    in_a_run = {f"{term}_in_a_run" for term in ("step", "generation", "training")}
    assert {point["phase"] for point in found["points"]} == {"decode", "prefill", "train", "rollout", *in_a_run}
    assert all(point["seconds"] > 0 and point["predicted_s"] > 0 for point in found["points"])
    assert load_recipe(CalibrationSettings, calibration).build().of("CPU").train == found["efficiency"]["train"]
    question = ["--cluster", ROOT / "recipes/planner/this-cpu.toml", "--model", small.model, "--colocated", "--json"]
    plan = json.loads(run("plan", *question, "--workload", small.run, "--calibration", calibration))["plan"]
    b = plan["breakdown"]
    assert b["step_s"] == pytest.approx(b["sync_s"] + b["rollout_s"] + b["reward_s"] + b["train_s"])
    measured = [row["perf/step_time"] for row in read_metrics(small.run) if "perf/step_time" in row]
    assert min(measured) / 30 < b["step_s"] < max(measured) * 30  # one scale; how near is the benchmark's matter


def test_a_workload_is_measured_from_a_run(small: Any) -> None:
    load = read_workload(small.run)
    assert (load.groups, load.group_size, load.max_staleness) == (4, 4, 0)
    assert 1 <= load.output.mean <= load.output.longest <= 10
    assert 0 < load.trained_share <= 1
    assert (load.max_batch, load.engine_context_tokens, load.weight_bytes) == (16, 64, 4.0)


def test_a_name_outside_the_catalogue_is_refused(small: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--gpu: unknown GPU 'Abacus'"):
        run("profile", small.recipe, "--gpu", "Abacus", "--out", tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("shown", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.15, "A100-80"),
        ("NVIDIA A100 80GB PCIe", 79.15, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.38, "A100-40"),
        ("A100-PCIE-40GB", 39.38, "A100-40"),
        ("NVIDIA A800-SXM4-80GB", 79.15, "A800"),
        ("NVIDIA A10", 22.06, "A10"),
        ("NVIDIA L4", 22.03, "L4"),
        ("NVIDIA L20", 44.4, "L20"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA H20", 95.0, "H20"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, None),
        ("NVIDIA A100-SXM-64GB", 63.4, None),
        ("NVIDIA A10G", 22.06, None),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA H20-3e", 139.8, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
    ],
)
def test_a_gpu_is_found_by_its_whole_name_and_its_memory(shown: str, gib: float, name: str | None) -> None:
    if name is None:
        with pytest.raises(UserError, match=f"--gpu: {re.escape(shown)} is not in the catalogue; give"):
            catalogue_name(shown, gib * 2**30)
    else:
        assert catalogue_name(shown, gib * 2**30) == name


@pytest.mark.parametrize(("mode", "threads"), [("sync", 8), ("async", 6)])
def test_the_trainer_is_measured_with_as_many_threads_as_in_a_run(
    small: Any, monkeypatch: pytest.MonkeyPatch, mode: str, threads: int
) -> None:
    changes = {"rollout.mode": mode, "engine.processes": 2, "run.threads": 0, "engine.dtype": "auto"}
    seen: list[int] = []

    def measured(recipe: Recipe, say: Any) -> None:
        assert recipe.engine.dtype == "float32"  # as in a run, whose predictions use the calibration
        seen.append(torch.get_num_threads())
        raise InterruptedError

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("baton.profile.measure.engine_points", lambda recipe, say: [])
    monkeypatch.setattr("baton.profile.measure.measure_train_steps", measured)
    before = torch.get_num_threads()
    try:
        with pytest.raises(InterruptedError):
            profile(load_recipe(Recipe, small.recipe, changes), None, print, num_steps=1)
    finally:
        torch.set_num_threads(before)
    assert seen == [threads]
