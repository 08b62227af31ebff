"""SIGKILL of the controller, workers and environments in the middle of episodes; the benchmark plays 1,000 episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.episode_kills import Plan, have_equal_bits, play

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timing]


def test_kills_of_any_process_leave_the_weights_as_they_were_and_repeat_no_action(model: Path, tmp_path: Path) -> None:
    _, whole = play(Plan("sync", 1, 6, 4), model, tmp_path / "whole")
    kills = {"controller": 1, "worker": 1, "environment": 2}
    for attempt in range(3):  # on a busy machine, the run may end before the kills
        report, found = play(Plan("sync", 1, 6, 4, kills), model, tmp_path / f"killed{attempt}")
        assert report.repeated_actions == 0
        assert report.unscored_episodes == 0
        assert have_equal_bits(whole, found)
        if sum(report.kills.values()) >= 3:
            return
    pytest.fail("three runs ended before three kills")
