"""Which engine settings of a hub `baton worker` accepts."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cli.worker import worker
from baton.errors import UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines import factory
from baton.swarm.auth import Role, TokenFile

ARGUMENTS = {"trust_remote_code": True}


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_worker_that_a_run_started_takes_vllms_arguments_from_the_hub(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[EngineSettings] = []

    class Connected:
        """A worker whose hub sends a recipe with arguments of vLLM."""

        def __init__(self, options: Any, make_engine: Any) -> None:
            self.make_engine = make_engine

        async def run(self) -> None:
            settings = EngineSettings(kind="vllm", vllm={"arguments": ARGUMENTS})  # type: ignore[arg-type]
            self.make_engine(SimpleNamespace(engine_settings=lambda: settings, attention="sdpa"), tmp_path, None)

        def leave(self) -> None:
            pass

    monkeypatch.setattr("baton.swarm.worker.worker.SwarmWorker", Connected)
    monkeypatch.setattr(factory, "engine_from_skeleton", lambda directory, base, settings, **_: built.append(settings))
    (tmp_path / "token").write_text(TokenFile(tmp_path / "tokens.json").create(Role.WORKER, 60))
    reader, writer = os.pipe()
    with os.fdopen(reader) as standard_input, os.fdopen(writer, "w"):
        monkeypatch.setattr("sys.stdin", standard_input)
        with nullcontext() if tied else pytest.raises(UserError, match="got trust_remote_code from the hub"):
            worker("http://127.0.0.1:1", tmp_path / "token", device="cpu", tied=tied)
    assert [settings.vllm.arguments for settings in built] == [ARGUMENTS] * tied
