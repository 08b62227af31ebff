"""A running SGLang server behind the `Engine` protocol: see `rollout/engines/external.py`.

The server is this engine's alone: its requests are all aborted when weights change.

**An abort** is reported when the server has let go of the request: all it made until then is in the report.

**A new version** comes to an idle server: all requests are aborted until its load is zero, their tokens are noted under
the old version, it reads the new weights from a directory and flushes its prefixes, and what may go on is asked for
anew, from its ids. So no token has a wrong version, and none is computed from keys and values of another one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from baton.errors import EngineFault
from baton.files import memory_directory
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.client import GeneratedTokens
from baton.rollout.engines.external import ExternalEngine, RunningRequest
from baton.rollout.engines.sglang.client import SglangClient
from baton.rollout.engines.slot_table import Text
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import FromWorker, PolicyVersion


class SglangEngine(ExternalEngine[SglangClient]):
    """An `Engine` whose tokens an SGLang server makes."""

    # versions of SGLang differ in whether logprobs are those before or after top-p and top-k have cut the vocabulary
    _only_temperature = "with SGLang only temperature is allowed"

    def __init__(
        self,
        line: SglangClient,
        weights: WholeWeights,
        settings: EngineSettings,
        end_ids: tuple[int, ...],
        text: Text,
        write_skeleton: Callable[[Path], None],
    ) -> None:
        """It serves no version until weights are loaded. write_skeleton: all of a model but its weights."""
        super().__init__(line, weights, settings, PolicyVersion("", -1), end_ids, text)
        self._write_skeleton = write_skeleton
        self._directory: Path | None = None
        """Of the weights that the server holds: it goes back to them when the next ones fail."""
        self._is_quiet = False
        """Whether every stream was to end."""

    def abort(self, lease_id: int) -> None:
        """End a lease; it is reported with all it has once the server has let go of it. Harmless for an unknown one."""
        keys = [key for key, running in self.running.items() if running.row.lease.lease_id == lease_id]
        for key in keys:
            self.running[key].is_ending = True
        if keys:
            self._line.end(keys)
        else:
            super().abort(lease_id)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights; running leases go on under the new version, their keys and values computed again.

        Raises EngineFault, with nothing changed, for tensors that do not fit; and when the server does not take them.
        """
        whole = self._weights.whole(tensors)
        self._line.quiesce()
        self._is_quiet = True
        self._outbox += self._take(0.0)
        self._is_quiet = False
        directory, label = self._write(whole), f"{version.lineage}-{version.number}-{self._num_loads}"
        self._num_loads += 1
        try:
            self._line.load(str(directory), label)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._forget_directory()
        self._directory, self._label = directory, label
        self._book.switch(version)
        self._outbox += self._put_down()
        held, self.running = list(self.running.values()), {}
        self._begin(held)

    def close(self) -> None:
        """Let go of the server, which stays. May be called twice."""
        super().close()
        self._forget_directory()

    def _write(self, whole: Mapping[str, Any]) -> Path:
        """Write a model's directory where the server reads it."""
        own = self._settings.sglang.weights_directory
        directory = Path(tempfile.mkdtemp(prefix="baton-", dir=own or memory_directory()))
        directory.chmod(0o755)  # the server may be another user's
        self._write_skeleton(directory)
        save_file(dict(whole), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _forget_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _grow(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        if said.weights is not None and said.weights != self._label:
            raise EngineFault(
                f"{self._line.name} serves weights {said.weights!r}, but was given {self._label!r}: somebody else "
                "changes them; a server is one engine's alone"
            )
        return super()._grow(said, running)

    def _ended_early(self, said: GeneratedTokens, running: RunningRequest) -> None:
        if said.finish == "abort" and running.is_ending:
            del self.running[said.key]
            self._book.abort(running.row.lease.lease_id)
        elif not (said.finish == "abort" and self._is_quiet):
            super()._ended_early(said, running)
