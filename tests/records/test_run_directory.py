"""The files of a run are found by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.records.run_directory import RunDirectory


def test_a_batch_is_read_without_listing_the_files_of_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trajectories").mkdir()
    run = RunDirectory(tmp_path)
    run.write_groups(1, [])

    def listed(*_: object) -> None:
        raise AssertionError("the directory was listed")

    monkeypatch.setattr(Path, "glob", listed)
    assert run.groups(1) == []
