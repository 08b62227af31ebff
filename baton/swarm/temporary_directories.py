"""Temporary directories of a hub process. If the process is killed, the run's next hub process removes them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from baton.files import write_whole

_PREFIX = "baton-hub-"


class TemporaryDirectories:
    """Creates directories, and records their paths in a file for the next hub process."""

    def __init__(self, notes: Path) -> None:
        """Remove the directories that an earlier process of the run has left. `notes`: file with their paths."""
        self._notes = notes
        self._directories: list[Path] = []
        if notes.exists():
            for line in notes.read_text().splitlines():
                if Path(line).name.startswith(_PREFIX):
                    shutil.rmtree(line, ignore_errors=True)

    def directory(self, where: Path | None = None) -> Path:
        """Create a directory in `where`; by default, in the system's directory for temporary files."""
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        self._directories.append(made)
        write_whole(self._notes, "".join(f"{path}\n" for path in self._directories).encode())
        return made

    def close(self) -> None:
        """Remove all directories. May be called twice."""
        for path in self._directories:
            shutil.rmtree(path, ignore_errors=True)
        self._notes.unlink(missing_ok=True)
