"""`SglangEngine`: an `Engine` whose tokens a running SGLang server generates (base class in `../external.py`).

No other client may use the server, because the engine aborts all requests of the server before it loads weights.

**Abort.** An aborted lease is reported when the server has ended its request. The report contains all tokens that were
generated before the end of the request.

**New version.** New weights are loaded while the server is idle. The engine repeats the abort of all requests until the
server's load is zero, and records the tokens of these requests under the old version. The server then reads the new
weights from a directory and flushes its prefix cache. Requests that may continue are sent again with all their token
ids. Every token therefore has the right version, and no token is computed from keys and values of another version.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from baton.errors import EngineFault, UserError
from baton.files import memory_directory, writing
from baton.policy.settings import ModelSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings, SglangSettings
from baton.rollout.engines.client import GeneratedTokens
from baton.rollout.engines.external import ExternalEngine, RunningRequest
from baton.rollout.engines.sglang.client import SglangClient
from baton.rollout.engines.whole_weights import ModelFiles, ReadBase, Skeleton
from baton.types import FromWorker, PolicyVersion

_BYTES_PER_TOKEN = 256
"""Maximum number of bytes that a token takes in an event of a stream, with its id, logprob and text."""
_RESERVED_TOKENS = 6
"""With a context length of C, SGLang's scheduler ends a response at C - 2 tokens of prompt and response together, and
accepts an input of at most C - 7 tokens (`max_req_len`, `max_req_input_len`). The input of a resumed trajectory can
have `max_context_tokens` - 1 tokens, so C must be at least `max_context_tokens` + 6."""


class SglangEngine(ExternalEngine[SglangClient]):
    """An engine on a running SGLang server."""

    # some versions of SGLang compute logprobs before top-p and top-k, others afterwards
    _only_temperature = "with SGLang only temperature is allowed"

    _directory: Path | None = None
    """Directory of the current weights, which the server reads again if loading the next weights fails."""
    _is_loading = False
    """Whether weights are being loaded: the load aborts all requests, so an aborted stream is no fault."""

    def abort(self, lease_id: int) -> None:
        """End a lease, if it is known. The lease is reported when the server has ended its request."""
        keys = [key for key, running in self.running.items() if running.row.lease.lease_id == lease_id]
        for key in keys:
            self.running[key].is_ending = True
        if keys:
            self.client.end(keys)
        else:
            super().abort(lease_id)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights. Running leases continue under the new version, with recomputed keys and values. Raises
        EngineFault if tensors do not fit (no weight has changed then), or if the server does not load the weights."""
        self._is_loading = True
        try:
            super().load_weights(tensors, version)
        finally:
            self._is_loading = False
        held, self.running = list(self.running.values()), {}
        self._submit_rows(held)

    def _load_tensors(self, tensors: Mapping[str, Any], version: PolicyVersion, label: str) -> None:
        own = self._settings.sglang.weights_directory
        directory = Path(tempfile.mkdtemp(prefix="baton-", dir=own or memory_directory()))
        try:
            directory.chmod(0o755)  # the server may run as another user
            with writing(directory):
                self._skeleton.save(directory)
                save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
            self.client.load(str(directory), label)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._forget_directory()
        self._directory = directory

    def close(self) -> None:
        """Disconnect from the server, which keeps running. May be called twice."""
        super().close()
        self._forget_directory()

    def _forget_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        if said.weights is not None and said.weights != self._label:
            raise EngineFault(
                f"{self.client.name} serves weights {said.weights!r} instead of {self._label!r}: another client has "
                "loaded weights; use a separate server for each engine"
            )
        return super()._append_tokens(said, running)

    def _ended_early(self, said: GeneratedTokens, running: RunningRequest) -> None:
        if said.finish == "abort" and running.is_ending:
            del self.running[said.key]
            self._table.abort(running.row.lease.lease_id)
        elif not (said.finish == "abort" and self._is_loading):
            super()._ended_early(said, running)


def sglang_of_model(model: ModelSettings, settings: EngineSettings, version: PolicyVersion) -> SglangEngine:
    """Build an engine, and make its server load a model or adapter as `version`."""
    files = ModelFiles(model, settings)
    engine = sglang_from_skeleton(files.base_directory(), files.read_base, settings)
    try:
        engine.load_weights(policy_tensors(files.load()), version)
    except BaseException:
        engine.close()
        raise
    return engine


def api_key(settings: SglangSettings) -> str | None:
    """Return the server's API key; None if `key_variable` is not set. Raises UserError if the environment variable that
    `key_variable` names is not set."""
    key = None if settings.key_variable is None else os.environ.get(settings.key_variable)
    if settings.key_variable is not None and not key:
        raise UserError(
            f"engine.sglang.key_variable: the environment variable {settings.key_variable} is not set; set it to the "
            "server's API key"
        )
    return key


def sglang_from_skeleton(directory: Path, read_base: ReadBase | None, settings: EngineSettings) -> SglangEngine:
    """Build an engine as `factory.engine_from_skeleton` does. `read_base`: reads the tensors of the base model;
    required if versions are adapters."""
    own = settings.sglang
    if own.url is None:
        raise UserError(
            "engine.sglang.url: got nothing, but engine.kind = 'sglang' requires the URL of a running server, such as "
            "http://127.0.0.1:30000"
        )
    if own.weights_directory is not None and not Path(own.weights_directory).is_dir():
        raise UserError(
            f"engine.sglang.weights_directory: got {own.weights_directory}, which is no directory on this machine; "
            "create it, or remove the key if the server runs on this machine"
        )
    key = api_key(own)
    skeleton = Skeleton(directory, settings)
    client = SglangClient(
        own.url,
        key=key,
        longest_event=(1 << 20) + _BYTES_PER_TOKEN * settings.max_context_tokens,
        answer_timeout_s=own.answer_timeout_s,
    )
    has = client.server.context_length
    if has is not None and has < settings.max_context_tokens + _RESERVED_TOKENS:
        client.close()
        raise UserError(
            f"engine.max_context_tokens: got {settings.max_context_tokens}, allowed are at most "
            f"{has - _RESERVED_TOKENS}, because {client.name} was started with --context-length {has}, of which SGLang "
            f"reserves {_RESERVED_TOKENS} tokens"
        )
    return SglangEngine(client, skeleton, read_base, settings, PolicyVersion("", -1))
