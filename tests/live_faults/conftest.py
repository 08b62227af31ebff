"""A random model, and a run of it without a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live_faults.driver import MODES, SHAPE
from tests.swarm.swarm_processes import Outcome, model, outcome, swarm

__all__ = ["model"]


@pytest.fixture(scope="session")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run in `sync` that no fault is injected into, with its engine in the trainer's process."""
    with swarm(tmp_path_factory.mktemp("undisturbed"), model, **SHAPE, **MODES["sync"]) as run:
        run.engine_beside_trainer()
        run.finish()
        return outcome(run.run)
