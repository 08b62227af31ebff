"""Which engine settings of a hub `baton worker` accepts, and how it ends when its token becomes invalid."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from baton.cli.worker import worker
from baton.errors import UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines import factory
from baton.swarm.auth import INVALID_TOKEN, Role, TokenFile
from baton.swarm.messages import PROTOCOL, Welcome, encode

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


def test_a_worker_whose_token_became_invalid_while_it_reconnects_exits_with_code_2(tmp_path: Path) -> None:
    """Before that, the hub cannot read its token file, which says nothing about the token."""
    welcome = Welcome(
        PROTOCOL, "run", "i", "", False, None, "eager", EngineSettings().model_dump(), "resume",
        relay_secret="", heartbeat_s=60.0, report_every_s=60.0,
    )  # fmt: skip
    (tmp_path / "token").write_text(TokenFile(tmp_path / "tokens.json").create(Role.WORKER, 60))
    num_connections = 0

    async def hub(request: web.Request) -> web.StreamResponse:
        nonlocal num_connections
        num_connections += 1
        if num_connections > 1:
            return web.Response(status=401, headers={} if num_connections == 2 else {"WWW-Authenticate": INVALID_TOKEN})
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.send_bytes(encode(welcome))
        await connection.close()
        return connection

    async def play() -> tuple[int | None, str]:
        app = web.Application()
        app.add_routes([web.get("/worker", hub)])  # no /model: the first connection ends before the engine is built
        server = web.AppRunner(app)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{server.addresses[0][1]}"
        command = [sys.executable, "-m", "baton", "worker", url, "--token-file", str(tmp_path / "token")]
        options = ["--device", "cpu", "--reconnect-timeout", "60s"]
        process = await asyncio.create_subprocess_exec(*command, *options, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(300):
            _, said = await process.communicate()
        await server.cleanup()
        return process.returncode, said.decode()

    code, said = asyncio.run(play())
    assert code == 2, said
    assert "refuses this token (401): ask its owner for a new one" in " ".join(said.split())
    assert num_connections == 3
