"""A worker by itself: what it does when nobody is there, and when it leaves before it is ready."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp import web

from baton.errors import DeadlineExceeded, EngineFault
from baton.rollout.engine import EngineSettings
from baton.swarm.messages import PROTOCOL, Leaving, Welcome, decode_from_worker, encode
from baton.swarm.transfer import model_digest, pack_model
from baton.swarm.worker.worker import SwarmWorker, WorkerOptions

pytestmark = pytest.mark.timing


class HandClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until a test advances it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def test_a_worker_that_finds_no_hub_gives_up_when_its_patience_ends_and_says_which_hub() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes the port meanwhile
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            loop.call_soon(setattr, loop, "now_s", loop.now_s + 60.0)  # while it waits before it tries again

        options = WorkerOptions(url, "token", reconnect_timeout_s=100.0, say=say)
        worker = SwarmWorker(options, lambda *_: pytest.fail("there is nothing to build an engine for"))
        loop = HandClock()
        with (
            pytest.raises(DeadlineExceeded, match=f"no hub has answered at {url} for 120 s"),
            asyncio.Runner(loop_factory=lambda: loop) as controller,
        ):
            controller.run(worker.run())
    assert len(said) == 2, "after 0 and 60 s it tries again, and says so"


def test_a_worker_that_leaves_while_its_engine_is_built_sends_no_leaving(tmp_path: Path) -> None:
    """The hub would count it as malformed, because it comes before Hello."""
    (tmp_path / "config.json").write_bytes(b"{}")
    model, is_built, may_end, heard = pack_model(tmp_path), Event(), Event(), list[Any]()
    welcome = Welcome(
        PROTOCOL, "run", "i", model_digest(model), False, None, "eager", EngineSettings().model_dump(), "resume",
        relay_secret="", heartbeat_s=60.0, report_every_s=60.0,
    )  # fmt: skip

    def make_engine(*_: object) -> Any:
        is_built.set()
        may_end.wait(60)
        raise EngineFault("the test is over")

    async def play() -> None:
        is_closed = asyncio.Event()

        async def hub(request: web.Request) -> web.WebSocketResponse:
            connection = web.WebSocketResponse()
            await connection.prepare(request)
            await connection.send_bytes(encode(welcome))
            heard.extend([decode_from_worker(message.data) async for message in connection])
            is_closed.set()
            return connection

        async def send_model(request: web.Request) -> web.Response:
            return web.Response(body=model)

        app = web.Application()
        app.add_routes([web.get("/worker", hub), web.get("/model", send_model)])
        server = web.AppRunner(app)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        worker = SwarmWorker(WorkerOptions(f"http://127.0.0.1:{server.addresses[0][1]}", "token"), make_engine)
        running = asyncio.create_task(worker.run())
        assert await asyncio.to_thread(is_built.wait, 60)
        worker.leave()
        await is_closed.wait()
        may_end.set()
        await running
        await server.cleanup()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await play()

    asyncio.run(bounded())
    assert not any(isinstance(message, Leaving) for message in heard)
