"""No process holds a copy of a version in anonymous memory: not the trainer, a rank, the hub, nor a worker's fetcher.
The pages of mapped files are not counted, because the system can evict them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PART_BYTES = 80 * 2**20
"""Working memory of the thread that codes a part (`run/memory.py`)."""
OTHER_BYTES = 48 * 2**20
"""Chunks of 1 MiB, the HTTP server's buffers, and threads' stacks."""


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_publication_needs_memory_for_a_tensor_and_a_part_in_each_process(ranks: int, tmp_path: Path) -> None:
    """The growth of each process while a version is gathered, published, served and fetched: first a keyframe, then a
    delta after a train step. The allocator returns freed blocks at once: what it keeps for later differs by 50 MiB from
    run to run."""
    script = ROOT / "tests" / "run" / "publication.py"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "trainer")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, str(script), str(tmp_path), str(ranks)]
    output = subprocess.run(command, check=True, env=environment, timeout=600, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    hub_limit = PART_BYTES + OTHER_BYTES
    rank_limit = 4 * found["largest_tensor"] + OTHER_BYTES  # a tensor, its cast copy, and gloo's buffers
    assert found["version"] > 1.5 * hub_limit, "a copy of the version would exceed the limits"
    for own, *of_ranks in found["growth"]:
        assert own < hub_limit + (found["largest_tensor"] if ranks == 1 else 0), found
        assert all(grown < rank_limit for grown in of_ranks), found
