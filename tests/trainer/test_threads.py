"""When torch's deterministic algorithms are used, where threads allocate memory, and how much memory is unused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.policy import memory
from baton.policy.load import torch_dtype
from baton.policy.threads import set_deterministic, set_up_threads, unordered_writes


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    set_deterministic(before)


def is_on() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("asked", "without_cuda"), [(None, True), (True, True), (False, False)])
def test_without_cuda_they_are_on_unless_they_are_refused(asked: bool | None, without_cuda: bool) -> None:
    set_up_threads(torch.get_num_threads(), deterministic=asked)
    assert is_on() == without_cuda


@pytest.mark.parametrize(("device", "within"), [("cuda:1", False), ("cpu", True)])
def test_writes_at_unique_indices_do_without_them_on_cuda(device: str, within: bool) -> None:
    set_deterministic(True)
    with unordered_writes(torch.device(device)):
        assert is_on() == within
    assert is_on()
    set_deterministic(False)
    with unordered_writes(torch.device(device)):
        assert not is_on()
    assert not is_on()


@pytest.mark.parametrize(("capability", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_float32_on_a_gpu_without_bfloat16(
    capability: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU of capability below 8 computes bfloat16 by emulation only, which torch counts by default."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or capability
    )
    cuda = torch.device("cuda")
    assert torch_dtype("auto", cuda) is expected
    assert torch_dtype("bfloat16", cuda) is torch.bfloat16  # who asks for it gets it
    assert torch_dtype("auto", torch.device("cpu")) is torch.float32
    assert ("Tesla T4 has no bfloat16 arithmetic" in caplog.text) == (not capability)


ALLOCATE = """
import ctypes, sys
from threading import Thread
from baton.policy.memory import share_heap

allocate = ctypes.CDLL(None).malloc
allocate.restype, allocate.argtypes, found = ctypes.c_void_p, [ctypes.c_size_t], []
if sys.argv[1:]:
    share_heap()
for _ in range(2):
    thread = Thread(target=lambda: found.append(allocate(1000)))
    thread.start()
    thread.join()
lines = [line.split()[0] for line in open("/proc/self/maps") if line.endswith("[heap]\\n")]
begin, end = (int(place, 16) for place in lines[0].split("-"))
print([begin <= place < end for place in found])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_threads_allocate_memory_from_the_heap_of_the_process() -> None:
    """Otherwise, memory that one train step's thread has freed is not used by the next one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def is_in_heap(*arguments: str) -> str:
        command = [sys.executable, "-c", ALLOCATE, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=300).stdout

    assert is_in_heap() == "[False, False]\n"
    assert is_in_heap("shared") == "[True, True]\n"


@pytest.mark.parametrize(
    ("own", "controller", "files"),
    [
        ("0::/job/step\n", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu:/\n4:memory:/job/step\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_unused_memory_is_that_of_the_tightest_cgroup(
    own: str, controller: str, files: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may use 1000 bytes, of which 700 are used; 200 of them are cached pages, which the kernel can evict. The
    step has no limit of its own. A container sees the job's directory as its root."""
    root = tmp_path / "cgroups"
    limit, used, evictable = files
    for directory, values in (("job/step", ("max", 600)), ("job", ("1000", 700))):
        (root / directory).mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, used), values, strict=True):
            (root / directory / name).write_text(f"{value}\n")
        (root / directory / "memory.stat").write_text(f"anon 500\n{evictable} 200\n")
    (tmp_path / "own").write_text(own)
    assert memory.CGROUPS[controller][1:] == files
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    cpu = torch.device("cpu")
    for seen in (root, root / "job"):
        monkeypatch.setattr(memory, "CGROUPS", {controller: (seen, *files)})
        assert memory.available_bytes(cpu) == 500
    monkeypatch.setattr(memory, "CGROUPS", {controller: (tmp_path / "none", *files)})
    assert memory.available_bytes(cpu) > 10**6
