"""Trainer and embedded engine on an emulated CUDA device: tests/fake_cuda.

No result here says anything about real kernels or their speed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.trainer.algorithm import PRESETS
from tests.all_cases import ALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "fake_cuda" / "guard.cpp"

LAUNCHES = {"packed": 188, "padded": 225, "packed, recomputed": 250, "packed, lora": 274, "decode": 66}
"""Largest numbers of kernel launches per layer: forward and backward pass of a microbatch, or a decode step. They may
only become smaller."""
WAITS = {"packed": 0, "padded": 1, "packed, recomputed": 0, "packed, lora": 0, "decode": 1, "step": 2}
"""Largest numbers of waits for the device, independent of the number of layers. `step`: a train step of one packed
microbatch. They may only become smaller."""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the emulated device."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("the emulated device needs a C++ compiler (g++)")
    made, torch_directory = tmp_path_factory.mktemp("fake_cuda") / "guard.so", Path(torch.__file__).parent
    folders = (f"-I{torch_directory}/include", f"-L{torch_directory}/lib", f"-Wl,-rpath,{torch_directory}/lib")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", abi, *folders, str(SOURCE), "-o", str(made)]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True, timeout=500)
    return made


@pytest.fixture(scope="module", params=["cuda", "hip"])
def found(request: pytest.FixtureRequest, guard: Path) -> dict[str, Any]:
    """What ran on the emulated device, in a process of its own; with "hip" as a build of torch for ROCm."""
    results = guard.with_name(f"{request.param}.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "tests.fake_cuda", str(guard), str(results), request.param]
    subprocess.run(run, check=True, cwd=ROOT, env=environment, timeout=1500)
    return {**json.loads(results.read_text()), "kind": request.param}


@pytest.mark.timeout(2400)
def test_the_emulated_device_refuses_what_cuda_refuses(found: dict[str, Any]) -> None:
    emulation = found["emulation"]
    for name, sentence in {
        "two devices": "Expected all tensors to be on the same device",
        "numpy": "can't convert cuda:0",
        "generator": "Expected a 'cuda' device type for generator",
        "running sum": "does not have a deterministic implementation",
    }.items():
        assert sentence in emulation[name]["error"]
    if found["kind"] == "hip":
        assert "not supported for ROCm" in emulation["wide product"]["error"]
    assert emulation["indexed writes"] == 1
    assert emulation["tf32 error"] == 1.0  # 4097 has 13 bits


def test_rotary_angles_do_not_use_tf32(found: dict[str, Any]) -> None:
    assert found["emulation"]["rotary error"] >= 1.0
    assert found["emulation"]["rotary error, kept exact"] == 0.0


def test_every_preset_trains_packed_and_padded_recomputed_and_not_all_weights_and_adapters(
    found: dict[str, Any],
) -> None:
    steps = found["steps"]
    assert {name: step["error"] + step["where"] for name, step in steps.items() if "error" in step} == {}
    names = 5 + (len(PRESETS) if ALL or found["kind"] == "cuda" else 1)  # 5 settings that add passes
    assert len(steps) == names * (8 if ALL else 4)
    for name, step in steps.items():
        assert step["is_packed"] == ("always" in name), name
        assert step["devices"] == ["cuda:0"], name
        assert step["is_finite"], name
        assert step["moved"], name


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_and_waits_do_not_become_more(found: dict[str, Any], name: str) -> None:
    one = found["decode"] if name == "decode" else found["passes"][name]
    assert one.get("error", "") == ""
    if found["kind"] == "cuda" or not name.startswith("packed"):  # without the kernel, a launch for each row
        assert 0 < one["launches_per_layer"] <= LAUNCHES[name]
    assert sum(one["waits"].values()) <= WAITS[name], one["waits"]


def test_a_step_waits_for_the_device_a_few_times(found: dict[str, Any]) -> None:
    waits = found["steps"]["grpo: always, kept, full"]["waits"]
    assert sum(waits.values()) <= WAITS["step"], waits


def test_a_decode_step_writes_its_keys_without_the_slow_kernel(found: dict[str, Any]) -> None:
    assert found["decode"]["slow"] == {}
    assert found["decode"]["ended"] == 16
    assert sum(found["decode"]["copies"].values()) <= 2, found["decode"]["copies"]


def test_a_sleeping_trainers_tensors_are_on_the_gpu_while_they_are_sent(found: dict[str, Any]) -> None:
    sent = [[["cuda:0", 30.0]], [], [["cuda:0", 80.0]], []]
    assert found["staged"] == {"sent": sent, "left": 0}


def test_a_difference_of_versions_is_found_on_the_device(found: dict[str, Any]) -> None:
    """Ten of 1,000 elements of one tensor, and one of another, with the checksums that the host computes."""
    case = found["differences"]
    assert case["is_equal"], case
    assert case["devices"] == ["cuda:0"] * 4
    assert [case["values"][0], case["values"][2], case["values"][3]] == [list(range(0, 1000, 100)), [42], [5.0]]
