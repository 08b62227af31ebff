"""A live run survives each fault of the list: hub, connections, engine processes, trainer ranks and files are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live_faults.faults import ALL, Fault
from tests.live_faults.laws import survive
from tests.swarm.swarm_processes import Outcome

pytestmark = [pytest.mark.numerics, pytest.mark.timing]


@pytest.mark.parametrize("fault", [fault for fault in ALL if fault.is_quick], ids=lambda fault: fault.id)
def test_a_run_survives_a_few_faults_quickly(fault: Fault, model: Path, tmp_path: Path, undisturbed: Outcome) -> None:
    survive(fault, model, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in ALL if not fault.is_quick], ids=lambda fault: fault.id)
def test_a_run_survives(fault: Fault, model: Path, tmp_path: Path, undisturbed: Outcome) -> None:
    survive(fault, model, tmp_path, undisturbed)
