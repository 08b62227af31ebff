"""A running SGLang server behind the `Engine` protocol, on top of `rollout/engines/external.py`.

One engine uses the server exclusively: all requests of the server are aborted when weights change.

**An abort** is reported once the server has ended the request; the report includes all tokens generated until then.

**A new version** is loaded while the server is idle: all requests are aborted until its load is zero, their tokens are
recorded under the old version, the server reads the new weights from a directory and flushes its prefix cache, and
requests that may continue are sent again with their ids. So each token has the right version, and none is computed from
keys and values of another version.
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
    """An `Engine` whose tokens an SGLang server generates."""

    # whether logprobs are those before or after top-p and top-k depends on the version of SGLang
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
        """Serve no version until weights are loaded.

        write_skeleton: writes a model's configuration and tokenizer to a directory.
        """
        super().__init__(line, weights, settings, PolicyVersion("", -1), end_ids, text)
        self._write_skeleton = write_skeleton
        self._directory: Path | None = None
        """Directory of the server's current weights, to which the server returns when loading the next ones fails."""
        self._is_quiet = False
        """Whether all streams were aborted for new weights; an aborted stream is then no fault."""

    def abort(self, lease_id: int) -> None:
        """End a lease; it is reported once the server has ended the request. Does nothing for an unknown lease."""
        keys = [key for key, running in self.running.items() if running.row.lease.lease_id == lease_id]
        for key in keys:
            self.running[key].is_ending = True
        if keys:
            self._line.end(keys)
        else:
            super().abort(lease_id)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights; running leases continue under the new version, with recomputed keys and values.

        Raises EngineFault, with nothing changed, for tensors that do not fit; also if the server does not load them.
        """
        whole = self._weights.whole(tensors)
        self._line.quiesce()
        self._is_quiet = True
        self._outbox += self._collect_tokens(0.0)
        self._is_quiet = False
        directory, label = self._write_model(whole), f"{version.lineage}-{version.number}-{self._num_loads}"
        self._num_loads += 1
        try:
            self._line.load(str(directory), label)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._forget_directory()
        self._directory, self._label = directory, label
        self._book.switch(version)
        self._outbox += self._abort_rows()
        held, self.running = list(self.running.values()), {}
        self._submit_rows(held)

    def close(self) -> None:
        """Disconnect from the server, which keeps running. May be called twice."""
        super().close()
        self._forget_directory()

    def _write_model(self, whole: Mapping[str, Any]) -> Path:
        """Write a model directory that the server can read."""
        own = self._settings.sglang.weights_directory
        directory = Path(tempfile.mkdtemp(prefix="baton-", dir=own or memory_directory()))
        directory.chmod(0o755)  # the server may run as another user
        self._write_skeleton(directory)
        save_file(dict(whole), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _forget_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        if said.weights is not None and said.weights != self._label:
            raise EngineFault(
                f"{self._line.name} serves weights {said.weights!r}, but was given {self._label!r}: somebody else "
                "changes them; a server is one engine's alone"
            )
        return super()._append_tokens(said, running)

    def _ended_early(self, said: GeneratedTokens, running: RunningRequest) -> None:
        if said.finish == "abort" and running.is_ending:
            del self.running[said.key]
            self._book.abort(running.row.lease.lease_id)
        elif not (said.finish == "abort" and self._is_quiet):
            super()._ended_early(said, running)
