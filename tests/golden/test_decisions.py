"""The state machines decide as they did when these logs were recorded: moves, renames and redesigns change no decision.

Each seed is a random but valid sequence of events. A golden file holds a digest of every seed's log, and the whole log
of the first few, so that a difference can be read. After a deliberate change of a decision, and only then:

    python tests/golden/test_decisions.py --record
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fleet_story
import lease_story
import pytest
import scheduler_story
from neutral import LEASES, SCHEDULER, SUPERVISION, VERSIONS, Dialect, Log, difference, digest, names_of

FOLDER = Path(__file__).parent / "decisions"
SEEDS = 200
WHOLE = 3
"""Seeds whose logs are kept as text."""
MODES = ("sync", "partial", "async")
HEADER = """\
# {name}: digests of the decision logs of {seeds} seeds, then the logs of the first {whole}.
# Recorded by `python tests/golden/test_decisions.py --record`; run it only to change a decision deliberately.
"""


@dataclass(frozen=True)
class Machine:
    """A state machine and the lives that its golden files hold."""

    dialect: Dialect
    lives: dict[str, Callable[[int], Log]]
    """Name of a golden file → the log of a seed."""


def _by_mode(name: str, write: Callable[[str, int], Log]) -> dict[str, Callable[[int], Log]]:
    return {f"{name}-{mode}": lambda seed, mode=mode: write(mode, seed) for mode in MODES}  # type: ignore[misc]


MACHINES = {
    "scheduler": Machine(SCHEDULER, _by_mode("scheduler", scheduler_story.write)),
    "leases": Machine(LEASES, _by_mode("leases", lease_story.write)),
    "versions": Machine(VERSIONS, {"versions": fleet_story.versions}),
    "supervision": Machine(SUPERVISION, {"supervision": fleet_story.supervision}),
}


def text_of(name: str, logs: list[Log]) -> str:
    """Return what a golden file says."""
    lines = [HEADER.format(name=name, seeds=SEEDS, whole=WHOLE)]
    lines += [f"{seed} {digest(log.lines)} {len(log.lines)}\n" for seed, log in enumerate(logs)]
    for seed, log in enumerate(logs[:WHOLE]):
        lines += [f"\n# seed {seed}\n", *(f"{line}\n" for line in log.lines)]
    return "".join(lines)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_decision_is_the_one_that_was_recorded(machine: str) -> None:
    seen: set[str] = set()
    for name, life in MACHINES[machine].lives.items():
        logs = [life(seed) for seed in range(SEEDS)]
        seen = seen.union(*(log.names for log in logs))
        golden, now = (FOLDER / f"{name}.txt").read_text(), text_of(name, logs)
        if now != golden:
            pytest.fail(f"{name}: other decisions than were recorded\n{difference(golden, now)}", pytrace=False)
    assert seen == names_of(MACHINES[machine].dialect), "every event and command occurs"


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(f"{__doc__}")
    FOLDER.mkdir(exist_ok=True)
    for chosen in MACHINES.values():
        for title, tell_life in chosen.lives.items():
            recorded = text_of(title, [tell_life(seed) for seed in range(SEEDS)])
            (FOLDER / f"{title}.txt").write_text(recorded)
