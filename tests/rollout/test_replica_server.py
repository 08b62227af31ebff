"""What a replica's process does with its first message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.errors import Fault
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm import remote
from baton.rollout.engines.vllm.remote import CallWorkers, Done, ReplicaServer, encode
from baton.rollout.processes.protocol import Start
from baton.types import PolicyVersion


def start(**arguments: Any) -> Start:
    settings = EngineSettings(kind="vllm", vllm={"arguments": arguments})
    return Start("m", "cpu", "sdpa", settings.model_dump(), PolicyVersion("run", 0))


def answer(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, type=Done | Fault)


def test_vllm_reports_processes_that_a_signal_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    client = SimpleNamespace(detect_stops=lambda: calls.append("detect"), check=lambda: calls.append("check"))
    monkeypatch.setattr(remote, "vllm_of_model", lambda *_, **__: SimpleNamespace(client=client))
    server = ReplicaServer()
    assert answer(server.handle(encode(start()))) == Done()
    assert answer(server.handle(encode(CallWorkers()))) == Done()
    assert calls == ["detect", "check"]
