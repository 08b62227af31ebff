"""Processor seconds per GB of each operation on one part (8 MiB) of a version, alone and with one thread.

    python benchmarks/publication/parts.py            # raw results: results/parts.json

The weights are random bfloat16, of which 1 % change by one unit in the last place. Files are in memory (/dev/shm).
Each figure is the median of `ROUNDS` rounds over `NUM_PARTS` parts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from blake3 import blake3

from baton.weights.delta import decode_blocks, decode_changes, encode
from baton.weights.version_files import FlatFile

HERE = Path(__file__).parent
PART, NUM_PARTS, ROUNDS = 8 * 2**20, 16, 5


def main() -> None:
    """Measure, write the results, print the table."""
    sys.path.insert(0, str(HERE.parent))
    from machine import machine

    random = np.random.default_rng(0)
    values = (random.standard_normal(PART // 2 * NUM_PARTS, np.float32) * np.float32(0.02)).view(np.uint32)
    before = (values >> 16).astype(np.uint16)
    after = before + (random.random(before.size) < 0.01).astype(np.uint16)
    old, new = (list(each.view(np.uint8).reshape(NUM_PARTS, PART)) for each in (before, after))
    file, buffer = FlatFile(Path("/dev/shm"), PART * NUM_PARTS), np.empty(PART, np.uint8)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[int], object], rounds: int = ROUNDS) -> None:
        seconds = []
        for _ in range(rounds):
            begin = time.process_time()
            for index in range(NUM_PARTS):
                work(index)
            seconds.append(time.process_time() - begin)
        found[name] = round(median(seconds) / (PART * NUM_PARTS) * 1e9, 4)

    def part(index: int) -> slice:
        return slice(index * PART, (index + 1) * PART)

    timed("write into new pages of a file", lambda index: file.write(index * PART, old[index]), rounds=1)
    timed("write into existing pages of a file", lambda index: file.write(index * PART, old[index]))
    timed("digest of the mapped file", lambda index: blake3(file.bytes[part(index)].data).digest())
    timed("digest of memory in the cache", lambda index: blake3(buffer.data).digest())
    timed("copy of the held version", lambda index: file.bytes[part(index)].copy())
    deltas = [b"".join(encode(new[index], old[index], 2).data) for index in range(NUM_PARTS)]
    wholes = [b"".join(encode(new[index], None, 2).data) for index in range(NUM_PARTS)]
    timed("decode the changes, delta", lambda index: decode_changes("sparse", deltas[index], old[index], 2))
    target = FlatFile(Path("/dev/shm"), PART * NUM_PARTS)
    target.write(0, file.bytes)

    def copy_and_hash(index: int) -> None:
        digest = blake3()
        for begin in range(index * PART, (index + 1) * PART, 2**21):
            np.copyto(target.bytes[begin : begin + 2**21], file.bytes[begin : begin + 2**21])
            digest.update(target.bytes[begin : begin + 2**21].data)

    timed("copy to another mapped file and hash, 2 MiB at a time", copy_and_hash)
    timed("decode, keyframe", lambda index: deque(decode_blocks("full", wholes[index], buffer, 2), maxlen=0))
    timed("encode, delta", lambda index: encode(new[index], old[index], 2))
    timed("encode, keyframe", lambda index: encode(new[index], None, 2))
    (HERE / "results" / "parts.json").write_text(json.dumps({**machine(), "seconds_per_gb": found}, indent=1) + "\n")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
