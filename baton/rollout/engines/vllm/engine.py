"""`VllmEngine`: an `Engine` whose tokens vLLM generates in its own processes (base class in `../external.py`).

**New version.** New weights are loaded between two steps of vLLM. The engine pauses vLLM, records all generated tokens
under the old version, copies the tensors in place, switches the slot table, and resumes. Running requests keep their
keys and values. The salt of the prefix cache changes with the weights, so no prefix of an older version is reused.

**Noise.** The seed of a request depends on (run seed, group, sample, start position). A request that runs alone draws
the same tokens again. Unlike Baton's keyed noise, the draws differ on other machines and after a resume.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from baton.errors import EngineFault
from baton.files import memory_directory
from baton.rollout.engines.client import GeneratedTokens
from baton.rollout.engines.external import ExternalEngine, RunningRequest
from baton.rollout.engines.vllm.client import VllmClient
from baton.types import FromWorker, PolicyVersion


class VllmEngine(ExternalEngine[VllmClient]):
    """An engine on vLLM."""

    # vLLM returns logprobs after top-p and top-k, but a trajectory records logprobs before them
    _only_temperature = "vLLM returns logprobs after top-p and top-k: only temperature is allowed"

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights immediately. Running leases keep their KV cache and continue under the new version.

        Raises EngineFault, without changing any weight, for tensors that do not fit.
        """
        whole = self._weights.whole(tensors)
        self._line.pause()
        self._outbox += self._collect_tokens(0.0)
        self._num_loads += 1
        self._label = f"{self._name}-{self._num_loads}"
        taken = self._load_whole(whole, self._label)
        if taken != len(whole):
            raise EngineFault(f"vLLM loaded only {taken} of the {len(whole)} tensors of version {version.number}")
        self._book.switch(version)
        self._outbox += self._abort_rows()
        self._line.resume()
        self._heard_s = time.monotonic()

    def _load_whole(self, whole: Mapping[str, Any], label: str) -> int:
        """Write the tensors to one file in memory, which all workers of vLLM load."""
        with TemporaryDirectory(prefix="baton-", dir=memory_directory(), ignore_cleanup_errors=True) as directory:
            path = Path(directory) / "weights.safetensors"
            save_file(dict(whole), path)
            return self._line.load(str(path), label)

    def _collect_tokens(self, timeout_s: float) -> list[FromWorker]:
        reports = super()._collect_tokens(timeout_s)
        heartbeat_timeout_s = self._settings.vllm.answer_timeout_s
        if self.running and time.monotonic() - self._heard_s > heartbeat_timeout_s:
            raise EngineFault(
                f"vLLM has generated no token for {heartbeat_timeout_s:.0f} s, with {len(self.running)} trajectories "
                "running (engine.vllm.answer_timeout_s)"
            )
        return reports

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        reports = super()._append_tokens(said, running)
        if said.finish is not None:
            self._check_account(said, running)
        return reports

    def _check_account(self, said: GeneratedTokens, running: RunningRequest) -> None:
        """Raise EngineFault if vLLM attributes tokens to other weights than this engine has recorded."""
        account = said.by_weights
        if account is None or "" in running.by_weights or sum(account.values()) != running.by_weights.total():
            return  # there is nothing to compare, or vLLM has generated tokens after the end of the trajectory
        if account != running.by_weights:
            raise EngineFault(
                f"trajectory {running.row.lease.trajectory.name}: tokens by weights are {running.by_weights} in this "
                f"engine and {said.by_weights} in vLLM"
            )
