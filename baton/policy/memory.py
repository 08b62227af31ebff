"""Copies tensors to a device, and measures how much memory tensors use and how much memory a device has available."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS: Final = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller in `OWN_CGROUPS` (empty for cgroup v2) → root of the hierarchy, the file with a cgroup's limit, the file
with its usage, and the field in `memory.stat` for cached pages of files, which the kernel can evict."""
_M_ARENA_MAX: Final = -8
"""Parameter of glibc's `mallopt`: the maximum number of heaps."""


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device. With CUDA, the copy uses pinned memory and may end after the call returns."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def share_heap() -> None:
    """Make all threads of this process allocate host memory from one heap. By default, glibc gives threads heaps of
    their own, and a thread cannot use memory that another thread has freed in its heap. Each train step runs in a
    thread of its own, so by default the memory of earlier train steps would not be reused (`benchmarks/memory`). A
    thread that has allocated memory before this call keeps its heap. Has no effect with other C libraries."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Return freed host memory to the system. By default, glibc keeps freed blocks of up to 32 MiB in its heap, and
    later tensors may not fit into these blocks. Has no effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def held_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes that these tensors occupy on devices of this type. Tensors that share a storage count once."""
    there = (t.untyped_storage() for t in tensors if t.device.type == device.type and t.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def available_bytes(device: torch.device) -> int:
    """Return the unused bytes of a device; for a CPU, the minimum over the host and the process's cgroups, which limit
    the memory of containers and batch jobs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if _MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        available = 1024 * int(lines["MemAvailable"].split()[0])
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_unused_in_cgroups()])


def _unused_in_cgroups() -> Iterator[int]:
    """Yield the unused bytes of each cgroup with a limit, from the process's own cgroup up to the root. In a container,
    the path of the own cgroup may be a path of the host that does not exist in the container. The root is then the
    container's own cgroup."""
    lines = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else []
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers not in CGROUPS:
            continue
        root, limit_file, usage_file, evictable = CGROUPS[controllers]
        directory = root / own.lstrip("/")
        for each in (directory, *(parent for parent in directory.parents if parent.is_relative_to(root))):
            with suppress(OSError):  # v2's root has no such files
                limit = (each / limit_file).read_text().strip()
                if limit != "max":
                    stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
                    used = int((each / usage_file).read_text()) - int(stat.get(evictable, 0))
                    yield max(0, int(limit) - used)


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of this process's tensors on a CUDA device since this function was last called."""
    peak = int(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def peak_memory() -> dict[str, float]:
    """Return the metric of this process's peak memory. With CUDA, the value is the highest peak of torch's allocator on
    any device; otherwise, the value is the peak resident set size."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        peak = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
    elif _STATUS.is_file():  # on Linux, ru_maxrss includes the peak of the parent process
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        peak = 1024 * int(lines["VmHWM"].split()[0])
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"perf/trainer_peak_bytes": float(peak)}
