"""Directories of one process of a run: gone with it, or removed by the next one where it was killed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from baton.files import write_whole


class Scratch:
    """Makes directories and notes them in a file before anything is in them: a kill leaves no weights in memory."""

    def __init__(self, notes: Path) -> None:
        """notes: one path a line; what an earlier process of the run has left there is removed now."""
        self._notes = notes
        self._directories: list[Path] = []
        if notes.exists():
            for line in notes.read_text().splitlines():
                if Path(line).name.startswith(_PREFIX):
                    shutil.rmtree(line, ignore_errors=True)

    def directory(self, where: Path | None = None) -> Path:
        """Make one, in the system's place for temporary ones by default."""
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        self._directories.append(made)
        write_whole(self._notes, "".join(f"{path}\n" for path in self._directories).encode())
        return made

    def close(self) -> None:
        """Remove them all. May be called twice."""
        for path in self._directories:
            shutil.rmtree(path, ignore_errors=True)
        self._notes.unlink(missing_ok=True)


_PREFIX = "baton-hub-"
