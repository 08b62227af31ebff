"""The package reads the clock of the process only where `clock_reads.toml` says. A class that the simulator shares with
a live run takes a `baton.clock.Clock`, or events with their time.

After a read was removed: python tests/test_clock_reads.py --record
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "baton"
ALLOWED = Path(__file__).parent / "clock_reads.toml"
READS = {f"time.{name}" for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "process_time")}
HEADER = """\
# Number of reads of the process's clock by file: see test_clock_reads.py. No number may grow, and no file may be added:
# a class takes a Clock of baton/clock.py instead.

"""


def clock_reads() -> dict[str, int]:
    """Return how often each file of the package names a function that reads the clock."""
    found: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), f"{path}: import time as a whole"
            if isinstance(node, ast.Attribute) and ast.unparse(node) in READS:
                found[path.relative_to(PACKAGE).as_posix()] += 1
    return dict(found)


def test_the_clock_is_read_nowhere_else() -> None:
    allowed, found = tomllib.loads(ALLOWED.read_text()), clock_reads()
    more = {file: count for file, count in found.items() if count > allowed.get(file, 0)}
    assert not more, "these files read the clock more often than clock_reads.toml allows: take a Clock instead"
    assert allowed == found, "a read was removed: record the shorter list with test_clock_reads.py --record"


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(f"{__doc__}")
    ALLOWED.write_text(HEADER + "".join(f'"{file}" = {count}\n' for file, count in clock_reads().items()))
