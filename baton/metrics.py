"""Numbers by step: `metrics.jsonl` and TensorBoard, always both.

Names follow the set that users of other trainers look for; docs/metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tensorboardX import SummaryWriter

from baton.files import write_whole


class MetricsWriter:
    """Appends one row per step. Rows after a checkpoint are cut when a run is resumed from it."""

    def __init__(self, directory: Path, *, resume_step: int = 0) -> None:
        """Open the files in `directory`, dropping rows later than `resume_step`."""
        self._file = directory / "metrics.jsonl"
        kept = [row for row in read_metrics(directory) if row["step"] <= resume_step] if self._file.exists() else []
        write_whole(self._file, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1, write_to_disk=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of one step; a step may be written in several rows."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._board.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl, in order; a half-written last row is left out."""
    rows = []
    for line in (directory / "metrics.jsonl").read_bytes().splitlines():
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            break
    return rows
