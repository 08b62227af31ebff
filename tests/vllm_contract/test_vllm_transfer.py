"""benchmarks/gpu/transfer.py runs from end to end with a real vLLM on a CPU. Its figures say nothing about GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "transfer.py"


def test_every_path_that_needs_no_gpu_is_measured_and_named_as_such(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path), "--scratch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "transfer.json").read_text())
    assert found["is_cpu"]
    assert found["failed"] == found["left_out"] == []
    assert {"commit", "device", "torch", "vllm", "gpus", "links"} <= found["machine"].keys()
    ((paths, num_bytes),) = [(one["paths"], one["num_bytes"]) for one in found["sizes"]]
    assert list(paths) == ["digest", "store", "file", "direct_gloo", "sparse_gloo"]
    assert all(len(one["versions"]) == found["versions"] for one in paths.values())
    assert paths["direct_gloo"]["sent_bytes"] == [num_bytes] * found["versions"]
    first, *later = paths["sparse_gloo"]["sent_bytes"]
    assert first == num_bytes
    assert all(0 < sent < 0.05 * num_bytes for sent in later)
    table = (tmp_path / "transfer.md").read_text()
    assert table in done.stdout
    assert "no figures of a GPU" in table
    assert "| size | digest alone | store | file in shared memory | direct, gloo | sparse, gloo |" in table
