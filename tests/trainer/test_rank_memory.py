"""The peaks of ranks on fake tensors (benchmarks/memory) against the law, the stated limits, and the present code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.cases import SHOWN, Case
from benchmarks.memory.fake_rank import predict
from tests.all_cases import ALL

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "memory" / "results" / "ranks.json").read_text())["rows"]


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{name: row[name] for name in Case._fields})


PEAKS = {case_of(row): row["peak"] for row in RESULTS}


def test_the_law_is_within_fifteen_per_cent_of_every_measured_peak() -> None:
    assert {Case(model, ranks) for model in SHOWN for ranks in (8, 16, 64)} <= PEAKS.keys()
    for case, peak in PEAKS.items():
        assert predict(case)[1] == pytest.approx(peak, rel=0.15), case


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (Case("8B", 8), 25e9),
        (Case("14B", 8), 42e9),
        (Case("32B", 16), 80e9),
        (Case("30B-A3B", 16), 80e9),
        (Case("8B", 8, 32768, row=32768), 80e9),
    ],
)
def test_large_models_fit_on_few_gpus(case: Case, limit: float) -> None:
    assert PEAKS[case] <= limit


@pytest.mark.slow
def test_the_present_code_has_the_measured_peaks(tmp_path: Path) -> None:
    """In a process of its own, which replaces functions of transformers."""
    found = tmp_path / "ranks.json"
    models = ["0.6B with 4 layers", *(["0.6B"] if ALL else [])]
    command = [sys.executable, "-m", "benchmarks.memory.fake_rank", str(found), "--models", *models]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=2000 if ALL else 500)
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == (4 if ALL else 1)
    for row in rows:
        assert row["peak"] == pytest.approx(PEAKS[case_of(row)], rel=0.02), row
