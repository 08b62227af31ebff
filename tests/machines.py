"""Run the tests that depend on the machine as other machines would: `make test-machines`.

Tests marked `numerics` run under each instruction set and number of threads of NUMERICS, tests marked `timing` run
REPEATS times beside BUSY processes that compute. Arguments are passed on to pytest, for example `-m "timing and not
slow"` or a file; `--only numerics` or `--only timing` leaves the other part out. All failures are listed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

NUMERICS = [
    {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": threads}
    for capability, threads in product(("default", "avx2"), ("1", "2"))
]
REPEATS = 5
BUSY = 4
BUSY_CODE = """
import os, sys, time
parent, end_s = os.getppid(), time.monotonic() + 7200
while os.getppid() == parent and time.monotonic() < end_s:
    sum(range(100_000))
"""
"""Ends with the process that started it, and after two hours in any case."""


@dataclass(frozen=True)
class Outcome:
    """What one run of pytest said."""

    name: str
    exit_code: int
    num_tests: int
    failed: tuple[str, ...]


def run(name: str, arguments: list[str], environment: Mapping[str, str]) -> Outcome:
    """Run pytest on two cores, its output on the terminal: threads of several processes would starve each other."""
    processes = max(1, 2 // int(environment["OMP_NUM_THREADS"]))
    print(f"\n==== {name}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(processes), f"--junitxml={report}", *arguments]
        exit_code = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = (f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failed)
    return Outcome(name, exit_code, len(cases), tuple(sorted(names)))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_CODE]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def all_runs(only: str | None, arguments: list[str]) -> Iterator[Outcome]:
    """Run each part as its machine; a `-m` among the arguments replaces the part's own."""
    if only != "timing":
        for environment in NUMERICS:
            name = " ".join(f"{key}={value}" for key, value in environment.items())
            yield run(f"numerics, {name}", ["-m", "numerics", *arguments], environment)
    if only != "numerics":
        for repeat in range(1, REPEATS + 1):
            with busy_processes(BUSY):
                name = f"timing, run {repeat} of {REPEATS} beside {BUSY} busy processes"
                yield run(name, ["-m", "timing", *arguments], {"OMP_NUM_THREADS": "1"})


def main() -> int:
    """Run all, print one line for each run and the failures below it; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["numerics", "timing"])
    chosen, arguments = parser.parse_known_args()
    outcomes = list(all_runs(chosen.only, arguments))
    print("\n==== summary")
    for outcome in outcomes:
        state = "passed" if not outcome.exit_code else f"{len(outcome.failed)} FAILED (exit code {outcome.exit_code})"
        print(f"{outcome.name}: {outcome.num_tests} tests, {state}")
        for test in outcome.failed:
            print(f"    {test}")
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
