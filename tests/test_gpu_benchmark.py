"""benchmarks/gpu runs from end to end at toy size on a CPU, as it will when a GPU appears; its sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timing

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The raw results of one run."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(FOLDER / "run.py"), "--device", "cpu", "--tiny", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "table.md").read_text() in done.stdout
    raw: dict[str, Any] = json.loads((out / "raw.json").read_text())
    return raw


def test_every_part_is_there_with_commit_and_hardware(found: dict[str, Any]) -> None:
    assert found["is_tiny"]
    assert found["skipped"] == []
    assert {"commit", "device", "torch", "transformers", "cores"} <= found["machine"].keys()
    assert [case["context"] for case in found["decode"]] == ["16", "48", "mixed"]
    assert [case["shape"] for case in found["train"]] == ["tiny"]
    modes = {"sync", "partial", "async", "sync_2x"}
    (measured,) = found["modes"]
    assert (measured["cap"], {mode["mode"] for mode in measured["modes"]}) == (64, modes)
    assert [(case["cap"], case["tokens_per_s"].keys()) for case in found["simulated"]] == [(64, modes), (256, modes)]


def test_what_is_simulated_is_marked_and_nothing_else(found: dict[str, Any]) -> None:
    assert all(case["is_simulated"] for case in found["simulated"])
    assert not any(case["is_simulated"] for case in found["modes"])


def test_the_roofline_is_the_time_of_reading_weights_and_each_rows_own_keys_and_values(found: dict[str, Any]) -> None:
    """By hand, in float32. A layer: q and o 64·64 each, k and v 64·32 each, 3·64·96 of the feed-forward, norms of 64,
    64, 16 and 16; embedding 320·64, tied; last norm 64. A token of the cache: 2 layers · 2 · 2 heads · 16 = 128."""
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = 4 * (2 * layer + 320 * 64 + 64)
    even, mixed = found["decode"][0], found["decode"][2]
    assert even["weight_bytes"] == pytest.approx(weights, rel=0.01)
    assert even["own_kv_bytes"] == 8 * (16 + 3 + 2) * 128 * 4, "8 rows of 16, 3 steps before and half of 4"
    assert mixed["own_kv_bytes"] == sum(6 * i + 5 for i in range(1, 9)) * 128 * 4
    assert mixed["scanned_positions"] >= 8 * 53 > mixed["own_positions"], "all rows scan as far as the longest"
    rate = found["device"]["bytes_per_s"]
    expected = (even["weight_bytes"] + even["own_kv_bytes"]) / rate / even["step_s"]
    assert even["of_roofline"] == pytest.approx(expected)


def test_a_train_step_counts_every_token_once_in_each_of_three_passes(found: dict[str, Any]) -> None:
    """By hand: responses of 8 and 16 after prompts of 64; 2 FLOPs a weight, norms of queries and keys among them."""
    products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 16) + 320 * 64
    attention = 2 * 4 * 64 * (72**2 + 80**2) / 2
    (train,) = found["train"]
    assert train["tokens"] == 152
    assert train["flops"] == pytest.approx(3 * (152 * 2 * products + attention))
    assert train["mfu"] is None, "of a CPU nobody knows the peak"


def test_a_line_through_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from modes import line

    assert line([(0.0, 2.0), (10.0, 7.0)]) == pytest.approx((2.0, 0.5))
    assert line([(4.0, 3.0)]) == (3.0, 0.0)
    assert line([(0.0, 2.0), (10.0, 1.0)]) == (1.5, 0.0), "a step does not get shorter with its context"


# ---- transfers into vLLM; tests/vllm_contract runs them with a real one ----------------------------------------------


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("psutil", reason="benchmarks/direct counts processor seconds with it")
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import transfer

    yield transfer
    for name in ("transfer", "run", "shapes"):
        sys.modules.pop(name, None)


def test_each_number_of_gpus_has_its_paths_and_what_is_left_out_has_a_reason(transfer: Any) -> None:
    def paths(num_gpus: int, tensor_parallel: int = 1) -> tuple[list[tuple[str, tuple[int, ...]]], list[str]]:
        cases, left = transfer.cases_of(num_gpus, tensor_parallel)
        return [(name, case.gpus) for case in cases for name in case.paths], left

    host = [("store", (0,)), ("file", (0,))]
    on_cpu = [("store", ()), ("file", ()), ("direct_gloo", ()), ("sparse_gloo", ())]
    assert paths(0) == (on_cpu, [])
    found, (reason,) = paths(1)
    assert found == [*host, ("direct_ipc", (0,))]
    assert reason == "NCCL: a trainer and a vLLM need 2 GPUs, and this machine has 1"
    assert paths(2) == ([*host, ("direct_ipc", (0,)), ("direct_nccl", (1,)), ("sparse_nccl", (1,))], [])
    found, (reason,) = paths(3, 2)
    assert found == [("direct_nccl", (1, 2)), ("sparse_nccl", (1, 2))]
    assert "--tensor-parallel is 2" in reason


def test_without_a_gpu_or_without_vllm_it_says_so(transfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.importlib.util, "find_spec", lambda name: None)
    assert transfer.refusal("cpu", ["tiny"]).startswith("vLLM is not installed")
    monkeypatch.setattr(transfer.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(transfer.torch.cuda, "is_available", lambda: False)
    assert transfer.refusal("cuda", ["8B"]).startswith("--device: got cuda, but torch")
    assert transfer.refusal("cpu", ["9B"]).startswith("--sizes: got 9B, allowed are 0.6B, 1.7B, 8B, small, tiny")
    assert transfer.refusal("cpu", ["tiny"]) == ""


def test_rows_have_the_columns_of_benchmarks_direct(transfer: Any) -> None:
    """Medians of the versions after the first one; a path that failed leaves its cell empty."""

    def seconds(*values: float) -> dict[str, Any]:
        return {"versions": [(value, value / 2) for value in values]}

    sizes = [
        {"size": "a", "num_bytes": 2**30, "paths": {"digest": seconds(9, 1, 2, 3), "file": seconds(9, 4, 4, 4)}},
        {"size": "b", "num_bytes": 2**31, "paths": {"digest": seconds(9, 3, 2, 9), "direct_ipc": seconds(9, 6, 5, 7)}},
    ]
    raw = json.loads((FOLDER.parent / "direct" / "results" / "raw.json").read_text())
    row = transfer.row_of("a", 2**30, sizes[0]["paths"])
    assert row == {"size": "a", "mb": 1024, "digest_s": 2, "digest_processor_s": 1, "file_s": 4, "file_processor_s": 2}
    assert row.keys() - {"size"} <= raw["rows"][0].keys()
    machine = {"gpus": ["H100"], "device": "", "vllm": "1", "torch": "2", "commit": "abc"}
    found = {"machine": machine, "is_cpu": False, "versions": 4, "changed": 0.01, "sizes": sizes}
    found |= {"left_out": ["x: y"], "failed": ["z: error"]}
    table = transfer.table_of(found)
    assert "| size | digest alone | file in shared memory | direct, ipc |" in table
    assert "| a, 1024 MiB | 2 s (1) | 4 s (2) |  |" in table
    assert "| b, 2048 MiB | 3 s (1.5) |  | 6 s (3) |" in table
    assert table.endswith("Not measured: x: y.\nFailed: z: error.\n")
    assert "no figures of a GPU" in transfer.table_of({**found, "is_cpu": True})
